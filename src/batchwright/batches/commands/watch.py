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
from rich.padding import Padding
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
from batchwright.batches.local import SenderLoad, Silence
from batchwright.batches.part import BatchesPart
from batchwright.batches.send.health import Complaint
from batchwright.batches.store import STALLED_SECONDS, Batch, Pace
from batchwright.cli.show import BAR_COLUMNS, bar, console, number, print_json, seconds
from batchwright.cli.tables import fact_lines, head_lines
from batchwright.errors import DatabaseUnavailable
from batchwright.inference.prices import Price
from batchwright.states import JobStatus

_LOOK_SECONDS = 0.25
_WAITING_SECONDS = 2.0
_PLAIN_SECONDS = 2.0
_PLAIN_SECONDS_MAX = 60.0
_PLAIN_SHARE = 0.02
_METER_SECONDS = 10.0
_STALE_SECONDS = 3.0
_ERRORS_SHOWN = 3
_WORDS_SHOWN = 120


class Sending(Protocol):
    """What the process that sends knows better than the database."""

    def load(self) -> SenderLoad: ...
    def silence(self) -> Silence: ...
    def trouble(self) -> str | None: ...
    def advice(self) -> str | None: ...


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
    """The latest state of a batch, drawn by rich."""

    seen: Seen
    prices: Mapping[str, Price]
    title: str = ""
    sending: Sending | None = None
    trouble: str | None = None
    notice: str | None = None
    ahead: timedelta = timedelta(0)
    """How far this machine's clock is before the database's."""
    began_at: datetime | None = None
    """When this process began to run it, by the database's clock; None if others run it."""
    meter: Meter = dataclasses.field(default_factory=Meter)

    @property
    def batch(self) -> Batch:
        return self.seen.batch

    def elapsed_seconds(self) -> float:
        """Time in which no worker ran it does not count, as far as that is known."""
        now = datetime.now(UTC) - self.ahead
        return ((self.batch.ended_at or now) - (self.began_at or self.batch.created_at)).total_seconds()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        parts: list[RenderableType] = [*self._head(width)]
        if self.batch.total:
            parts.append(self._bar(options.max_width))
        for facts in (self._pace(), self._future()):
            parts += fact_lines([Text(fact) for fact in facts], width)
        parts += [Padding(Text(line, "red"), (0, 0, 0, 2)) for line in (*self._errors(), *self.problems())]
        silence = self.silence()
        silent = [] if silence is None else [silence_text(silence)]
        parts += [Padding(Text(text, "yellow"), (0, 0, 0, 2)) for text in (*silent, *self.troubles())]
        if self.notice:
            parts.append(Padding(Text(self.notice, "bold"), (0, 0, 0, 2)))
        yield from parts

    def silence(self) -> Silence | None:
        """A note that no answer has arrived for a while, if a worker waits for one."""
        batch, pace = self.batch, self.seen.pace
        if batch.has_ended or batch.paused_at is not None or not batch.total or batch.done == batch.total:
            return None
        found = Silence(0.0)
        if self.sending is not None:
            found = self.sending.silence()
        elif pace is not None and (self.seen.shards or {}).get(JobStatus.RUNNING):
            found = Silence(pace.silent_seconds)
        return found if found.seconds >= STALLED_SECONDS else None

    def troubles(self) -> list[str]:
        """Why it makes no progress, as far as that is known."""
        if self.batch.has_ended:
            return []
        if self.batch.paused_at is not None:
            return [f"paused; resume it: batchwright batch resume {self.batch.id}"]
        ours = (self.sending.trouble(), self.sending.advice()) if self.sending is not None else ()
        found = (self.trouble, *ours, self.batch.waits_for, *self.seen.waiting)
        return list(dict.fromkeys(one for one in found if one))

    def problems(self) -> list[str]:
        """Why it failed as a whole, or what to do about failed lines; `batch run` prints these itself."""
        if not self.batch.has_ended or self.sending is not None:
            return []
        found = list_problems(self.batch)
        shown = [f"{problem_place(one)}{problem_words(one)}" for one in found[:_ERRORS_SHOWN]]
        if len(found) > _ERRORS_SHOWN:
            shown.append(f"more: batchwright batch show {self.batch.id}")
        id, failed = self.batch.id, count_failed(self.batch)
        if failed and self.batch.error_file_id is not None:
            shown.append(
                f"{number(failed)} of {number(self.batch.total)} failed; see: batchwright batch show {id}; "
                f"retry with: batchwright batch retry {id}"
            )
        return shown

    def lines(self) -> list[str]:
        """Two lines: how it goes, and what will come of it."""
        return [" · ".join(parts) for parts in (self._pace(), self._future()) if parts]

    def _head(self, width: int) -> list[Text]:
        facts = [status_text(self.batch), Text(seconds(self.elapsed_seconds()))]
        return head_lines(Text(self.title or self.batch.id, "bold"), facts, width)

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
            found += _load_parts(self.sending.load())
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
        if self._moves and (eta := eta_text(self.batch, self.seen.pace)) is not None:
            found.append(f"done {eta.plain}")
        if (spent := cost_text(self.batch, self.prices)) is not None:
            found.append(f"cost {spent}")
        if self.batch.cached_tokens:
            found.append(f"{self.batch.cached_tokens / self.batch.input_tokens:.0%} of prompt tokens from a cache")
        return found

    @property
    def _moves(self) -> bool:
        """Whether answers come in, so that the pace says something about the end."""
        if self.silence() is not None:
            return False
        load = None if self.sending is None else self.sending.load()
        return load is None or load.in_flight > 0 or not load.retrying

    def _errors(self) -> list[str]:
        shown = group_errors(self.batch)[:_ERRORS_SHOWN]
        return [f"{number(one['count'])} failed with {one['code']}, such as {one['sample_custom_id']}" for one in shown]


def _load_parts(load: SenderLoad) -> list[str]:
    found = [f"{number(load.in_flight)} in flight"]
    if load.limit is not None:
        found.append(f"limit {number(load.limit)}")
    if load.retrying:
        soon = f" (next in {seconds(load.retry_seconds)})" if load.retry_seconds and not load.in_flight else ""
        found.append(f"{number(load.retrying)} waiting to retry{soon}")
    return found


def silence_text(silence: Silence) -> str:
    """`no answer for 40 s; 3 timed out`, with the server's own words."""
    waited = f"no answer for {silence.seconds:.0f} s" if silence.seconds < 60 else None
    parts = [waited or f"no answer for {seconds(silence.seconds)}"]
    parts += [_complaint_text(one) for one in silence.complaints[:_ERRORS_SHOWN]]
    return "; ".join(parts)


def _complaint_text(one: Complaint) -> str:
    words = one.words if len(one.words) <= _WORDS_SHOWN else f"{one.words[:_WORDS_SHOWN]}…"
    return f"{one.short} ({words})" if words else one.short


OnLook = Callable[[View], object]


async def watch(part: BatchesPart, id: str, *, json: bool = False) -> Batch:
    """Show the batch until it ends, in the form that suits the output; returns how it ended."""
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
    view.began_at = None if sending is None else now
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
            view.trouble = f"the database is unavailable: {str(error).splitlines()[0]}"
        on_look(view)
        if view.batch.has_ended and view.trouble is None:
            return view.batch
        await asyncio.sleep(max(_LOOK_SECONDS, 5 * (time.monotonic() - began)))


async def _look(part: BatchesPart, before: Seen, is_full: bool) -> Seen:
    """Why it waits is looked up less often than its progress."""
    batch = await part.batches.get(before.batch.id, tenant=None)
    if is_full or batch.has_ended:
        return await look_at(part, batch)
    pace: Pace | None = (await part.batches.paces([batch.id])).get(batch.id)
    return Seen(batch=batch, pace=pace, shards=before.shards, waiting=before.waiting)


@contextlib.contextmanager
def show_live(view: View, out: Console) -> Iterator[OnLook]:
    """Keep the view on a terminal. Each call of the returned function redraws it."""
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
        self._silent_seconds = 0.0
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
        self._say_silence(view)
        troubles = [*view.problems(), *view.troubles()]
        for one in troubles:
            if one not in self._troubles:
                _say(view, one)
        self._troubles = troubles

    def _say_silence(self, view: View) -> None:
        """When it begins, and whenever it has become twice as long."""
        silence = view.silence()
        if silence is None:
            self._silent_seconds = 0.0
        elif silence.seconds >= 2 * self._silent_seconds:
            self._silent_seconds = silence.seconds
            _say(view, silence_text(silence))


class JsonLines:
    """Print one JSON object for each change."""

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
