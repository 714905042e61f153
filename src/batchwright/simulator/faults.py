"""Faults on demand: the kinds of faults, how a rule is written, and which requests it hits."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from batchwright.errors import InvalidInput

_ANY = frozenset({"rate", "match", "model", "times", "limit"})
_STATUS = frozenset({"code", "message", "retry_after"})
KINDS: dict[str, frozenset[str]] = {
    "array": frozenset(),
    "bad_json": frozenset(),
    "big": frozenset({"bytes"}),
    "drip": frozenset({"bytes", "every"}),
    "drop": frozenset({"after"}),
    "empty": frozenset(),
    "error_body": frozenset({"code", "message"}),
    "hang": frozenset({"seconds"}),
    "not_json": frozenset(),
    "pretty": frozenset({"crlf"}),
    "reset": frozenset(),
    "slow": frozenset({"seconds"}),
    "truncate": frozenset({"bytes"}),
    "wrong_length": frozenset({"by"}),
}
"""Every kind other than the statuses 400 to 599, with its options."""

IN_PROMPT = re.compile(rb"\[\[fault:([a-z0-9_.:=-]{1,200})\]\]")
"""A prompt that contains `[[fault:500]]` gets that fault."""

_NUMBERS = {"after", "by", "bytes", "crlf", "every", "limit", "rate", "retry_after", "seconds", "times"}
_BYTES_MAX = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One rule. The seed and the bodies decide which requests it hits, not the order of arrival."""

    kind: str
    rate: float = 1.0
    """The share of requests that it hits."""
    match: str | None = None
    """Only bodies that contain this text."""
    model: str | None = None
    """Only requests for this model."""
    times: int | None = None
    """Only the first requests with the same body, so that a retry succeeds."""
    limit: int | None = None
    """Maximum number of requests that it hits in total."""
    after: int | None = None
    by: int = -10
    bytes: int | None = None
    code: str | None = None
    crlf: int = 0
    every: float = 0.1
    message: str | None = None
    retry_after: float | None = None
    seconds: float | None = None

    @property
    def status(self) -> int | None:
        return int(self.kind) if self.kind.isdecimal() else None

    @property
    def is_early(self) -> bool:
        """Whether it happens before the model has done any work."""
        return self.kind.isdecimal() or self.kind in ("hang", "reset") or (self.kind == "drop" and self.after is None)

    def __str__(self) -> str:
        fields = dataclasses.fields(self)[2:]
        said = [f"{one.name}={_plain(getattr(self, one.name))}" for one in fields if self._differs(one)]
        return ":".join([self.kind, *([_plain(self.rate)] if self.rate != 1 else []), *said])

    def _differs(self, field: dataclasses.Field[Any]) -> bool:
        return bool(getattr(self, field.name) != field.default)


def parse(text: str) -> Fault:
    """`429:0.05:retry_after=2`: the kind, the share of requests (by default all), and other options."""
    kind, *rest = text.strip().split(":")
    allowed = _allowed(text, kind)
    if rest and "=" not in rest[0]:
        rest[0] = f"rate={rest[0]}"
    values: dict[str, Any] = {}
    for part in rest:
        name, equals, value = part.partition("=")
        if not equals or name not in allowed:
            raise InvalidInput(
                f"fault {text!r}: {part!r} is not an option; {kind} accepts {', '.join(sorted(allowed))}"
            )
        values[name] = _number(text, name, value) if name in _NUMBERS else value
    return Fault(kind=kind, **values)


def _allowed(text: str, kind: str) -> frozenset[str]:
    if re.fullmatch("[45][0-9][0-9]", kind):
        return _ANY | _STATUS
    if kind not in KINDS:
        raise InvalidInput(f"fault {text!r}: there is no kind {kind!r}; use 400 to 599, {', '.join(KINDS)}")
    return _ANY | KINDS[kind]


def _number(text: str, name: str, value: str) -> float | int:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    most = 1.0 if name == "rate" else _BYTES_MAX
    least = -_BYTES_MAX if name == "by" else 0
    if not least <= number <= most:
        raise InvalidInput(f"fault {text!r}: {name}={value} must be a number from {least} to {_plain(most)}")
    return number if name in ("rate", "every", "retry_after", "seconds") else int(number)


class Faults:
    """The rules in force; the first that hits a request decides."""

    def __init__(self, rules: Sequence[Fault], seed: int) -> None:
        self._seed = seed
        self.put(rules)

    def put(self, rules: Sequence[Fault]) -> None:
        self.rules = list(rules)
        self.fired = [0] * len(self.rules)

    def choose(self, model: str, body: bytes, key: int, asked: int) -> Fault | None:
        """`asked` is how often this body has arrived so far, including this time."""
        for index, rule in enumerate(self.rules):
            if self._hits(index, rule, model, body, key, asked):
                self.fired[index] += 1
                return rule
        return None

    def _hits(self, index: int, rule: Fault, model: str, body: bytes, key: int, asked: int) -> bool:
        if rule.limit is not None and self.fired[index] >= rule.limit:
            return False
        if rule.model is not None and rule.model != model:
            return False
        if rule.times is not None and asked > rule.times:
            return False
        if rule.match is not None and rule.match.encode() not in body:
            return False
        return (
            rule.rate >= 1
            or xxhash.xxh3_64_intdigest(b"%d %d %d" % (index, key, asked), self._seed) < rule.rate * 2**64
        )


def spoil(fault: Fault, body: bytes) -> bytes:
    """The body of an answer with this fault; kinds that do not affect the body return it unchanged."""
    match fault.kind:
        case "array":
            return b"[" + body + b"]"
        case "big":
            return _padded(body, fault.bytes or 17_000_000)
        case "empty":
            return b""
        case "error_body":
            message = fault.message or "a fault rule asks for an error in an answer with status 200"
            error = {"message": message, "type": "server_error", "param": None, "code": fault.code or "engine_error"}
            return orjson.dumps({"error": error})
        case "not_json":
            return b"<html><body><h1>Bad Gateway</h1></body></html>"
        case "pretty":
            pretty = orjson.dumps(orjson.loads(body), option=orjson.OPT_INDENT_2) + b"\n"
            return pretty.replace(b"\n", b"\r\n") if fault.crlf else pretty
        case _:
            return body


def _padded(body: bytes, size: int) -> bytes:
    """The same answer with an extra field that pads it to the requested length, unless it is already longer."""
    head = body[:-1] + b',"padding":"'
    return head + b"x" * max(0, size - len(head) - 2) + b'"}'


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
