"""The rows of requests that wait for a batch, or are in one.

    added by an item ─▶ placed in a batch ─┬─▶ answered: the row is deleted, and the answer is in the cache
                          ▲                ├─▶ put back, and placed again
                          └────────────────┴─▶ put back with an error, which the item gets

Only the job that gathers for the run may place rows in a batch or take them out, and it must be locked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import orjson

from batchwright.db.database import Session
from batchwright.db.retry import retry_deadlocks
from batchwright.db.statements import statements
from batchwright.engine import owned
from batchwright.engine.jobs import JobId
from batchwright.engine.queue import Queue
from batchwright.inference.spending import Sums
from batchwright.ingest.lines import Ask, Back, Sent, Unsent, numbered
from batchwright.ingest.runs import Run

SQL = statements(__package__, "pending.sql", parts=owned.JOBS_VIEW)
_WOKEN = 1000


class State(NamedTuple):
    """A request that is not answered yet."""

    hash: bytes
    run_id: str
    item_id: str
    batch_id: str | None
    error: dict[str, Any] | None
    created_at: datetime
    age: float


class Group(NamedTuple):
    """Unsent requests of one model."""

    fingerprint: str
    kind: str
    model: str
    requests: int
    age: float
    """Age of the oldest."""


class OpenBatch(NamedTuple):
    """A batch that is not fully settled."""

    id: str
    kind: str
    age: float


class Charge(NamedTuple):
    """An item's share of the cost of some lines."""

    cost: Decimal
    prompt_tokens: int
    completion_tokens: int


class Pending:
    """The requests of all runs."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._database = queue.database

    # Items ------------------------------------------------------------------------------------------------------

    async def add(self, run: Run, item_id: str, ask: Ask, texts: Mapping[bytes, str], *, session: Session) -> None:
        """Add these requests, unless they already exist. The run is locked, so that none is answered meanwhile."""
        params = {
            **_of(run, ask.fingerprint),
            "run_id": run.id,
            "item_id": item_id,
            "kind": ask.kind,
            "model": ask.model,
            "hashes": list(texts),
            "inputs": list(texts.values()),
            "tokens": [ask.tokens(text) for text in texts.values()],
        }
        await self._ask("add", session, **params)

    async def states(
        self, run: Run, fingerprint: str, hashes: Sequence[bytes], *, session: Session | None = None
    ) -> list[State]:
        rows = await self._ask("states", session, **_of(run, fingerprint), hashes=list(hashes))
        return [State(bytes(hash), *rest) for hash, *rest in rows]

    async def withdraw(
        self, run: Run, fingerprint: str, hashes: Sequence[bytes], *, session: Session | None = None
    ) -> None:
        """Delete requests of the run that are in no batch."""
        await self._ask("withdraw", session, **_of(run, fingerprint), hashes=list(hashes), run_id=run.id)

    async def count_before(self, run_id: str, item_id: str, limit: int) -> int:
        """Number of items that were listed before this one and need work."""
        ((count,),) = await self._ask("before", None, run_id=run_id, item_id=item_id, limit=limit)
        return int(count)

    async def forget_errors(self, run_id: str, *, session: Session) -> None:
        """Delete requests that failed, so that they are sent again."""
        await self._ask("forget_errors", session, run_id=run_id)

    # The gatherer -----------------------------------------------------------------------------------------------

    async def has_gatherer(self, run_id: str, *, session: Session) -> bool:
        return any(is_open for (is_open,) in await self._ask("gatherer", session, run_id=run_id))

    async def add_gatherer(self, run_id: str, job_id: UUID, *, session: Session) -> None:
        await self._ask("add_gatherer", session, run_id=run_id, job_id=job_id)

    async def count(self, run_id: str, *, session: Session | None = None) -> tuple[int, int]:
        """Number of requests that wait for an answer, and how many of them are in a batch."""
        ((total, sent),) = await self._ask("count", session, run_id=run_id)
        return total, sent

    async def unsent(self, run_id: str) -> list[Group]:
        return [Group(*row) for row in await self._ask("unsent", None, run_id=run_id)]

    async def is_busy(self, run_id: str) -> bool:
        """Whether an item of the run may add more soon."""
        return bool((await self._ask("is_busy", None, run_id=run_id))[0][0])

    async def batches(self, run_id: str) -> list[OpenBatch]:
        return [OpenBatch(*row) for row in await self._ask("batches", None, run_id=run_id)]

    async def drop_needless(self, run_id: str, *, session: Session) -> int:
        return len(await self._ask("drop_needless", session, run_id=run_id))

    async def drop_unsent(
        self, run_id: str, models: Sequence[str] | None = None, *, with_errors: bool = False, session: Session
    ) -> int:
        params = {"run_id": run_id, "models": None if models is None else list(models), "with_errors": with_errors}
        return len(await self._ask("drop_unsent", session, **params))

    async def take(self, run: Run, fingerprint: str, limit: int, *, session: Session) -> list[Unsent]:
        """Unsent requests of one model, locked."""
        rows = await self._ask("take", session, **_of(run, fingerprint), run_id=run.id, limit=limit)
        return [Unsent(bytes(hash), *rest) for hash, *rest in rows]

    async def place(
        self, run: Run, fingerprint: str, batch_id: str, lines: Sequence[Sequence[Unsent]], *, session: Session
    ) -> None:
        placed = list(numbered(lines))
        params = {
            "batch_id": batch_id,
            "hashes": [row.hash for row, _, _ in placed],
            "lines": [line for _, line, _ in placed],
            "places": [place for _, _, place in placed],
            "left_out": [row.left_out for row, _, _ in placed],
        }
        rows = await self._ask("place", session, **_of(run, fingerprint), **params)
        assert len(rows) == len(placed), f"{len(placed) - len(rows)} requests of {run.id} were placed by another worker"

    async def lines(self, batch_id: str, first: int, end: int) -> list[Sent]:
        """The requests of these lines, in their order."""
        return _sent(await self._ask("lines", None, batch_id=batch_id, first=first, end=end))

    async def named_lines(self, batch_id: str, lines: Sequence[int]) -> list[Sent]:
        return _sent(await self._ask("named_lines", None, batch_id=batch_id, lines=list(lines)))

    async def count_lines(self, batch_id: str) -> int:
        ((last,),) = await self._ask("last_line", None, batch_id=batch_id)
        return 0 if last is None else int(last) + 1

    async def next_lines(self, batch_id: str, limit: int) -> list[int]:
        """Lines that are not settled yet."""
        return [line for (line,) in await self._ask("next_lines", None, batch_id=batch_id, limit=limit)]

    # Settlement -------------------------------------------------------------------------------------------------

    async def lock_items(self, ids: Sequence[str], *, session: Session) -> None:
        """Lock items before the run: all code uses this order."""
        await self._ask("lock_items", session, ids=sorted(ids))

    async def answered(
        self, run: Run, fingerprint: str, batch_id: str, hashes: Sequence[bytes], *, session: Session
    ) -> set[bytes]:
        """Remove answered requests from the batch. Returns those that were still in it."""
        params = {"batch_id": batch_id, "hashes": list(hashes)}
        return {bytes(hash) for (hash,) in await self._ask("answered", session, **_of(run, fingerprint), **params)}

    async def put_back(
        self, run: Run, fingerprint: str, batch_id: str, back: Sequence[Back], *, session: Session
    ) -> set[bytes]:
        params = {
            "batch_id": batch_id,
            "hashes": [one.hash for one in back],
            "failures": [one.failures for one in back],
            "packs": [one.pack for one in back],
            "left_out": [one.left_out for one in back],
            "errors": [None if one.error is None else orjson.dumps(one.error).decode() for one in back],
        }
        return {bytes(hash) for (hash,) in await self._ask("put_back", session, **_of(run, fingerprint), **params)}

    async def charge_items(self, charges: Mapping[str, Charge], *, session: Session) -> None:
        params = {
            "ids": list(charges),
            "costs": [one.cost for one in charges.values()],
            "prompt_tokens": [one.prompt_tokens for one in charges.values()],
            "completion_tokens": [one.completion_tokens for one in charges.values()],
        }
        await self._ask("charge_items", session, **params)

    async def settle(self, run_id: str, batch_id: str, tokens: int, sums: Sums, *, session: Session) -> None:
        """Charge the cost of lines to the run; `tokens` is the estimate for them."""
        await self._ask(
            "settle",
            session,
            run_id=run_id,
            batch_id=batch_id,
            tokens=tokens,
            cost=sums.cost,
            is_unknown=sums.unpriced > 0,
            prompt_tokens=sums.prompt_tokens,
            completion_tokens=sums.completion_tokens,
            calls=sums.calls,
        )

    async def close(self, batch_id: str, *, session: Session) -> None:
        """Free what is still reserved for a fully settled batch."""
        await self._ask("close", session, batch_id=batch_id)

    async def wake(self, run_id: str) -> int:
        """Wake items that wait although none of their own requests is open. Returns how many."""
        woken = 0
        while count := await self._wake_some(run_id):
            woken += count
        return woken

    @retry_deadlocks
    async def _wake_some(self, run_id: str) -> int:
        async with self._database.transaction() as session:
            jobs = {JobId(job) for (job,) in await self._ask("wake", session, run_id=run_id, limit=_WOKEN)}
            await self.queue.wake(sorted(jobs), session=session)
        return len(jobs)

    def _ask(self, statement: str, session: Session | None, **params: Any) -> Any:
        return self._database.ask(SQL[statement], params, session)


def _of(run: Run, fingerprint: str) -> dict[str, Any]:
    return {"tenant": run.tenant, "fingerprint": fingerprint}


def _sent(rows: Sequence[Sequence[Any]]) -> list[Sent]:
    return [Sent(line, bytes(hash), *rest) for line, hash, *rest in rows]
