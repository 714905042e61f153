"""The live view of a task: a line for each job at a provider."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from batchwright.cli.show import console, money, number, print_json, seconds
from batchwright.cli.tables import fact_lines, head_lines, split_facts, table_lines
from batchwright.errors import DatabaseUnavailable
from batchwright.providers.commands.show import (
    Seen,
    as_json,
    error_text,
    look_at,
    name_of,
    next_look,
    phase_text,
    progress,
    results_text,
    status_text,
)
from batchwright.providers.jobs import RemoteJob
from batchwright.providers.part import ProvidersPart
from batchwright.providers.tasks import Task

_LOOK_SECONDS = 0.5
_JOBS_SHOWN = 20


@dataclasses.dataclass(slots=True)
class View:
    """The latest state of a task, drawn by rich."""

    seen: Seen
    trouble: str | None = None
    ahead: timedelta = timedelta(0)
    """How far the clock of this machine is ahead of the database's."""

    @property
    def task(self) -> Task:
        return self.seen.task

    def elapsed_seconds(self) -> float:
        now = datetime.now(UTC) - self.ahead
        return ((self.task.ended_at or now) - self.task.created_at).total_seconds()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._head(options.max_width)
        if self.seen.jobs:
            yield from self._jobs(options.max_width)
        if (more := len(self.seen.jobs) - _JOBS_SHOWN) > 0:
            yield Text(f"  … and {number(more)} more", "bright_black")
        for line in self.errors():
            yield Padding(Text(line, "red"), (0, 0, 0, 2))
        for line in self.troubles():
            yield Padding(Text(line, "yellow"), (0, 0, 0, 2))
        for line in self.ending():
            yield from fact_lines(split_facts(line), options.max_width)

    def _head(self, width: int) -> list[Text]:
        return head_lines(
            Text(self.task.id, "bold"), [status_text(self.task), Text(seconds(self.elapsed_seconds()))], width
        )

    def _jobs(self, width: int) -> list[Text]:
        """Open jobs first, because ended jobs no longer change."""
        jobs = sorted(self.seen.jobs, key=lambda job: job.has_ended)[:_JOBS_SHOWN]
        columns = {
            "name": [Text(name_of(job)) for job in jobs],
            "phase": [phase_text(job) for job in jobs],
            "done": [_done_text(job) for job in jobs],
            "cost": [Text("" if job.cost is None else money(job.cost)) for job in jobs],
            "poll": [Text(poll_text(job, self.task), "bright_black") for job in jobs],
            "status": [Text(job.raw_status or "") for job in jobs],
        }
        return table_lines(columns, width, elastic=("name", "status"), has_header=False, indent=2)

    def errors(self) -> list[str]:
        found = [f"{name_of(job)}: {error_text(job.error)}" for job in self.seen.jobs if job.error is not None]
        if self.task.error is not None:
            found.insert(0, error_text(self.task.error))
        return list(dict.fromkeys(found))[:_JOBS_SHOWN]

    def troubles(self) -> list[str]:
        """Why the task does not continue, if that is known."""
        if self.task.has_ended:
            return []
        found = (self.trouble, self.task.cancel_note, *self.seen.waiting)
        return list(dict.fromkeys(one for one in found if one))

    def ending(self) -> list[str]:
        """The results, and how to get them."""
        if not self.task.has_ended:
            return []
        cost = "" if self.task.cost is None else f" · cost {money(self.task.cost)}"
        lines = [f"{results_text(self.task)}{cost}"]
        return [*lines, f"batchwright task result {self.task.id}"] if self.task.result_file_id is not None else lines


OnLook = Callable[[View], object]


def poll_text(job: RemoteJob, task: Task) -> str:
    when = next_look(job, task)
    tries = f" after {number(job.failures)} failed calls" if job.failures and when else ""
    return f"polls {when}{tries}" if when else ""


def _done_text(job: RemoteJob) -> Text:
    return Text(progress(job)).append(f" {number(job.failed)} failed" if job.failed else "", "red")


async def watch(part: ProvidersPart, id: str, *, json: bool = False) -> Task:
    """Show the task until it ends, in the form that suits the output. Returns the ended task."""
    ((now,),) = await part.core.pool.rows("SELECT clock_timestamp()")
    view = View(Seen(task=await part.tasks.get(id, tenant=None)), ahead=datetime.now(UTC) - now)
    if json:
        return await follow(part, view, JsonLines())
    if not sys.stdout.isatty():
        return await follow(part, view, Lines())
    with show_live(view, console()) as draw:
        return await follow(part, view, draw)


async def follow(part: ProvidersPart, view: View, on_look: OnLook) -> Task:
    """Read the task from the database twice a second, and less often if that is slow. The provider is not polled."""
    while True:
        began = time.monotonic()
        try:
            view.seen = await look_at(part, await part.tasks.get(view.task.id, tenant=None))
            view.trouble = None
        except DatabaseUnavailable as error:
            view.trouble = f"the database is unavailable: {str(error).splitlines()[0]}"
        on_look(view)
        if view.task.has_ended and view.trouble is None:
            return view.task
        await asyncio.sleep(max(_LOOK_SECONDS, 5 * (time.monotonic() - began)))


@contextlib.contextmanager
def show_live(view: View, out: Console) -> Iterator[OnLook]:
    """Keep the view on a terminal. Each call of the returned function redraws it."""
    with Live(console=out, auto_refresh=False, get_renderable=lambda: view) as screen:
        yield lambda _: screen.refresh()


class Lines:
    """Without a terminal: print a line for each change of the task or a job, and for each problem."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}
        self._troubles: list[str] = []

    def __call__(self, view: View) -> None:
        self._say_new(view, "", status_text(view.task).plain)
        for job in view.seen.jobs:
            words = (name_of(job), job.phase, job.raw_status, progress(job), job.failed and f"{job.failed} failed")
            self._say_new(view, job.key, " ".join(str(word) for word in words if word))
        for line in (troubles := [*view.errors(), *view.troubles()]):
            if line not in self._troubles:
                _say(view, line)
        self._troubles = troubles
        for line in view.ending():
            _say(view, line)

    def _say_new(self, view: View, what: str, text: str) -> None:
        if self._said.get(what) != text:
            self._said[what] = text
            _say(view, text)


class JsonLines:
    """Print one JSON object for each change."""

    def __init__(self) -> None:
        self._said: dict[str, Any] | None = None

    def __call__(self, view: View) -> None:
        shown = as_json(view.seen)
        if shown != self._said:
            self._said = shown
            print_json(shown, indent=False)


def _say(view: View, text: str) -> None:
    clock = (datetime.now(UTC) - view.ahead).strftime("%H:%M:%S")
    sys.stdout.write(f"{clock} {text}\n")
    sys.stdout.flush()
