"""What an answer means: whether it is usable, whether and when to resend the request, and what it cost.

Every request passes through here, so the values are msgspec structs: creating frozen dataclasses takes six times as
long.

The status and whether we had connected decide, never the name of an exception:

    answer       2xx with a JSON object, 3xx, 4xx, too large,      recorded as it is
                 cut off by the deadline
    unavailable  no connection, 429, 502, 503, 529                 retried until the deadline
    counted      other 5xx, 408, no or half an answer, not JSON,   resent up to max_retries times
                 2xx with an error and no result
"""

from __future__ import annotations

import email.utils
import random
import re
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import orjson

RETRY_AFTER_SECONDS_MAX = 300.0
TOKENS_MAX = 2**31 - 1
"""Higher token counts of a request are not believed, so that sums over a batch stay within a bigint."""
_UNAVAILABLE = frozenset({429, 502, 503, 529})
_OVERLOAD = frozenset({429, 503, 529})
_LINE_BREAKS = bytes.maketrans(b"\r\n", b"  ")
_ABSENT = msgspec.Raw(b"")
_HTML = re.compile(rb"\s*<(!doctype html|html|head|body)", re.IGNORECASE)


class Verdict(StrEnum):
    """What happens to a request after an attempt."""

    ANSWER = "answer"
    UNAVAILABLE = "unavailable"
    COUNTED = "counted"


_ANSWER = Verdict.ANSWER
"""Used for every answer; access through the enum takes five times as long."""


class Failure(StrEnum):
    """Why there is no complete answer. Only CONNECT and EXPIRED mean that nothing was sent."""

    CONNECT = "connection_failed"
    DEADLINE = "request_aborted"
    EXPIRED = "batch_expired"
    LOST = "connection_lost"
    TIMEOUT = "request_timeout"
    TOO_LARGE = "response_too_large"
    UNSENDABLE = "invalid_request"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as the server counted them; None if it did not report them."""

    input: int | None = None
    output: int | None = None
    cached: int | None = None
    reasoning: int | None = None

    @property
    def total(self) -> int | None:
        return None if self.input is None else self.input + (self.output or 0)


UNKNOWN = Usage()


class RateHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's `x-ratelimit-*` headers, unparsed."""

    requests_limit: str | None = None
    requests_remaining: str | None = None
    requests_reset: str | None = None
    tokens_limit: str | None = None
    tokens_remaining: str | None = None
    tokens_reset: str | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The raw reply, before it is judged."""

    status: int | None = None
    body: bytes = b""
    retry_after: str | None = None
    request_id: str | None = None
    rates: RateHeaders | None = None
    location: str | None = None
    """The target of a redirect."""
    failure: Failure | None = None
    detail: str = ""
    seconds: float = 0.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, judged; `body` is one line of JSON that can be spliced into an envelope."""

    verdict: Verdict
    status: int | None
    body: bytes
    code: str | None
    """None if the server's own body is used as it is, whatever its status."""
    message: str
    retry_after: float | None
    request_id: str | None
    usage: Usage
    is_overload: bool
    """Whether the server showed that it is overloaded: 429, 503, 529 or no answer in time."""
    seconds: float
    succeeded: bool
    """Whether the server answered with a 2xx, and with a result."""
    rates: RateHeaders | None = None
    """The server's limits, if it reported them."""


def classify(reply: Reply, *, now: float) -> Answer:
    """Judge a reply; `now` is the wall clock, to which a Retry-After date is compared."""
    body, is_object, top = _check(reply.body)
    status, failure = reply.status, reply.failure
    is_good = failure is None and status is not None and 200 <= status < 300
    if is_good and is_object and top.error is None:  # first, because nearly all answers are like this
        verdict, code, message = _ANSWER, None, ""
    else:
        code, message = _find_problem(reply, is_object, top)
        verdict = _judge(reply, code)
    return Answer(
        verdict=verdict,
        status=status,
        body=body,
        code=code,
        message=message,
        retry_after=retry_after_seconds(reply.retry_after, now=now) if reply.retry_after else None,
        request_id=reply.request_id,
        usage=_read_usage(top.usage),
        is_overload=status in _OVERLOAD if failure is None else failure is Failure.TIMEOUT,
        seconds=reply.seconds,
        succeeded=is_good and code is None,
        rates=reply.rates,
    )


def retry_after_seconds(text: str | None, *, now: float) -> float | None:
    """Seconds or an HTTP date, capped; anything else is ignored."""
    if not text:
        return None
    if text.strip().isascii() and text.strip().isdigit():
        return min(float(text[:12]), RETRY_AFTER_SECONDS_MAX)
    try:
        date = email.utils.parsedate_to_datetime(text)
        return min(max(date.timestamp() - now, 0.0), RETRY_AFTER_SECONDS_MAX)
    except (ValueError, TypeError, OverflowError):
        return None


def pause_seconds(answer: Answer, attempt: int, *, initial: float, longest: float) -> float:
    """How long to wait after the given attempt (1 is the first); never less than the server asked for.

    Half of the pause is random, so that requests that failed together are not retried at the same moment.
    """
    pause = min(initial * 2.0 ** min(attempt - 1, 30), longest) * random.uniform(0.5, 1.0)
    return max(pause, (answer.retry_after or 0.0) * random.uniform(1.0, 1.1))


class _Top(msgspec.Struct):
    """The few fields that we need. The decoder skips all others, but checks their syntax."""

    usage: Any = None
    error: Any = None
    choices: msgspec.Raw = _ABSENT
    data: msgspec.Raw = _ABSENT
    output: msgspec.Raw = _ABSENT
    results: msgspec.Raw = _ABSENT

    @property
    def is_error(self) -> bool:
        results = (self.choices, self.data, self.output, self.results)
        return self.error is not None and all(bytes(one) in (b"", b"null", b"[]") for one in results)


_Count = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] | None


class _Details(msgspec.Struct):
    cached_tokens: _Count = None
    reasoning_tokens: _Count = None


class _Counts(msgspec.Struct):
    """A usage whose counts are all valid."""

    prompt_tokens: _Count = None
    input_tokens: _Count = None
    total_tokens: _Count = None
    completion_tokens: _Count = None
    output_tokens: _Count = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _UsualTop(_Top):
    usage: _Counts | None = None


_EMPTY = _Top()
_decode_usual = msgspec.json.Decoder(_UsualTop).decode
_decode_top = msgspec.json.Decoder(_Top).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _check(body: bytes) -> tuple[bytes, bool, _Top]:
    """The body as one line. A body that is not a JSON object becomes a JSON string of its text.

    JSON allows no raw line break inside a string, so in a checked body each one is between tokens.
    """
    try:
        if not body.isascii():
            body.decode()  # The decoder does not look into strings that it skips.
        top = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return orjson.dumps(body.decode("utf-8", "replace")), False, _EMPTY
    if 10 in body or 13 in body:  # \n or \r; searching for them as numbers is eight times as fast
        body = body.translate(_LINE_BREAKS)
    return body, True, top


def _decode(body: bytes) -> _Top:
    try:
        return _decode_usual(body)
    except msgspec.DecodeError:
        return _decode_odd(body)


def _decode_odd(body: bytes) -> _Top:
    try:
        return _decode_top(body)
    except msgspec.DecodeError:
        _decode_object(body)  # A number such as 1e999 is valid JSON but fits no float: only the usage is unknown.
        return _EMPTY


def _find_problem(reply: Reply, is_object: bool, top: _Top) -> tuple[str | None, str]:
    if reply.failure is not None:
        return reply.failure.value, reply.detail
    status = reply.status or 0
    if 300 <= status < 400:
        where = _name_target(reply.location)
        message = f"the server answered {status}{where}; redirects are not followed, correct the gateway's url"
        return "redirect_refused", message
    if not is_object:
        is_html = _HTML.match(reply.body) is not None
        what = "HTML, as a web site or a proxy does" if is_html else "something that is not a JSON object"
        return "invalid_response", f"the server answered {status} with {what}"
    if 200 <= status < 300 and top.is_error:
        return "error_in_response", f"the server answered {status}, but with an error and no result"
    return None, ""


def _name_target(location: str | None) -> str:
    """The server that a redirect leads to, without path and query, which may hold secrets."""
    try:
        parts = urlsplit(location or "")
        host = parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
    except ValueError:
        return ""
    return f", a redirect to {parts.scheme}://{host}" if parts.scheme in ("http", "https") and host else ""


def _judge(reply: Reply, code: str | None) -> Verdict:
    if reply.failure is not None:
        return _FAILURES[reply.failure]
    status = reply.status or 0
    if status in _UNAVAILABLE:
        return Verdict.UNAVAILABLE
    if status >= 500 or status < 200 or status == 408 or (status < 300 and code is not None):
        return Verdict.COUNTED
    return Verdict.ANSWER


_FAILURES = {
    Failure.CONNECT: Verdict.UNAVAILABLE,
    Failure.DEADLINE: Verdict.ANSWER,
    Failure.EXPIRED: Verdict.ANSWER,
    Failure.LOST: Verdict.COUNTED,
    Failure.TIMEOUT: Verdict.COUNTED,
    Failure.TOO_LARGE: Verdict.ANSWER,
    Failure.UNSENDABLE: Verdict.ANSWER,
}


def _read_usage(found: Any) -> Usage:
    """Chat, completions and embeddings report prompt and completion tokens, responses report input and output tokens,
    and some rerankers report only a total, which is all input."""
    if type(found) is _Counts:
        return _sum_up(found)
    if not isinstance(found, dict):
        return UNKNOWN
    of_input = found.get("prompt_tokens_details") or found.get("input_tokens_details")
    of_output = found.get("completion_tokens_details") or found.get("output_tokens_details")
    return Usage(
        input=_read_count(found, "prompt_tokens", "input_tokens", "total_tokens"),
        output=_read_count(found, "completion_tokens", "output_tokens"),
        cached=_read_count(of_input, "cached_tokens") if isinstance(of_input, dict) else None,
        reasoning=_read_count(of_output, "reasoning_tokens") if isinstance(of_output, dict) else None,
    )


def _sum_up(found: _Counts) -> Usage:
    """The same for a regular usage, in a third of the time."""
    input, output = found.prompt_tokens, found.completion_tokens
    if input is None:
        input = found.total_tokens if found.input_tokens is None else found.input_tokens
    of_input = found.prompt_tokens_details or found.input_tokens_details
    of_output = found.completion_tokens_details or found.output_tokens_details
    return Usage(
        input=input,
        output=found.output_tokens if output is None else output,
        cached=None if of_input is None else of_input.cached_tokens,
        reasoning=None if of_output is None else of_output.reasoning_tokens,
    )


def _read_count(found: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = found.get(name)
        if type(value) is int and 0 <= value <= TOKENS_MAX:  # a bool is not a count
            return value
    return None
