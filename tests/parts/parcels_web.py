"""The page and the route of parcels.py: only an HTTP server may import this."""

from fastapi import APIRouter
from starlette.responses import HTMLResponse

pages = APIRouter()
router = APIRouter()


@pages.get("/parcels")
async def show() -> HTMLResponse:
    return HTMLResponse("<h1>Parcels</h1>")


@router.post("/v1/parcels")
async def take(parcel: dict[str, int]) -> dict[str, int]:
    return parcel
