"""The live view of a batch: how far it is, how fast, and when it will be done."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

from batchwright.batches.commands.show import (
    COLOURS,
    Seen,
    as_json,
    cost_text,
    count_failed,
    eta_text,
    group_errors,
    list_problems,
    look_at,
    problem_place,
    problem_words,
    progress,
    status_text,
)
from batchwright.batches.local import SenderLoad
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batch, Pace
from batchwright.cli.show import BAR_COLUMNS, bar, console, number, print_json, seconds
from batchwright.errors import DatabaseUnavailable
from batchwright.inference.prices import Price

_LOOK_SECONDS = 0.25
_WAITING_SECONDS = 2.0
_PLAIN_SECONDS = 2.0
_PLAIN_SECONDS_MAX = 60.0
_PLAIN_SHARE = 0.02
_METER_SECONDS = 10.0
_STALE_SECONDS = 3.0
_ERRORS_SHOWN = 3


class Sending(Protocol):
    """What the process that sends knows better than the database."""

    def load(self) -> SenderLoad: ...
    def trouble(self) -> str | None: ...


class Rates(NamedTuple):
    """Per second."""

    requests: float
    tokens: float


class Meter:
    """How fast requests and tokens come in, over the last seconds; looks that brought nothing new do not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int, int]] = deque()

    def note(self, batch: Batch) -> None:
        now, tokens = self._clock(), batch.input_tokens + batch.output_tokens
        if not self._seen or self._seen[-1][1:] != (batch.done, tokens):
            self._seen.append((now, batch.done, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _METER_SECONDS:
            self._seen.popleft()

    def rates(self) -> Rates | None:
        if len(self._seen) < 2:
            return None
        began, done, tokens = self._seen[0]
        last, done_now, tokens_now = self._seen[-1]
        now = self._clock()
        took = (now if now - last > _STALE_SECONDS else last) - began
        return Rates((done_now - done) / took, (tokens_now - tokens) / took) if took > 0 else None


@dataclasses.dataclass(slots=True)
class View:
    """What was seen of a batch last; rich draws it."""

    seen: Seen
    prices: Mapping[str, Price]
    title: str = ""
    sending: Sending | None = None
    trouble: str | None = None
    notice: str | None = None
    ahead: timedelta = timedelta(0)
    """How far this machine's clock is before the database's."""
    meter: Meter = dataclasses.field(default_factory=Meter)

    @property
    def batch(self) -> Batch:
        return self.seen.batch

    def elapsed_seconds(self) -> float:
        now = datetime.now(UTC) - self.ahead
        return ((self.batch.ended_at or now) - self.batch.created_at).total_seconds()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[RenderableType] = [self._head()]
        if self.batch.total:
            parts.append(self._bar(options.max_width))
        parts += [Text(f"  {line}") for line in self.lines()]
        parts += [Text(f"  {line}", "red") for line in (*self._errors(), *self.problems())]
        parts += [Text(f"  {text}", "yellow") for text in self.troubles()]
        if self.notice:
            parts.append(Text(f"  {self.notice}", "bold"))
        yield from parts

    def troubles(self) -> list[str]:
        """Why it does not go on, as far as that is known."""
        if self.batch.has_ended:
            return []
        if self.batch.paused_at is not None:
            return [f"paused; go on: batchwright batch resume {self.batch.id}"]
        found = (self.trouble, self.sending and self.sending.trouble(), self.batch.waits_for, *self.seen.waiting)
        return list(dict.fromkeys(one for one in found if one))

    def problems(self) -> list[str]:
        """Why it failed as a whole; `batch show` has them all, and `batch run` prints them itself."""
        found = list_problems(self.batch) if self.batch.has_ended and self.sending is None else []
        shown = [f"{problem_place(one)}{problem_words(one)}" for one in found[:_ERRORS_SHOWN]]
        return shown if len(found) <= _ERRORS_SHOWN else [*shown, f"more: batchwright batch show {self.batch.id}"]

    def lines(self) -> list[str]:
        """Two lines: how it goes, and what will come of it."""
        return [" · ".join(parts) for parts in (self._pace(), self._future()) if parts]

    def _head(self) -> Text:
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append(self.title or self.batch.id, "bold").append("  ").append_text(status_text(self.batch))
        return head.append(f" · {seconds(self.elapsed_seconds())}")

    def _bar(self, width: int) -> Text:
        """As long as there is room for it and its numbers in one line."""
        batch = self.batch
        numbers = f"  {progress(batch)} · {batch.done / batch.total:.0%}"
        columns = max(0, min(BAR_COLUMNS, width - len(numbers) - 2))
        done = "green" if batch.has_ended else COLOURS[batch.status]
        parts = {done: batch.completed, "red": batch.failed, "yellow": batch.expired + batch.cancelled}
        return Text("  ").append_text(bar(parts, batch.total, columns)).append(numbers)

    def _pace(self) -> list[str]:
        found = [f"{number(self.batch.completed)} completed", f"{number(count_failed(self.batch))} failed"]
        if self.batch.has_ended:
            return found if self.batch.total else []
        if (rates := self._rates()) is not None:
            found += [f"{rates.requests:,.1f} requests/s", f"{number(rates.tokens)} tokens/s"]
        if self.sending is not None:
            load = self.sending.load()
            found.append(f"{number(load.in_flight)} in flight")
            if load.limit is not None:
                found.append(f"limit {number(load.limit)}")
        return found if self.batch.total else []

    def _rates(self) -> Rates | None:
        """By what was seen here; before that is worth anything, by the last minute in the database."""
        if (rates := self.meter.rates()) is not None:
            return rates
        pace, batch = self.seen.pace, self.batch
        if pace is None or not pace.rate:
            return None
        return Rates(pace.rate, pace.rate * (batch.input_tokens + batch.output_tokens) / max(1, batch.done))

    def _future(self) -> list[str]:
        found = []
        if (eta := eta_text(self.batch, self.seen.pace)) is not None:
            found.append(f"done {eta.plain}")
        if (spent := cost_text(self.batch, self.prices)) is not None:
            found.append(f"cost {spent}")
        if self.batch.cached_tokens:
            found.append(f"{self.batch.cached_tokens / self.batch.input_tokens:.0%} of prompt tokens from a cache")
        return found

    def _errors(self) -> list[str]:
        shown = group_errors(self.batch)[:_ERRORS_SHOWN]
        return [f"{number(one['count'])} failed with {one['code']}, such as {one['sample_custom_id']}" for one in shown]


OnLook = Callable[[View], object]


async def watch(part: BatchesPart, id: str, *, json: bool = False) -> Batch:
    """Show the batch until it has ended, in the way that suits the output; answers how it ended."""
    view = await begin_view(part, id)
    if json:
        return await follow(part, view, JsonLines())
    if not sys.stdout.isatty():
        return await follow(part, view, Lines())
    with show_live(view, console()) as draw:
        return await follow(part, view, draw)


async def begin_view(part: BatchesPart, id: str, *, title: str = "", sending: Sending | None = None) -> View:
    batch = await part.batches.get(id, tenant=None)
    ((now,),) = await part.core.pool.rows("SELECT clock_timestamp()")
    view = View(Seen(batch=batch), part.settings.prices, title=title, sending=sending)
    view.ahead = datetime.now(UTC) - now
    return view


async def follow(part: BatchesPart, view: View, on_look: OnLook) -> Batch:
    """Look at the batch several times a second, more rarely if that is costly."""
    waiting_at = 0.0
    while True:
        began = time.monotonic()
        try:
            is_full = view.sending is None and began - waiting_at >= _WAITING_SECONDS
            waiting_at = began if is_full else waiting_at
            view.seen = await _look(part, view.seen, is_full)
            view.trouble = None
            view.meter.note(view.batch)
        except DatabaseUnavailable as error:
            view.trouble = f"the database is away: {str(error).splitlines()[0]}"
        on_look(view)
        if view.batch.has_ended and view.trouble is None:
            return view.batch
        await asyncio.sleep(max(_LOOK_SECONDS, 5 * (time.monotonic() - began)))


async def _look(part: BatchesPart, before: Seen, is_full: bool) -> Seen:
    """Why it waits is asked less often than how far it is."""
    batch = await part.batches.get(before.batch.id, tenant=None)
    if is_full or batch.has_ended:
        return await look_at(part, batch)
    pace: Pace | None = (await part.batches.paces([batch.id])).get(batch.id)
    return Seen(batch=batch, pace=pace, shards=before.shards, waiting=before.waiting)


@contextlib.contextmanager
def show_live(view: View, out: Console) -> Iterator[OnLook]:
    """Keeps the view on a terminal; it is drawn anew by each call of what this gives."""
    with Live(console=out, auto_refresh=False, get_renderable=lambda: view) as screen:
        yield lambda _: screen.refresh()


class Lines:
    """Without a terminal: now and then a line, and one for each change of status and each trouble.

    The longer it takes, the rarer they are: a day is about 1,600 lines, not 43,000.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._said = ""
        self._said_at = -math.inf
        self._status = ""
        self._troubles: list[str] = []

    def __call__(self, view: View) -> None:
        status = status_text(view.batch).plain
        if status != self._status:
            _say(view, status)
            self._status = status
        text = " · ".join([progress(view.batch), *view.lines()]) if view.batch.total else ""
        now = self._clock()
        pause = min(_PLAIN_SECONDS_MAX, max(_PLAIN_SECONDS, _PLAIN_SHARE * (now - self._began)))
        if text and text != self._said and (view.batch.has_ended or now - self._said_at >= pause):
            self._said, self._said_at = text, now
            _say(view, text)
        troubles = [*view.problems(), *view.troubles()]
        for one in troubles:
            if one not in self._troubles:
                _say(view, one)
        self._troubles = troubles


class JsonLines:
    """One object for each change."""

    def __init__(self) -> None:
        self._said: Batch | None = None

    def __call__(self, view: View) -> None:
        if view.batch != self._said:
            self._said = view.batch
            print_json(as_json(view.seen, view.prices), indent=False)


def _say(view: View, text: str) -> None:
    clock = (datetime.now(UTC) - view.ahead).strftime("%H:%M:%S")
    sys.stdout.write(f"{clock} {text}\n")
    sys.stdout.flush()
