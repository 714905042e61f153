"""Collect an ended batch: store its answers, record its cost, and return requests without an answer to the queue.

    output file, error file ─▶ some lines at a time ─▶ answers, rows, money and events in one commit

If the rows of a line are no longer in the batch, the line was settled before. So a file can be reread after any crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from itertools import groupby
from operator import attrgetter
from typing import Any

from batchwright.batches.store import Batch
from batchwright.db.database import Session
from batchwright.db.retry import retry_deadlocks
from batchwright.engine.owned import Held, fenced, note
from batchwright.errors import NotFound, RetryLater
from batchwright.files.store import Files
from batchwright.inference.answers import Answer
from batchwright.inference.spending import Spending, Spent, Sums
from batchwright.inference.tokens import share_out
from batchwright.ingest.ledger import Answers
from batchwright.ingest.lines import Ask, Settled, read_line, settle_line, share_money, split_lines, unanswered
from batchwright.ingest.metrics import IngestCounts
from batchwright.ingest.money import Prices
from batchwright.ingest.pending import Charge, Pending
from batchwright.ingest.runs import Run, Runs
from batchwright.states import BatchStatus

_LINES_PER_COMMIT = 200
_BYTES_PER_COMMIT = 8 * 1024 * 1024
_CODES = {
    BatchStatus.CANCELLED: "batch_cancelled",
    BatchStatus.EXPIRED: "batch_expired",
    BatchStatus.FAILED: "batch_failed",
}
"""Error codes of lines that are in neither file."""
_NOTHING = Charge(Decimal(0), 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """What is needed to collect an ended batch: its run, the job that gathers, and the kind of request."""

    run: Run
    held: Held
    batch_id: str
    ask: Ask
    created_at: datetime | None = None
    """When the batch was created."""

    @property
    def of_run(self) -> Held:
        """The run's job, whose history gets the events."""
        return Held(self.run.job_id, 0, self.held.worker)

    def may_park(self, run: Run) -> bool:
        """Whether an error of this batch may park the run. Not if the run was resumed since: the cause may be fixed."""
        return run.resumed_at is None or self.created_at is None or self.created_at > run.resumed_at


class Collector:
    """Settles the lines of batches; each commit is fenced by the job that gathers for the run."""

    def __init__(
        self, pending: Pending, answers: Answers, prices: Prices, files: Files, counts: IngestCounts | None = None
    ) -> None:
        self._answers = answers
        self._counts = counts or IngestCounts()
        self._files = files
        self._pending = pending
        self._prices = prices
        self._runs = Runs(pending.queue)
        self._spending = Spending(pending.queue.database)

    async def collect(self, home: Home, batch: Batch) -> set[str]:
        """Settle every line; put back lines that are in neither file. Returns the fields that the server refused."""
        refused: set[str] = set()
        for file_id in (batch.output_file_id, batch.error_file_id):
            async for lines in self._read(file_id):
                found = dict(await asyncio.to_thread(_read_lines, lines))
                refused |= await self._settle(home, found)
        await self.return_rest(home, _CODES.get(batch.status, "no_answer"))
        return refused

    async def return_rest(self, home: Home, code: str) -> None:
        """Put lines without an answer back."""
        while lines := await self._pending.next_lines(home.batch_id, _LINES_PER_COMMIT):
            await self._settle(home, dict.fromkeys(lines, unanswered(code)))

    async def close(self, home: Home) -> None:
        """Close a batch whose waiting items were all notified: it needs no further checks."""
        async with fenced(self._pending.queue, home.held) as session:
            await self._pending.close(home.batch_id, session=session)

    async def tidy(self, batch: Batch) -> None:
        """Delete the files, which contain texts of documents. Keep them if a line failed, so that users can see why."""
        for file_id in (batch.input_file_id, batch.output_file_id):
            if file_id is not None and batch.done == batch.completed:
                try:
                    await self._files.delete(file_id, tenant=batch.tenant)
                except NotFound:
                    continue

    async def _read(self, file_id: str | None) -> AsyncIterator[list[bytes]]:
        """Some complete lines at a time. A deleted file has none."""
        if file_id is None:
            return
        try:
            file = await self._files.get(file_id, tenant=None, also_gone=True)
        except NotFound:
            return
        rest, lines, size = b"", list[bytes](), 0
        async for piece in self._files.content(file):
            whole, rest = split_lines([piece], rest)
            for line in whole:
                if lines and (len(lines) >= _LINES_PER_COMMIT or size + len(line) > _BYTES_PER_COMMIT):
                    yield lines
                    lines, size = [], 0
                lines.append(line)
                size += len(line)
        if lines:
            yield lines

    async def _settle(self, home: Home, answers: Mapping[int, Answer]) -> set[str]:
        rows = await self._pending.named_lines(home.batch_id, list(answers))
        if not rows:
            return set()

        def settle() -> list[Settled]:
            lines = groupby(rows, key=attrgetter("line"))
            return [settle_line(home.ask, list(some), answers[line]) for line, some in lines]

        settled = await asyncio.to_thread(settle)
        await self._commit(home, settled)
        return {one.refused_field for one in settled if one.refused_field is not None}

    # One commit -------------------------------------------------------------------------------------------------

    @retry_deadlocks
    async def _commit(self, home: Home, settled: Sequence[Settled]) -> None:
        """Lock jobs first, then items, then the run, then requests: all code uses this order."""
        costs = [self._cost(home.ask, one) for one in settled]
        charges, sums = _charges(settled, costs), _sums(settled, costs)
        tokens = sum(row.tokens for one in settled for row in one.rows)
        credential = next((one.credential for one in settled if one.credential), None)
        async with fenced(self._pending.queue, home.held) as session:
            await self._tell(home, settled, costs, session)
            await self._pending.lock_items(list(charges), session=session)
            run = await self._runs.lock(home.run.id, tenant=None, session=session)
            await self._move_rows(home, settled, session)
            await self._pending.charge_items(charges, session=session)
            await self._pending.settle(home.run.id, home.batch_id, tokens, sums, session=session)
            if credential is not None and home.may_park(run):
                await self._park(home, credential, session)
            if sums.calls:
                await self._spending.add(Spent(run.tenant, home.ask.model, "batch", sums), session=session)
        for one, cost in zip(settled, costs, strict=True):
            self._counts.paid(home.ask.model, "batch", one.usage.input or 0, one.usage.output or 0, cost)

    async def _move_rows(self, home: Home, settled: Sequence[Settled], session: Session) -> None:
        run, fingerprint = home.run, home.ask.fingerprint
        values = {hash: value for one in settled for hash, value in one.values.items()}
        back = [row for one in settled for row in one.back]
        gone = await self._pending.answered(run, fingerprint, home.batch_id, list(values), session=session)
        gone |= await self._pending.put_back(run, fingerprint, home.batch_id, back, session=session)
        if len(gone) != len(values) + len(back):
            raise RetryLater(f"requests of {home.batch_id} were settled by another worker", 1.0)
        tokens: dict[bytes, int | None] = {row.hash: row.tokens for one in settled for row in one.rows}
        await self._answers.keep(run.tenant, fingerprint, values, tokens, session=session)

    def _cost(self, ask: Ask, one: Settled) -> Decimal | None:
        """A refusal costs nothing. The cost of an answer follows from its tokens, and is unknown without them."""
        if one.usage.total is None:
            return None if one.is_paid else Decimal(0)
        return self._prices.cost(ask.model, "batch", one.usage)

    async def _tell(
        self,
        home: Home,
        settled: Sequence[Settled],
        costs: Sequence[Decimal | None],
        session: Session,
    ) -> None:
        """Add an event to the run's job for each line that a server has seen: a line may belong to many items."""
        events = [_event(home, one, cost) for one, cost in zip(settled, costs, strict=True) if one.is_answered]
        if unseen := [one for one in settled if not one.is_answered]:
            message = f"{len(unseen)} lines of {home.batch_id} have no answer: {unseen[0].error}"
            fields = {"batch": home.batch_id, "lines": len(unseen)}
            events.append({"event": "batch_lines_returned", "level": "warning", "message": message, "fields": fields})
        await note(self._pending.queue, home.of_run, *events, session=session)

    async def _park(self, home: Home, message: str, session: Session) -> None:
        if await self._runs.park(home.run.id, "credential", message, session=session) is None:
            return  # it is parked already
        fields = {"batch": home.batch_id, "reason": "credential"}
        event = {"event": "run_parked", "level": "warning", "message": message, "fields": fields}
        await note(self._pending.queue, home.of_run, event, session=session)


def _read_lines(lines: Sequence[bytes]) -> list[tuple[int, Answer]]:
    return [read_line(line) for line in lines]


def _event(home: Home, one: Settled, cost: Decimal | None) -> dict[str, Any]:
    fields = {"batch": home.batch_id, "line": one.line, "kind": home.ask.kind, "inputs": len(one.rows), "lane": "batch"}
    return {
        "event": "model_called" if one.error is None else "model_failed",
        "level": "info" if one.error is None else "warning",
        "message": None if one.error is None else str(one.error),
        "model": home.ask.model,
        "prompt_tokens": one.usage.input,
        "completion_tokens": one.usage.output,
        "cost": cost,
        "error_kind": None if one.error is None else one.error.kind,
        "fields": fields,
    }


def _charges(settled: Sequence[Settled], costs: Sequence[Decimal | None]) -> dict[str, Charge]:
    """The share of each item, by the tokens of its texts. The shares add up exactly to the total."""
    charges: dict[str, Charge] = {}
    for one, cost in zip(settled, costs, strict=True):
        weights = [row.tokens for row in one.rows]
        parts = zip(
            one.rows,
            share_money(cost or Decimal(0), weights),
            share_out(one.usage.input or 0, weights),
            share_out(one.usage.output or 0, weights),
            strict=True,
        )
        for row, money, prompt, completion in parts:
            before = charges.get(row.item_id, _NOTHING)
            charges[row.item_id] = Charge(
                before.cost + money, before.prompt_tokens + prompt, before.completion_tokens + completion
            )
    return charges


def _sums(settled: Sequence[Settled], costs: Sequence[Decimal | None]) -> Sums:
    return Sums(
        calls=sum(one.is_answered for one in settled),
        unpriced=sum(cost is None for cost in costs),
        prompt_tokens=sum(one.usage.input or 0 for one in settled),
        completion_tokens=sum(one.usage.output or 0 for one in settled),
        cost=sum((cost for cost in costs if cost is not None), Decimal(0)),
    )
