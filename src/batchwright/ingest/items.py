"""The rows of items, the documents of a run: every transition is a compare-and-set, and updates the run's counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import orjson

from batchwright.db.database import Row, Session
from batchwright.db.statements import statements
from batchwright.engine import owned
from batchwright.engine.queue import Queue
from batchwright.errors import NotFound
from batchwright.ingest.pipeline import ENQUEUED
from batchwright.states import ITEM, ItemStatus

if TYPE_CHECKING:
    from batchwright.ingest.runs import Run

SQL = statements(__package__, "items.sql", parts=owned.JOBS_VIEW)
_INBOX_COUNT_MAX = 10_000
_INBOX_GROUPS_MAX = 500
_SCAN_MAX = 5_000
_HEADS_MAX = 10_000
OPEN_COUNT_MAX = 5_000
"""Maximum number of open items of a run that are examined for their progress and what they wait for."""
ITEM_JOB = "ingest.item"
PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An item as its row was when it was read."""

    id: str
    run_id: str
    tenant: str
    collection_id: int
    document_id: int
    source: str
    name: str
    etag: str | None
    size: int | None
    metadata: dict[str, Any]
    status: ItemStatus
    step: str
    generation: int
    retry_count: int
    last_error_kind: str | None
    last_error: dict[str, Any] | None
    cause: str | None
    job_ids: list[UUID]
    prompt_tokens: int
    completion_tokens: int
    cost: Decimal
    created_at: datetime
    ended_at: datetime | None
    dismissed_at: datetime | None

    @property
    def has_ended(self) -> bool:
        return self.status in ITEM.terminal

    @property
    def job_id(self) -> UUID:
        """The job that works on it, or did last."""
        return self.job_ids[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFailure:
    """Why an item has failed."""

    kind: str
    """RateLimited, Transient, SchemaInvalid or Fatal."""
    code: str
    message: str
    step: str
    scope: str | None = None
    traceback: str | None = None

    @property
    def cause(self) -> str:
        """What failures are grouped by."""
        return f"{self.step}:{self.kind}:{self.code}"

    def document(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ItemFailure.__dataclass_fields__}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Cause:
    """Failed items of one cause."""

    cause: str
    step: str | None
    kind: str
    code: str | None
    count: int
    first_at: datetime
    last_at: datetime
    item_ids: list[str]
    names: list[str]
    message: str | None
    job_ids: list[UUID]
    has_more: bool = False
    """Whether there are more than were examined; then `count` is a minimum."""


class ItemPage(NamedTuple):
    """Some items in the order of their listing, and where the next page starts; `next` is None on the last page.

    A page may be short or empty and still have a next one, because a list examines a bounded number of items.
    """

    items: list[Item]
    next: str | None


class StepState(NamedTuple):
    """A step of an item, as users see it."""

    step: str
    state: str
    is_reused: bool
    starts: int
    retry_count: int
    error_kind: str | None
    not_before: datetime | None
    waiting: dict[str, Any] | None
    started_at: datetime | None
    ended_at: datetime | None
    output: dict[str, Any] | None


class Wanted(NamedTuple):
    """Which failed items a user selects: by id, by cause, or all of them."""

    ids: Sequence[str] | None = None
    cause: str | None = None
    only_inbox: bool = False
    """Leave out cancelled and dismissed items."""
    only_latest: bool = False
    """Leave out items whose document a later run has processed, whether it failed there again or not."""

    def params(self) -> dict[str, Any]:
        return {
            "ids": None if self.ids is None else list(self.ids),
            "cause": self.cause,
            "only_inbox": self.only_inbox,
            "only_latest": self.only_latest,
        }


class Items:
    """The items of all tenants."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._database = queue.database

    async def get(self, id: str, *, tenant: str | None, session: Session | None = None) -> Item:
        for row in await self._database.ask(SQL["get"], {"id": id, "tenant": tenant}, session):
            return _item(row)
        raise NotFound(f"there is no item {id!r}", kind="item", id=id)

    async def page(
        self,
        run_id: str,
        *,
        after: str | None = None,
        limit: int = 100,
        statuses: Sequence[ItemStatus] | None = None,
        step: str | None = None,
        cause: str | None = None,
    ) -> ItemPage:
        """In the order in which they were listed."""
        scan_max = limit + 1 if step is None and cause is None else max(limit + 1, _SCAN_MAX)
        rows = await self._ask(
            "list",
            None,
            run_id=run_id,
            after=after,
            limit=limit + 1,
            scan_max=scan_max,
            statuses=[status.value for status in statuses or ItemStatus],
            step=step,
            cause=cause,
        )
        found = [_item(row[1:]) for row in rows if row[1] is not None]
        if len(found) > limit:
            return ItemPage(found[:limit], found[limit - 1].id)
        return ItemPage(found, rows[0][0])

    async def list(self, run_id: str, *, limit: int = 100, **wanted: Any) -> Sequence[Item]:
        """Like `page`, but reads more pages until there are `limit` items."""
        found: list[Item] = []
        after = wanted.pop("after", None)
        while len(found) < limit:
            page = await self.page(run_id, after=after, limit=limit - len(found), **wanted)
            found += page.items
            after = page.next
            if after is None:
                break
        return found

    async def jobless(self, run_id: str, limit: int) -> Sequence[tuple[str, UUID]]:
        """Open items whose job was never enqueued, with the id that it will have."""
        return [(id, job) for id, job in await self._ask("jobless", None, run_id=run_id, limit=limit)]

    async def count_open(self, run_id: str, limit: int = 1, *, session: Session | None = None) -> int:
        """Count open items, up to `limit`."""
        ((count,),) = await self._ask("count_open", session, run_id=run_id, limit=limit)
        return int(count)

    async def open_jobs(
        self, run_id: str, after: str = "", *, session: Session | None = None
    ) -> Sequence[tuple[str, UUID]]:
        """A page of open items whose job is open, with that job."""
        rows = await self._ask("open_jobs", session, run_id=run_id, after=after, limit=PAGE)
        return [(id, job) for id, job in rows]

    # Transitions: each returns the new state, or None if the item's state does not allow it --------------------------

    async def complete(self, id: str, *, session: Session) -> ItemStatus | None:
        return await self._move("complete", id, session)

    async def skip(self, id: str, *, session: Session) -> ItemStatus | None:
        """End an item that needed no work."""
        return await self._move("skip", id, session)

    async def fail(self, id: str, failure: ItemFailure, *, session: Session) -> ItemStatus | None:
        error = orjson.dumps(failure.document()).decode()
        return await self._move("fail", id, session, error_kind=failure.kind, error=error, cause=failure.cause)

    async def cancel(self, run_id: str, *, session: Session) -> int:
        """Cancel all open items of a run. Returns how many."""
        ((count,),) = await self._ask("cancel", session, run_id=run_id)
        return int(count)

    async def retry(
        self, run_id: str, wanted: Wanted, *, anew: bool = False, limit: int = PAGE, session: Session
    ) -> Sequence[tuple[str, UUID]]:
        """Open failed and cancelled items again. Returns them with the ids of their next jobs.

        They keep their completed steps, unless they begin `anew`.
        """
        rows = await self._ask("retry", session, run_id=run_id, anew=int(anew), limit=limit, **wanted.params())
        return [(id, job) for id, job in rows]

    async def _move(self, verb: str, id: str, session: Session, **values: Any) -> ItemStatus | None:
        rows = await self._ask(verb, session, id=id, **values)
        return ItemStatus(rows[0][0]) if rows else None

    # The inbox --------------------------------------------------------------------------------------------------

    async def inbox(self, tenant: str | None, *, run_id: str | None = None, limit: int = 100) -> Sequence[Cause]:
        """Failed items by cause, the largest group first; without a run, only the latest of each document.

        About 10,000 items are examined, divided among the causes.
        """
        limits = {"limit": limit, "count_max": _INBOX_COUNT_MAX, "groups_max": _INBOX_GROUPS_MAX}
        return [Cause(*row) for row in await self._ask("inbox", None, tenant=tenant, run_id=run_id, **limits)]

    async def dismiss(self, tenant: str | None, wanted: Wanted, *, run_id: str | None = None) -> int:
        """Take failed items out of the inbox. Returns how many."""
        return len(await self._ask("dismiss", None, tenant=tenant, run_id=run_id, **wanted.params()))

    async def runs_with_failures(self, tenant: str | None, wanted: Wanted, limit: int = 1000) -> Sequence[str]:
        limits = {"limit": limit, "scan_max": _SCAN_MAX, "heads_max": _HEADS_MAX}
        rows = await self._ask("runs_with_failures", None, tenant=tenant, **limits, **wanted.params())
        return [id for (id,) in rows]

    # Watching ---------------------------------------------------------------------------------------------------

    async def funnel(self, run: Run) -> dict[str, int]:
        """Open items by the last step that they have reached.

        Only the first `OPEN_COUNT_MAX` are examined. The others were listed last, and count as not started.
        """
        at = dict(await self._ask("funnel", None, run_id=run.id, count_max=OPEN_COUNT_MAX))
        looked_at = sum(at.values())
        if looked_at >= OPEN_COUNT_MAX and run.item_count_open > looked_at:
            at[ENQUEUED] = at.get(ENQUEUED, 0) + run.item_count_open - looked_at
        return at

    async def steps(self, id: str) -> Sequence[StepState]:
        return [StepState(*row) for row in await self._ask("steps", None, id=id)]

    async def waits(self, run_id: str, limit: int = 10) -> Sequence[Row]:
        """What the first `OPEN_COUNT_MAX` open items wait for: (for, message, how many, until when)."""
        rows: Sequence[Row] = await self._ask("waits", None, run_id=run_id, limit=limit, count_max=OPEN_COUNT_MAX)
        return rows

    async def clear_waits(self, run_id: str, *, session: Session) -> int:
        return len(await self._ask("clear_waits", session, run_id=run_id))

    async def wake_late(self, seconds: float, limit: int, *, session: Session) -> int:
        """Wake items that still sleep because their run was parked, if it was resumed within the last `seconds`."""
        rows = await self._ask("wake_late", session, seconds=seconds, limit=limit)
        await self.queue.wake([job for (job,) in rows], session=session)
        return len(rows)

    async def abandoned(self, limit: int, *, session: Session) -> Sequence[tuple[str, str]]:
        """Open items whose job ended, but did not end the item."""
        return [(id, status) for id, status in await self._ask("abandoned", session, limit=limit)]

    def _ask(self, statement: str, session: Session | None, **params: Any) -> Any:
        return self._database.ask(SQL[statement], params, session)


def _item(row: Row | Mapping[str, Any]) -> Item:
    values = dict(zip(Item.__dataclass_fields__, row, strict=True))
    return Item(**values | {"status": ItemStatus(values["status"])})
