"""The live view of a job: where it stands, how far it and its children are, and what happened last."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from batchwright.app import AsyncBatchwright
from batchwright.cli.commands.show import event_line, event_table, last_message, state_text
from batchwright.cli.commands.show import progress as progress_text
from batchwright.cli.show import COLOURS, bar, compact, console, counts_text, print_json, seconds, status_bar
from batchwright.engine.jobs import Job, JobEvent, JobId
from batchwright.errors import DatabaseUnavailable
from batchwright.states import JOB, JobStatus

_LOOK_SECONDS = 0.25
_EVENTS_SHOWN = 8
_EVENTS_PER_LOOK = 200
_PLAIN_PROGRESS_SECONDS = 2.0


@dataclasses.dataclass(slots=True)
class View:
    """What was seen of a job last; rich draws it."""

    job: Job
    children: Mapping[JobStatus, int] = dataclasses.field(default_factory=dict)
    events: deque[JobEvent] = dataclasses.field(default_factory=lambda: deque(maxlen=_EVENTS_SHOWN))
    trouble: str | None = None
    ahead: timedelta = timedelta(0)
    """How far this machine's clock is before the database's."""

    @property
    def is_over(self) -> bool:
        return self.job.status in JOB.terminal

    def elapsed_seconds(self) -> float:
        """By the database's clock, which wrote the other end."""
        now = datetime.now(UTC) - self.ahead
        return ((self.job.finished_at or now) - self.job.created_at).total_seconds()

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [self._head()]
        if bar := self._bar():
            parts.append(bar)
        if self.children:
            parts.append(Text("  ").append_text(counts_text(self.children)))
        if self.job.status is JobStatus.SUCCEEDED and self.job.result is not None:
            parts.append(Text(f"  result  {compact(self.job.result)}", "green", no_wrap=True, overflow="ellipsis"))
        elif self.job.error is not None:
            parts.append(Text(f"  {last_message(self.job)}", "red"))
        if self.events:
            shown = event_table(list(self.events))
            parts += [Text(), Padding(shown, (0, 0, 0, 2))]
        if self.trouble:
            parts.append(Text(f"  {self.trouble}", "yellow"))
        return Group(*parts)

    def _head(self) -> Text:
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append(self.job.job_type, "bold").append(f"  {self.job.id}  ", "bright_black")
        head.append(self.job.status, COLOURS[self.job.status])
        for part in (seconds(self.elapsed_seconds()), state_text(self.job)):
            if part:
                head.append(f" · {part}")
        return head

    def _bar(self) -> Text | None:
        """The job's own progress, or its children's, one colour for each way to end."""
        if self.children:
            return Text("  ").append_text(status_bar(self.children, "children"))
        if self.job.progress_total:
            shown = {"green" if self.is_over else "cyan": self.job.progress_current or 0}
            return Text("  ").append_text(bar(shown, self.job.progress_total)).append(f"  {progress_text(self.job)}")
        return None


async def watch(batchwright: AsyncBatchwright, id: JobId, *, json: bool = False) -> Job:
    """Show the job until it has ended, in the way that suits the output; answers how it ended."""
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
    """Look at the job several times a second, more rarely if that is costly.

    `on_look` gets what was seen and the events that are new.
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
            view.trouble, events = f"the database is away: {str(error).splitlines()[0]}", []
        last = events[-1].id if events else last
        on_look(view, events)
        if until(view) and len(events) < _EVENTS_PER_LOOK and view.trouble is None:
            return view.job
        await asyncio.sleep(max(_LOOK_SECONDS, 5 * (time.monotonic() - began)))


async def _look(batchwright: AsyncBatchwright, view: View, last: int) -> list[JobEvent]:
    """The job before its events: whoever sees it ended has also seen its last event."""
    view.job = await batchwright.queue.get(view.job.id)
    if view.job.waits:
        view.children = await batchwright.queue.count_children(view.job.id)
    events = await batchwright.queue.events(view.job.id, after=last, limit=_EVENTS_PER_LOOK)
    view.events.extend(events)
    view.trouble = None
    return events


class Lines:
    """Without a terminal: a line for each event, and now and then one for progress."""

    def __init__(self) -> None:
        self._said = ""
        self._said_at = 0.0
        self._trouble: str | None = None

    def __call__(self, view: View, events: list[JobEvent]) -> None:
        for event in events:
            _say(event_line(event))
        self._progress(view)
        if view.trouble and self._trouble is None:
            _say(view.trouble)
        self._trouble = view.trouble
        if view.is_over and len(events) < _EVENTS_PER_LOOK:
            words = compact(view.job.result) if view.job.status is JobStatus.SUCCEEDED else last_message(view.job)
            _say(f"{view.job.status} after {seconds(view.elapsed_seconds())}: {words}")

    def _progress(self, view: View) -> None:
        text = f"children: {counts_text(view.children).plain}" if view.children else progress_text(view.job)
        now = time.monotonic()
        if text and text != self._said and (view.is_over or now - self._said_at >= _PLAIN_PROGRESS_SECONDS):
            self._said, self._said_at = text, now
            clock = (datetime.now(UTC) - view.ahead).strftime("%H:%M:%S")
            _say(f"{clock} {'':7} {'progress':18} {text.removeprefix('children: ')}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
