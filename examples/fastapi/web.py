"""The pages of the shop: `uvicorn web:app`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from jobs import write_receipt
from pydantic import BaseModel
from shop import Order, open_session

from batchwright import AsyncBatchwright


class NewOrder(BaseModel):
    email: str
    total: Decimal


@asynccontextmanager
async def life(app: FastAPI) -> AsyncIterator[None]:
    """The client lives as long as the application."""
    async with AsyncBatchwright() as batchwright:
        app.state.batchwright = batchwright
        yield


def find_client(request: Request) -> AsyncBatchwright:
    client: AsyncBatchwright = request.app.state.batchwright
    return client


app = FastAPI(lifespan=life)
Client = Annotated[AsyncBatchwright, Depends(find_client)]


@app.post("/orders", status_code=201)
async def create_order(new: NewOrder, batchwright: Client) -> dict[str, object]:
    """Store the order and its job in one transaction: either both exist after it, or neither."""
    async with open_session() as session, session.begin():
        order = Order(email=new.email, total=new.total)
        session.add(order)
        await session.flush()  # now it has an id
        job = await batchwright.enqueue(write_receipt, {"order_id": order.id}, connection=session)
        charge(order)
        return {"order": order.id, "job": str(job)}


@app.get("/orders/{id}")
async def show_order(id: int) -> dict[str, object]:
    async with open_session() as session:
        order = await session.get(Order, id)
        if order is None:
            raise HTTPException(404, f"there is no order {id}")
        return {"order": order.id, "receipt": order.receipt}


def charge(order: Order) -> None:
    if order.total > 1000:
        raise HTTPException(402, f"{order.total} is more than the card allows")
