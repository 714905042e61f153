"""What can be said of a batch before it ends: when that will be, whether in time, and what it has cost so far."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple

from batchwright.batches.settings import Price
from batchwright.batches.store import Batch, Pace
from batchwright.states import BatchStatus

EVERY_MODEL = "*"
LOW_SHARE = 0.75
"""A batch that needs more than this share of the time it has left is at a low risk of missing its deadline."""
_TOKENS_PER_PRICE = 1_000_000
_LONGEST = timedelta(days=365)


class DeadlineRisk(StrEnum):
    """How the pace of late fits the time that is left."""

    NONE = "none"
    """At this pace it ends well before its deadline; or the deadline does not count any more."""
    LOW = "low"
    """At this pace it ends in time, but in the last quarter of the time left."""
    HIGH = "high"
    """At this pace it does not end in time."""


class Outlook(NamedTuple):
    """When a batch will have its answers at the pace of late; None where nobody can know."""

    eta: datetime | None
    risk: DeadlineRisk | None


def outlook(batch: Batch, pace: Pace | None) -> Outlook:
    """Nothing is known of a batch that is not planned, is paused or has answered nothing of late."""
    if batch.status is BatchStatus.FINALIZING:
        return Outlook(None, DeadlineRisk.NONE)
    if batch.status is not BatchStatus.IN_PROGRESS or batch.paused_at is not None or batch.stop_reason is not None:
        return Outlook(None, None)
    if pace is None or not pace.rate:
        return Outlook(None, None)
    needed = min(_LONGEST, timedelta(seconds=max(0, batch.total - batch.done) / pace.rate))
    left = batch.expires_at - pace.now
    if needed > left:
        return Outlook(pace.now + needed, DeadlineRisk.HIGH)
    return Outlook(pace.now + needed, DeadlineRisk.LOW if needed > left * LOW_SHARE else DeadlineRisk.NONE)


def cost(usage_by_model: Mapping[str, Mapping[str, Any]], prices: Mapping[str, Price]) -> float | None:
    """What the tokens so far cost; None if a model that used some has no price, because a part is no cost."""
    total = 0.0
    for model, usage in usage_by_model.items():
        price = prices.get(model) or prices.get(EVERY_MODEL)
        if price is not None:
            total += _priced(usage, price)
        elif any(usage.values()):
            return None
    return total if prices else None


def _priced(usage: Mapping[str, Any], price: Price) -> float:
    cached = min(usage.get("cached", 0), usage.get("input", 0))
    of_cached = price.input if price.cached is None else price.cached
    fresh = usage.get("input", 0) - cached
    return float(fresh * price.input + cached * of_cached + usage.get("output", 0) * price.output) / _TOKENS_PER_PRICE
