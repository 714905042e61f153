"""The story of a batch, told by its job: plan, hand over to shards, and when they have ended, write the files.

    validating ─ plan ─▶ in_progress ─ Wait(shards) … resumed ─▶ finalizing ─ files ─▶ completed
         │                  ▲  │                                   │  │
         │                  └──┼──────── lines without an answer ──┘  │
         └ bad input: failed   └ told to stop: expired · failed · cancelling ─ files ─▶ cancelled

Each run looks at the row and does what comes next, so that it does not matter where an earlier one died. A store that
is unavailable and a full disk are waited for: until the window is over, and for an hour at least.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchwright.batches import plan, planner
from batchwright.batches.assemble import Assembly
from batchwright.batches.checkpoint import Owner
from batchwright.batches.envelopes import error_code_of
from batchwright.batches.files import File, Files
from batchwright.batches.finalize import Finalizer, Result
from batchwright.batches.journal import Outcome as Record
from batchwright.batches.lines import Problem
from batchwright.batches.metrics import BatchCounts
from batchwright.batches.operations import send_shard
from batchwright.batches.settings import BatchSettings
from batchwright.batches.shards import Slice, last_journal_number
from batchwright.batches.store import AWAY_SECONDS, QUEUE, SHARD_QUEUE, Batch, Batches, Ending, refuse_stranger
from batchwright.batches.takeover import Takeover
from batchwright.batches.waits import Waits, reason_to_wait
from batchwright.batches.webhooks import EVENTS, Webhooks
from batchwright.batches.workspace import InputDamaged, Workspace
from batchwright.db.database import adopt
from batchwright.engine.catalog import Catalog
from batchwright.engine.context import Context
from batchwright.engine.jobs import Done, NewJob, Outcome, Wait
from batchwright.errors import (
    DatabaseError,
    Fatal,
    NotFound,
    RetryLater,
    StorageError,
    Transient,
)
from batchwright.states import BATCH, BatchStatus
from batchwright.telemetry import tracing

log = logging.getLogger(__name__)

_OPEN = tuple(status for status in BatchStatus if status not in BATCH.terminal)
_MISSING = {"code": "answers_missing", "message": "Lines were left without an answer; the error file names them."}


def shard_queue(queue: str, model: str) -> str:
    """Shards of ordinary batches wait in one queue per model, those of a private queue in queues below it."""
    return f"{SHARD_QUEUE}{model}" if queue == QUEUE else f"{queue}/{SHARD_QUEUE}{model}"


class Processor:
    """Runs `batch.process`."""

    def __init__(
        self,
        batches: Batches,
        files: Files,
        workspace: Workspace,
        catalog: Catalog,
        takeover: Takeover,
        webhooks: Webhooks,
        waits: Waits,
        counts: BatchCounts,
        settings: BatchSettings,
        *,
        models: frozenset[str] | None,
    ) -> None:
        self._batches = batches
        self._files = files
        self._workspace = workspace
        self._catalog = catalog
        self._webhooks = webhooks
        self._waits = waits
        self._counts = counts
        self._settings = settings
        self._models = models
        self._finalizer = Finalizer(batches, files, workspace, takeover)

    async def run(self, ctx: Context, batch_id: str) -> Outcome:
        try:
            batch = await self._found(batch_id)
            refuse_stranger(ctx, batch.id, batch.job_id)
            return await self._go_on(ctx, batch)
        except DatabaseError as error:
            _trace_return(ctx, batch_id, error)
            raise RetryLater(str(error), 1.0) from error

    async def _go_on(self, ctx: Context, batch: Batch) -> Outcome:
        with tracing.span("process-batch", parent=ctx.traceparent, attributes=_attributes(batch)) as span:
            try:
                outcome = await self._next(ctx, batch, span)
            except (OSError, StorageError) as error:
                return await self._wait_or_give_up(ctx, batch, span, error)
            self._waits.end(batch.id)
            return outcome

    async def _wait_or_give_up(self, ctx: Context, batch: Batch, span: tracing.Span, error: Exception) -> Outcome:
        """Whether it may go on waiting is told by its window and the database's clock, not by attempts."""
        if ctx.after_death:
            self._counts.recovered(batch.status, "error")
        if (reason := reason_to_wait(error)) is not None:
            may_wait = await self._waits.note(batch.id, reason, str(error))
            if may_wait or batch.in_progress_at is None:
                _trace_return(ctx, batch.id, error)
                raise RetryLater(str(error), AWAY_SECONDS) from error
        elif isinstance(error, OSError):
            _trace_return(ctx, batch.id, error)
            raise Transient(str(error), code="unexpected") from error
        batch = await self._batches.get(batch.id, tenant=None)
        return await self._end_with_counts(ctx, batch, span, error)

    async def _found(self, batch_id: str) -> Batch:
        try:
            return await self._batches.get(batch_id, tenant=None)
        except NotFound:
            self._counts.skipped("db_inconsistency")
            self._counts.recovered("unknown", "cleaned_up")
            raise

    async def _next(self, ctx: Context, batch: Batch, span: tracing.Span) -> Outcome:
        if batch.has_ended:
            self._counts.skipped("not_runnable_state")
            if ctx.after_death:
                self._counts.recovered(batch.status, "cleaned_up")
            return Done()
        if batch.status is BatchStatus.VALIDATING:
            return await self._validate(ctx, batch, span)
        if batch.in_progress_at is None:
            return await self._end(ctx, batch, Ending(target=BatchStatus.CANCELLED, sources=_OPEN), span)
        if batch.status is BatchStatus.IN_PROGRESS and batch.stop_reason is None and ctx.joined is None:
            return await self._hand_over(batch)
        return await self._conclude(ctx, batch, span)

    # Plan -------------------------------------------------------------------------------------------------------

    async def _validate(self, ctx: Context, batch: Batch, span: tracing.Span) -> Outcome:
        taken_up = await self._batches.take_up(batch.id)
        if taken_up is None:
            raise RetryLater("the batch was moved before it was planned", 0)
        batch, is_late = taken_up
        if ctx.claim == 1:
            self._counts.waited((_now() - batch.created_at).total_seconds())
        if ctx.after_death:
            self._counts.recovered(batch.status, "expired" if is_late else "re_enqueued")
        if is_late:
            return await self._end(ctx, batch, Ending(target=BatchStatus.EXPIRED, sources=_OPEN), span)
        with self._workspace.use(batch.id) as folder:
            try:
                file = await self._files.get(batch.input_file_id, tenant=None, also_gone=True)
                input = await self._workspace.fetch_input(batch.id, self._files.store, file.key, file.bytes)
                only = await self._wanted(batch)
            except NotFound:
                return await self._refuse(ctx, batch, _no_input(batch), span)
            except InputDamaged as error:
                problem = Problem(code="input_damaged", line=None, message=str(error), param="file_id")
                return await self._refuse(ctx, batch, _errors(problem), span)
            models = await self._known_models(batch)
            rules = plan.Rules(endpoint=batch.endpoint, limits=self._settings.limits, models=models, only=only)
            return await self._plan(ctx, batch, file, input, rules, folder, span)

    async def _plan(
        self, ctx: Context, batch: Batch, file: File, input: Path, rules: plan.Rules, folder: Path, span: tracing.Span
    ) -> Outcome:
        began = time.perf_counter()
        planned = await planner.make(input, rules, folder, size=file.bytes)
        if planned.problems is not None:
            return await self._refuse(ctx, batch, planned.problems, span)
        await self._workspace.keep_plan(batch.id, self._files.store)
        total, models = planned.total, planned.models
        begun = await self._batches.begin(batch.id, total=total, models=models, input_sha256=file.sha256)
        self._counts.planned(total, time.perf_counter() - began)
        if begun is None:
            raise RetryLater("the batch was moved while it was planned", 0)
        ctx.emit("batch.planned", f"{total} requests for {len(models)} models", requests=total, models=len(models))
        return await self._hand_over(begun)

    async def _known_models(self, batch: Batch) -> frozenset[str] | None:
        """Those with a gateway here or at another worker, which then takes their shards; None if some takes any.

        A worker that left in the last minutes counts: it may only be restarting.
        """
        if self._models is None:
            return None
        ours = shard_queue(batch.queue, "")
        served = {queue.removeprefix(ours) for queue in await self._batches.served() if queue.startswith(ours)}
        return None if "" in served else self._models | served

    async def _wanted(self, batch: Batch) -> frozenset[bytes] | None:
        """Of a batch that repeats another: the lines that failed there, by the digests of their custom_ids."""
        if batch.retry_of is None:
            return None
        first = await self._batches.get(batch.retry_of, tenant=batch.tenant)
        if first.error_file_id is None:
            raise Fatal(f"batch {first.id} has no error file to retry from", code="no_error_file")
        try:
            file = await self._files.get(first.error_file_id, tenant=batch.tenant, also_gone=True)
            return await self._failed_lines(file, set(batch.retry_codes or ()))
        except (NotFound, ValueError) as error:
            raise InputDamaged(
                f"The error file {first.error_file_id} of {first.id} cannot be read: {error}."
            ) from error

    async def _failed_lines(self, file: File, codes: set[str]) -> frozenset[bytes]:
        """ValueError if it is not the file that was written: a part of it would look like a whole with fewer lines."""
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

    async def _hand_over(self, batch: Batch) -> Outcome:
        """The shards, each a job of its own; when the last one has ended we come back."""
        with self._workspace.use(batch.id):
            return self._wait_for(batch, await self._finalizer.slices(batch))

    def _wait_for(self, batch: Batch, shards: Sequence[Slice]) -> Outcome:
        firsts: set[str] = set()
        children = []
        for one in shards:
            is_first = one.model not in firsts
            firsts.add(one.model)
            children.append(
                NewJob(
                    send_shard,
                    one,
                    queue=shard_queue(batch.queue, one.model),
                    priority=batch.priority if is_first else min(9, batch.priority + 1),
                    owner=batch.id,
                    traceparent=tracing.current_traceparent() or batch.traceparent,
                )
            )
        return Wait(children, on_join="resume", allow_failures=True)

    # Files ------------------------------------------------------------------------------------------------------

    async def _conclude(self, ctx: Context, batch: Batch, span: tracing.Span) -> Outcome:
        if ctx.after_death and batch.status in (BatchStatus.FINALIZING, BatchStatus.CANCELLING):
            self._counts.recovered(batch.status, "finalized" if batch.status is BatchStatus.FINALIZING else "cancelled")
        if batch.status is BatchStatus.IN_PROGRESS and batch.stop_reason is None:
            batch = await self._finalize_or_fail(ctx, batch)
        target, filler = _ending_of(batch)
        try:
            with self._workspace.use(batch.id):
                assembly = await self._finalizer.gather(batch, self._owner(ctx, batch))
                if filler is None and assembly.missing:
                    if (outcome := await self._resend(ctx, batch, assembly)) is not None:
                        return outcome
                    target, filler = BatchStatus.FAILED, "batch_failed"
                if filler is not None:
                    await asyncio.to_thread(assembly.fill, filler)
                result = await self._finalizer.write(batch, assembly)
        except NotFound as error:
            return await self._end_with_counts(ctx, batch, span, error)
        return await self._end(ctx, batch, result.ending(target, _OPEN), span, result)

    async def _finalize_or_fail(self, ctx: Context, batch: Batch) -> Batch:
        if ctx.joined is not None and ctx.joined.failed:
            message = f"{ctx.joined.failed} of {ctx.joined.total} shards failed"
            await self._batches.stop(batch.id, "error", {"code": "shards_failed", "message": message})
        else:
            await self._batches.finalize(batch.id)
        moved = await self._batches.get(batch.id, tenant=None)
        if moved.status is BatchStatus.IN_PROGRESS and moved.stop_reason is None:
            raise RetryLater("the batch was moved while it was finished", 0)
        return moved

    async def _resend(self, ctx: Context, batch: Batch, assembly: Assembly) -> Outcome | None:
        """Every shard says that it is done, and lines have no answer: send those again. None if that was done before,
        as often as is reasonable; then something is wrong that sending does not cure."""
        resends = await self._batches.resend(batch.id)
        if resends is None:
            if (await self._batches.get(batch.id, tenant=None)).status is not BatchStatus.FINALIZING:
                raise RetryLater("the batch was moved while it was finished", 0)
            log.error("batch %s: %d lines have no answer, although they were sent again", batch.id, assembly.missing)
            return None
        log.error("batch %s: %d lines have no answer, and are sent again", batch.id, assembly.missing)
        self._counts.resent(assembly.missing)
        text = f"{assembly.missing} lines had no answer, and are sent again"
        ctx.emit("batch.lines_resent", text, level="warning", lines=assembly.missing)
        shards = await self._finalizer.slices_with(batch, assembly.missing_offsets)
        return self._wait_for(batch, [replace(one, round=resends) for one in shards])

    @staticmethod
    def _owner(ctx: Context, batch: Batch) -> Owner:
        """For answers that are found at the end, in the journals of any shard."""
        return Owner(
            batch_id=batch.id,
            shard=0,
            model=batch.models[0] if batch.models else "",
            journal_number=last_journal_number(ctx.claim),
            job_id=ctx.job_id,
            job_claim=ctx.claim,
            worker=ctx.worker,
            traceparent=tracing.current_traceparent(),
        )

    # The last move ----------------------------------------------------------------------------------------------

    async def _refuse(self, ctx: Context, batch: Batch, errors: dict[str, Any], span: tracing.Span) -> Outcome:
        ending = Ending(target=BatchStatus.FAILED, sources=_OPEN, errors=errors)
        return await self._end(ctx, batch, ending, span)

    async def _end_with_counts(self, ctx: Context, batch: Batch, span: tracing.Span, error: Exception) -> Outcome:
        """The files cannot be written: the counts are what is left, until somebody repairs the batch.

        What expired or was cancelled stays so: that its files are missing is said in its errors.
        """
        log.error("batch %s ends without files: %s", batch.id, error)
        code = "files_not_written" if batch.in_progress_at is not None else "storage_error"
        errors = _errors(Problem(code=code, line=None, message=str(error)))
        target, filler = _ending_of(batch)
        if target is BatchStatus.COMPLETED:
            target, filler = BatchStatus.FAILED, "batch_failed"
        counts = {name: getattr(batch, name) for name in ("completed", "failed", "expired", "cancelled")}
        counts[Record.of(filler or "").name.lower()] += max(0, batch.total - batch.done)
        ending = Ending(target=target, sources=_OPEN, counts=counts, errors=errors)
        return await self._end(ctx, batch, ending, span)

    async def _end(
        self, ctx: Context, batch: Batch, ending: Ending, span: tracing.Span, result: Result | None = None
    ) -> Outcome:
        """One commit: the batch's last move, its files, its webhooks, and the success of its job."""
        if ending.target is BatchStatus.FAILED and ending.errors is None:
            stopped = batch.stop_error or _MISSING
            problem = Problem(code=stopped["code"], line=None, message=stopped["message"])
            ending = replace(ending, errors=_errors(problem))

        ended: list[BatchStatus] = []

        async def write(connection: Any) -> None:
            session = await adopt(connection)
            status = await self._batches.end(batch.id, ending, session=session)
            if status is None:
                raise RetryLater("the batch was moved while it ended", 0)
            if result is not None:
                await self._finalizer.add_files(result, session)
            ended.append(status)
            jobs = self._webhooks.jobs(batch.tenant, batch.id, EVENTS[status], _now())
            await self._batches.queue.enqueue(await self._catalog.prepare(jobs, session=session), session=session)

        if ending.errors is not None:
            span.error(Fatal(ending.errors["data"][0]["message"]))
        span.set(_ending_attributes(batch, ending))
        ctx.when_settled(lambda verb: self._count_end(batch, ending, ended[-1]) if verb == "succeed" else None)
        return Done(write=write)  # without a result: only `write` finds out whether a user has cancelled meanwhile

    def _count_end(self, batch: Batch, ending: Ending, status: BatchStatus) -> None:
        """After the commit: before it, the same end may be tried several times, or in vain."""
        now = _now()
        if status is BatchStatus.CANCELLED:
            at_end = batch.finalizing_at is not None
            self._counts.cancelled("finalizing" if at_end else "in_progress" if batch.in_progress_at else "queued")
        self._counts.ended(
            status.value,
            _reason(batch, ending),
            total=batch.total,
            seconds=(now - batch.taken_up_at).total_seconds() if batch.taken_up_at else 0.0,
            since_created=(now - batch.created_at).total_seconds(),
        )


def _trace_return(ctx: Context, batch_id: str, error: Exception) -> None:
    """A batch is put back: a span of its own, which nobody's cancellation cuts short."""
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


def _ending_of(batch: Batch) -> tuple[BatchStatus, str | None]:
    """Where a batch that sends nothing any more goes, and what is said of the lines that have no answer."""
    if batch.status is BatchStatus.FINALIZING:
        return BatchStatus.COMPLETED, None
    if batch.status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED, "batch_cancelled"
    if batch.stop_reason == "deadline":
        return BatchStatus.EXPIRED, "batch_expired"
    return BatchStatus.FAILED, "batch_failed"


def _reason(batch: Batch, ending: Ending) -> str:
    match ending.target:
        case BatchStatus.EXPIRED:
            return "expired_execution" if batch.in_progress_at else "expired_dequeue"
        case BatchStatus.FAILED if batch.in_progress_at is not None:
            return "system_error"
        case _:
            return "none"


def _errors(problem: Problem) -> dict[str, Any]:
    return {"object": "list", "data": [problem.as_json()], "total": 1}


def _no_input(batch: Batch) -> dict[str, Any]:
    message = f"Cannot find file {batch.input_file_id}, or this tenant does not have access to it."
    return _errors(Problem(code="invalid_request", line=None, message=message, param="file_id"))


def _attributes(batch: Batch) -> dict[str, Any]:
    return {"batch.id": batch.id, "tenant.id": batch.tenant, "file.id": batch.input_file_id}


def _now() -> datetime:
    return datetime.now(UTC)
