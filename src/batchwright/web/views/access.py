"""Signing in and out, the search field, assets, and the answer for unknown addresses."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from batchwright.access.keys import Scope
from batchwright.api.services import service, services
from batchwright.errors import InvalidInput, Unauthorized
from batchwright.web.pages import PageRoute, Pages
from batchwright.web.site import Site
from batchwright.web.visit import SESSION, Reader, Visit, stranger, visit_of

pages = Pages("access", package="batchwright.web")

_HOME = "/ui"
_INSIDE = re.compile(r"/ui(?:[/?][^\\\s]*)?")
_KEY_CHARACTERS_MAX = 200


@pages.get("/ui/sign-in")
async def show_sign_in(request: Request, next: Annotated[str, Query(max_length=2_000)] = _HOME) -> Response:
    """The form; a visitor who needs no key is redirected."""
    if await services(request).gate.is_open_to_all():
        return RedirectResponse(_inside(next), status_code=303)
    return _form(stranger(request), next)


@pages.post("/ui/sign-in")
async def sign_in(request: Request) -> Response:
    """Exchange a key for a session. Tries are counted before anything is looked up."""
    visit, found = stranger(request), services(request)
    site = visit.site
    address = request.client.host if request.client else ""
    if wait := site.sign_ins.wait_seconds(address):
        words = f"too many sign-ins from this address; try again in {wait:.0f} seconds"
        raise HTTPException(429, words, headers={"Retry-After": f"{wait:.0f}"})
    await visit.require_token()
    next, secret = await visit.field("next", _HOME), await visit.field("key")
    holder = await found.core.keys.find(secret) if len(secret) <= _KEY_CHARACTERS_MAX else None
    if holder is None:
        return _form(visit, next, "This key is unknown, revoked or expired.", status=403)
    if Scope.READ not in holder.scopes:
        return _form(visit, next, "This key lacks the scope “read”, which the dashboard needs.", status=403)
    seconds = int(site.settings.session_hours * 3600)
    session = await found.core.sessions.open(holder, lifetime_seconds=seconds)
    response = RedirectResponse(_inside(next), status_code=303)
    visit.keep_session(response, session.token, seconds)
    return response


@pages.post("/ui/sign-out")
async def sign_out(visit: Reader) -> Response:
    """End the session on the server as well, not only in this browser."""
    token = visit.request.cookies.get(SESSION)
    if token is not None:
        await visit.services.core.sessions.close(token)
    response = RedirectResponse("/ui/sign-in", status_code=303)
    visit.drop_session(response)
    return response


@pages.get("/ui/search")
async def search(visit: Reader, q: Annotated[str, Query(max_length=200)] = "") -> Response:
    """The format of the text decides: an id leads to its object, anything else to the jobs of that type."""
    text = q.strip()
    if not text:
        raise InvalidInput("type an id, or the type of a job")
    place = visit.site.find(text)
    return RedirectResponse(visit.url(place) if place else visit.url("/ui/jobs", type=text), status_code=303)


async def show_asset(request: Request) -> Response:
    """Needs no key: assets contain no user data."""
    found = service(request, Site).assets.answer(request.path_params["name"])
    if found is None:
        raise HTTPException(404, "there is no such file; reload the page")
    return found


async def show_nothing(request: Request) -> Response:
    """The answer for an address that has no page."""
    try:
        await visit_of(request, Scope.READ)
    except Unauthorized:
        stranger(request)
    raise HTTPException(404, "there is no such page")


def _form(visit: Visit, next: str, problem: str | None = None, *, status: int = 200) -> Response:
    hours = visit.site.settings.session_hours * 3600
    return visit.draw("sign_in.html", status=status, title="Sign in", next=next, problem=problem, hours=hours)


def _inside(next: str) -> str:
    """Only our own pages: otherwise this site could be used to redirect people to another one."""
    return next if _INSIDE.fullmatch(next) else _HOME


fallbacks = (
    PageRoute("/ui/assets/{name}", show_asset, methods=["GET"], include_in_schema=False),
    PageRoute("/ui/{rest:path}", show_nothing, methods=["GET"], include_in_schema=False),
)
