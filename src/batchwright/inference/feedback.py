"""What a server says about its limits: refusals with the time to wait, and OpenAI's `x-ratelimit-*` headers."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.inference.answers import Answer, RateHeaders
from batchwright.inference.settings import seconds

REFUSED = 429
_MINUTE = 60.0
_RESET_SECONDS_MAX = 300.0
"""If a server announces a longer pause than this, we try again after this time."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a server has left for us of one kind, requests or tokens."""

    count: float | None = None
    limit_per_second: float | None = None
    """Limits are per minute, or per day: then the true limit per minute is even lower."""
    seconds: float | None = None
    """Nothing is left; the next one is available after this time."""

    def is_below(self, per_second: float) -> bool:
        """Whether this lowers a bucket that holds a second's worth, and at least one."""
        return self.count is not None and self.count < max(1.0, per_second)


_NOTHING = Left()


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What one answer reports to all senders to the same server."""

    is_refused: bool = False
    retry_after: float | None = None
    seconds_ago: float = 0.0
    """When the request was sent: refusals of requests that were sent before a cut say nothing new."""
    requests: Left = _NOTHING
    tokens: Left = _NOTHING


NO_FEEDBACK = Feedback()


def read_feedback(answer: Answer) -> Feedback:
    """NO_FEEDBACK for an answer that has no such headers and is not a refusal."""
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
        # If the server's bucket is full after this time, it gains one after the matching fraction of it. If the server
        # resets the whole limit at once instead, a refusal will say how long to wait.
        wait = min(until_full / (most or 1.0), _RESET_SECONDS_MAX)
    return Left(count, None if most is None else most / _MINUTE, wait)


def _number(text: str | None) -> float | None:
    """The number if it is finite and not negative, otherwise None."""
    text = (text or "").strip()
    return float(text[:15]) if text.isascii() and text.isdigit() else None


def _duration(text: str | None) -> float | None:
    """Parses durations such as 6m0s or 20ms; a bare number such as 1.5 is seconds."""
    text = (text or "").strip()[:30]
    found = seconds(text)
    if isinstance(found, str):
        try:
            found = float(found)
        except ValueError:
            return None
    return float(found) if 0 <= found < float("inf") else None
