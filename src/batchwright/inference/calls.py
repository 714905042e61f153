"""Paid calls to a model server: recorded before they are sent, and settled with their answers and cost.

    begin ── the intent is committed
      └─ sent once
           ├─ settle ── answers and cost, in one commit
           └─ fail ──── refused, lost, or unusable; it may have cost something anyway

A call that began but neither settled nor failed belongs to a process that died: it may have been paid for.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import orjson

from batchwright.errors import Fatal, OperationError, RateLimited, SchemaInvalid, Transient
from batchwright.inference.answers import Answer, Failure, Usage, Verdict
from batchwright.inference.tokens import share_out

EMBEDDING = "embedding"
ENTITIES = "entities"
_CREDENTIAL_STATUSES = frozenset({401, 402, 403, 404, 405})
"""Errors that no input can change: the key, the account, the model's name or the url is wrong."""
_CREDENTIAL_CODES = frozenset(
    {
        "account_deactivated",
        "api_key_invalid",
        "billing_hard_limit_reached",
        "billing_not_active",
        "insufficient_balance",
        "insufficient_credits",
        "insufficient_quota",
        "invalid_api_key",
        "invalid_authentication",
        "model_not_found",
    }
)
_MISDIRECTED = frozenset({Failure.UNSENDABLE, "redirect_refused"})
"""Our own codes, like those in _NO_ANSWER: they count only if the server did not write them."""
_REFUSED_STATUSES = frozenset({400, 413, 422})
_TRANSIENT_STATUSES = frozenset({408, 409, 425})
_NO_ANSWER = frozenset(
    {Failure.CONNECT, Failure.DEADLINE, Failure.EXPIRED, Failure.LOST, Failure.TIMEOUT, "invalid_response"}
)
_NAMED_MAX = 5
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def new_call_id() -> str:
    return f"call_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The intent of one request, known before it is sent."""

    kind: str
    """`embedding` or `entities`."""
    model: str | None
    """None for a local model, which costs nothing."""
    keys: Sequence[bytes]
    """The content keys that it answers, one for each input."""
    tokens_each: Sequence[int]
    """Estimated tokens of each input, by which the cost is divided."""
    tokens_guess: int
    """Estimated tokens of the prompt and the longest answer."""
    id: str = field(default_factory=new_call_id)
    """Sent as x-request-id."""


class Ledger(Protocol):
    """Where calls are recorded; the caller implements it with the database. Each call begins, then settles or fails."""

    async def begin(self, call: Call) -> None:
        """Commit the intent. If this raises, neither this call nor any call that has not begun is sent."""

    async def settle(self, call: Call, values: Mapping[bytes, bytes], usage: Usage, answer: Answer) -> None:
        """Store the answers by key and the cost, in one commit. Keys without a usable answer are left out.

        An answer that cannot be stored is paid for again later, so an implementation retries for a while.
        """

    async def fail(self, call: Call, error: OperationError, answer: Answer) -> None:
        """Record why there is nothing to store; `answer.usage` says what it cost anyway."""


class Refused(SchemaInvalid):
    """The server refuses the request as it is; with many inputs, the fault may be in one of them."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param
        """The field of the request that the server named."""


class InputRefused(SchemaInvalid):
    """Some inputs were refused or got no usable answer, each on its own; `codes` says why, by key."""

    def __init__(self, model: str | None, codes: Mapping[bytes, str], *, count: int) -> None:
        few = sorted(codes.items())[:_NAMED_MAX]
        names = ", ".join(f"{key.hex()[:16]} ({code})" for key, code in few)
        more = f" and {len(codes) - len(few)} more" if len(codes) > len(few) else ""
        different = set(codes.values())
        super().__init__(
            f"the model {model} gave nothing usable for {len(codes)} of {count} texts: {names}{more}",
            code=different.pop() if len(different) == 1 else "input_refused",
        )
        self.codes = dict(codes)


def share_usage(call: Call, usage: Usage) -> dict[bytes, Usage]:
    """The amount of each input, by its share of the tokens; the amounts add up to the total."""
    parts = {
        name: share_out(total, call.tokens_each)
        for name in ("input", "output", "cached", "reasoning")
        if (total := getattr(usage, name)) is not None
    }
    return {key: Usage(**{name: part[place] for name, part in parts.items()}) for place, key in enumerate(call.keys)}


def error_of(answer: Answer, *, inputs: int) -> OperationError | None:
    """What an answer means for the work: the one place that turns statuses and codes into error classes.

    Messages hold the status, a machine's code and the request's id, and nothing else of what the server wrote, which
    may repeat the prompt or the key.
    """
    if answer.succeeded:
        return None
    status, code, param = _read_error(answer)
    said = _describe(answer, status, code)
    if code in _CREDENTIAL_CODES or status in _CREDENTIAL_STATUSES or answer.code in _MISDIRECTED:
        message = f"{said}; correct the key, the account, the model or the url of the gateway"
        return Fatal(message, scope="credential", code=code or f"http_{status}")
    if status == 429:
        return RateLimited(said, retry_after=answer.retry_after, code=code or "rate_limited")
    if answer.code in _NO_ANSWER and (status is None or status < 400 or answer.code != "invalid_response"):
        return Transient(said, code=code)
    if status in _REFUSED_STATUSES or answer.code == Failure.TOO_LARGE:
        of = "its input" if inputs == 1 else f"one or more of its {inputs} inputs"
        return Refused(f"{said}; the fault is in {of} or in its settings", code=code or f"http_{status}", param=param)
    if status in _TRANSIENT_STATUSES or status is None or not 400 <= status < 500:
        return Transient(said, code=code or f"http_{status}")
    return Fatal(said, scope="item", code=code or f"http_{status}")


class _Error(msgspec.Struct):
    """The error in a body, in OpenAI's format or a simpler variant of it."""

    code: Any = None
    type: Any = None
    param: Any = None


def _read_error(answer: Answer) -> tuple[int | None, str | None, str | None]:
    """Status, code and field. Some servers put a status into the body of a 200."""
    status, found = answer.status, _find_error(answer.body)
    if answer.code == "error_in_response" and type(found.code) is int and 400 <= found.code < 600:
        status = found.code
    is_page = answer.code == "invalid_response" and status is not None and status >= 400
    ours = None if is_page or answer.code == "error_in_response" else answer.code
    words = [one.lower() for one in (found.code, found.type) if isinstance(one, str) and _CODE.fullmatch(one)]
    known = next((word for word in words if word in _CREDENTIAL_CODES), None)
    code = known or ours or next(iter(words), None)
    return status, code, found.param if isinstance(found.param, str) else None


def _find_error(body: bytes) -> _Error:
    try:
        whole = orjson.loads(body)
        return msgspec.convert(whole.get("error") or whole, _Error)
    except (orjson.JSONDecodeError, AttributeError, msgspec.ValidationError):
        return _Error()


def _describe(answer: Answer, status: int | None, code: str | None) -> str:
    if status is None:
        said = f"the model server gave no answer: {code}"
    else:
        said = f"the model server answered {status}" + (f" {code}" if code is not None else "")
    id = answer.request_id
    return f"{said} (request {id})" if id is not None and _REQUEST_ID.fullmatch(id) else said


def local_answer(seconds: float) -> Answer:
    """What a ledger gets for work done in this process."""
    return Answer(
        verdict=Verdict.ANSWER,
        status=None,
        body=b"{}",
        code=None,
        message="",
        retry_after=None,
        request_id=None,
        usage=Usage(input=0, output=0),
        is_overload=False,
        seconds=seconds,
        succeeded=True,
    )
