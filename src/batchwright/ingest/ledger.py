"""Paid answers: each request is recorded before it is sent; its answer is stored by content, and its cost recorded.

    begin ── the intent and a reservation of its cost, in one commit ──▶ sent
    settle ─ the answers, the cost and the event, in one commit
    fail ─── no answer to store; only what it cost

A request whose answer never arrived keeps its row: it is in doubt, and its cost stays reserved.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from batchwright.db.database import Database, Session
from batchwright.db.retry import retry_deadlocks, retry_unavailable
from batchwright.db.statements import statements
from batchwright.engine.owned import JOBS_VIEW, Held, fenced, lock, note
from batchwright.engine.queue import Queue
from batchwright.errors import Conflict, OperationError
from batchwright.inference.answers import Answer, Failure, Usage
from batchwright.inference.calls import Call, share_usage
from batchwright.inference.spending import Spending, Spent, Sums
from batchwright.ingest.items import Item
from batchwright.ingest.lines import Ask, Unsent
from batchwright.ingest.metrics import IngestCounts
from batchwright.ingest.money import Prices, show_amount
from batchwright.ingest.rates import Rates
from batchwright.ingest.results import BudgetUsedUp, Deferred
from batchwright.ingest.runs import Run

SQL = statements(__package__, "ledger.sql", parts=JOBS_VIEW)
log = logging.getLogger(__name__)
_TRIES_MAX = 4
_IN_DOUBT = frozenset({Failure.LOST, Failure.TIMEOUT, Failure.DEADLINE})


class Answers:
    """Stored answers of models, by content: equal text is paid for once per tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, tenant: str, fingerprint: str, hashes: Iterable[bytes]) -> dict[bytes, bytes]:
        params = {"tenant": tenant, "fingerprint": fingerprint, "hashes": list(hashes)}
        rows = await self._database.ask(SQL["answers"], params)
        return {bytes(hash): bytes(value) for hash, value in rows}

    async def touch(self, tenant: str, fingerprint: str, hashes: Iterable[bytes]) -> None:
        """Mark answers as used, so that they are not evicted."""
        params = {"tenant": tenant, "fingerprint": fingerprint, "hashes": sorted(hashes)}
        await self._database.ask(SQL["touch"], params)

    async def keep(
        self,
        tenant: str,
        fingerprint: str,
        values: Mapping[bytes, bytes],
        tokens: Mapping[bytes, int | None],
        *,
        session: Session | None = None,
    ) -> None:
        hashes = sorted(values)
        params = {
            "tenant": tenant,
            "fingerprint": fingerprint,
            "hashes": hashes,
            "values": [values[hash] for hash in hashes],
            "tokens": [tokens.get(hash) for hash in hashes],
        }
        await self._database.ask(SQL["keep"], params, session)

    async def evict(self, keep_seconds: float, limit: int, *, session: Session | None = None) -> int:
        """Remove answers that were not used for this long. Returns how many."""
        params = {"keep_seconds": keep_seconds, "limit": limit}
        return len(await self._database.ask(SQL["evict"], params, session))


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLedger:
    """The calls of one step of one item, in realtime."""

    queue: Queue
    held: Held
    run: Run
    item: Item
    fingerprint: str
    prices: Prices
    rates: Rates
    counts: IngestCounts
    lane: str = "realtime"

    async def begin(self, call: Call) -> None:
        if call.model is None:
            return
        await self.rates.reserve(call.model, call.tokens_guess, holder=call.id)
        try:
            await self.rates.wait(call.id)  # wait before recording the request, so that it is then sent at once
            async with fenced(self.queue, self.held) as session:
                await self._commit_intent(call, session)
        except BaseException:
            await self.rates.cancel(call.id)
            raise

    async def settle(self, call: Call, values: Mapping[bytes, bytes], usage: Usage, answer: Answer) -> None:
        tokens = {key: part.input for key, part in share_usage(call, usage).items()}

        @retry_deadlocks
        async def commit() -> None:
            answers = Answers(self.queue.database)
            async with self._transaction() as session:
                await answers.keep(self.item.tenant, self.fingerprint, values, tokens, session=session)
                if call.model is not None:
                    await self._write_cost(call, usage, "model_called", session, is_paid=True)

        await retry_unavailable(commit, tries_max=_TRIES_MAX)  # the answer is paid for: a short outage must not lose it
        if call.model is not None:
            await self.rates.settle(call.id, usage.total, answer)
            self._count(call.model, usage)

    async def fail(self, call: Call, error: OperationError, answer: Answer) -> None:
        if call.model is None:
            return
        await self.rates.settle(call.id, answer.usage.total, answer)
        await retry_unavailable(lambda: self._write_failure(call, error, answer), tries_max=_TRIES_MAX)
        if _is_in_doubt(answer):
            self.counts.doubted()
        else:
            self._count(call.model, answer.usage)

    def _count(self, model: str, usage: Usage) -> None:
        cost = self.prices.cost(model, self.lane, usage)
        self.counts.paid(model, self.lane, usage.input or 0, usage.output or 0, cost)

    @retry_deadlocks
    async def _write_failure(self, call: Call, error: OperationError, answer: Answer) -> None:
        async with self._transaction() as session:
            if _is_in_doubt(answer):
                await self.queue.database.ask(SQL["doubt"], {"id": call.id}, session)
                await self._note(session, "model_call_in_doubt", str(error), call, error_kind="Transient")
            else:
                await self._write_cost(
                    call, answer.usage, "model_failed", session, is_paid=answer.succeeded, error=error
                )

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Session]:
        """A transaction that is not fenced, but locks in the usual order: the job, the item, the run."""
        async with self.queue.database.transaction() as session:
            await lock(self.queue, self.held.id, session=session)
            yield session

    async def doubt_older(self) -> int:
        """Mark requests of a dead worker as in doubt: they may have been paid for. Returns how many."""
        params = {"item_id": self.item.id, "job_id": self.held.id, "claim": self.held.claim}
        async with fenced(self.queue, self.held) as session:
            rows = await self.queue.database.ask(SQL["doubt_older"], params, session)
            for row in rows:
                await _note_doubt(self.queue, self.held, row[0], row[3:], session)
        return len(rows)

    async def _commit_intent(self, call: Call, session: Session) -> None:
        assert call.model is not None
        guess = self.prices.guess(call.model, self.lane, call)
        params = {
            "id": call.id,
            "tenant": self.item.tenant,
            "run_id": self.run.id,
            "item_id": self.item.id,
            "job_id": self.held.id,
            "claim": self.held.claim,
            "kind": call.kind,
            "model": call.model,
            "lane": self.lane,
            "inputs": len(call.keys),
            "tokens": call.tokens_guess,
            "cost": guess,
        }
        if not await self.queue.database.ask(SQL["begin"], params, session):
            raise await self._why_not(guess, session)

    async def _why_not(self, guess: Decimal | None, session: Session) -> Exception:
        rows = await self.queue.database.ask(SQL["why_not"], {"run_id": self.run.id}, session)
        if not rows:
            return Conflict(f"the run {self.run.id} is gone")
        ((status, budget, spent, reserved),) = rows
        if status != "RUNNING":
            return Deferred(f"the run is {status}", 600.0, waits_for="user")
        return BudgetUsedUp(
            f"{show_amount(spent + reserved)} of the budget of {show_amount(budget)} are spent or reserved, and "
            f"the next request may cost {show_amount(guess)}"
        )

    async def _write_cost(
        self,
        call: Call,
        usage: Usage,
        event: str,
        session: Session,
        *,
        is_paid: bool,
        error: OperationError | None = None,
    ) -> None:
        """A refusal costs nothing. The cost of an answer follows from its tokens, and is unknown without them."""
        assert call.model is not None
        is_known = usage.total is not None
        cost = self.prices.cost(call.model, self.lane, usage) if is_known else None if is_paid else Decimal(0)
        params = {
            "id": call.id,
            "cost": cost,
            "is_unknown": cost is None,
            "prompt_tokens": usage.input or 0,
            "completion_tokens": usage.output or 0,
        }
        ((settled,),) = await self.queue.database.ask(SQL["settle"], params, session)
        if not settled:
            log.warning("call %s was settled before, or its run is gone", call.id)
            return
        message = None if error is None else str(error)
        kind = None if error is None else error.kind
        await self._note(session, event, message, call, usage=usage, cost=cost, error_kind=kind)
        sums = Sums.of_call(usage.input, usage.output, cost)
        spent = Spent(self.item.tenant, call.model, self.lane, sums)
        await Spending(self.queue.database).add(spent, session=session)

    async def _note(
        self,
        session: Session,
        event: str,
        message: str | None,
        call: Call,
        *,
        usage: Usage | None = None,
        cost: Decimal | None = None,
        error_kind: str | None = None,
    ) -> None:
        record: dict[str, Any] = {
            "event": event,
            "level": "info" if error_kind is None else "warning",
            "message": message,
            "model": call.model,
            "prompt_tokens": None if usage is None else usage.input,
            "completion_tokens": None if usage is None else usage.output,
            "cost": cost,
            "error_kind": error_kind,
            "fields": {"call": call.id, "kind": call.kind, "inputs": len(call.keys), "lane": self.lane},
        }
        await note(self.queue, self.held, record, session=session)


async def doubt_ended(queue: Queue, limit: int, *, session: Session) -> int:
    """Mark requests as in doubt whose jobs ended without settling them, e.g. after a cancel. Returns how many."""
    rows = await queue.database.ask(SQL["doubt_ended"], {"limit": limit}, session)
    for id, job_id, claim, *about in rows:
        await _note_doubt(queue, Held(job_id, claim, ""), id, about, session)
    return len(rows)


async def _note_doubt(queue: Queue, held: Held, id: str, about: Sequence[Any], session: Session) -> None:
    kind, model, tokens, cost = about
    message = f"the worker died before it stored the answer to {id}; it may have been paid for"
    fields = {"call": id, "kind": kind, "tokens_guess": tokens, "cost_guess": cost, "model": model}
    record = {"event": "model_call_in_doubt", "level": "warning", "message": message, "fields": fields}
    await note(queue, held, record, session=session)


async def reserve_batch(
    queue: Queue,
    run: Run,
    held: Held,
    batch_id: str,
    ask: Ask,
    lines: Sequence[Sequence[Unsent]],
    *,
    cost: Decimal | None,
    session: Session,
) -> bool:
    """Reserve what a batch may cost. Returns False if that exceeds the budget."""
    rows = [row for line in lines for row in line]
    params = {
        "id": batch_id,
        "tenant": run.tenant,
        "run_id": run.id,
        "item_id": None,
        "job_id": held.id,
        "claim": held.claim,
        "kind": ask.kind,
        "model": ask.model,
        "lane": "batch",
        "inputs": len(rows),
        "tokens": sum(row.tokens for row in rows),
        "cost": cost,
    }
    return bool(await queue.database.ask(SQL["begin"], params, session))


def _is_in_doubt(answer: Answer) -> bool:
    """Whether the server may have answered, although no answer arrived."""
    return answer.code in _IN_DOUBT and answer.usage.total is None
