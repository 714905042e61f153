"""The life of a task, driven by its job: plan, stage the inputs, submit once, poll until done, fetch the results.

    PENDING ─ plan ─ stage ─ submit ─▶ IN_PROGRESS ─ Snooze … poll … ─▶ all jobs ended ─ merge ─▶ COMPLETED
       │                                    │                                                     PARTIAL_COMPLETE
       └ nothing can be submitted: FAILED   └ cancelled, or timed out: fetch what there is ──────▶ FAILED, CANCELLED

Each run reads the rows and does the next step for every job of the task, so it does not matter where an earlier run
died.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from batchwright.db.database import Session, wrap_connection
from batchwright.engine.catalog import Catalog
from batchwright.engine.context import Context
from batchwright.engine.outcomes import Done, Outcome, Snooze
from batchwright.engine.owned import Held, fenced
from batchwright.errors import (
    ConfigurationError,
    DatabaseError,
    Fatal,
    Fenced,
    OperationError,
    RetryLater,
    SchemaInvalid,
    StorageError,
)
from batchwright.files.store import Files, NewFile, new_file_id, object_key
from batchwright.providers import state
from batchwright.providers.contract import Counts, Input, Job, Problem, Request, Status, TaskType
from batchwright.providers.directory import Directory
from batchwright.providers.errand import CredentialRefused, Errand, Over, Progress, Ready, Refused, Waits
from batchwright.providers.jobs import Hold, JobEnding, NewRemoteJob, RemoteJob, RemoteJobs
from batchwright.providers.prices import ANY, Price, find_price
from batchwright.providers.results import Harvest, Merge
from batchwright.providers.tasks import Ending, Task, Tasks
from batchwright.states import TaskStatus
from batchwright.storage import Store, Stored
from batchwright.webhooks.announcer import Announcer

log = logging.getLogger(__name__)

RESULT = "task_output"
"""The purpose of a task's result file."""
FOLDER = "tasks"
INLINE_BYTES_MAX = 16 * 1024
"""Larger results of a job are only in the store, not in its document."""
INLINE_TASK_BYTES_MAX = 256 * 1024
"""Maximum size of results in the documents of all jobs of a task, which are written and read together."""
HARVEST_SECONDS = 600.0
"""How long a task waits after its timeout for its jobs to stop; then it ends without them."""
ROUND_SECONDS = 30.0
"""After this time a round starts no more work: a task may have a thousand jobs, and its user may cancel it."""
CREDENTIAL_SECONDS = 7 * 86_400.0
"""How long after its timeout a task still waits for the credential that it needs to fetch its results."""
_AT_ONCE = 8
_STORE_SECONDS = 10.0
_CONFIGURATION_SECONDS = 60.0
_NAMES_MAX = 5
_SNOOZE_SECONDS_MIN = 0.05
_CANCELLED = {"kind": "fatal", "code": "cancelled", "message": "it was cancelled before anything was submitted"}
_LATE = {"kind": "fatal", "code": "timeout", "message": "the task timed out before it could be submitted"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTools:
    """The shared services of a worker process for its tasks."""

    announcer: Announcer
    catalog: Catalog
    directory: Directory
    files: Files
    jobs: RemoteJobs
    store: Store
    tasks: Tasks


class TaskRunner:
    """Runs `provider.task`."""

    def __init__(self, tools: TaskTools) -> None:
        self.tools = tools

    async def run(self, ctx: Context, task_id: str) -> Outcome:
        try:
            task = await self.tools.tasks.get(task_id, tenant=None)
            if ctx.pipeline_id != task.job_id:
                raise Fatal(f"{ctx.job_type} belongs to {task.id}, whose own job runs it; enqueue nothing for it")
            if task.has_ended:
                return Done()
            run = Run(self.tools, ctx, task)
            try:
                return await run.advance()
            except ConfigurationError as error:
                return await run.wait_for_configuration(error)
        except (DatabaseError, Fenced) as error:
            raise RetryLater(str(error), 1.0) from error
        except StorageError as error:
            raise RetryLater(str(error), _STORE_SECONDS) from error


class Run:
    """One run of a task's job."""

    def __init__(self, tools: TaskTools, ctx: Context, task: Task) -> None:
        self._tools = tools
        self._ctx = ctx
        self._task = task
        self._held = Held(ctx.job_id, ctx.claim, ctx.worker)
        self._inputs = {input.id: input for input in task.inputs}
        self._rows: list[RemoteJob] = []
        self._held_back: dict[str, Hold] = {}
        self._ends_at = 0.0
        self._slowed: str | None = None
        self._has_begun = task.status is not TaskStatus.PENDING

    @property
    def _must_stop(self) -> bool:
        return self._task.cancel_requested_at is not None or self._task.seconds_left <= 0

    async def advance(self) -> Outcome:
        """Do the next step for every job of the task."""
        self._rows = await self._tools.jobs.of(self._task.id)
        if not self._rows:
            if self._must_stop:
                return self._end_unsubmitted(_CANCELLED if self._task.cancel_requested_at is not None else _LATE)
            if problems := await self._plan():
                return self._end_with_problems(problems)
        self._held_back = await self._try_credentials()
        open_rows = sorted((row for row in self._rows if not row.has_ended), key=lambda row: row.due_seconds)
        self._ends_at = time.monotonic() + ROUND_SECONDS
        waits = await _gather(_AT_ONCE, (self._advance_job(row) for row in open_rows))
        self._rows = await self._tools.jobs.of(self._task.id)
        self._report_progress()
        if all(row.has_ended for row in self._rows):
            return await self._finish()
        return await self._come_back(waits)

    # Plan -------------------------------------------------------------------------------------------------------

    async def _plan(self) -> Sequence[Problem]:
        """Commit the intents if the inputs are valid; otherwise return what is wrong. Nothing has been paid yet."""
        if self._task.task_type not in get_args(TaskType):
            message = f"no configured provider supports tasks of the type {self._task.task_type!r}"
            return [Problem(message=message, param="task_type")]
        planned = list(plan_jobs(self._task, self._tools.directory))
        for target in self._task.targets:
            adapter = self._tools.directory.get(target.provider)
            try:
                inputs = list(self._inputs)
                found = await adapter.inspect(make_request(self._task, "bw-" + "0" * 26, target.model, inputs))
            except OperationError as error:
                if isinstance(error, Fatal) and error.scope == "credential":
                    continue  # the submission gets the same error, and waits there
                if not isinstance(error, (Fatal, SchemaInvalid)):
                    raise RetryLater(str(error), getattr(error, "retry_after", None) or _STORE_SECONDS) from error
                found = [Problem(message=str(error))]
            if found:
                return found
        self._rows = await self._tools.jobs.plan(self._task.id, planned, self._held)
        self._ctx.emit("task.planned", f"{len(planned)} jobs for {len(self._task.targets)} targets", jobs=len(planned))
        return ()

    # Credentials ------------------------------------------------------------------------------------------------

    async def _try_credentials(self) -> dict[str, Hold]:
        """The providers that refuse our credential. When a retry is due, one process tries the credential."""
        holds = await self._tools.jobs.holds()
        providers = {row.provider for row in self._rows if not row.has_ended} & set(holds)
        for provider in providers:
            if holds[provider].try_seconds <= 0 and await self._tools.jobs.may_try(provider):
                try:
                    await self._tools.directory.get(provider).check()
                except OperationError as error:
                    log.warning("the credential of %s is still refused: %s", provider, error)
                else:
                    await self._tools.jobs.release(provider)
                    await self._tools.tasks.wake_parked(provider)
                    self._ctx.emit("provider.released", f"{provider} accepts its credential again")
                    del holds[provider]
        return {provider: holds[provider] for provider in providers & set(holds)}

    async def _hold(self, refused: CredentialRefused) -> None:
        await self._tools.jobs.hold(refused.provider, refused.error.code, str(refused.error))
        self._held_back = await self._tools.jobs.holds()
        text = f"{refused.provider} refuses its credential: {refused.error}; work for it waits"
        self._ctx.emit("provider.held", text, level="error", error_kind="fatal", provider=refused.provider)

    # The jobs of the task ---------------------------------------------------------------------------------------

    async def _advance_job(self, row: RemoteJob) -> float:
        """Do what can be done for one job now; returns the seconds until its next step."""
        if self._ctx.stopping or time.monotonic() > self._ends_at:
            return max(0.0, row.due_seconds)
        errand = self._errand(row)
        if (hold := self._held_back.get(row.provider)) is not None and not self._is_lost(row):
            if self._task.seconds_left > -CREDENTIAL_SECONDS:
                return max(hold.try_seconds, 1.0)
            return await self._settle(errand, Waits(hold.try_seconds))
        try:
            progress = await errand.advance(stop=self._must_stop)
            if isinstance(progress, Ready):
                progress = await self._store_results(errand, progress.status)
        except CredentialRefused as refused:
            await self._hold(refused)
            return 1.0
        return await self._settle(errand, progress)

    def _is_lost(self, row: RemoteJob) -> bool:
        """Whether to stop waiting for a provider that refuses our credential. Paid results are still waited for."""
        return self._must_stop and row.phase in ("planned", "staged")

    async def _settle(self, errand: Errand, progress: Progress) -> float:
        match progress:
            case Waits(seconds, reason):
                self._slowed = reason or self._slowed
                if self._task.seconds_left <= 0 and self._has_waited_enough(errand):
                    message = f"its job at {errand.row.provider} had not ended when the task timed out"
                    await self._fail_job(errand, {"kind": "fatal", "code": "timeout", "message": message})
                    return 0.0
                return seconds
            case Refused(error):
                is_late = error.get("code") == "cancelled" and self._task.cancel_requested_at is None
                await self._fail_job(errand, _LATE if is_late else error)
            case Over() | Ready():
                pass
        return 0.0

    def _has_waited_enough(self, errand: Errand) -> bool:
        """Whether a timed-out job has had its time to stop, or cannot be stopped and is still at work."""
        has_had_time = (errand.row.stopping_seconds or 0.0) >= HARVEST_SECONDS
        if has_had_time or self._task.seconds_left <= -CREDENTIAL_SECONDS:
            return True
        return errand.is_at_work and errand.row.cancelled == "unsupported"

    def _errand(self, row: RemoteJob) -> Errand:
        adapter = self._tools.directory.get(row.provider)
        request = make_request(self._task, row.key, row.model, row.input_ids)
        pace = self._tools.directory.pace(row.provider)
        return Errand(self._tools.jobs, adapter, row, request, self, self._held, pace)

    async def _store_results(self, errand: Errand, status: Status) -> Progress:
        """Write all results into the store, count them, and end the job according to the counts."""
        row = errand.row
        key = f"{FOLDER}/{self._task.id}/{row.number}-{self._ctx.claim}.jsonl"
        inline_bytes_max = min(INLINE_BYTES_MAX, INLINE_TASK_BYTES_MAX // len(self._rows))
        harvest = Harvest(self._task, errand, status, self._price(row), inline_bytes_max)
        try:
            await self._tools.store.put(key, harvest.lines)
        except OperationError as error:
            return await errand.put_off_results(error)
        outcome = state.count_outcome(total=harvest.total, succeeded=harvest.succeeded)
        entries = harvest.small_entries()
        ended = state.record_end(
            row.document or {}, status, outcome, entries=entries, output_uri=_output_uri(errand.row, key)
        )
        if outcome is state.TaskEnding.FAILED and harvest.first_error is not None and not status.error:
            ended["error"] = harvest.first_error
        await errand.end(
            JobEnding(
                document=ended,
                error=status.error,
                raw_status=status.raw_status,
                counts=Counts(
                    total=harvest.total, succeeded=harvest.succeeded, failed=harvest.total - harvest.succeeded
                ),
                results_key=key,
                usage=harvest.usage,
                cost=harvest.bill.cost,
            )
        )
        self._ctx.emit(
            "provider.ended",
            f"{row.provider}: {harvest.succeeded} of {harvest.total} results",
            model=row.model,
            prompt_tokens=harvest.usage.input_tokens,
            completion_tokens=harvest.usage.output_tokens,
            cost=harvest.bill.cost,
            price=harvest.bill.source,
            provider=row.provider,
            cached_tokens=harvest.usage.cached_tokens,
            audio_seconds=harvest.usage.audio_seconds,
            external_id=row.external_id,
        )
        await errand.clean_up()
        return Over()

    def _price(self, row: RemoteJob) -> Price | None:
        directory = self._tools.directory
        return find_price(directory.settings(row.provider).prices, directory.kind(row.provider).name, row.model)

    async def _fail_job(self, errand: Errand, error: Mapping[str, Any]) -> None:
        row = errand.row
        document = state.fail_job(
            row.document or self.describe(row, row.job),
            str(error.get("message")),
        )
        total = len(row.input_ids)
        counts = Counts(total=total, succeeded=0, failed=total)
        await errand.end(JobEnding(document=document, error=error, counts=counts))
        self._ctx.emit(
            "provider.failed", f"{row.provider}: {error.get('message')}", level="error", provider=row.provider
        )
        await errand.clean_up()

    # Callbacks of errands ---------------------------------------------------------------------------------------

    def describe(self, row: RemoteJob, job: Job | None) -> dict[str, Any]:
        request = make_request(self._task, row.key, row.model, row.input_ids)
        return state.new_job(self._task.task_type, self._tools.directory.kind(row.provider).name, request, job)

    def describe_poll(self, row: RemoteJob, status: Status) -> Mapping[str, Any]:
        return state.record_poll(row.document or {}, status)

    async def referred(self, row: RemoteJob, session: Session) -> None:
        """The first submitted job moves the task to IN_PROGRESS, in the same commit."""
        if self._task.status is TaskStatus.PENDING:
            await self._tools.tasks.begin(self._task.id, self._state([row]), session=session)
            self._has_begun = True

    async def is_wanted(self) -> bool:
        """Staging may have taken a while, and the user may have cancelled the task meanwhile."""
        self._task = await self._tools.tasks.get(self._task.id, tenant=None)
        return not self._task.has_ended and not self._must_stop

    def report(self, event: str, message: str, **fields: Any) -> None:
        self._ctx.emit(event, message, **fields)

    def _state(self, rows: Iterable[RemoteJob]) -> dict[str, Any]:
        """The task's provider_state, built from the documents of its jobs."""
        task = self._task
        jobs = [dict(row.document) for row in rows if row.document is not None]
        if task.task_type == "completion":
            return state.describe_completion(input_dataset_ids=task.file_ids, jobs=jobs)
        described = state.describe_transcription(
            self._tools.directory.kind(task.targets[0].provider).name,
            dataset_ids=task.file_ids,
            invalid_urls=task.invalid_urls,
            jobs=jobs,
        )
        if "gcs_map" in described:
            for row in rows:
                if row.job is not None:
                    inputs = [self._inputs[id] for id in row.input_ids]
                    described["gcs_map"] |= state.sources(inputs, row.job)
        return described

    # Between rounds ---------------------------------------------------------------------------------------------

    async def wait_for_configuration(self, error: ConfigurationError) -> Outcome:
        """Wait until the task's timeout: another worker may have the configuration, or this one after a restart."""
        if self._task.seconds_left <= 0 and not self._has_begun:
            return self._end_unsubmitted({"kind": "fatal", "code": "misconfigured", "message": str(error)})
        async with fenced(self._tools.tasks.queue, self._held) as session:
            await self._tools.tasks.save(
                self._task.id, provider_state=None, waits_for=str(error), cancel_note=None, session=session
            )
        raise RetryLater(str(error), _CONFIGURATION_SECONDS) from error

    async def _come_back(self, waits: Sequence[float]) -> Outcome:
        rows = self._rows
        held = [hold for hold in self._held_back.values() if any(row.provider == hold.provider for row in rows)]
        waits_for = f"the credential of {held[0].provider}: {held[0].message}" if held else None
        note = next((f"{row.provider} cannot cancel a job" for row in rows if row.cancelled == "unsupported"), None)
        provider_state = self._state(rows) if any(row.document is not None for row in rows) else None
        async with fenced(self._tools.tasks.queue, self._held) as session:
            await self._tools.tasks.save(
                self._task.id,
                provider_state=provider_state,
                waits_for=waits_for,
                cancel_note=note and f"{note}: the job continues, and its results are fetched when it ends",
                session=session,
            )
        seconds = max(_SNOOZE_SECONDS_MIN, min(waits, default=1.0))
        if self._task.seconds_left > 0:
            seconds = min(seconds, self._task.seconds_left + 0.1)
        return Snooze(seconds, waits_for or self._slowed or "the provider is at work", progress=self._progress())

    def _report_progress(self) -> None:
        if (progress := self._progress()) is not None:
            self._ctx.progress(*progress)

    def _progress(self) -> tuple[int, int] | None:
        totals = [row.total if row.total is not None else len(row.input_ids) for row in self._rows]
        done = [(row.succeeded or 0) + (row.failed or 0) for row in self._rows]
        return (sum(done), sum(totals)) if totals else None

    # The end ----------------------------------------------------------------------------------------------------

    async def _finish(self) -> Outcome:
        task = self._task = await self._tools.tasks.get(self._task.id, tenant=None)  # begun or cancelled meanwhile
        if task.has_ended:
            return Done()
        rows = self._rows
        provider_state = self._state(rows)
        outcome = state.end_task(provider_state)
        if outcome is state.TaskEnding.COMPLETED and task.invalid_urls:
            outcome = state.TaskEnding.PARTIAL_COMPLETE
        stored = await self._write_result(provider_state)
        self._report_unknown_costs()
        ending = Ending(
            provider_state=provider_state,
            error=self._error() if outcome is state.TaskEnding.FAILED else None,
            succeeded=sum(row.succeeded or 0 for row in rows),
            failed=sum(row.failed or 0 for row in rows) + len(task.invalid_urls),
            input_tokens=_sum(row.input_tokens for row in rows),
            output_tokens=_sum(row.output_tokens for row in rows),
            audio_seconds=_sum(row.audio_seconds for row in rows),
            cost=_total_cost(rows),
            result_file_id=stored.id if stored is not None else None,
        )
        return self._end(self._verb(outcome), ending, stored)

    def _error(self) -> Mapping[str, Any]:
        """Why there is no result. If the task stopped its jobs because it timed out, that is the reason."""
        error = _task_error(self._rows)
        is_late = self._task.cancel_requested_at is None and any(row.cancelled is not None for row in self._rows)
        if not is_late or error.get("code") == "timeout":
            return error
        return {"kind": "fatal", "code": "timeout", "message": f"the task timed out: {error['message']}"}

    def _report_unknown_costs(self) -> None:
        """Report them in one warning for all jobs. A partial sum would mislead, so the task has no cost."""
        unknown = [row for row in self._rows if row.succeeded and row.cost is None]
        if not unknown:
            return
        names = dict.fromkeys(f"{row.provider}/{row.model}" if row.model else row.provider for row in unknown)
        shown = ", ".join(list(names)[:_NAMES_MAX]) + (" …" if len(names) > _NAMES_MAX else "")
        first = unknown[0]
        remedy = f'write it as [providers.{first.provider}.prices."{first.model or ANY}"]'
        if self._price(first) is not None:
            remedy = "the provider does not report the amount"
        self._ctx.emit("task.cost_unknown", f"the cost of {shown} is unknown; {remedy}", level="warning")

    def _verb(self, outcome: state.TaskEnding) -> str:
        if self._task.cancel_requested_at is not None and outcome is not state.TaskEnding.COMPLETED:
            return "end_cancelled"
        if not self._has_begun:
            return "fail"
        return {
            state.TaskEnding.COMPLETED: "complete",
            state.TaskEnding.PARTIAL_COMPLETE: "complete_in_part",
            state.TaskEnding.FAILED: "fail",
        }[outcome]

    async def _write_result(self, provider_state: Mapping[str, Any]) -> NewFile | None:
        """The merged result file; none if there is no result to write."""
        task = self._task
        if all(row.results_key is None for row in self._rows):
            return None
        id = new_file_id()
        merge = Merge(self._tools.store, task, self._rows, str(provider_state.get("provider") or ""))
        stored: Stored = await self._tools.store.put(object_key(id), merge.chunks)
        suffix = "jsonl" if task.task_type == "completion" else "json"
        return NewFile(
            id=id,
            tenant=task.tenant,
            purpose=RESULT,
            filename=f"{task.id}_result.{suffix}",
            stored=stored,
            expires_seconds=task.result_expires_seconds,
        )

    def _end_with_problems(self, problems: Sequence[Problem]) -> Outcome:
        """The inputs cannot be sent as they are."""
        return self._end_unsubmitted(
            {
                "kind": "schema_invalid",
                "code": "invalid_inputs",
                "message": problems[0].message,
                "problems": [_problem_document(problem, self._inputs) for problem in problems],
            }
        )

    def _end_unsubmitted(self, error: Mapping[str, Any]) -> Outcome:
        """Nothing was submitted, so nothing was paid."""
        verb = "end_cancelled" if self._task.cancel_requested_at is not None else "fail"
        failed = len(self._task.inputs) + len(self._task.invalid_urls)
        return self._end(verb, Ending(error=error, failed=failed), None)

    def _end(self, verb: str, ending: Ending, file: NewFile | None) -> Outcome:
        """One commit: the task's last transition, its result file, its webhooks, and the success of its job."""
        task, tools = self._task, self._tools

        async def write(connection: Any) -> None:
            session = await wrap_connection(connection)
            status = await getattr(tools.tasks, verb)(task.id, ending, session=session)
            if status is None:
                raise RetryLater("the task changed its status while it ended", 0)
            if file is not None:
                await tools.files.add(file, session=session)
            await tools.announcer.announce(task.tenant, task.id, EVENTS[status], session)

        return Done({"task_id": task.id, "succeeded": ending.succeeded, "failed": ending.failed}, write=write)


EVENTS: dict[TaskStatus, Any] = {
    TaskStatus.COMPLETED: "task.completed",
    TaskStatus.PARTIAL_COMPLETE: "task.partial_complete",
    TaskStatus.FAILED: "task.failed",
    TaskStatus.CANCELLED: "task.cancelled",
}


def make_request(task: Task, key: str, model: str | None, input_ids: Sequence[str]) -> Request:
    """The request to a provider for a task with these inputs."""
    inputs = {input.id: input for input in task.inputs}
    return Request(
        key=key,
        task_type=task.task_type,
        model=model,
        inputs=[inputs[id] for id in input_ids],
        options=task.options,
    )


def plan_jobs(task: Task, directory: Directory) -> Iterable[NewRemoteJob]:
    """One job for each target, or several if a provider accepts fewer inputs at a time."""
    number = 0
    ids = [input.id for input in task.inputs]
    for target in task.targets:
        most = directory.get(target.provider).abilities.inputs_max or len(ids)
        for start in range(0, len(ids), most):
            yield NewRemoteJob(number, target.provider, target.model, ids[start : start + most])
            number += 1


async def _gather(at_once: int, calls: Iterable[Any]) -> list[float]:
    """Run all, a limited number at a time; raise the first error after all have ended."""
    room = asyncio.Semaphore(at_once)

    async def run(call: Any) -> float:
        async with room:
            waited: float = await call
            return waited

    found = await asyncio.gather(*(run(call) for call in calls), return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [one for one in found if not isinstance(one, BaseException)]


def _output_uri(row: RemoteJob, key: str) -> str:
    """Where the results of a completion are: at the provider if it says so, else in our store."""
    return str(row.extra.get("output_uri") or f"store:{key}")


def _task_error(rows: Sequence[RemoteJob]) -> dict[str, Any]:
    found = next((row.error for row in rows if row.error), None)
    message = next((row.document["error"] for row in rows if row.document and row.document.get("error")), None)
    return dict(found or {"kind": "fatal", "code": "no_result", "message": message or "no job has a result"})


def _problem_document(problem: Problem, inputs: Mapping[str, Input]) -> dict[str, Any]:
    input = inputs.get(problem.input_id or "")
    return {"message": problem.message, "param": problem.param, "input": input and input.filename}


def _sum(values: Iterable[Any]) -> Any:
    """The sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _total_cost(rows: Sequence[RemoteJob]) -> float | None:
    """The total cost; None if a job that did some work has no known cost, because a partial sum would mislead."""
    paid = [row for row in rows if row.succeeded]
    if not paid or any(row.cost is None for row in paid):
        return None
    return sum(row.cost or 0.0 for row in paid)
