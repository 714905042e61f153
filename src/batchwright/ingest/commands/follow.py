"""Shows a run until it ends. While no worker works on it, this process does."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import typer

from batchwright.app import VERSION, AsyncBatchwright
from batchwright.cli.exit_codes import FAILED
from batchwright.cli.flags import settings_from
from batchwright.cli.loop import loop_factory
from batchwright.cli.show import number, show_meanwhile
from batchwright.cli.stop import Stop, end, end_if_nobody_reads
from batchwright.errors import DatabaseUnavailable
from batchwright.ingest.commands.show import exit_code, look_at
from batchwright.ingest.commands.watch import OnLook, View, begin_view, follow, show
from batchwright.ingest.explain import remedy_of_parked
from batchwright.ingest.local import Lock, has_worker, is_alone, local_settings, release_dead, try_lock, work_until
from batchwright.ingest.part import IngestPart
from batchwright.ingest.runs import Run
from batchwright.settings import Settings
from batchwright.states import RunStatus
from batchwright.telemetry import tracing
from batchwright.telemetry.logs import configure_logs

_ALONE_SECONDS = 2.0

Begin = Callable[[AsyncBatchwright], Awaitable[int]]


def run_command(begin: Begin, database_url: str | None, config: Path | None) -> NoReturn:
    """Open a client and call `begin`, which returns the exit code."""
    settings = settings_from(database_url, config)
    configure_logs("ERROR", settings.log.form)
    logging.getLogger("psycopg").setLevel(logging.ERROR)  # its warnings would be printed over the view
    tracing.start(version=VERSION)
    try:
        with end_if_nobody_reads(), asyncio.Runner(loop_factory=loop_factory()) as runner:
            code = runner.run(_open(begin, settings))
    finally:
        tracing.stop()
    end(code, settings)


async def _open(begin: Begin, settings: Settings) -> int:
    batchwright = AsyncBatchwright(settings=settings)
    with show_meanwhile("starting the database …"):
        await batchwright.open()
    try:
        return await begin(batchwright)
    finally:
        await batchwright.close()


class Follower:
    """Shows one run until it has ended, is parked, or we are asked to stop."""

    def __init__(self, batchwright: AsyncBatchwright, *, json: bool) -> None:
        self._batchwright = batchwright
        self._part = batchwright.part(IngestPart)
        self._stop = Stop()
        self._json = json
        self._signal: int = signal.SIGINT
        self._has_worked = False

    async def run(self, run: Run) -> int:
        """The exit code."""
        self._stop.on_ask = self._note_signal
        self._stop.listen()
        view = await begin_view(self._part, run.id)
        with show(view, json=self._json) as on_look:
            while not self._stop.asked.is_set() and not _is_over(view.run):
                if not await self._work_if_alone(view, on_look):
                    await self._watch(view, on_look)
            if not _is_over(view.run):
                await self._look_again(view, on_look)
        return self._conclude(view.run)

    async def _work_if_alone(self, view: View, on_look: OnLook) -> bool:
        """Run a worker here, unless there is one. Returns whether it ran."""
        with try_lock(self._part) as lock:
            if lock is None:
                return False
            await release_dead(self._part.core, lock)
            if await has_worker(self._part.core):
                return False
            await self._work(view, on_look, lock)
            lock.sign("")
            return True

    async def _work(self, view: View, on_look: OnLook, lock: Lock) -> None:
        self._batchwright.settings = local_settings(self._batchwright.settings, view.run)
        worker = self._batchwright.worker()
        lock.sign(worker.id)
        self._has_worked = view.is_worker = True

        def stop(number: int) -> None:
            self._note_signal(number)
            view.notice = "stopping: steps in progress may end; press Ctrl-C again to quit now"
            worker.stop()

        self._stop.on_ask = stop
        if self._stop.asked.is_set():
            worker.stop()
        await work_until(worker, follow(self._part, view, on_look, _is_over))
        self._stop.on_ask = self._note_signal
        view.notice, view.is_worker = None, False

    async def _watch(self, view: View, on_look: OnLook) -> None:
        """Watch until the run is over, no worker is left, or we are asked to stop."""
        self._has_worked = False
        await first_of(follow(self._part, view, on_look, _is_over), self._wait_until_alone(), self._stop.asked.wait())

    async def _wait_until_alone(self) -> None:
        while True:
            await asyncio.sleep(_ALONE_SECONDS)
            try:
                if await is_alone(self._part):
                    return
            except DatabaseUnavailable:
                continue

    async def _look_again(self, view: View, on_look: OnLook) -> None:
        """Show the last state before we stop. Leave out why the run waits: our last message says it."""
        seen = await look_at(self._part, await self._part.runs.get(view.run.id, tenant=None))
        view.seen = replace(seen, waits=())
        on_look(view)

    def _note_signal(self, number: int) -> None:
        self._signal = number

    # The last message -------------------------------------------------------------------------------------------

    def _conclude(self, run: Run) -> int:
        if run.has_ended:
            return exit_code(run)
        if run.status is RunStatus.PARKED:
            return self._tell_parked(run)
        return self._tell_stopped(run)

    def _tell_parked(self, run: Run) -> int:
        if not self._json:
            typer.echo(f"{run.id} is parked: {run.parked_message}", err=True)
            typer.echo(remedy_of_parked(run.id, run.parked_reason), err=True)
        return FAILED

    def _tell_stopped(self, run: Run) -> int:
        if not self._json and self._has_worked:
            ended = run.item_count_total - run.item_count_open
            typer.echo(
                f"stopped at {number(ended)} of {number(run.item_count_total)} documents; they are kept", err=True
            )
            typer.echo("  resume:   the same command again, or", err=True)
            typer.echo(f"            batchwright ingest resume {run.id}", err=True)
            typer.echo(f"  give up:  batchwright ingest cancel {run.id}", err=True)
        elif not self._json:
            typer.echo(f"{run.id} continues in the workers", err=True)
            typer.echo(f"  watch:    batchwright ingest watch {run.id}", err=True)
            typer.echo(f"  give up:  batchwright ingest cancel {run.id}", err=True)
        return 128 + self._signal


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them ends; then cancel the others and raise its error, if any."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def _is_over(run: Run) -> bool:
    return run.has_ended or run.status is RunStatus.PARKED
