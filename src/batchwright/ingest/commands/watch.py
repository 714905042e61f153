"""The live view of a run: its progress, its rate, what it costs, and what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from batchwright.cli.show import bar_with, console, number, print_json, seconds
from batchwright.cli.tables import fact_lines, split_facts
from batchwright.errors import DatabaseUnavailable
from batchwright.ingest.commands.show import (
    Seen,
    as_json,
    cause_text,
    counts_text,
    funnel_lines,
    listing_rows,
    look_at,
    money_text,
    status_text,
    tokens_text,
    waits_text,
)
from batchwright.ingest.part import IngestPart
from batchwright.ingest.runs import Run

_LOOK_SECONDS = 0.5
_RATE_SECONDS = 60.0
_FUNNEL_ROWS_MAX = 10
_WAITS_SHOWN = 3
_CAUSES_SHOWN = 3
_BAR_COLUMNS_MAX = 40
_BAR_COLUMNS_MIN = 8
_LABEL_COLUMNS = 34
_PLAIN_SECONDS = 2.0
_PLAIN_SECONDS_MAX = 60.0
_PLAIN_SHARE = 0.01


class Meter:
    """The number of documents that end per minute, measured over the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque()

    def note(self, run: Run) -> None:
        now = self._clock()
        self._marks.append((now, run.item_count_total - run.item_count_open))
        while len(self._marks) > 2 and now - self._marks[1][0] > _RATE_SECONDS:
            self._marks.popleft()

    @property
    def per_minute(self) -> float | None:
        """None until a document has ended while this command was watching."""
        if len(self._marks) < 2:
            return None
        (first_at, first), (last_at, last) = self._marks[0], self._marks[-1]
        if last <= first or last_at <= first_at:
            return None
        return 60.0 * (last - first) / (last_at - first_at)


@dataclasses.dataclass(slots=True)
class View:
    """The last state of a run, as rich draws it."""

    seen: Seen
    trouble: str | None = None
    notice: str | None = None
    """A message about this process, such as that it is stopping."""
    is_worker: bool = False
    """Whether this process works on the run. The database shows it only a moment later."""
    ahead: timedelta = timedelta(0)
    """How far the clock of this machine is ahead of the database's."""
    meter: Meter = dataclasses.field(default_factory=Meter)

    @property
    def run(self) -> Run:
        return self.seen.run

    def elapsed_seconds(self) -> float:
        now = datetime.now(UTC) - self.ahead
        return ((self.run.ended_at or now) - self.run.created_at).total_seconds()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        columns = max(_BAR_COLUMNS_MIN, min(_BAR_COLUMNS_MAX, width - _LABEL_COLUMNS))
        yield from self._head(width)
        if self.run.item_count_total:
            yield self._bar(width - 2)
        if self.run.item_count_total > self.run.item_count_unchanged:
            yield from funnel_lines(self._rows(), columns)
        for line in self.lines():
            yield from fact_lines(split_facts(line), width)
        for line in self.errors():
            yield _cut(f"  ✗ {line}", "red")
        for line in self.troubles():
            # These lines end with what to do, so they are never cut.
            yield Padding(Text(line, "yellow"), (0, 0, 0, 2))
        for line in self.ending():
            yield Padding(Text(line), (0, 0, 0, 2))

    def _head(self, width: int) -> list[Text]:
        named = Text(self.run.id, "bold").append("  ").append_text(status_text(self.run))
        facts = [named, Text(seconds(self.elapsed_seconds())), Text(self.run.collection)]
        return fact_lines(facts, width, indent=0)

    def _bar(self, width: int) -> Text:
        run = self.run
        good = run.item_count_done + run.item_count_unchanged
        parts = {"green": good, "red": run.item_count_failed, "yellow": run.item_count_cancelled}
        ended = run.item_count_total - run.item_count_open
        numbers = f"  {number(ended)}/{number(run.item_count_total)} documents"
        return Text("  ").append_text(bar_with(parts, run.item_count_total, numbers, width))

    def _rows(self) -> list[Any]:
        """With many steps, show the first ones and the last ones."""
        rows = list(self.seen.funnel)
        if len(rows) <= _FUNNEL_ROWS_MAX:
            return rows
        return [*rows[: _FUNNEL_ROWS_MAX - 2], *rows[-2:]]

    def lines(self) -> list[str]:
        return [line for line in (self.pace(), tokens_text(self.run), money_text(self.run, self.seen.doubt)) if line]

    def pace(self) -> str | None:
        run, rate = self.run, self.meter.per_minute
        parts = [counts_text(run)] if run.item_count_total or run.has_ended else ["listing the sources"]
        if rate is not None and not run.has_ended:
            parts.append(f"{number(rate)}/min")
            if run.listed_at is not None and run.item_count_open:
                parts.append(f"{seconds(60.0 * run.item_count_open / rate)} left")
        return " · ".join(parts)

    def errors(self) -> list[str]:
        error = self.run.error
        found = [f"{error.get('code')}: {error.get('message')}"] if error is not None else []
        return [*found, *map(cause_text, self.seen.causes[:_CAUSES_SHOWN])]

    def troubles(self) -> list[str]:
        """Why the run does not continue, if that is known."""
        if self.run.has_ended:
            return []
        waits = [one for one in self.seen.waits if not (self.is_worker and one.reason == "no_worker")]
        found = [self.trouble, self.notice, *map(waits_text, waits[:_WAITS_SHOWN])]
        return list(dict.fromkeys(one for one in found if one))

    def ending(self) -> list[str]:
        """Counts of other files that the listing found, and the next commands."""
        if not self.run.has_ended:
            return []
        lines = [f"{word} {text.splitlines()[0]}" for word, text in listing_rows(self.run) if text is not None]
        if self.run.item_count_failed:
            lines.append(f"batchwright ingest inbox --run {self.run.id}")
        if self.run.item_count_done + self.run.item_count_unchanged:
            lines.append(f'batchwright ingest search {self.run.collection} "…"')
        return lines


def _cut(text: str, style: str = "") -> Text:
    return Text(" ".join(text.split("\n")), style, no_wrap=True, overflow="ellipsis")


OnLook = Callable[[View], object]
IsOver = Callable[[Run], bool]


async def begin_view(part: IngestPart, id: str) -> View:
    ((now,),) = await part.core.pool.rows("SELECT clock_timestamp()")
    return View(Seen(run=await part.runs.get(id, tenant=None)), ahead=datetime.now(UTC) - now)


async def watch(part: IngestPart, id: str, *, json: bool = False) -> Run:
    """Show the run until it has ended, in the form that suits the output. Returns the ended run."""
    view = await begin_view(part, id)
    with show(view, json=json) as on_look:
        return await follow(part, view, on_look)


async def follow(part: IngestPart, view: View, on_look: OnLook, is_over: IsOver = lambda run: run.has_ended) -> Run:
    """Read the run from the database twice a second, and less often if that is slow."""
    while True:
        began = time.monotonic()
        try:
            view.seen = await look_at(part, await part.runs.get(view.run.id, tenant=None), causes=_CAUSES_SHOWN)
            view.trouble = None
            view.meter.note(view.run)
        except DatabaseUnavailable as error:
            view.trouble = f"the database is unavailable: {str(error).splitlines()[0]}"
        on_look(view)
        if is_over(view.run) and view.trouble is None:
            return view.run
        await asyncio.sleep(max(_LOOK_SECONDS, 5 * (time.monotonic() - began)))


@contextlib.contextmanager
def show(view: View, *, json: bool = False) -> Iterator[OnLook]:
    """Each call of the result draws the view: live on a terminal, as lines elsewhere, or as JSON."""
    if json:
        yield JsonLines()
    elif not sys.stdout.isatty():
        yield Lines()
    else:
        with Live(console=console(), auto_refresh=False, get_renderable=lambda: view) as screen:
            yield lambda _: screen.refresh()


class Lines:
    """Without a terminal: a line every few seconds, and one for each change of status and each problem.

    The longer the run takes, the fewer lines there are.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._said = ""
        self._said_at = -math.inf
        self._status = ""
        self._troubles: list[str] = []

    def __call__(self, view: View) -> None:
        status = status_text(view.run).plain
        if status != self._status:
            _say(view, status)
            self._status = status
        text, now = " · ".join(view.lines()), self._clock()
        pause = min(_PLAIN_SECONDS_MAX, max(_PLAIN_SECONDS, _PLAIN_SHARE * (now - self._began)))
        if text != self._said and (view.run.has_ended or now - self._said_at >= pause):
            self._said, self._said_at = text, now
            _say(view, text)
        troubles = [*view.errors(), *view.troubles()]
        for one in troubles:
            if one not in self._troubles:
                _say(view, one)
        self._troubles = troubles
        for line in view.ending():
            _say(view, line)


class JsonLines:
    """One object for each change."""

    def __init__(self) -> None:
        self._said: dict[str, Any] | None = None

    def __call__(self, view: View) -> None:
        shown = as_json(view.seen)
        if shown != self._said:
            self._said = shown
            print_json(shown, indent=False)


def _say(view: View, text: str) -> None:
    clock = (datetime.now(UTC) - view.ahead).strftime("%H:%M:%S")
    sys.stdout.write(f"{clock} {' '.join(text.splitlines())}\n")
    sys.stdout.flush()
