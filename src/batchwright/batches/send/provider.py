"""The life of a shard whose requests an outside provider answers: one job there, polled until it has ended.

    plan a job ─▶ stage ─▶ submit once ─▶ poll, Snooze … ─▶ results into the journal ─▶ Done
        ▲                                                         │
        └──────────── lines with a temporary failure, once ───────┘

Each run does what can be done now and snoozes the shard, so that a worker may have many, and any worker can continue.
When the batch must stop, the job is cancelled at the provider, and its results so far are fetched.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from orjson import dumps

from batchwright.batches.journal.checkpoint import UPLOAD_BYTES, Account
from batchwright.batches.journal.envelopes import RequestIds, answered
from batchwright.batches.plan.lines import split
from batchwright.batches.plan.planfile import Entry
from batchwright.batches.plan.shards import Shard
from batchwright.batches.send.shard import ShardClaim, pause_seconds
from batchwright.batches.send.work import End
from batchwright.batches.store import Batch, Control
from batchwright.batches.tally import LineStatus
from batchwright.batches.waits import CREDENTIAL
from batchwright.db.database import Session
from batchwright.engine.context import Context
from batchwright.engine.outcomes import Done, Outcome, Snooze
from batchwright.engine.owned import Held
from batchwright.errors import Fenced, OperationError, RetryLater
from batchwright.inference.answers import UNKNOWN, Answer, Reply, Verdict, classify
from batchwright.providers.contract import Counts, Job, Result, Status, Usage
from batchwright.providers.errand import CredentialRefused, Errand, Over, Progress, Ready, Refused, Waits
from batchwright.providers.jobs import Hold, JobEnding, NewRemoteJob, RemoteJob
from batchwright.providers.prices import Bill, Price, find_price
from batchwright.states import BatchStatus

if TYPE_CHECKING:
    from batchwright.batches.send.runner import ShardRunner

log = logging.getLogger(__name__)

SENT_MAX = 2
"""How often a line with a temporary failure is sent; each resend of the batch adds one more time."""
REFUSED_SECONDS = 600.0
"""Pause after a provider refused more work, because too much of ours already waits there."""
_HELD_SECONDS_MAX = 30.0
_SNOOZE_SECONDS_MIN = 0.05
_OPEN = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
_PASSING = ("rate_limited", "transient")
_FULL = "rate_limited"
_UNDONE = ("batch_cancelled", "batch_expired", "missing_result")
"""Codes of requests that a provider has not processed."""
_MISSING = {"code": "missing_result", "message": "The provider has no result for this request."}
_CODE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class ProviderShardRun(ShardClaim):
    """One claim of a shard at a provider."""

    def __init__(self, runner: ShardRunner, ctx: Context, shard: Shard) -> None:
        super().__init__(runner, ctx, shard)
        self._desk = runner.desk
        self._held = Held(ctx.job_id, ctx.claim, ctx.worker)
        self._name = f"{shard.batch_id}/{shard.name}"
        """The owner of its jobs at the provider, which are numbered."""
        self._batch: Batch
        self._traceparent: str | None = None
        self._is_complete = False
        """Whether every line has its answer."""

    async def advance(self, control: Control, traceparent: str | None) -> Outcome:
        self._traceparent = traceparent
        self._batch = await self._tools.batches.get(self.shard.batch_id, tenant=None)
        while True:
            must_stop = _must_stop(control)
            if must_stop and control.status == BatchStatus.IN_PROGRESS and control.stop_reason is None:
                await self._tools.batches.stop(control.id, "deadline")
            try:
                outcome = await self._do_next(control, must_stop)
            except Fenced as error:
                raise RetryLater(str(error), 1.0) from error
            now = (await self._tools.batches.controls([control.id])).get(control.id)
            if not isinstance(outcome, Snooze) or now is None or _must_stop(now) == must_stop:
                return outcome
            control = now  # the batch was ordered to stop meanwhile, and nothing else would wake this shard

    async def _do_next(self, control: Control, must_stop: bool) -> Outcome:
        if control.status not in _OPEN:
            return Done()
        rows = await self._desk.jobs.of(self._name)
        if not rows or rows[-1].has_ended:
            if must_stop:
                return Done()
            if control.is_paused:
                return Snooze(pause_seconds(control), End.PAUSE.value)
            if not (planned := await self._plan_job(rows)):
                return self._finish()
            rows = planned
        return await self._run_errand(rows, control, must_stop)

    # A job for the provider -------------------------------------------------------------------------------------

    def _finish(self) -> Outcome:
        return Done(progress=(self.shard.count, self.shard.count))

    async def _plan_job(self, rows: Sequence[RemoteJob]) -> list[RemoteJob]:
        """Commit the intent of a job for the lines without an answer; empty if there are none."""
        shard, name = self.shard, self.shard.name
        if rows or shard.round:
            if (waiting := await self._find_shortage()) is not None:
                raise RetryLater(waiting, _HELD_SECONDS_MAX)
            async with self._open_ledger() as ledger:
                if not (pending := ledger.pending):
                    return []
                name = f"{shard.name}.{len(rows)}-{self._ctx.claim}"
                await self._desk.write_requests(shard, name, ledger.descriptor, pending)
        assert shard.provider is not None
        new = NewRemoteJob(len(rows), shard.provider, shard.provider_model, [name])
        planned = await self._desk.jobs.plan(self._name, [new], self._held)
        if rows and _was_full(rows[-1]):
            await self._desk.jobs.note(planned[-1], self._held, seconds=REFUSED_SECONDS)
            planned = await self._desk.jobs.of(self._name)
        return planned

    async def _run_errand(self, rows: Sequence[RemoteJob], control: Control, must_stop: bool) -> Outcome:
        row = rows[-1]
        is_paid = row.phase in ("submitting", "submitted")
        if (is_paid or not must_stop) and (hold := await self._desk.find_hold(row.provider)) is not None:
            return await self._wait_for_credential(hold)
        errand = self._desk.errand(row, self.shard, self._batch.endpoint, self, self._held)
        try:
            progress = await errand.advance(stop=must_stop, may_submit=not control.is_paused)
            if isinstance(progress, Ready):
                if (waiting := await self._wait_for_room()) is not None:
                    return waiting
                progress = await self._fetch_results(errand, progress.status, rows, must_stop)
        except CredentialRefused as refused:
            await self._desk.hold(refused)
            text = f"{refused.provider} refuses its credential: {refused.error}; its work waits"
            self._ctx.emit("provider.held", text, level="error", error_kind="fatal", provider=refused.provider)
            return await self._do_next(control, must_stop)
        return await self._settle(errand, progress, control)

    async def _settle(self, errand: Errand, progress: Progress, control: Control) -> Outcome:
        match progress:
            case Waits(seconds, reason):
                if control.seconds_left > 0:
                    seconds = min(seconds, control.seconds_left + 0.1)
                done = (errand.row.succeeded or 0) + (errand.row.failed or 0)
                text = reason or f"{errand.row.provider} is working on it"
                return Snooze(max(_SNOOZE_SECONDS_MIN, seconds), text, progress=(done, self.shard.count))
            case Refused(error):
                await self._give_up(errand, error)
            case Over() | Ready():
                pass
        return self._finish() if self._is_complete else Snooze(0, "the job at the provider has ended")

    async def _wait_for_credential(self, hold: Hold) -> Outcome:
        """Wait while its window is open. The reason is reported each time, so that users see it."""
        message = f"{hold.provider}: {hold.message}"
        await self._tools.waits.note(self.shard.batch_id, CREDENTIAL, message)
        return Snooze(min(_HELD_SECONDS_MAX, max(1.0, hold.try_seconds)), message)

    # Its results ------------------------------------------------------------------------------------------------

    async def _fetch_results(
        self, errand: Errand, status: Status, rows: Sequence[RemoteJob], must_stop: bool
    ) -> Progress:
        """Write all results into the journal and register them, then end the job. A repetition adds what is missing."""
        sent = sum(not _was_full(row) for row in rows)
        may_repeat = not must_stop and (sent < SENT_MAX + self.shard.round or _is_full(status))
        async with self._open_ledger() as ledger:
            bill = Bill(self._price(errand.row))
            harvest = Harvest(ledger, bill, must_stop=must_stop, may_repeat=may_repeat, seconds=_age(errand.row))
            try:
                async with aclosing(errand.results(status)) as results:
                    async for result in results:
                        if (answer := harvest.take(result)) is not None:
                            self._tools.counts.answered(self.shard.model, answer)
                        if ledger.account.journal.untaken >= UPLOAD_BYTES:
                            await self._checkpoints.flush(ledger.account)
                harvest.close()
            except OperationError as error:
                return await errand.put_off_results(error)
        self._is_complete = not ledger.pending
        self._tools.waits.end(self.shard.batch_id)
        await self._end(errand, harvest, status)
        return Over()

    async def _end(self, errand: Errand, harvest: Harvest, status: Status) -> None:
        row, spent = errand.row, harvest.bill.cost
        counts = Counts(total=harvest.total, succeeded=harvest.succeeded, failed=harvest.total - harvest.succeeded)
        await errand.end(
            JobEnding(error=status.error, raw_status=status.raw_status, counts=counts, usage=harvest.usage, cost=spent)
        )
        self._ctx.emit(
            "provider.ended",
            f"{row.provider}: {harvest.succeeded} of {harvest.total} results; {harvest.left} lines are left",
            model=self.shard.model,
            prompt_tokens=harvest.usage.input_tokens,
            completion_tokens=harvest.usage.output_tokens,
            cost=spent,
            price=harvest.bill.source,
            provider=row.provider,
            external_id=row.external_id,
        )
        await errand.clean_up()

    def _price(self, row: RemoteJob) -> Price | None:
        directory = self._desk.directory
        return find_price(directory.settings(row.provider).prices, directory.kind(row.provider).name, row.model)

    async def _give_up(self, errand: Errand, error: Mapping[str, Any]) -> None:
        """There will be no job: its lines fail. If the batch stops, the code that writes its files adds the lines."""
        if error.get("code") != "cancelled":
            async with self._open_ledger() as ledger:
                for entry in ledger.pending:
                    ledger.keep(entry.offset, _failure(error))
            self._is_complete = True
        await errand.end(JobEnding(error=error))
        message = f"{errand.row.provider}: {error.get('message')}"
        self._ctx.emit("provider.failed", message, level="error", provider=errand.row.provider)
        await errand.clean_up()

    @asynccontextmanager
    async def _open_ledger(self) -> AsyncIterator[Ledger]:
        """Its lines and their answers. What was added is registered at the end; after an error, by the next claim."""
        batch = self._batch
        with self._tools.workspace.use(batch.id):
            descriptor = await self._open_input(batch)
            try:
                entries = await self._read_entries()
                account = await self._checkpoints.open(self._owner(self._traceparent))
                try:
                    found = await self._recover(account, entries)
                    yield Ledger(account, descriptor, entries, found)
                    await self._checkpoints.flush(account)
                    if account.is_lost:
                        raise Fenced(f"shard {self._name} was given to another worker")
                finally:
                    self._checkpoints.close(account)
            finally:
                os.close(descriptor)

    # Callbacks of errands ---------------------------------------------------------------------------------------

    def describe(self, row: RemoteJob, job: Job | None) -> None:
        return None

    def describe_poll(self, row: RemoteJob, status: Status) -> None:
        return None

    async def referred(self, row: RemoteJob, session: Session) -> None:
        """Nothing else is written in the same commit."""

    async def is_wanted(self) -> bool:
        """Staging may have taken a while: the batch may have been cancelled or paused, or its window may have ended."""
        control = (await self._tools.batches.controls([self.shard.batch_id])).get(self.shard.batch_id)
        return control is not None and not _must_stop(control) and not control.is_paused

    def report(self, event: str, message: str, **fields: Any) -> None:
        self._ctx.emit(event, message, **fields)


class Ledger:
    """The lines of a shard while its journal is open, and which of them have their answer."""

    def __init__(self, account: Account, descriptor: int, entries: Sequence[Entry], answered: set[int]) -> None:
        self.account = account
        self.descriptor = descriptor
        self._answered = answered
        self._ids = RequestIds(account.owner.batch_id)
        self._entries = {entry.offset: entry for entry in entries}

    @property
    def pending(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.offset not in self._answered]

    def offset_of(self, id: str) -> int | None:
        """The line with this id at the provider; None if the id is not ours."""
        try:
            offset = int(id[-10:], 16)
        except ValueError:
            return None
        return offset if offset in self._entries and self._ids.in_files(offset) == id else None

    def has(self, offset: int) -> bool:
        return offset in self._answered

    def keep(self, offset: int, answer: Answer) -> None:
        """Write the line of an answer, like one from a server of our own."""
        entry = self._entries[offset]
        custom_id, _, _ = split(os.pread(self.descriptor, entry.length, offset))
        line = answered(self._ids.in_files(offset), custom_id, answer)
        status = LineStatus.OK if answer.succeeded else LineStatus.of(answer.code or "")
        self.account.journal.append(offset, status, line, answer.usage)
        self._answered.add(offset)


class Harvest:
    """Writes the results of a job into the journal and counts them."""

    def __init__(self, ledger: Ledger, bill: Bill, *, must_stop: bool, may_repeat: bool, seconds: float) -> None:
        self.bill = bill
        self.total = 0
        self.succeeded = 0
        self.left = 0
        self.usage = Usage()
        self._ledger = ledger
        self._must_stop = must_stop
        self._may_repeat = may_repeat
        self._seconds = seconds

    def take(self, result: Result) -> Answer | None:
        """Write a result, if its line has no answer and will not be resent."""
        offset = self._ledger.offset_of(result.key)
        if offset is None:
            log.warning("batch %s: an answer belongs to none of its lines", self._ledger.account.owner.batch_id)
            return None
        self.total += 1
        self.succeeded += result.value is not None
        self.usage += result.usage
        self.bill.add(result)
        if self._ledger.has(offset):
            return None
        if result.error is not None and self._leaves(result.error):
            self.left += 1
            return None
        answer = _answer(result, self._seconds)
        self._ledger.keep(offset, answer)
        return answer

    def close(self) -> None:
        """Call this after the last result. Lines that are not resent get an answer, or they would be resent forever."""
        if not self._must_stop and not self._may_repeat:
            for entry in self._ledger.pending:
                self._ledger.keep(entry.offset, _failure(_MISSING))

    def _leaves(self, error: Mapping[str, Any]) -> bool:
        """Whether a line stays without an answer: it is resent, or the end of the batch explains why it has none."""
        if self._must_stop:
            return error.get("code") in _UNDONE
        return self._may_repeat and error.get("kind") in _PASSING


def _must_stop(control: Control) -> bool:
    return control.status != BatchStatus.IN_PROGRESS or control.stop_reason is not None or control.seconds_left <= 0


def _is_full(status: Status) -> bool:
    """Whether the job failed as a whole because too much of ours waits at the provider."""
    return status.error is not None and status.error.get("kind") == _FULL


def _was_full(row: RemoteJob) -> bool:
    return row.error is not None and row.error.get("kind") == _FULL


def _age(row: RemoteJob) -> float:
    """Seconds since the job was submitted."""
    return 0.0 if row.submitted_at is None else max(0.0, (datetime.now(UTC) - row.submitted_at).total_seconds())


def _answer(result: Result, seconds: float) -> Answer:
    """A result as an answer, as if a server of our own had sent it: judged by the same rules."""
    found: Mapping[str, Any] = result.value or result.error or {}
    match found.get("response"):
        case {"status_code": int() as status, "body": body, **rest}:
            name = rest.get("request_id")
            request_id = name if isinstance(name, str) and name else None
            reply = Reply(status=status, body=dumps(body), request_id=request_id, seconds=seconds)
            return classify(reply, now=time.time())
        case _:
            return _failure(result.error or {})


def _failure(error: Mapping[str, Any]) -> Answer:
    """A provider's error as an answer."""
    code = str(error.get("code") or "")
    return Answer(
        verdict=Verdict.ANSWER,
        status=None,
        body=b'""',
        code=code if _CODE.fullmatch(code) else "provider_error",
        message=str(error.get("message") or "the provider did not say why"),
        retry_after=None,
        request_id=None,
        usage=UNKNOWN,
        is_overload=False,
        seconds=0.0,
        succeeded=False,
    )
