"""The router with which a part adds its pages, and the error pages."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from batchwright.access.keys import Scope
from batchwright.api.errors import status_of
from batchwright.errors import BatchwrightError, Unauthorized
from batchwright.web.visit import Visit, finish, show_error, wants_stream

log = logging.getLogger(__name__)

Group = Literal["", "Work", "Engine", "Access"]
GROUPS: tuple[Group, ...] = ("", "Work", "Engine", "Access")
"""The groups of the menu, in order; the first has no title."""


@dataclass(frozen=True, slots=True)
class Link:
    """A menu entry, shown to visitors with its scope."""

    label: str
    path: str
    group: Group = "Work"
    order: int = 50
    """Its position in the group: small numbers come first."""
    scope: Scope = Scope.READ


@dataclass(frozen=True, slots=True)
class Finder:
    """Where the search field leads for a text of this format."""

    pattern: str
    """A regular expression for the whole text."""
    path: str
    """Where to go: `{}` stands for the text."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A part's panel on the overview, such as its running batches."""

    title: str
    template: str
    """Rendered inside the panel; it sees the result of `load` as `panel`."""
    load: Callable[[Visit], Awaitable[Mapping[str, Any] | None]]
    """Called once for all viewers of a tenant's overview: it depends only on `visit.tenant`. None hides the panel."""
    order: int = 50
    """Small numbers come first."""
    href: str | None = None
    """The page with the details."""


class PageRoute(APIRoute):
    """A route whose errors are pages, and whose answers carry the headers of pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response = await handle(request)
            except Exception as error:  # every error is shown as a page
                response = await answer_error(request, error)
            return finish(request, response)

        return answer


class Pages(APIRouter):
    """The pages of a part: a router that also adds menu links and templates.

    >>> pages = Pages("letters", package="letters", links=[Link("Letters", "/ui/letters")])
    """

    def __init__(
        self,
        name: str,
        *,
        package: str,
        links: Sequence[Link] = (),
        finders: Sequence[Finder] = (),
        panels: Sequence[Panel] = (),
    ) -> None:
        super().__init__(route_class=PageRoute, default_response_class=Response)
        self.name = name
        """Its templates are called `name/file.html`."""
        self.package = package
        """The package with the folder `templates`."""
        self.links = links
        self.finders = finders
        self.panels = panels


async def answer_error(request: Request, error: Exception) -> Response:
    """A page that says what is wrong and what to do; visitors without a session go to the sign-in page first."""
    if isinstance(error, Unauthorized) and request.method == "GET" and not wants_stream(request):
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/ui/sign-in?next={quote(here)}", status_code=303)
    status, message = _status_and_message(request, error)
    if wants_stream(request):
        return PlainTextResponse(message, status_code=status)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return await show_error(request, status, message, headers)


def _status_and_message(request: Request, error: Exception) -> tuple[int, str]:
    if isinstance(error, RequestValidationError):
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"][1:])
        # A malformed id in an address is simply a page that does not exist.
        if problem["loc"][0] == "path":
            return 404, "there is no such page; check the address"
        return 400, f"{name}: {str(problem['msg']).removeprefix('Value error, ')}"
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail)
    if isinstance(error, BatchwrightError) and (known := status_of(error)) is not None:
        return known
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return 500, "an internal error occurred; see the server's log"
