"""The job of one item: it runs every step that is ready, until all are done or it must wait."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.db.database import wrap_connection
from batchwright.engine.context import Context
from batchwright.engine.outcomes import Done, Outcome, Snooze
from batchwright.engine.owned import Held
from batchwright.errors import ConfigurationError, DatabaseError, Fatal, Fenced, NotFound, RetryLater, StorageError
from batchwright.ingest.context import FETCHED, StepContext, Tools
from batchwright.ingest.items import Items
from batchwright.ingest.machine import PARKED_SECONDS, Call, Machine
from batchwright.ingest.pipeline import Graph
from batchwright.ingest.results import StepResult
from batchwright.ingest.runs import Runs
from batchwright.states import RunStatus

log = logging.getLogger(__name__)
_CONFIGURATION_SECONDS = 60.0


class ItemRunner:
    """Runs `ingest.item`."""

    def __init__(self, tools: Tools, graph: Graph) -> None:
        self.tools = tools
        self.graph = graph
        self.items = Items(tools.queue)
        self.runs = Runs(tools.queue)

    async def run(self, ctx: Context, item_id: str) -> Outcome:
        try:
            return await self._run(ctx, item_id)
        except (DatabaseError, Fenced) as error:
            raise RetryLater(str(error), 1.0) from error
        except ConfigurationError as error:
            raise RetryLater(str(error), _CONFIGURATION_SECONDS) from error

    async def _run(self, ctx: Context, item_id: str) -> Outcome:
        try:
            item = await self.items.get(item_id, tenant=None)
        except NotFound:
            return Done({"item_id": item_id, "status": "removed"})
        if item.has_ended:
            return Done({"item_id": item.id, "status": item.status.value})
        if ctx.job_id != item.job_id:
            raise Fatal(f"{ctx.job_type} belongs to {item.id}, whose own job runs it; enqueue nothing for it")
        run = await self.runs.get(item.run_id, tenant=None)
        if run.status is not RunStatus.RUNNING:
            return Snooze(PARKED_SECONDS, run.parked_message or f"the run is {run.status.value}")
        held = Held(ctx.job_id, ctx.claim, ctx.worker)
        machine = await Machine.open(self.tools.queue, self.graph, held, run, item, run.config["max_retries"])
        machine.is_after_death, machine.counts = ctx.after_death, self.tools.counts
        step_context = StepContext(tools=self.tools, machine=machine, held=held)
        if ctx.claim > 1 or len(item.job_ids) > 1:
            await step_context.ledger("").doubt_older()
        return await Journey(self, ctx, machine, step_context).advance()


class Journey:
    """One run of an item's job."""

    def __init__(self, runner: ItemRunner, ctx: Context, machine: Machine, step_context: StepContext) -> None:
        self._runner = runner
        self._ctx = ctx
        self._machine = machine
        self._step_context = step_context

    async def advance(self) -> Outcome:
        machine, graph = self._machine, self._machine.graph
        while ready := graph.ready(machine.done):
            if self._ctx.stopping:
                return Snooze(0, "the worker stops; another one continues")
            if machine.is_unchanged:
                return self._end("skip")
            due = machine.due(ready)
            if not due:
                return self._wait(ready)
            result = await machine.run_parallel_steps({name: self._call(name) for name in due})
            if result.is_final:
                return self._fail(result)
            if machine.parked is not None:
                return Snooze(PARKED_SECONDS, machine.parked)
        return self._end("complete")

    def _wait(self, ready: Sequence[str]) -> Outcome:
        """Wait until the first of these steps is due, but not beyond the deadline of the run."""
        seconds, reason = self._machine.wait_for(ready)
        left = self._machine.run.seconds_left
        if left is None:
            return Snooze(seconds, reason)
        if left > 0:
            return Snooze(min(seconds, left + 0.1), reason)
        return self._fail(self._machine.late(ready))

    def _call(self, name: str) -> Call:
        return functools.partial(self._machine.graph.steps[name].run, self._step_context)

    # The end ----------------------------------------------------------------------------------------------------

    def _end(self, verb: str) -> Outcome:
        """End the item: its last transition, and the state of its source, are in the commit that ends the job."""
        machine, item = self._machine, self._machine.item
        fetched = machine.outputs.get(FETCHED, {})
        version_id = _version_of(machine.outputs)
        if verb == "skip" and machine.live is not None:
            version_id = machine.live.id

        async def write(connection: Any) -> None:
            session = await wrap_connection(connection)
            library = self._runner.tools.library
            if verb == "skip":
                await self._runner.items.skip(item.id, session=session)
            else:
                await self._runner.items.complete(item.id, session=session)
                if version_id is not None:
                    await library.note_steps(version_id, machine.record(), session=session)
            if version_id is not None:
                await library.finish(item.document_id, version_id, fetched.get("etag"), session=session)

        status = "UNCHANGED" if verb == "skip" else "DONE"
        self._ctx.when_settled(functools.partial(self._tidy, fetched.get("blob_key")))
        self._ctx.when_settled(functools.partial(self._count, status))
        return Done({"item_id": item.id, "status": status}, write=write)

    def _fail(self, result: StepResult) -> Outcome:
        machine, item = self._machine, self._machine.item
        failure = machine.failure(result)

        async def write(connection: Any) -> None:
            session = await wrap_connection(connection)
            await self._runner.items.fail(item.id, failure, session=session)

        self._ctx.when_settled(functools.partial(self._count, "FAILED"))
        shown = {"item_id": item.id, "status": "FAILED", "step": result.step, "code": result.code}
        return Done(shown, write=write)

    def _count(self, status: str, verb: str | None) -> None:
        if verb == "succeed":
            self._runner.tools.counts.item_ended(status)

    def _tidy(self, blob_key: str | None, verb: str | None) -> None:
        """Remove the copy of the source. If that fails, upkeep removes it later."""
        if verb == "succeed" and blob_key is not None:
            task = asyncio.ensure_future(self._remove(blob_key))
            _tidying.add(task)
            task.add_done_callback(_tidying.discard)

    async def _remove(self, key: str) -> None:
        try:
            await self._runner.tools.store.delete(key)
        except StorageError as error:
            log.warning("%s was not removed: %s", key, error)


_tidying: set[asyncio.Future[None]] = set()


def _version_of(outputs: Mapping[str, Mapping[str, Any]]) -> int | None:
    return next((found for output in outputs.values() if (found := output.get("version_id")) is not None), None)
