"""The step machine of one item: it runs the steps that are not done yet, and reuses the results of the others.

    run_step ── done already? ──▶ its stored output, without a call
        │   └── same key as the live version? ──▶ the output of that version
        └── start ─ commit ─▶ call ─▶ ok: output, event and step in one commit
                                  └─▶ an error: its category decides, in `_react`

Each step has its own row, so that branches can end in any order: a step is done only if its own row says so.
Every write is fenced by the claim of the item's job: a worker that has lost the job can complete nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from batchwright.db.database import Session
from batchwright.db.statements import statements
from batchwright.engine.owned import JOBS_VIEW, Held, absolve, fenced, note
from batchwright.engine.queue import Queue
from batchwright.errors import DatabaseBusy, DatabaseUnavailable, Fatal, Fenced
from batchwright.ingest.items import Item, ItemFailure
from batchwright.ingest.metrics import IngestCounts
from batchwright.ingest.pipeline import Graph
from batchwright.ingest.results import (
    RETRIES,
    BudgetUsedUp,
    Category,
    OutputLost,
    StepResult,
    result_from_exception,
    worst,
)
from batchwright.ingest.runs import Run, Runs
from batchwright.states import RunStatus

SQL = statements(__package__, "machine.sql", parts=JOBS_VIEW)
log = logging.getLogger(__name__)

PARKED_SECONDS = 600.0
"""How often an item of a parked run checks whether it may continue; `resume` wakes it at once."""
_BACKOFF_SECONDS = 1.0
_BACKOFF_SECONDS_MAX = 300.0
_RATE_SECONDS = 5.0
_RATE_SECONDS_MIN = 0.5
"""Minimum wait, even if the server says "at once": it has just refused a request."""
_OUTPUT_BYTES_MAX = 262_144

Write = Callable[[Session], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a step returns if it also writes rows: one commit writes them and completes the step."""

    value: Mapping[str, Any]
    write: Write | None = None


Call = Callable[[], Awaitable[Mapping[str, Any] | Output | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The version of the document that search finds now."""

    id: int
    recipe: str
    sha256: str
    steps: Mapping[str, Mapping[str, Any]]
    etag: str | None
    """The etag of its source at the time of the fetch."""


@dataclass(slots=True)
class _StepRow:
    state: str = "open"
    key: str | None = None
    output: Mapping[str, Any] | None = None
    retry_count: int = 0
    due_at: float = 0.0
    """Time on the monotonic clock."""
    waiting: Mapping[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Machine:
    """An item while a worker processes it."""

    queue: Queue
    graph: Graph
    held: Held
    run: Run
    item: Item
    max_retries: int
    counts: IngestCounts = field(default_factory=IngestCounts)
    live: Live | None = None
    is_after_death: bool = False
    """Whether the previous worker died while it held the item."""
    parked: str | None = None
    """Why the run is parked, once the machine has seen it."""
    _rows: dict[str, _StepRow] = field(default_factory=dict)

    @classmethod
    async def open(cls, queue: Queue, graph: Graph, held: Held, run: Run, item: Item, max_retries: int) -> Machine:
        machine = cls(queue=queue, graph=graph, held=held, run=run, item=item, max_retries=max_retries)
        await machine._load()
        return machine

    # State --------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> set[str]:
        return {name for name, row in self._rows.items() if row.state == "done" and name in self.graph.steps}

    @property
    def outputs(self) -> dict[str, Mapping[str, Any]]:
        return {name: row.output or {} for name, row in self._rows.items() if row.state == "done"}

    def keys(self) -> dict[str, str]:
        """The key of every step, once the first step is done: keys follow from the content and the settings."""
        first = self._rows.get(self.graph.first)
        return {} if first is None or first.key is None else self._keys_from(first.key)

    def _keys_from(self, first: str) -> dict[str, str]:
        keys = {self.graph.first: first}
        for name in self.graph.order:
            if name not in keys:
                keys[name] = self.graph.key(name, keys, self.run.config, "")
        return keys

    def record(self) -> dict[str, Mapping[str, Any]]:
        """Keys and outputs of all steps of a version, so that a later run knows what it can reuse."""
        keys = self.keys()
        return {name: {"key": keys[name], "output": output} for name, output in self.outputs.items() if name in keys}

    @property
    def is_unchanged(self) -> bool:
        """Whether the live version has the same content and the same steps."""
        keys = self.keys()
        if self.live is None or not keys or self.run.config.get("force"):
            return False
        return all(self.live.steps.get(name, {}).get("key") == key for name, key in keys.items())

    def due(self, names: Sequence[str]) -> list[str]:
        now = time.monotonic()
        return [name for name in names if name not in self._rows or self._rows[name].due_at <= now]

    def wait_for(self, names: Sequence[str]) -> tuple[float, str]:
        """How long until the first of these steps is due, and what it waits for."""
        first = min(names, key=lambda name: self._rows[name].due_at)
        row = self._rows[first]
        waiting = row.waiting or {}
        return max(0.05, row.due_at - time.monotonic()), f"{first}: {waiting.get('message', 'a retry')}"

    def late(self, names: Sequence[str]) -> StepResult:
        """The result for an item that still waits at the deadline of its run."""
        first = min(names, key=lambda name: self._rows[name].due_at)
        waiting = self._rows[first].waiting or {}
        message = waiting.get("message", "a retry")
        return StepResult(
            step=first,
            category=Category.RATE_LIMITED if waiting.get("for") == "rate" else Category.TRANSIENT,
            code="deadline_exceeded",
            message=f"the deadline of the run passed while it waited for: {message}",
            scope=RETRIES,
        )

    # Steps --------------------------------------------------------------------------------------------------------

    async def run_step(self, target: str, call: Call) -> StepResult:
        """Run a step, or return its stored output if it is done."""
        row = self._rows.setdefault(target, _StepRow())
        if row.state == "done":
            return StepResult(step=target, output=row.output)
        try:
            if (reused := self._find_reusable(target)) is not None:
                return await self._complete(target, Output(value=reused), is_reused=True)
            if not await self._start(target):
                return StepResult(step=target, message=self.parked or "", waits_for="user")
            return await self._try(target, call)
        except DatabaseBusy as error:  # the server is available, but a statement of this step takes too long
            return await self._react(result_from_exception(target, error))
        except (DatabaseUnavailable, Fenced):
            raise
        except Exception as error:
            log.debug("step %s of %s: %r", target, self.item.id, error)
            return await self._react(result_from_exception(target, error))

    async def run_parallel_steps(self, calls: Mapping[str, Call]) -> StepResult:
        """Run steps at the same time, each with its own commit; the worst category decides.

        Waits for all of them, even if one fails: what a sibling has paid for is kept.
        """
        tries = [asyncio.ensure_future(self.run_step(target, call)) for target, call in calls.items()]
        try:
            await asyncio.wait(tries)
        except asyncio.CancelledError:
            for one in tries:
                one.cancel()
            await asyncio.gather(*tries, return_exceptions=True)
            raise
        results = await asyncio.gather(*tries, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return worst([result for result in results if isinstance(result, StepResult)])

    async def _try(self, target: str, call: Call) -> StepResult:
        began = time.monotonic()
        try:
            found = await call()
        except OutputLost as lost:
            await self._undo(lost.step)
            return StepResult(step=target, message=str(lost), waits_for="redo")
        except BudgetUsedUp as error:
            return await self._park(target, "budget", str(error))
        output = found if isinstance(found, Output) else Output(value=found or {})
        return await self._complete(target, output, seconds=time.monotonic() - began)

    def _find_reusable(self, target: str) -> Mapping[str, Any] | None:
        """The output of the live version's step, if it has the same key."""
        if self.live is None or target == self.graph.first or self.run.config.get("force"):
            return None
        then = self.live.steps.get(target)
        if then is None or not self.graph.steps[target].is_reusable or then.get("key") != self.keys().get(target):
            return None
        output: Mapping[str, Any] = then.get("output") or {}
        return output

    async def _start(self, target: str) -> bool:
        """Record the start of a step. Returns False if the run is parked."""
        rows = await self._ask("start", None, step=target, run_id=self.run.id, **self._claim)
        if not rows:
            raise await self._why_not(target)
        ((_, status),) = rows
        if status == RunStatus.RUNNING.value:
            return True
        self.parked = f"the run is {status}"
        async with fenced(self.queue, self.held) as session:
            await self._put_off(target, session, PARKED_SECONDS, {"for": "user", "message": self.parked})
        return False

    async def _complete(
        self, target: str, output: Output, *, is_reused: bool = False, seconds: float = 0.0
    ) -> StepResult:
        """Write the output, the rows of the step, the item's step and the event, in one commit.

        A step may write many rows, so the job is locked after them: while it is locked, its lease cannot be renewed.
        """
        if output.write is None:
            value, key, stale = await self._finish(target, output, is_reused, seconds, None)
        else:
            async with self.queue.database.transaction() as session:
                await output.write(session)
                value, key, stale = await self._finish(target, output, is_reused, seconds, session)
        self.counts.step_completed(target, seconds, is_reused=is_reused)
        self._rows[target] = _StepRow(state="done", key=key, output=value)
        for name in stale:
            self._rows[name] = _StepRow()
        return StepResult(step=target, output=value)

    async def _finish(
        self, target: str, output: Output, is_reused: bool, seconds: float, session: Session | None
    ) -> tuple[Mapping[str, Any], str, list[str]]:
        """Complete the step in the open transaction, or in one statement if there is nothing else to write."""
        document = _dump(target, output.value)  # after the write, which may have added to the value
        value: Mapping[str, Any] = orjson.loads(document)
        key = self._key_of(target, value)
        stale = self._find_stale(target, key)
        if session is None and (stale or self.is_after_death):
            async with self.queue.database.transaction() as session:
                return await self._finish(target, output, is_reused, seconds, session)
        fields = {"step": target, "seconds": round(seconds, 4), **({"reused": True} if is_reused else {})}
        rows = await self._ask(
            "complete",
            session,
            step=target,
            key=key,
            output=document,
            is_reused=is_reused,
            reached=self.graph.reached({*self.done, target}.difference(stale)),
            fields=orjson.dumps(fields).decode(),
            **self._claim,
        )
        if not rows:
            raise await self._why_not(target)
        if session is not None:
            for name in stale:
                await self._ask("undo", session, step=name)
            if self.is_after_death:  # the item made progress, so it did not cause that worker's death
                await absolve(self.queue, self.held, session=session)
        return value, key, stale

    @property
    def _claim(self) -> dict[str, Any]:
        return {"job_id": self.held.id, "claim": self.held.claim, "worker": self.held.worker}

    async def _why_not(self, target: str) -> Exception:
        """Why the claim wrote nothing."""
        try:
            async with fenced(self.queue, self.held):
                return AssertionError(f"{target} of {self.item.id} was completed by another worker under our claim")
        except Fenced as error:
            return error

    def _key_of(self, target: str, output: Mapping[str, Any]) -> str:
        if target == self.graph.first:
            return self.graph.key(target, {}, self.run.config, str(output.get("sha256", "")))
        return self.keys()[target]

    def _find_stale(self, target: str, key: str) -> list[str]:
        """Steps of older content: when the document is fetched again, it may have changed."""
        if target != self.graph.first:
            return []
        keys = self._keys_from(key)
        return [name for name in self.done if self._rows[name].key != keys[name]]

    # Reactions ----------------------------------------------------------------------------------------------------

    async def _react(self, result: StepResult) -> StepResult:
        """Apply the category of a result to its step. For a terminal category, the caller ends the item."""
        self.counts.step_failed(result.step, result.category.value)
        if result.waits_for is not None:
            await self._wait(result, "step_deferred")
            return result
        match result.category:
            case Category.RATE_LIMITED:
                seconds = _RATE_SECONDS if result.retry_after is None else max(_RATE_SECONDS_MIN, result.retry_after)
                await self._wait(replace(result, retry_after=seconds * random.uniform(1.0, 1.25)), "step_failed")
            case Category.TRANSIENT:
                return await self._retry(result)
            case Category.FATAL if result.scope == "credential":
                await self._fail(result)
                return await self._park(result.step, "credential", result.message)
            case _:
                await self._fail(result)
        return result

    async def _wait(self, result: StepResult, event: str) -> None:
        """Repeat the same step later, without using a retry."""
        seconds = max(0.0, result.retry_after or 0.0)
        waiting = {"for": result.waits_for or "rate", "message": result.message}
        is_known = (self._rows[result.step].waiting or {}) == waiting
        async with fenced(self.queue, self.held) as session:
            await self._put_off(result.step, session, seconds, waiting, error_kind=result.category.value)
            if not is_known or event == "step_failed":
                await self._note_result(session, event, result)
            if event == "step_failed":
                await self._note(session, "retry_scheduled", None, step=result.step, seconds=round(seconds, 3))

    async def _retry(self, result: StepResult) -> StepResult:
        row = self._rows[result.step]
        retries = row.retry_count + 1
        if retries > self.max_retries:
            await self._fail(result)
            return replace(result, scope=RETRIES)
        step = min(_BACKOFF_SECONDS_MAX, _BACKOFF_SECONDS * 2.0 ** (retries - 1))
        seconds = random.uniform(0.0, step)
        waiting = {"for": "backoff", "message": f"retry {retries} of {self.max_retries} after: {result.message}"}
        async with fenced(self.queue, self.held) as session:
            await self._put_off(
                result.step, session, seconds, waiting, retry_count=retries, error_kind=result.category.value
            )
            error = orjson.dumps(self.failure(result).document()).decode()
            await self._ask("note_error", session, retry_count=retries, error_kind=result.category.value, error=error)
            await self._note_result(session, "step_failed", result)
            await self._note(
                session, "retry_scheduled", None, step=result.step, seconds=round(seconds, 3), retry=retries
            )
        return replace(result, waits_for="backoff")

    async def _fail(self, result: StepResult) -> None:
        async with fenced(self.queue, self.held) as session:
            await self._note_result(session, "step_failed", result)

    async def _park(self, target: str, reason: str, message: str) -> StepResult:
        """Park the whole run until a user resumes it; then this step runs again."""
        self.parked = message
        async with fenced(self.queue, self.held) as session:
            await self._put_off(target, session, PARKED_SECONDS, {"for": reason, "message": message})
            if await Runs(self.queue).park(self.run.id, reason, message, session=session) is not None:
                await self._note(session, "run_parked", message, level="warning", step=target, reason=reason)
        return StepResult(step=target, message=message, waits_for=reason, retry_after=PARKED_SECONDS)

    async def _undo(self, step: str) -> None:
        if self._rows[step].state != "done":
            return
        async with fenced(self.queue, self.held) as session:
            await self._ask("undo", session, step=step)
            await self._note(session, "step_undone", f"the output of {step} is gone", step=step)
        self._rows[step] = _StepRow()
        if self.live is not None:  # the live version's copy of the output is gone, too
            steps = {name: said for name, said in self.live.steps.items() if name != step}
            self.live = replace(self.live, steps=steps)

    def failure(self, result: StepResult) -> ItemFailure:
        return ItemFailure(
            kind=result.category.value,
            code=result.code,
            message=result.message,
            step=result.step,
            scope=result.scope,
            traceback=result.traceback,
        )

    # Rows -----------------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        now = time.monotonic()
        for name, state, key, output, retries, seconds, waiting in await self._ask("steps", None):
            due_at = 0.0 if seconds is None else now + seconds
            self._rows[name] = _StepRow(state, key, output, retries, due_at, waiting)
        for row in await self.queue.database.ask(SQL["live"], {"document_id": self.item.document_id}):
            self.live = Live(**dict(zip(("id", "recipe", "sha256", "steps", "etag"), row, strict=True)))

    async def _put_off(
        self,
        target: str,
        session: Session,
        seconds: float,
        waiting: Mapping[str, Any],
        *,
        retry_count: int | None = None,
        error_kind: str = "",
    ) -> None:
        row = self._rows[target]
        retries = row.retry_count if retry_count is None else retry_count
        await self._ask(
            "put_off",
            session,
            step=target,
            seconds=seconds,
            retry_count=retries,
            error_kind=error_kind,
            waiting=orjson.dumps(waiting).decode(),
        )
        row.retry_count, row.waiting, row.due_at = retries, waiting, time.monotonic() + seconds

    async def _note_result(self, session: Session, event: str, result: StepResult) -> None:
        await self._note(
            session,
            event,
            result.message,
            level="info" if result.category is Category.OK else "warning",
            error_kind=result.category.value or None,
            step=result.step,
            code=result.code or None,
            waits_for=result.waits_for,
        )

    async def _note(
        self,
        session: Session,
        event: str,
        message: str | None,
        *,
        level: str = "info",
        error_kind: str | None = None,
        **fields: Any,
    ) -> None:
        said = {name: value for name, value in fields.items() if value is not None}
        record = {"event": event, "message": message, "level": level, "fields": said, "error_kind": error_kind}
        await note(self.queue, self.held, record, session=session)

    def _ask(self, statement: str, session: Session | None, **params: Any) -> Any:
        said = {"item_id": self.item.id, "generation": self.item.generation, **params}
        return self.queue.database.ask(SQL[statement], said, session)


def _dump(step: str, value: Mapping[str, Any]) -> str:
    document = orjson.dumps(value, default=str)
    if len(document) > _OUTPUT_BYTES_MAX:
        raise Fatal(
            f"the output of {step} has {len(document)} bytes, and the limit is {_OUTPUT_BYTES_MAX}; put it into the "
            "store and return its key",
            scope="item",
            code="output_too_large",
        )
    return document.decode()
