"""Batches that need a person's attention now, and the cost of batches today."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal

from batchwright.batches.progress import DeadlineRisk, forecast
from batchwright.batches.store import Batch, Batches, Pace
from batchwright.engine.attention import Concern
from batchwright.engine.metrics import read_gauges
from batchwright.inference.prices import Price, cost
from batchwright.inference.spending import Spent, Sums
from batchwright.states import BatchStatus
from batchwright.telemetry.metrics import series

LANE = "batches"
_OPEN = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
_BATCHES_MAX = 100
_PACES_MAX = 20
"""Maximum number of batches whose pace is read, those that must end first: each has many segments."""


async def find_concerns(batches: Batches, tenant: str | None) -> list[Concern]:
    """Batches that wait for something, are paused or will be late; and, over all tenants, servers and disks."""
    found = await batches.list(tenant, limit=_BATCHES_MAX, statuses=_OPEN)
    urgent = sorted((one for one in found if one.in_progress_at), key=lambda one: one.expires_at)[:_PACES_MAX]
    paces = await batches.paces([one.id for one in urgent])
    of_batches = [concern for one in found for concern in _of_batch(one, paces.get(one.id))]
    return of_batches if tenant is not None else [*await _of_workers(batches), *of_batches]


async def spent_today(batches: Batches, prices: Mapping[str, Price], tenant: str | None) -> list[Spent]:
    """By tenant and model. The cost of a model without a price is unknown, and counted as unpriced."""
    found = []
    for whose, model, input, cached, output in await batches.used_today(tenant):
        usage = {"input": input, "cached": cached, "output": output}
        paid = cost({model: usage}, prices)
        sums = Sums(1, int(paid is None), input, output, Decimal(str(paid or 0.0)))
        if input or output:
            found.append(Spent(whose, model, LANE, sums))
    return found


def _of_batch(batch: Batch, pace: Pace | None) -> Iterator[Concern]:
    link = f"batches/{batch.id}"
    if batch.waits_for is not None:
        yield Concern(
            kind="waiting",
            level="error",
            message=f"the batch {batch.id} waits: {batch.waits_for}",
            remedy="correct that; the batch then resumes automatically",
            link=link,
        )
    if batch.paused_at is not None:
        yield Concern(
            kind="paused",
            level="warning",
            message=f"the batch {batch.id} is paused with {batch.total - batch.done:,} requests left, and its window "
            "keeps running",
            remedy="resume it, or cancel it",
            link=link,
        )
    elif forecast(batch, pace).risk is DeadlineRisk.HIGH:
        yield Concern(
            kind="late",
            level="warning",
            message=f"the batch {batch.id} is too slow for its window of {batch.completion_window}",
            remedy="start more workers, raise its priority, or give the model server more capacity",
            link=link,
        )


async def find_unreachable(batches: Batches, models: Collection[str]) -> list[str]:
    """Which of these models have a server that live workers cannot reach, as sentences."""
    gauges = series(await read_gauges(batches.queue.database))
    return [message for model, message in _unreachable(gauges) if model in models]


def _unreachable(gauges: Mapping[str, Mapping[tuple[str, ...], float]]) -> Iterator[tuple[str, str]]:
    for (model, *_), n in gauges.get("model_breaker_open", {}).items():
        if n:
            where = f"{int(n)} worker process{'es' if n > 1 else ''}"
            yield model, f"the server of the model {model!r} cannot be reached from {where}; nothing is sent to it"


async def _of_workers(batches: Batches) -> list[Concern]:
    """What live worker processes report about their model servers and disks."""
    gauges = series(await read_gauges(batches.queue.database))
    found = [
        Concern(
            kind="unreachable",
            level="error",
            message=message,
            remedy="start the model server, or correct its url; waiting requests then resume automatically",
            link="workers",
        )
        for _, message in _unreachable(gauges)
    ]
    if full := sum(gauges.get("work_disk_full", {}).values()):
        found.append(
            Concern(
                kind="disk",
                level="error",
                message=f"the disk of the work folder is nearly full in {int(full)} worker process"
                f"{'es' if full > 1 else ''}; nothing is sent there",
                remedy="free some space, or set batches.work_dir to a larger disk",
                link="workers",
            )
        )
    return found
