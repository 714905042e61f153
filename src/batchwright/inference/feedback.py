"""What a server says about its limits: refusals with the time to wait, and OpenAI's `x-ratelimit-*` headers."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.inference.answers import Answer, RateHeaders
from batchwright.inference.settings import seconds

REFUSED = 429
_MINUTE = 60.0
_RESET_SECONDS_MAX = 300.0
"""A server that says nothing will come for longer is asked again after so long."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a server has left for us of one kind, requests or tokens."""

    count: float | None = None
    limit_per_second: float | None = None
    """Limits are by the minute, or by the day: then the true one is lower still."""
    seconds: float | None = None
    """Nothing is left, and the next comes after so long."""

    def is_below(self, per_second: float) -> bool:
        """Whether it lowers a bucket that holds a second's worth, and at least one."""
        return self.count is not None and self.count < max(1.0, per_second)


_NOTHING = Left()


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What one answer says to all who send to the same server."""

    is_refused: bool = False
    retry_after: float | None = None
    seconds_ago: float = 0.0
    """When the request was sent: refusals of what was sent before a cut say nothing new."""
    requests: Left = _NOTHING
    tokens: Left = _NOTHING


NO_FEEDBACK = Feedback()


def read_feedback(answer: Answer) -> Feedback:
    """Of an answer that has no such headers and is no refusal, nothing is made."""
    rates, is_refused = answer.rates, answer.status == REFUSED
    if rates is None and not is_refused:
        return NO_FEEDBACK
    requests, tokens = (_NOTHING, _NOTHING) if rates is None else _read(rates)
    return Feedback(
        is_refused=is_refused,
        retry_after=answer.retry_after,
        seconds_ago=answer.seconds,
        requests=requests,
        tokens=tokens,
    )


def _read(rates: RateHeaders) -> tuple[Left, Left]:
    requests = _left(rates.requests_limit, rates.requests_remaining, rates.requests_reset)
    return requests, _left(rates.tokens_limit, rates.tokens_remaining, rates.tokens_reset)


def _left(limit: str | None, remaining: str | None, reset: str | None) -> Left:
    most, count = _number(limit), _number(remaining)
    most = most or None
    wait = None
    if count is not None and count < 1 and (until_full := _duration(reset)) is not None:
        # A bucket of theirs that is full after so long has one more after that part of it. Where the whole limit comes
        # at once, a refusal will say how long to wait.
        wait = min(until_full / (most or 1.0), _RESET_SECONDS_MAX)
    return Left(count, None if most is None else most / _MINUTE, wait)


def _number(text: str | None) -> float | None:
    """Not negative and finite, or nothing."""
    text = (text or "").strip()
    return float(text[:15]) if text.isascii() and text.isdigit() else None


def _duration(text: str | None) -> float | None:
    """Such as 6m0s, 20ms or 1.5, which is seconds."""
    text = (text or "").strip()[:30]
    found = seconds(text)
    if isinstance(found, str):
        try:
            found = float(found)
        except ValueError:
            return None
    return float(found) if 0 <= found < float("inf") else None
