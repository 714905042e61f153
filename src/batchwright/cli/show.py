"""What commands print: tables and facts for people, JSON for programs."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchwright.cli.tables import Columns, table_lines
from batchwright.jsonl import one_line
from batchwright.states import JOB, JobStatus
from batchwright.terminal import columns_of, wrap

if TYPE_CHECKING:
    from batchwright.db.check import Finding

COLOURS = {
    JobStatus.QUEUED: "bright_black",
    JobStatus.RUNNING: "cyan",
    JobStatus.SUCCEEDED: "green",
    JobStatus.FAILED: "red",
    JobStatus.CANCELLED: "yellow",
}
BAR_COLUMNS = 46
_BAR_ORDER = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.RUNNING)
_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "red")}
_PIPE_COLUMNS = 1000
_MONEY_MIN = 0.0001
_AGES = ((86_400, "d"), (3600, "h"), (60, "min"))
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def console() -> Console:
    """Standard output. A pipe gets lines that are as long as they need to be."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def print_json(value: Any, *, indent: bool = True) -> None:
    """Print JSON. Keys may be statuses, which the encoder accepts only with an option."""
    shape = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    document = orjson.dumps(value, option=shape, default=str)
    sys.stdout.write(one_line(document).decode() + "\n")
    sys.stdout.flush()


def terminal_width() -> int | None:
    """The number of columns, or None if standard output is not a terminal."""
    return console().width if sys.stdout.isatty() else None


def print_table(columns: Columns, *, elastic: Sequence[str] = ("message",)) -> None:
    """Print a table as wide as the terminal. Columns without any value are left out."""
    out = console()
    for line in table_lines(columns, terminal_width(), elastic=elastic):
        out.print(line, soft_wrap=True)


def print_indented(text: Text, indent: int = 2) -> None:
    """Print a text: wrapped between words on a terminal, and in one line in a pipe."""
    width = terminal_width()
    if width is None:
        console().print(Text(" " * indent).append_text(text), soft_wrap=True)
        return
    for line in text.wrap(console(), width - indent):
        line.rstrip()
        console().print(Text(" " * indent).append_text(line), soft_wrap=True)


def print_facts(facts: Sequence[tuple[str, Any]]) -> None:
    """Names and values. Empty values are left out, and long ones continue on the next line."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts:
        if value not in (None, ""):
            table.add_row(Text(name, "bold"), value if isinstance(value, Text) else Text(str(value)))
    console().print(table)


def print_findings(findings: list[Finding]) -> None:
    """Plain lines that the terminal wraps: remedies hold commands to copy."""
    out = console()
    width = max((len(finding.name) for finding in findings), default=0) + 1
    for finding in findings:
        sign, colour = _SIGNS[finding.level]
        out.print(Text.assemble((f"{sign} {finding.name:{width}}", colour), finding.text), soft_wrap=True)
        if finding.remedy:
            out.print(Text(f"  {'':{width}}→ {finding.remedy}"), soft_wrap=True)


def print_text(text: Text) -> None:
    """A sentence or two, from the left edge."""
    print_indented(text, 0)


def say(text: str) -> None:
    """To standard error, beside what a command prints."""
    typer.echo(wrap(text, columns_of(sys.stderr)), err=True)


@contextlib.contextmanager
def show_meanwhile(text: str) -> Iterator[None]:
    """Show a text on a terminal while something takes long, such as the first start of the embedded database."""
    if not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(text)
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


# Texts, numbers and bars --------------------------------------------------------------------------------------------


def as_dict(thing: Any) -> dict[str, Any]:
    """The fields of a dataclass, one level deep."""
    return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}


def compact(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def number(n: float) -> str:
    return f"{n:,.0f}"


def money(amount: float) -> str:
    """Very small amounts are not shown as zero."""
    if 0 < amount < _MONEY_MIN:
        return f"<{_MONEY_MIN}"
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.4f}"


def size(n: float) -> str:
    unit = 0
    while n >= 1000 and unit < len(_UNITS) - 1:
        n, unit = n / 1000, unit + 1
    return f"{n:,.1f} {_UNITS[unit]}" if unit else f"{n:,.0f} {_UNITS[0]}"


def seconds(n: float) -> str:
    if n < 60:
        return f"{max(0.0, n):.1f} s"
    minutes, rest = divmod(int(n), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def age(n: float) -> str:
    """A length of time in one unit, as tables show it."""
    for unit, name in _AGES:
        if n >= unit:
            return f"{int(n // unit)} {name}"
    return f"{max(0, int(n))} s"


def ago(now: datetime, moment: datetime | None) -> str:
    return "" if moment is None else f"{age((now - moment).total_seconds())} ago"


def time_text(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def jobs_text(n: int) -> str:
    return f"{n} job{'' if n == 1 else 's'}"


def counts_text(counts: Mapping[JobStatus, int]) -> Text:
    """`12 queued · 3 running`, without statuses that no job has."""
    return Text(" · ").join(counts_parts(counts))


def counts_parts(counts: Mapping[JobStatus, int]) -> list[Text]:
    return [Text(f"{counts[status]} {status.lower()}", COLOURS[status]) for status in JobStatus if counts.get(status)]


def status_bar(counts: Mapping[JobStatus, int], noun: str, width: int = _PIPE_COLUMNS) -> Text:
    """How many have ended, and how. The bar is shorter where there is little room."""
    total = sum(counts.values())
    done = sum(n for status, n in counts.items() if status in JOB.terminal)
    shown = {COLOURS[status]: counts.get(status, 0) for status in _BAR_ORDER}
    return bar_with(shown, total, f"  {done}/{total} {noun}", width)


def bar_with(parts: Mapping[str, int], total: int, numbers: str, width: int) -> Text:
    """A bar and its numbers in one line of at most `width` columns."""
    return bar(parts, total, max(0, min(BAR_COLUMNS, width - len(numbers)))).append(numbers)


def bar(parts: Mapping[str, int], total: int, columns: int = BAR_COLUMNS) -> Text:
    """Parts of a whole in their colours; each gets its share, rounded down."""
    text, filled, so_far = Text(), 0, 0
    for colour, n in parts.items():
        so_far += n
        end = min(columns, so_far * columns // max(1, total))
        text.append("━" * (end - filled), colour)
        filled = end
    return text.append("─" * (columns - filled), "bright_black")
