"""A request for a page: the visitor, what the visitor may see, and how the response is rendered."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import cached_property
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote, unquote, urlencode

import orjson
from fastapi import Depends, Request
from starlette.datastructures import FormData
from starlette.responses import HTMLResponse, RedirectResponse, Response

from batchwright.access.gate import EVERYBODY, Caller, admit
from batchwright.access.keys import Scope
from batchwright.api.services import Services, service, services
from batchwright.api.streams import LiveStream
from batchwright.api.turns import CALLER
from batchwright.errors import BatchwrightError, DatabaseError, Forbidden, InvalidInput, Unauthorized
from batchwright.web.live import Gone, Load
from batchwright.web.site import Site

SESSION = "batchwright_session"
SEED = "batchwright_seed"
FLASH = "batchwright_flash"
_PING_SECONDS = 15.0
STREAM_SECONDS_MAX = 300.0
"""A stream ends after this time. The browser then reconnects, and its session is checked again."""
_FLASH_SECONDS = 30
_FLASH_CHARACTERS_MAX = 500
_FIELDS_MAX = 2_000
_FIELD_BYTES_MAX = 4 * 1024 * 1024
_TENANT_CHARACTERS_MAX = 100
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "Vary": "Accept, Cookie",
    "X-Frame-Options": "DENY",
}
_REMEDIES = {
    400: "Go back, correct it, and send it again.",
    401: "Sign in with a key that is valid.",
    403: "Sign in with a key that has this scope, or ask an administrator.",
    404: "It may have been removed by retention, or belong to another tenant. Check the address, or search for it.",
    409: "The object changed meanwhile. Go back to see its current state.",
    413: "Send less at once.",
    429: "Wait a minute, then try again.",
    500: "Try again. If it happens again, check the server's log.",
    503: "Try again soon; nothing was lost.",
}


class Visit:
    """A request for a page by one visitor."""

    def __init__(self, request: Request, caller: Caller | None, name: str | None, seed: str) -> None:
        self.request = request
        self._caller = caller
        self.name = name
        """The name of the key; None where none is needed yet."""
        self._seed = seed

    # The visitor ------------------------------------------------------------------------------------------------

    @property
    def caller(self) -> Caller:
        if self._caller is None:
            raise Unauthorized("this needs a key: sign in first")
        return self._caller

    @property
    def tenant(self) -> str | None:
        """Whose objects are shown; None means all."""
        return self.caller.tenant

    @property
    def is_signed_in(self) -> bool:
        return self._caller is not None and self._caller.key is not None

    def may(self, scope: Scope | str) -> bool:
        return self._caller is not None and Scope(scope) in self._caller.scopes

    @property
    def services(self) -> Services:
        return services(self.request)

    @cached_property
    def site(self) -> Site:
        return service(self.request, Site)

    # Forms ------------------------------------------------------------------------------------------------------

    @property
    def csrf(self) -> str:
        """The CSRF token of every form: bound to this session, or to this browser if no session is needed."""
        return hashlib.sha256(f"csrf:{self._seed}".encode()).hexdigest()

    async def form(self) -> FormData:
        return await self.request.form(max_fields=_FIELDS_MAX, max_part_size=_FIELD_BYTES_MAX)

    async def field(self, name: str, default: str = "") -> str:
        """A field of the form as text, without spaces around it."""
        value = (await self.form()).get(name, default)
        return value.strip() if isinstance(value, str) else default

    async def require_token(self) -> None:
        """Refuse a POST that does not come from one of our forms."""
        given = self.request.headers.get("x-csrf-token")
        self.check_token(await self.field("csrf") if given is None else given)

    async def once(self) -> str | None:
        """A key for what this form creates: the same one if the form is sent twice. None if a script sent no `once`."""
        fields = [(name, value) for name, value in (await self.form()).multi_items() if isinstance(value, str)]
        return self.once_of(fields)

    def once_of(self, fields: Sequence[tuple[str, str]]) -> str | None:
        """Like `once`, for a form that is read as it arrives."""
        if not dict(fields).get("once"):
            return None
        others = sorted((name, value) for name, value in fields if name != "csrf")
        return hashlib.sha256(orjson.dumps([str(self.request.url), others])).hexdigest()

    def check_token(self, given: str) -> None:
        if not hmac.compare_digest(given.encode(), self.csrf.encode()):
            raise Forbidden("this form has expired, or is not from this site; reload the page and send it again")

    # Addresses --------------------------------------------------------------------------------------------------

    def url(self, path: str, **query: Any) -> str:
        """An address on this site; keeps the chosen tenant."""
        if (tenant := self.request.query_params.get("tenant")) and "tenant" not in query:
            query["tenant"] = tenant
        return _with_query(path, query)

    def here(self, **changes: Any) -> str:
        """The current address with these changes; None removes a parameter."""
        query: dict[str, Any] = {}
        for name, value in self.request.query_params.multi_items():
            query.setdefault(name, []).append(value)
        return _with_query(self.request.url.path, {**query, **changes})

    # Answers ----------------------------------------------------------------------------------------------------

    async def show(
        self, template: str, load: Load, *, title: str, vary: Hashable = None, status: int = 200, **context: Any
    ) -> Response:
        """A page that updates by itself; `load` may depend only on the tenant, the address and `vary`."""
        query = tuple(sorted(self.request.query_params.multi_items()))
        key = (template, self.tenant, self.request.url.path, query, vary)
        fixed = {**context, "title": title}
        if wants_stream(self.request):
            return self._follow(key, template, load, fixed)
        loaded = await self.site.live.value(key, load)
        return self.draw(template, status=status, is_live=True, **{**fixed, **loaded})

    def draw(self, template: str, *, status: int = 200, is_live: bool = False, **context: Any) -> Response:
        """A page without updates."""
        context = {**context, **self._common_context(), "is_live": is_live}
        return HTMLResponse(self.site.page(template, context), status_code=status)

    def go(self, path: str, *, done: str | None = None, **query: Any) -> Response:
        """Redirect to another page, which says what was done."""
        self.site.live.forget()
        response = RedirectResponse(self.url(path, **query) if path else self.here(), status_code=303)
        if done:
            self._set_cookie(response, FLASH, quote(done[:_FLASH_CHARACTERS_MAX]), _FLASH_SECONDS)
        return response

    def keep_session(self, response: Response, token: str, seconds: int) -> None:
        self._set_cookie(response, SESSION, token, seconds)

    def drop_session(self, response: Response) -> None:
        for name in (SESSION, SEED):
            response.delete_cookie(name, path="/ui", httponly=True, samesite="strict", secure=self._is_secure)

    def keep_seed(self, response: Response) -> None:
        """Store the secret of the CSRF token in the browser, unless it has one already."""
        if SESSION not in self.request.cookies and self.request.cookies.get(SEED) != self._seed:
            self._set_cookie(response, SEED, self._seed, None)

    def drop_flash(self, response: Response) -> None:
        if FLASH in self.request.cookies and response.status_code == 200 and not wants_stream(self.request):
            response.delete_cookie(FLASH, path="/ui", httponly=True, samesite="strict", secure=self._is_secure)

    @property
    def _is_secure(self) -> bool:
        return self.request.url.scheme == "https"

    def _set_cookie(self, response: Response, name: str, value: str, seconds: int | None) -> None:
        response.set_cookie(
            name, value, max_age=seconds, path="/ui", httponly=True, samesite="strict", secure=self._is_secure
        )

    def _common_context(self) -> dict[str, Any]:
        """What every page has: the menu, the token, who is signed in."""
        return {
            "visit": self,
            "csrf_token": self.csrf,
            "once": secrets.token_hex(16),
            "flash": unquote(self.request.cookies.get(FLASH, ""))[:_FLASH_CHARACTERS_MAX],
            "menu": self.site.menu(self.may, self.request.url.path),
            "version": self.services.version,
        }

    def _follow(self, key: Hashable, template: str, load: Load, fixed: Mapping[str, Any]) -> Response:
        place = self.services.stream_places.take(self.caller)

        def draw(loaded: Mapping[str, Any]) -> dict[str, str]:
            # Each viewer has its own tokens: the script writes them into forms that come with an update.
            shared = {"visit": self, "csrf_token": "", "once": "", "is_fragment": True, "is_live": True}
            return self.site.fragments(template, {**fixed, **loaded, **shared})

        variant = (self.caller.scopes, self.request.query_params.get("tenant"))
        news = self.site.live.follow(key, load, variant=variant, draw=draw, idle_seconds=_PING_SECONDS)
        headers = {"X-Accel-Buffering": "no"}
        return LiveStream(place, self._frames(news), media_type="text/event-stream", headers=headers)

    async def _frames(self, news: AsyncGenerator[dict[str, str] | str | None, None]) -> AsyncGenerator[bytes, None]:
        gate, ends_at = self.services.gate, time.monotonic() + STREAM_SECONDS_MAX
        self.services.counts.add("event_streams", 1)
        try:
            yield b"retry: 2000\n\n"
            async with aclosing(news):
                async for one in news:
                    with suppress(DatabaseError):
                        if not await gate.is_still_open(self.caller):
                            yield b"event: leave\ndata: {}\n\n"
                            return
                    yield _frame(one)
                    if time.monotonic() > ends_at:
                        return
        except Gone:
            yield b"event: leave\ndata: {}\n\n"
        finally:
            self.services.counts.add("event_streams", -1)


class Enter:
    """A dependency that admits visitors with this scope, by their browser session."""

    def __init__(self, scope: Scope, *, checks_token: bool = True) -> None:
        self.scope = scope
        self.checks_token = checks_token

    async def __call__(self, request: Request) -> Visit:
        visit = await visit_of(request, self.scope)
        if request.method == "POST" and self.checks_token:
            await visit.require_token()
        return visit


Reader = Annotated[Visit, Depends(Enter(Scope.READ))]
Submitter = Annotated[Visit, Depends(Enter(Scope.SUBMIT))]
Uploader = Annotated[Visit, Depends(Enter(Scope.SUBMIT, checks_token=False))]
"""The view reads the form itself, as it arrives, and calls `visit.check_token` before it accepts anything."""
Operator = Annotated[Visit, Depends(Enter(Scope.OPERATE))]
Admin = Annotated[Visit, Depends(Enter(Scope.ADMIN))]


async def visit_of(request: Request, scope: Scope) -> Visit:
    """A visitor with a session for this scope; no session is needed until the first key is created."""
    found = services(request)
    tenant = request.query_params.get("tenant") or None
    if tenant is not None and (len(tenant) > _TENANT_CHARACTERS_MAX or "\0" in tenant):
        raise InvalidInput("the tenant must have 1 to 100 characters", param="tenant")
    token = request.cookies.get(SESSION)
    session = None if token is None else await found.core.sessions.find(token)
    if session is not None and token is not None:
        home = Caller(session.holder.tenant, session.holder.scopes, session.holder.id)
        request.scope[CALLER] = home
        request.state.visit = Visit(request, home, session.name, token)  # a visitor who is refused keeps the menu
        caller = admit(home, scope, tenant)
        request.state.visit = visit = Visit(request, caller, session.name, token)
        return visit
    if not await found.gate.is_open_to_all():
        raise Unauthorized("this needs a key: sign in first")
    caller = admit(EVERYBODY, scope, tenant)
    request.state.visit = visit = Visit(request, caller, None, _seed(request))
    return visit


def stranger(request: Request) -> Visit:
    """A visitor who has not signed in."""
    request.state.visit = visit = Visit(request, None, None, _seed(request))
    return visit


def wants_stream(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "")


def finish(request: Request, response: Response) -> Response:
    """The headers and cookies of every page."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    visit: Visit | None = getattr(request.state, "visit", None)
    if visit is not None:
        visit.keep_seed(response)
        visit.drop_flash(response)
    return response


async def show_error(request: Request, status: int, message: str, headers: Mapping[str, str]) -> Response:
    """An error as a page: what is wrong, and what to do."""
    visit: Visit | None = getattr(request.state, "visit", None)
    if visit is None:
        visit = await _find_visitor(request)
    response = visit.draw(
        "error.html",
        status=status,
        title=HTTPStatus(status).phrase,
        message=message[:1].upper() + message[1:],
        remedy=_REMEDIES.get(status, "Go back and try again."),
        code=status,
    )
    response.headers.update(headers)
    return response


async def _find_visitor(request: Request) -> Visit:
    """An error page has the menu of the signed-in visitor, if that can be determined."""
    with suppress(BatchwrightError):
        return await visit_of(request, Scope.READ)
    return stranger(request)


def _seed(request: Request) -> str:
    return request.cookies.get(SEED) or secrets.token_urlsafe(32)


def _with_query(path: str, query: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in query.items() if value not in (None, "", [], ())}
    return f"{path}?{urlencode(kept, doseq=True)}" if kept else path


def _frame(news: dict[str, str] | str | None) -> bytes:
    match news:
        case None:
            return b": ping\n\n"
        case str():
            return b"event: trouble\ndata: %b\n\n" % orjson.dumps({"message": news})
        case _:
            return b"event: patch\ndata: %b\n\n" % orjson.dumps(news)
