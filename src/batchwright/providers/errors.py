"""What a provider's error means: each adapter has a table, and the rules of HTTP cover the rest.

429                      rate_limited     wait, then retry
408, 425, 5xx            transient        retry later
400, 413, 415, 422       schema_invalid   the same input would fail the same way
401, 402, 403            credential       no job of this account will work until a person acts
other 3xx and 4xx        fatal
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from batchwright.errors import Fatal, OperationError, RateLimited, SchemaInvalid, Transient
from batchwright.inference.answers import retry_after_seconds
from batchwright.inference.http import NoAnswer, Response
from batchwright.providers.contract import InDoubt

MESSAGE_CHARACTERS_MAX = 500

log = logging.getLogger(__name__)


class Kind(StrEnum):
    """The classes of errors, as written in tables, results and states."""

    RATE_LIMITED = "rate_limited"
    TRANSIENT = "transient"
    SCHEMA_INVALID = "schema_invalid"
    FATAL = "fatal"
    CREDENTIAL = "credential"


_BY_STATUS = {
    400: Kind.SCHEMA_INVALID,
    401: Kind.CREDENTIAL,
    402: Kind.CREDENTIAL,
    403: Kind.CREDENTIAL,
    408: Kind.TRANSIENT,
    413: Kind.SCHEMA_INVALID,
    415: Kind.SCHEMA_INVALID,
    422: Kind.SCHEMA_INVALID,
    425: Kind.TRANSIENT,
    429: Kind.RATE_LIMITED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTable:
    """How one provider's errors differ from the rules of HTTP. The first match wins: text, then code, then status."""

    by_text: Mapping[str, Kind] = field(default_factory=dict)
    """Keyed by a part of the message, in lower case."""
    by_code: Mapping[str, Kind] = field(default_factory=dict)
    by_status: Mapping[int, Kind] = field(default_factory=dict)

    def kind(self, status: int | None, said: Said) -> Kind:
        message = said.message.lower()
        for text, kind in self.by_text.items():
            if text in message:
                return kind
        for code in said.codes:
            if code in self.by_code:
                return self.by_code[code]
        if status is None:
            return Kind.FATAL
        if status in self.by_status:
            return self.by_status[status]
        return Kind.TRANSIENT if status >= 500 else _BY_STATUS.get(status, Kind.FATAL)


@dataclass(frozen=True, slots=True)
class Said:
    """The content of an error document: its codes, the most specific first, and its message."""

    codes: tuple[str, ...] = ()
    message: str = ""

    @property
    def code(self) -> str | None:
        return self.codes[0] if self.codes else None


def read_error(document: Any) -> Said:
    """The error in a document, in any of the shapes that providers use.

    {"error": {…}}, {"error": "…"}, {"code", "message", "innerError": {…}}, {"detail": …}, or a list with one of them.
    """
    if isinstance(document, list) and document:
        return read_error(document[0])
    if not isinstance(document, Mapping):
        return Said((), _short(document) if isinstance(document, str) else "")
    if isinstance(inner := document.get("error"), (Mapping, str)):
        return read_error(inner)
    inner = document.get("innerError") or document.get("innererror")
    deeper = read_error(inner) if isinstance(inner, Mapping) else Said()
    own = [document.get(name) for name in ("code", "status", "type", "kind")]
    own = [*_reasons(document.get("details")), *own]
    codes = (*deeper.codes, *(str(code) for code in own if isinstance(code, (str, int)) and code not in ("error", "")))
    message = document.get("message") or document.get("detail") or deeper.message
    return Said(codes, _short(_text(message)))


def error_of(table: ErrorTable, response: Response, *, now: float) -> OperationError:
    """The error to raise for a response that is not 2xx; `now` is the wall clock."""
    said = _said(response)
    kind = table.kind(response.status, said)
    message = f"{response.status}: {said.message}" if said.message else f"the provider answered {response.status}"
    retry_after = retry_after_seconds(response.headers.get("retry-after"), now=now)
    return exception(kind, message, code=said.code or f"http_{response.status}", retry_after=retry_after)


def exception(kind: Kind, message: str, *, code: str | None, retry_after: float | None = None) -> OperationError:
    match kind:
        case Kind.RATE_LIMITED:
            return RateLimited(message, retry_after=retry_after, code=code)
        case Kind.TRANSIENT:
            return Transient(message, code=code)
        case Kind.SCHEMA_INVALID:
            return SchemaInvalid(message, code=code)
        case Kind.CREDENTIAL:
            return Fatal(message, scope="credential", code=code)
        case Kind.FATAL:
            return Fatal(message, code=code)


def describe(table: ErrorTable, document: Any, status: int | None = None, *, code: str = "failed") -> dict[str, Any]:
    """An error of a job or of a result, as it is stored: kind, code and message."""
    said = read_error(document)
    return {"kind": table.kind(status, said).value, "code": said.code or code, "message": said.message}


@contextmanager
def reading() -> Iterator[None]:
    """Wraps the parsing of a response: a response with an unexpected shape becomes a transient error."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        log.warning("a provider's answer has an unexpected shape: %s", type(error).__name__)
        raise Transient("the provider's answer has an unexpected shape", code="unexpected_answer") from error


async def submit_once(table: ErrorTable, asking: Awaitable[Response], *, now: Callable[[], float]) -> Any:
    """The response to the one request that costs money, as JSON.

    InDoubt means that the provider may have accepted the job. All other errors mean that it has not.
    """
    try:
        response = await asking
    except NoAnswer as error:
        if error.was_sent:
            raise InDoubt(str(error), code=error.code) from None
        raise
    if response.status >= 500:
        raise InDoubt(f"the provider answered {response.status}", code=f"http_{response.status}")
    if not response.is_ok:
        raise error_of(table, response, now=now())
    try:
        return response.json()
    except Transient as error:
        raise InDoubt(str(error), code=error.code) from None


def _reasons(details: Any) -> list[Any]:
    """The reasons in the details of an error: Google sends a list of them, Anthropic a single one."""
    found = details if isinstance(details, list) else [details]
    given = [detail for detail in found if isinstance(detail, Mapping)]
    return [detail[name] for detail in given for name in ("reason", "error_code") if name in detail]


def _said(response: Response) -> Said:
    try:
        return read_error(orjson.loads(response.body))
    except orjson.JSONDecodeError:
        return Said()


def _short(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARACTERS_MAX else text[: MESSAGE_CHARACTERS_MAX - 1] + "…"


def _text(message: Any) -> str:
    if message is None:
        return ""
    return message if isinstance(message, str) else orjson.dumps(message).decode()
