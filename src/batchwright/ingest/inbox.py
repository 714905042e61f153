"""What of documents waits for a person, in the engine's words."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Parked runs first: each of them holds up everything in it."""
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
