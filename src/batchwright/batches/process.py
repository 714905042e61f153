"""The life of a batch, driven by its job: plan it, create its shards, and write its files when they have ended.

    validating ─ plan ─▶ in_progress ─ Wait(shards) … resumed ─▶ finalizing ─ files ─▶ completed
         │                  ▲  │                                   │  │
         │                  └──┼──────── lines without an answer ──┘  │
         └ bad input: failed   └ ordered to stop: expired · failed · cancelling ─ files ─▶ cancelled

Each run reads the row and does the next step, so it does not matter where an earlier run died. If the store is
unavailable or the disk is full, it waits until the window ends, and for at least an hour.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from batchwright.batches.ending import Endings, error_list
from batchwright.batches.journal.checkpoint import Owner
from batchwright.batches.journal.envelopes import error_code_of
from batchwright.batches.journal.unregistered import UnregisteredAnswers
from batchwright.batches.journal.workspace import InputDamaged
from batchwright.batches.operations import send_provider_shard, send_shard
from batchwright.batches.output.assemble import Assembly
from batchwright.batches.output.finalize import Finalizer, Result
from batchwright.batches.plan import plan, planner
from batchwright.batches.plan.lines import Problem
from batchwright.batches.plan.shards import BRANCH_REQUESTS_MIN, Shard, last_journal_number, shards_of
from batchwright.batches.send.desk import Desk
from batchwright.batches.store import (
    AWAY_SECONDS,
    SHARD,
    Batch,
    Ending,
    later_priority,
    provider_queue,
    require_own_job,
    shard_queue,
)
from batchwright.batches.tally import LineStatus
from batchwright.batches.toolbox import Toolbox
from batchwright.batches.waits import reason_to_wait
from batchwright.db.database import Session, wrap_connection
from batchwright.engine.context import Context
from batchwright.engine.jobs import NewJob
from batchwright.engine.outcomes import Done, Outcome, Wait
from batchwright.errors import (
    DatabaseError,
    Fatal,
    NotFound,
    RetryLater,
    StorageError,
    Transient,
)
from batchwright.files.store import File
from batchwright.inference.budgets import live_workers
from batchwright.states import BatchStatus
from batchwright.telemetry import tracing

log = logging.getLogger(__name__)

_MISSING = {"code": "answers_missing", "message": "Lines were left without an answer; the error file names them."}


class EndingVerb(Protocol):
    """A verb of `Batches` that makes the last transition of a batch."""

    def __call__(self, id: str, ending: Ending, *, session: Session | None = None) -> Awaitable[BatchStatus | None]: ...


class Processor:
    """Runs `batch.process`."""

    def __init__(
        self,
        tools: Toolbox,
        endings: Endings,
        unregistered: UnregisteredAnswers,
        *,
        models: frozenset[str] | None,
        desk: Desk,
    ) -> None:
        self.tools = tools
        self.desk = desk
        self.endings = endings
        self.finalizer = Finalizer(tools.batches, tools.files, tools.workspace, unregistered)
        self.models = models
        """Models that have a gateway or a provider here; None if one gateway serves every model."""

    async def run(self, ctx: Context, batch_id: str) -> Outcome:
        try:
            batch = await self._find(batch_id)
            require_own_job(ctx, batch.id, batch.job_id)
            with tracing.span("process-batch", parent=ctx.traceparent, attributes=_attributes(batch)) as span:
                return await Run(self, ctx, batch, span).advance()
        except DatabaseError as error:
            _trace_return(ctx, batch_id, error)
            raise RetryLater(str(error), 1.0) from error

    async def _find(self, batch_id: str) -> Batch:
        try:
            return await self.tools.batches.get(batch_id, tenant=None)
        except NotFound:
            self.tools.counts.skipped("db_inconsistency")
            self.tools.counts.recovered("unknown", "cleaned_up")
            raise


class Run:
    """One run of a batch's job."""

    def __init__(self, processor: Processor, ctx: Context, batch: Batch, span: tracing.Span) -> None:
        self._ctx = ctx
        self._span = span
        self._found = batch
        """The batch as it was when the run began."""
        self._batch = batch
        """The batch as it is after our last transition."""
        self._models = processor.models
        self._desk = processor.desk
        self._endings = processor.endings
        self._finalizer = processor.finalizer
        self._batches = processor.tools.batches
        self._counts = processor.tools.counts
        self._files = processor.tools.files
        self._limits = processor.tools.settings.limits
        self._waits = processor.tools.waits
        self._workspace = processor.tools.workspace

    async def advance(self) -> Outcome:
        """Do the next step."""
        try:
            outcome = await self._do_next()
        except (OSError, StorageError) as error:
            return await self._wait_or_give_up(error)
        self._waits.end(self._batch.id)
        return outcome

    async def _wait_or_give_up(self, error: Exception) -> Outcome:
        """Its window and the database's clock decide whether it may keep waiting, not the number of its attempts."""
        batch = self._found
        if self._ctx.after_death:
            self._counts.recovered(batch.status, "error")
        if (reason := reason_to_wait(error)) is not None:
            may_wait = await self._waits.note(batch.id, reason, str(error))
            if may_wait or batch.in_progress_at is None:
                _trace_return(self._ctx, batch.id, error)
                raise RetryLater(str(error), AWAY_SECONDS) from error
        elif isinstance(error, OSError):
            _trace_return(self._ctx, batch.id, error)
            raise Transient(str(error), code="unexpected") from error
        self._batch = await self._batches.get(batch.id, tenant=None)
        return self._end_with_counts(error)

    async def _do_next(self) -> Outcome:
        ctx, batch = self._ctx, self._batch
        if batch.has_ended:
            self._counts.skipped("not_runnable_state")
            if ctx.after_death:
                self._counts.recovered(batch.status, "cleaned_up")
            return Done()
        if batch.status is BatchStatus.VALIDATING:
            return await self._validate()
        if batch.in_progress_at is None:
            return self._end(self._batches.end_cancelled, Ending())
        if batch.status is BatchStatus.IN_PROGRESS and batch.stop_reason is None and ctx.joined is None:
            return await self._hand_over()
        return await self._conclude()

    # Plan -------------------------------------------------------------------------------------------------------

    async def _validate(self) -> Outcome:
        picked_up = await self._batches.pick_up(self._batch.id)
        if picked_up is None:
            raise RetryLater("the batch changed its status before it was planned", 0)
        batch, is_late = picked_up
        self._batch = batch
        if self._ctx.claim == 1:
            self._counts.waited((_now() - batch.created_at).total_seconds())
        if self._ctx.after_death:
            self._counts.recovered(batch.status, "expired" if is_late else "re_enqueued")
        if is_late:
            return self._end(self._batches.expire, Ending())
        with self._workspace.use(batch.id) as folder:
            try:
                file = await self._files.get(batch.input_file_id, tenant=None, also_gone=True)
                input = await self._workspace.fetch_input(batch.id, self._files.store, file.key, file.bytes)
                only = await self._select_lines()
            except NotFound:
                return self._refuse(_no_input(batch))
            except InputDamaged as error:
                return self._refuse(Problem(code="input_damaged", line=None, message=str(error), param="file_id"))
            models = await self._find_models()
            providers = self._desk.plans
            rules = plan.Rules(
                endpoint=batch.endpoint, limits=self._limits, models=models, only=only, providers=providers
            )
            return await self._plan(file, input, rules, folder)

    async def _plan(self, file: File, input: Path, rules: plan.Rules, folder: Path) -> Outcome:
        id, began = self._batch.id, time.perf_counter()
        planned = await planner.make(input, rules, folder, size=file.bytes)
        if planned.problems is not None:
            return self._end(self._batches.fail, Ending(errors=planned.problems))
        if (problems := await self._prepare_for_providers(input, folder)).total:
            return self._end(self._batches.fail, Ending(errors=problems.as_json()))
        await self._workspace.keep_plan(id, self._files.store)
        total, models = planned.total, planned.models
        begun = await self._batches.begin(
            id, total=total, models=models, input_sha256=file.sha256, requests=planned.requests
        )
        self._counts.planned(total, time.perf_counter() - began)
        if begun is None:
            raise RetryLater("the batch changed its status while it was planned", 0)
        self._batch = begun
        text = f"{total} request{'' if total == 1 else 's'} for {len(models)} model{'' if len(models) == 1 else 's'}"
        self._ctx.emit("batch.planned", text, requests=total, models=len(models))
        return await self._hand_over()

    async def _prepare_for_providers(self, input: Path, folder: Path) -> plan.Problems:
        """The requests that outside providers do not accept; nothing is paid for yet."""
        problems = plan.Problems(self._limits.problems_kept)
        shards = await asyncio.to_thread(lambda: list(shards_of(self._batch.id, folder)))
        for problem in await self._desk.prepare(self._batch, shards, input, folder):
            problems.add(problem)
        return problems

    async def _find_models(self) -> frozenset[str] | None:
        """Models with a gateway here or at another worker, which then claims their shards; None if one serves them all.

        A worker that left in the last minutes counts: it may be restarting.
        """
        if self._models is None:
            return None
        ours = shard_queue(self._batch.queue, "")
        served = {queue.removeprefix(ours) for queue in await self._batches.served_queues() if queue.startswith(ours)}
        return None if "" in served else self._models | served

    async def _select_lines(self) -> frozenset[bytes] | None:
        """For a retry of another batch, the digests of the custom_ids of the lines that failed there."""
        batch = self._batch
        if batch.retry_of is None:
            return None
        first = await self._batches.get(batch.retry_of, tenant=batch.tenant)
        if first.error_file_id is None:
            raise Fatal(f"batch {first.id} has no error file to retry from", code="no_error_file")
        try:
            file = await self._files.get(first.error_file_id, tenant=batch.tenant, also_gone=True)
            return await self._read_failed_lines(file, set(batch.retry_codes or ()))
        except (NotFound, ValueError) as error:
            raise InputDamaged(
                f"The error file {first.error_file_id} of {first.id} cannot be read: {error}."
            ) from error

    async def _read_failed_lines(self, file: File, codes: set[str]) -> frozenset[bytes]:
        """ValueError if the file does not have the size that was written: a part of it would look like a whole file."""
        wanted = set()
        size, rest = 0, b""
        async for part in self._files.content(file):
            size += len(part)
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                code, custom_id = error_code_of(line)
                if not codes or code in codes:
                    wanted.add(plan.digest_of(custom_id))
        if size != file.bytes:
            raise ValueError(f"the store has {size} of its {file.bytes} bytes")
        return frozenset(wanted)

    async def _hand_over(self) -> Outcome:
        """Create the shards, each its own job; this job resumes when the last one has ended."""
        with self._workspace.use(self._batch.id):
            return self._wait_for(await self._finalizer.shards(self._batch, workers=await self._count_workers()))

    async def _count_workers(self) -> int:
        """The number of workers to divide shards for: one if the batch is small, or is run by this process alone."""
        if self._batch.total < 2 * BRANCH_REQUESTS_MIN or self._batch.is_private:
            return 1
        return await live_workers(self._batches.queue.database, SHARD)

    def _wait_for(self, shards: Sequence[Shard]) -> Outcome:
        batch = self._batch
        firsts: set[str] = set()
        children = []
        for one in shards:
            is_first = one.model not in firsts
            firsts.add(one.model)
            if one.provider is None:
                operation, queue = send_shard, shard_queue(batch.queue, one.model)
            else:
                operation, queue = send_provider_shard, provider_queue(batch.queue, one.provider)
            children.append(
                NewJob(
                    operation,
                    one,
                    queue=queue,
                    priority=batch.priority if is_first else later_priority(batch.priority),
                    owner=batch.id,
                    traceparent=tracing.current_traceparent() or batch.traceparent,
                )
            )
        return Wait(children, on_join="resume", allow_failures=True)

    # Files ------------------------------------------------------------------------------------------------------

    async def _conclude(self) -> Outcome:
        status = self._batch.status
        if self._ctx.after_death and status in (BatchStatus.FINALIZING, BatchStatus.CANCELLING):
            self._counts.recovered(status, "finalized" if status is BatchStatus.FINALIZING else "cancelled")
        if status is BatchStatus.IN_PROGRESS and self._batch.stop_reason is None:
            self._batch = await self._finalize_or_stop()
        verb, filler = self._last_move()
        try:
            with self._workspace.use(self._batch.id):
                assembly = await self._finalizer.gather(self._batch, self._owner())
                if filler is None and assembly.missing:
                    if (outcome := await self._resend(assembly)) is not None:
                        return outcome
                    verb, filler = self._batches.fail, "batch_failed"
                if filler is not None:
                    await asyncio.to_thread(assembly.fill, filler)
                result = await self._finalizer.write(self._batch, assembly)
        except NotFound as error:
            return self._end_with_counts(error)
        ending = replace(result.ending(), errors=self._why_failed() if filler == "batch_failed" else None)
        return self._end(verb, ending, result)

    async def _finalize_or_stop(self) -> Batch:
        id, joined = self._batch.id, self._ctx.joined
        if joined is not None and joined.failed:
            message = f"{joined.failed} of {joined.total} shards failed"
            await self._batches.stop(id, "error", {"code": "shards_failed", "message": message})
        else:
            await self._batches.finalize(id)
        moved = await self._batches.get(id, tenant=None)
        if moved.status is BatchStatus.IN_PROGRESS and moved.stop_reason is None:
            raise RetryLater("the batch changed its status while it was finished", 0)
        return moved

    async def _resend(self, assembly: Assembly) -> Outcome | None:
        """Every shard is done, but lines have no answer: resend those. None if they were resent too often already: then
        another attempt would not help."""
        id = self._batch.id
        resends = await self._batches.resend(id)
        if resends is None:
            if (await self._batches.get(id, tenant=None)).status is not BatchStatus.FINALIZING:
                raise RetryLater("the batch changed its status while it was finished", 0)
            log.error("batch %s: %d lines have no answer, although they were resent", id, assembly.missing)
            return None
        log.error("batch %s: %d lines have no answer, and are resent", id, assembly.missing)
        self._counts.resent(assembly.missing)
        text = f"{assembly.missing} lines had no answer, and are resent"
        self._ctx.emit("batch.lines_resent", text, level="warning", lines=assembly.missing)
        shards = await self._finalizer.shards_with(self._batch, assembly.missing_offsets)
        return self._wait_for([replace(one, round=resends) for one in shards])

    def _owner(self) -> Owner:
        """The owner of answers that are found at the end, in the journals of any shard."""
        ctx, models = self._ctx, self._batch.models
        return Owner(
            batch_id=self._batch.id,
            shard=0,
            model=models[0] if models else "",
            journal_number=last_journal_number(ctx.claim),
            job_id=ctx.job_id,
            job_claim=ctx.claim,
            worker=ctx.worker,
            traceparent=tracing.current_traceparent(),
        )

    # The last transition ----------------------------------------------------------------------------------------

    def _last_move(self) -> tuple[EndingVerb, str | None]:
        """The verb that ends a batch that no longer sends, and the error of the lines without an answer."""
        if self._batch.status is BatchStatus.FINALIZING:
            return self._batches.complete, None
        if self._batch.status is BatchStatus.CANCELLING:
            return self._batches.end_cancelled, "batch_cancelled"
        if self._batch.stop_reason == "deadline":
            return self._batches.expire, "batch_expired"
        return self._batches.fail, "batch_failed"

    def _why_failed(self) -> dict[str, Any]:
        stopped = self._batch.stop_error or _MISSING
        return error_list(Problem(code=stopped["code"], line=None, message=stopped["message"]))

    def _refuse(self, problem: Problem) -> Outcome:
        return self._end(self._batches.fail, Ending(errors=error_list(problem)))

    def _end_with_counts(self, error: Exception) -> Outcome:
        """The files cannot be written: only the counts are left, until an operator repairs the batch.

        An expired or cancelled batch stays so; its errors say that its files are missing.
        """
        batch = self._batch
        log.error("batch %s ends without files: %s", batch.id, error)
        code = "files_not_written" if batch.in_progress_at is not None else "storage_error"
        verb, filler = self._last_move()
        if filler is None:
            verb, filler = self._batches.fail, "batch_failed"
        counts = {name: getattr(batch, name) for name in ("completed", "failed", "expired", "cancelled")}
        counts[LineStatus.of(filler).name.lower()] += max(0, batch.total - batch.done)
        errors = error_list(Problem(code=code, line=None, message=str(error)))
        return self._end(verb, Ending(counts=counts, errors=errors))

    def _end(self, verb: EndingVerb, ending: Ending, result: Result | None = None) -> Outcome:
        """One commit: the batch's last transition, its files, its webhooks, and the success of its job."""
        batch = self._batch
        ended: list[BatchStatus] = []

        async def move(session: Session) -> BatchStatus | None:
            status = await verb(batch.id, ending, session=session)
            if status is not None and result is not None:
                await self._finalizer.add_files(result, session)
            return status

        async def write(connection: Any) -> None:
            status = await self._endings.write(batch.id, batch.tenant, move, await wrap_connection(connection))
            if status is None:
                raise RetryLater("the batch changed its status while it ended", 0)
            ended.append(status)

        def count(settled: str | None) -> None:
            if settled == "succeed":
                status = ended[-1]
                self._endings.count(batch, status, _reason(batch, status), at=_now(), worked=True)

        if ending.errors is not None:
            self._span.error(Fatal(ending.errors["data"][0]["message"]))
        self._span.set(_ending_attributes(batch, ending))
        self._ctx.when_settled(count)
        return Done(write=write)  # without a result: only `write` learns whether a user has cancelled meanwhile


def _trace_return(ctx: Context, batch_id: str, error: Exception) -> None:
    """Trace that a batch is re-enqueued, in a separate span that a cancellation does not end."""
    with tracing.detached("re-enqueue", link=ctx.traceparent) as span:
        span.set({"batch.id": batch_id, "tenant.id": ctx.tenant, "batch.re_enqueue.reason": str(error)})


def _ending_attributes(batch: Batch, ending: Ending) -> dict[str, str | int | None]:
    return {
        "batch.output_file.id": ending.output_file_id,
        "batch.error_file.id": ending.error_file_id,
        "batch.request.total": batch.total,
        "batch.request.completed": ending.counts.get("completed", batch.completed),
        "batch.request.failed": ending.counts.get("failed", batch.failed),
    }


def _reason(batch: Batch, status: BatchStatus) -> str:
    """Why a batch ended, as the metric names it."""
    if status is BatchStatus.EXPIRED:
        return "expired_execution" if batch.in_progress_at else "expired_dequeue"
    return "system_error" if status is BatchStatus.FAILED and batch.in_progress_at is not None else "none"


def _no_input(batch: Batch) -> Problem:
    message = f"Cannot find file {batch.input_file_id}, or this tenant does not have access to it."
    return Problem(code="invalid_request", line=None, message=message, param="file_id")


def _attributes(batch: Batch) -> dict[str, Any]:
    return {"batch.id": batch.id, "tenant.id": batch.tenant, "file.id": batch.input_file_id}


def _now() -> datetime:
    return datetime.now(UTC)
