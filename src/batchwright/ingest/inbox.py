"""Failed documents and parked runs, as entries of the engine's inbox."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.engine.attention import CONCERNS_MAX, Concern
from batchwright.engine.views import InboxGroup
from batchwright.ingest.explain import remedy_of_parked
from batchwright.ingest.items import ITEM_JOB, Cause, Items
from batchwright.ingest.runs import RUN_JOB, Runs

KINDS = {
    "Fatal": "fatal",
    "RateLimited": "rate_limited",
    "SchemaInvalid": "schema_invalid",
    "Transient": "transient",
}


async def find_groups(runs: Runs, items: Items, tenant: str | None) -> Sequence[InboxGroup]:
    """Parked runs come first: each of them blocks all its documents."""
    parked = [
        InboxGroup(
            job_type=RUN_JOB,
            code=f"parked_{reason}",
            kind="fatal",
            count=1,
            first_at=created_at,
            last_at=created_at,
            samples=[job_id],
            message=f"{id} of {collection!r} is parked with {open_count} open documents: {message}; "
            f"{remedy_of_parked(id, reason)}",
        )
        for id, collection, reason, message, job_id, open_count, created_at in await runs.parked(tenant)
    ]
    return [*parked, *map(_as_group, await items.inbox(tenant))]


async def find_concerns(runs: Runs, tenant: str | None) -> Sequence[Concern]:
    """Parked runs, one by one."""
    return [
        Concern(
            kind="parked",
            level="error",
            message=f"the run {id} of {collection!r} is parked with {open_count:,} open documents: {message}",
            remedy=remedy_of_parked(id, reason),
            link=f"documents/runs/{id}",
        )
        for id, collection, reason, message, _, open_count, _ in await runs.parked(tenant, limit=CONCERNS_MAX)
    ]


def _as_group(cause: Cause) -> InboxGroup:
    return InboxGroup(
        job_type=ITEM_JOB,
        code=cause.code,
        kind=KINDS.get(cause.kind, "fatal"),
        count=cause.count,
        first_at=cause.first_at,
        last_at=cause.last_at,
        samples=cause.job_ids,
        message=f"{cause.step}: {cause.message}; see: batchwright ingest inbox",
        has_more=cause.has_more,
    )
