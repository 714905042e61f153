"""The live view of a job: its status, its progress and that of its children, and its last events."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from batchwright.app import AsyncBatchwright
from batchwright.cli.commands.show import event_line, event_lines, last_message, state_text
from batchwright.cli.commands.show import progress as progress_text
from batchwright.cli.show import (
    COLOURS,
    bar_with,
    compact,
    console,
    counts_parts,
    counts_text,
    print_json,
    seconds,
    status_bar,
)
from batchwright.cli.tables import fact_lines, head_lines
from batchwright.engine.jobs import Job, JobEvent, JobId
from batchwright.errors import DatabaseUnavailable
from batchwright.states import JOB, JobStatus

_LOOK_SECONDS = 0.25
_EVENTS_SHOWN = 8
_EVENTS_PER_LOOK = 200
_PLAIN_PROGRESS_SECONDS = 2.0


@dataclasses.dataclass(slots=True)
class View:
    """The last state of a job, as rich draws it."""

    job: Job
    children: Mapping[JobStatus, int] = dataclasses.field(default_factory=dict)
    events: deque[JobEvent] = dataclasses.field(default_factory=lambda: deque(maxlen=_EVENTS_SHOWN))
    trouble: str | None = None
    ahead: timedelta = timedelta(0)
    """How far the clock of this machine is ahead of the database's."""

    @property
    def is_over(self) -> bool:
        return self.job.status in JOB.terminal

    def elapsed_seconds(self) -> float:
        """By the clock of the database, which wrote the job's times."""
        now = datetime.now(UTC) - self.ahead
        return ((self.job.finished_at or now) - self.job.created_at).total_seconds()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield from self._head(width)
        if bar := self._bar(width - 2):
            yield Text("  ").append_text(bar)
        if self.children:
            yield from fact_lines(counts_parts(self.children), width)
        if self.job.status is JobStatus.SUCCEEDED and self.job.result is not None:
            yield Text(f"  result  {compact(self.job.result)}", "green", no_wrap=True, overflow="ellipsis")
        elif self.job.error is not None:
            yield Padding(Text(last_message(self.job), "red"), (0, 0, 0, 2))
        if self.events:
            yield Text()
            yield from event_lines(self.events, width)
        if self.trouble:
            yield Padding(Text(self.trouble, "yellow"), (0, 0, 0, 2))

    def _head(self, width: int) -> list[Text]:
        named = Text(f"{self.job.id}  ", "bright_black").append(self.job.status, COLOURS[self.job.status])
        facts = [named, Text(seconds(self.elapsed_seconds())), Text(state_text(self.job))]
        return head_lines(Text(self.job.job_type, "bold"), [fact for fact in facts if fact], width)

    def _bar(self, width: int) -> Text | None:
        """The progress of the job or of its children, with a colour for each way to end."""
        if self.children:
            return status_bar(self.children, "children", width)
        if self.job.progress_total:
            shown = {"green" if self.is_over else "cyan": self.job.progress_current or 0}
            return bar_with(shown, self.job.progress_total, f"  {progress_text(self.job)}", width)
        return None


async def watch(batchwright: AsyncBatchwright, id: JobId, *, json: bool = False) -> Job:
    """Show the job until it has ended, in the form that suits the output. Returns the ended job."""
    if json:
        return await follow(batchwright, id, _json_lines)
    if not sys.stdout.isatty():
        return await follow(batchwright, id, Lines())
    return await watch_live(batchwright, id, console())


def _json_lines(_: View, events: list[JobEvent]) -> None:
    for event in events:
        print_json(event, indent=False)


async def watch_live(batchwright: AsyncBatchwright, id: JobId, out: Console) -> Job:
    view: list[View] = []
    with Live(console=out, auto_refresh=False, get_renderable=lambda: view[0] if view else Text()) as screen:

        def draw(seen: View, _: list[JobEvent]) -> None:
            view[:] = [seen]
            screen.refresh()

        return await follow(batchwright, id, draw)


async def follow(
    batchwright: AsyncBatchwright,
    id: JobId,
    on_look: Callable[[View, list[JobEvent]], object],
    *,
    until: Callable[[View], bool] = lambda view: view.is_over,
) -> Job:
    """Look at the job several times a second, and less often if that is slow.

    `on_look` receives the current state and the new events.
    """
    view = View(await batchwright.queue.get(id))
    ((now,),) = await batchwright.pool.rows("SELECT clock_timestamp()")
    view.ahead = datetime.now(UTC) - now
    last = 0
    while True:
        began = time.monotonic()
        try:
            events = await _look(batchwright, view, last)
        except DatabaseUnavailable as error:
            view.trouble, events = f"the database is unavailable: {str(error).splitlines()[0]}", []
        last = events[-1].id if events else last
        on_look(view, events)
        if until(view) and len(events) < _EVENTS_PER_LOOK and view.trouble is None:
            return view.job
        await asyncio.sleep(max(_LOOK_SECONDS, 5 * (time.monotonic() - began)))


async def _look(batchwright: AsyncBatchwright, view: View, last: int) -> list[JobEvent]:
    """Read the job first and then its events: so if the job has ended, its last event is among them."""
    view.job = await batchwright.queue.get(view.job.id)
    if view.job.waits:
        view.children = await batchwright.queue.count_children(view.job.id)
    events = await batchwright.queue.events(view.job.id, after=last, limit=_EVENTS_PER_LOOK)
    view.events.extend(events)
    view.trouble = None
    return events


class Lines:
    """Without a terminal: a line for each event, and some for progress."""

    def __init__(self) -> None:
        self._printed = ""
        self._printed_at = 0.0
        self._trouble: str | None = None

    def __call__(self, view: View, events: list[JobEvent]) -> None:
        for event in events:
            _print_line(event_line(event))
        self._progress(view)
        if view.trouble and self._trouble is None:
            _print_line(view.trouble)
        self._trouble = view.trouble
        if view.is_over and len(events) < _EVENTS_PER_LOOK:
            words = compact(view.job.result) if view.job.status is JobStatus.SUCCEEDED else last_message(view.job)
            _print_line(f"{view.job.status} after {seconds(view.elapsed_seconds())}: {words}")

    def _progress(self, view: View) -> None:
        text = f"children: {counts_text(view.children).plain}" if view.children else progress_text(view.job)
        now = time.monotonic()
        if text and text != self._printed and (view.is_over or now - self._printed_at >= _PLAIN_PROGRESS_SECONDS):
            self._printed, self._printed_at = text, now
            clock = (datetime.now(UTC) - view.ahead).strftime("%H:%M:%S")
            _print_line(f"{clock} {'':7} {'progress':18} {text.removeprefix('children: ')}")


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
