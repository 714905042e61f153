"""Gathers the requests of a run into batches, and collects the answers.

    requests wait ─▶ plan: places in a batch, and its money, in one commit
                       └─▶ send: the file and the batch are created from these rows, repeatably
                             └─▶ (hours) ─▶ collect ─▶ items are woken

The job lives as long as its run has waiting requests. Every part is safe to repeat: a planned batch that does not exist
yet is sent, an ended one is collected, and completed work is not repeated.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Batch, Batches, NewBatch
from batchwright.batches.submission import create
from batchwright.db.database import Session, wrap_connection
from batchwright.db.retry import retry_deadlocks
from batchwright.engine.catalog import Catalog
from batchwright.engine.context import Context
from batchwright.engine.jobs import new_id
from batchwright.engine.outcomes import Done, Outcome, Snooze
from batchwright.engine.owned import Held, fenced, note
from batchwright.errors import ConfigurationError, Conflict, DatabaseError, Fenced, NotFound, RetryLater, StorageError
from batchwright.files.store import BATCH, Files, NewFile, object_key, persist
from batchwright.inference.calls import EMBEDDING
from batchwright.inference.prices import cost_of
from batchwright.ingest.collect import Collector, Home
from batchwright.ingest.context import Tools
from batchwright.ingest.ledger import reserve_batch
from batchwright.ingest.lines import Ask, Unsent, ask_of, join_fields, line_bytes, pack
from batchwright.ingest.money import show_amount
from batchwright.ingest.pending import Group, OpenBatch, Pending
from batchwright.ingest.runs import QUEUE, Run, Runs
from batchwright.ingest.settings import IngestSettings
from batchwright.states import BatchStatus, RunStatus

log = logging.getLogger(__name__)

ROWS_MAX = 20_000
"""Maximum number of requests of one batch, and of rows that one commit moves."""
POLL_SECONDS = (1.0, 15.0)
"""Shortest and longest interval between polls: the older the batches are, the longer."""
_POLL_SHARE = 0.05
_TROUBLE_SECONDS = 30.0
_CONFIGURATION_SECONDS = 60.0
_STORE_SECONDS = 10.0
_WINDOW = "24h"
_FILES_KEPT_SECONDS = 7 * 24 * 3600
_LINES_AT_ONCE = 200
_GIVEN_UP = frozenset({RunStatus.CANCELLED, RunStatus.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherTools:
    """What gathering needs in addition to the tools of documents."""

    tools: Tools
    batches: Batches
    catalog: Catalog
    files: Files
    limits: BatchSettings
    settings: IngestSettings
    ring: Callable[[Sequence[str]], None]


class Gatherer:
    """Runs `ingest.gather`."""

    def __init__(self, tools: GatherTools) -> None:
        self.tools = tools
        self.pending = Pending(tools.tools.queue)
        self.runs = Runs(tools.tools.queue)
        shared = tools.tools
        self.collector = Collector(self.pending, shared.answers, shared.prices, tools.files, shared.counts)
        self.left_out: dict[str, frozenset[str]] = {}
        """Fields that servers have refused, by fingerprint. New batches leave them out."""

    async def run(self, ctx: Context, run_id: str) -> Outcome:
        """No error ends the job while requests wait."""
        try:
            return await self._run(ctx, run_id)
        except RetryLater:
            raise
        except (DatabaseError, Fenced) as error:
            raise RetryLater(str(error), 1.0) from error
        except StorageError as error:
            raise RetryLater(str(error), _STORE_SECONDS) from error
        except ConfigurationError as error:
            raise RetryLater(str(error), _CONFIGURATION_SECONDS) from error
        except Exception as error:
            log.exception("the requests of %s could not be gathered", run_id)
            return Snooze(_TROUBLE_SECONDS, f"{type(error).__name__}: {error}"[:500])

    async def _run(self, ctx: Context, run_id: str) -> Outcome:
        try:
            run = await self.runs.get(run_id, tenant=None)
        except NotFound:
            return Done({"run_id": run_id, "status": "removed"})
        if run.gather_job_ids[-1:] != [ctx.job_id]:
            return Done({"run_id": run_id, "status": "replaced"})
        round = Round(self, run, Held(ctx.job_id, ctx.claim, ctx.worker))
        return await round.go()


class Round:
    """One round over the requests of a run."""

    def __init__(self, gatherer: Gatherer, run: Run, held: Held) -> None:
        self._gatherer = gatherer
        self._held = held
        self._pending = gatherer.pending
        self._queue = gatherer.pending.queue
        self._run = run
        self._tools = gatherer.tools
        self._troubles: list[str] = []
        """Why batches make no progress."""

    async def go(self) -> Outcome:
        open = [one for one in await self._pending.batches(self._run.id) if not await self._look_after(one)]
        self._run = await self._gatherer.runs.get(self._run.id, tenant=None)
        if self._run.has_ended:
            await self._drop_unsent()
        elif self._run.status is RunStatus.RUNNING:
            open += await self._plan()
        total, sent = await self._pending.count(self._run.id)
        if not total:
            await self._wake()
            return Done({"run_id": self._run.id}, write=self._write_end)
        least, most = POLL_SECONDS
        if self._run.status is RunStatus.PARKED and not sent:
            return Snooze(most, self._run.parked_message)
        seconds = min(most, max(least, _POLL_SHARE * max((one.age for one in open), default=0.0)))
        reason = f"{sent:,} requests in {len(open)} batches, {total - sent:,} in none yet"
        return Snooze(seconds, "; ".join([reason, *self._troubles]))

    async def _write_end(self, connection: Any) -> None:
        """End with the run locked: an item that adds a request later sees that there is no gatherer."""
        session = await wrap_connection(connection)
        try:
            await self._gatherer.runs.lock(self._run.id, tenant=None, session=session)
        except NotFound:
            return
        if (await self._pending.count(self._run.id, session=session))[0]:
            raise RetryLater("requests were just added", 0.0)

    async def _wake(self) -> None:
        """Wake items that may have new answers."""
        if await self._pending.wake(self._run.id):
            self._tools.ring([QUEUE])

    def _ask(self, kind: str) -> Ask:
        models, config = self._tools.tools.models, self._run.config
        return ask_of(models.embedder(config) if kind == EMBEDDING else models.extractor(config))

    # Batches ----------------------------------------------------------------------------------------------------

    async def _look_after(self, one: OpenBatch) -> bool:
        """Do what a batch needs. Returns whether it is fully collected."""
        ask = self._ask(one.kind)
        try:
            batch = await self._tools.batches.get(one.id, tenant=None)
        except NotFound:
            return await self._send_or_forget(one, ask)
        if batch.has_ended:
            await self._collect(batch, ask)
            return True
        if batch.waits_for is not None:
            self._troubles.append(f"{batch.id} waits: {batch.waits_for}")
        if self._is_unwanted(ask) and batch.status is not BatchStatus.CANCELLING:
            await self._cancel(batch)
        return False

    async def _send_or_forget(self, one: OpenBatch, ask: Ask) -> bool:
        """Handle a batch that was planned by a worker that died before it sent the batch."""
        if self._run.status is RunStatus.RUNNING:
            await self._send(one.id, ask)
            return False
        if self._run.has_ended:
            home = self._home(one.id, ask)
            await self._gatherer.collector.return_rest(home, "batch_cancelled")
            await self._gatherer.collector.close(home)
        return self._run.has_ended

    async def _collect(self, batch: Batch, ask: Ask) -> None:
        home = replace(self._home(batch.id, ask), created_at=batch.created_at)
        refused = await self._gatherer.collector.collect(home, batch)
        known = self._gatherer.left_out.get(ask.fingerprint, frozenset())
        self._gatherer.left_out[ask.fingerprint] = known | refused
        await self._wake()
        await self._gatherer.collector.tidy(batch)
        await self._gatherer.collector.close(home)

    def _is_unwanted(self, ask: Ask) -> bool:
        return self._run.status in _GIVEN_UP or self._must_use_realtime(ask.model)

    def _must_use_realtime(self, model: str) -> bool:
        tools = self._tools.tools
        return tools.requests.is_late(self._run) and not tools.models.is_at_provider(model)

    async def _cancel(self, batch: Batch) -> None:
        try:
            await self._tools.batches.cancel(batch.id, tenant=None)
        except Conflict:
            return  # it has just ended
        self._tools.ring([batch.queue])

    def _home(self, batch_id: str, ask: Ask) -> Home:
        return Home(run=self._run, held=self._held, batch_id=batch_id, ask=ask)

    # Sending ----------------------------------------------------------------------------------------------------

    async def _send(self, batch_id: str, ask: Ask) -> None:
        """Create the batch from its rows. All ids follow from the batch's id, so that nothing is created twice."""
        count = await self._pending.count_lines(batch_id)
        file_id = f"file-{batch_id.removeprefix('batch_')}"
        stored = await self._tools.files.store.put(
            object_key(file_id), lambda: self._lines(batch_id, ask, count), limit=self._tools.limits.file_bytes_max
        )
        file = NewFile(
            id=file_id,
            tenant=self._run.tenant,
            purpose=BATCH,
            filename=f"{self._run.id}.jsonl",
            stored=stored,
            expires_seconds=_FILES_KEPT_SECONDS,
        )
        await persist(lambda: self._tools.files.add(file))
        new = NewBatch(
            id=batch_id,
            tenant=self._run.tenant,
            endpoint=ask.url,
            input_file_id=file_id,
            completion_window=_WINDOW,
            metadata={"ingest_run": self._run.id},
            output_expires_seconds=_FILES_KEPT_SECONDS,
            priority=self._run.priority,
            traceparent=self._run.traceparent,
        )
        batch, _ = await create(self._tools.batches, self._tools.catalog, new, must_be_served=True)
        self._tools.ring([batch.queue])

    async def _lines(self, batch_id: str, ask: Ask, count: int) -> AsyncIterator[bytes]:
        for first in range(0, count, _LINES_AT_ONCE):
            lines: dict[int, list[Any]] = {}
            for row in await self._pending.lines(batch_id, first, first + _LINES_AT_ONCE):
                lines.setdefault(row.line, []).append(row)
            yield b"".join(
                line_bytes(ask, number, [row.input for row in rows], rows[0].left_out) for number, rows in lines.items()
            )

    # Planning ---------------------------------------------------------------------------------------------------

    async def _plan(self) -> list[OpenBatch]:
        """Put requests that have waited long enough into batches, or all requests if no more are expected soon."""
        await self._withdraw()
        groups = await self._pending.unsent(self._run.id)
        due = [group for group in groups if self._is_due(group)]
        if len(due) < len(groups) and not await self._pending.is_busy(self._run.id):
            due = groups
        made = []
        for group in due:
            ask = self._ask(group.kind)
            while (batch := await self._plan_one(ask)) is not None:
                made.append(batch)
                await self._send(batch.id, ask)
        return made

    def _is_due(self, group: Group) -> bool:
        return group.age >= self._tools.settings.batch_wait_seconds or group.requests >= self._rows_max

    @property
    def _rows_max(self) -> int:
        limits = self._tools.limits
        return min(ROWS_MAX, limits.requests_max, limits.embedding_inputs_max)

    async def _withdraw(self) -> None:
        """Withdraw requests that no item needs, and those that must go in realtime because the deadline is near."""
        groups = await self._pending.unsent(self._run.id)
        late = [group.model for group in groups if self._must_use_realtime(group.model)]
        async with fenced(self._queue, self._held) as session:
            dropped = await self._pending.drop_needless(self._run.id, session=session)
            if late:
                dropped += await self._pending.drop_unsent(self._run.id, late, session=session)
        if dropped:
            await self._wake()

    async def _drop_unsent(self) -> None:
        async with fenced(self._queue, self._held) as session:
            await self._pending.drop_unsent(self._run.id, with_errors=True, session=session)

    async def _plan_one(self, ask: Ask) -> OpenBatch | None:
        """The next batch of a model, or None if there is nothing to plan or no money for it."""
        batch_id = f"batch_{new_id().hex}"
        missing = await self._place(batch_id, ask)
        if missing is None:
            return OpenBatch(batch_id, ask.kind, 0.0)
        if missing and not await self._pending.batches(self._run.id):
            await self._park(missing)
        return None

    @retry_deadlocks
    async def _place(self, batch_id: str, ask: Ask) -> str | None:
        """Place requests in a batch and reserve its cost, in one commit. Returns None, or why not ("" if none wait)."""
        async with fenced(self._queue, self._held) as session:
            run = await self._gatherer.runs.lock(self._run.id, tenant=None, session=session)
            if run.status is not RunStatus.RUNNING:
                return ""
            lines = await self._take(run, ask, session)
            if not lines:
                return ""
            affordable, cost = self._afford(run, ask, lines)
            if not affordable or not await reserve_batch(
                self._queue, run, self._held, batch_id, ask, affordable, cost=cost, session=session
            ):
                return _say_missing(run, self._guess(ask, lines[0]))
            await self._pending.place(run, ask.fingerprint, batch_id, affordable, session=session)
        return None

    async def _take(self, run: Run, ask: Ask, session: Session) -> list[list[Unsent]]:
        rows = await self._pending.take(run, ask.fingerprint, self._rows_max, session=session)
        known = self._gatherer.left_out.get(ask.fingerprint, frozenset())
        rows = [row._replace(left_out=join_fields(row.left_out, *known)) for row in rows]
        return pack(rows, ask.inputs_max, self._tools.limits.file_bytes_max)

    def _afford(
        self, run: Run, ask: Ask, lines: Sequence[list[Unsent]]
    ) -> tuple[Sequence[list[Unsent]], Decimal | None]:
        """The lines that the budget covers, and what they may cost; None if that is unknown."""
        total = Decimal(0)
        for count, line in enumerate(lines):
            guess = self._guess(ask, line)
            if guess is None:
                return lines, None
            if run.budget is not None and run.spent + run.reserved + total + guess > run.budget:
                return lines[:count], total
            total += guess
        return lines, total

    def _guess(self, ask: Ask, line: Sequence[Unsent]) -> Decimal | None:
        price = self._tools.tools.prices.find(ask.model, "batch")
        prompt = sum(row.tokens for row in line)
        return cost_of(price, prompt_tokens=prompt, completion_tokens=ask.answer_tokens)

    @retry_deadlocks
    async def _park(self, message: str) -> None:
        """Park the run until a user raises the budget; the requests stay."""
        event = {"event": "run_parked", "level": "warning", "message": message, "fields": {"reason": "budget"}}
        async with fenced(self._queue, self._held) as session:
            of_run = Held(self._run.job_id, 0, self._held.worker)
            await note(self._queue, of_run, event, session=session)
            await self._gatherer.runs.park(self._run.id, "budget", message, session=session)
        self._run = await self._gatherer.runs.get(self._run.id, tenant=None)


def _say_missing(run: Run, guess: Decimal | None) -> str:
    return (
        f"{show_amount(run.spent + run.reserved)} of the budget of {show_amount(run.budget)} are spent or reserved, "
        f"and the next request may cost {show_amount(guess)}"
    )
