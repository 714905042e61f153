"""How things look on paper: tables and facts for people, JSON for programs."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchwright.jsonl import one_line
from batchwright.states import JOB, JobStatus

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
_UNFOLDED = 1000
_GAP = 2
_MONEY_MIN = 0.0001
_ELASTIC_MIN = 8
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def console() -> Console:
    """Standard output; into a pipe nothing is cut to the width of a terminal that is not there."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNFOLDED)


def print_json(value: Any, *, indent: bool = True) -> None:
    """Statuses may be keys: they are text, which the encoder takes for something else."""
    shape = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    document = orjson.dumps(value, option=shape, default=str)
    sys.stdout.write(one_line(document).decode() + "\n")
    sys.stdout.flush()


def print_table(columns: Mapping[str, Sequence[Text]], *, elastic: Sequence[str] = ("message",)) -> None:
    """Only elastic columns may be cut; those in which nothing stands are left out, numbers stand on the right."""
    out = console()
    table, width = make_table(columns, out.width, elastic=elastic)
    if width > out.width:  # a line that the terminal wraps is better than a column that is not there
        out = Console(highlight=False, width=width)
    out.print(table)


def make_table(
    columns: Mapping[str, Sequence[Text]],
    width: int,
    *,
    elastic: Sequence[str] = ("message",),
    has_header: bool = True,
) -> tuple[Table, int]:
    """The table, and how wide it is: what is asked for, unless columns that must not be cut need more."""
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    natural = {name: max(len(name) * has_header, *(cell.cell_len for cell in cells)) for name, cells in shown.items()}
    widths = _fit(natural, width - _GAP * (len(shown) - 1), elastic)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0), show_header=has_header)
    for name, cells in shown.items():
        is_number = all(cell.plain.isdecimal() for cell in cells)
        side: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(name, width=widths[name], no_wrap=True, overflow="ellipsis", justify=side)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    return table, sum(widths.values()) + _GAP * (len(shown) - 1)


def _fit(natural: Mapping[str, int], room: int, elastic: Sequence[str]) -> dict[str, int]:
    """The widest of the elastic columns are cut first, and none of them to nothing."""
    widths = dict(natural)
    while sum(widths.values()) > room:
        cuttable = [name for name in elastic if widths.get(name, 0) > _ELASTIC_MIN]
        if not cuttable:
            break
        widths[max(cuttable, key=lambda name: widths[name])] -= 1
    return widths


def print_facts(facts: Sequence[tuple[str, Any]]) -> None:
    """Names and values, without those that are not there; an id that is cut would be of no use."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts:
        if value not in (None, ""):
            table.add_row(Text(name, "bold"), value if isinstance(value, Text) else Text(str(value)))
    console().print(table)


def print_findings(findings: list[Finding]) -> None:
    """Plain lines, which wrap as the terminal likes: remedies hold commands to be copied."""
    out = console()
    width = max((len(finding.name) for finding in findings), default=0) + 1
    for finding in findings:
        sign, colour = _SIGNS[finding.level]
        out.print(Text.assemble((f"{sign} {finding.name:{width}}", colour), finding.text), soft_wrap=True)
        if finding.remedy:
            out.print(Text(f"  {'':{width}}→ {finding.remedy}"), soft_wrap=True)


@contextlib.contextmanager
def show_meanwhile(text: str) -> Iterator[None]:
    """On a terminal, for as long as it takes: the first start of the embedded database takes a few seconds."""
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


# Words, numbers and bars --------------------------------------------------------------------------------------------


def as_dict(thing: Any) -> dict[str, Any]:
    """The fields of a dataclass, one level deep."""
    return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}


def compact(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def number(n: float) -> str:
    return f"{n:,.0f}"


def money(amount: float) -> str:
    """What is very little is not nothing."""
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


def time_text(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def jobs_text(n: int) -> str:
    return f"{n} job{'' if n == 1 else 's'}"


def counts_text(counts: Mapping[JobStatus, int]) -> Text:
    """`12 queued · 3 running`, without what is not there."""
    parts = [(f"{counts[status]} {status.lower()}", COLOURS[status]) for status in JobStatus if counts.get(status)]
    return Text(" · ").join(Text(*part) for part in parts)


def status_bar(counts: Mapping[JobStatus, int], noun: str) -> Text:
    """How many of them have ended, and how."""
    total = sum(counts.values())
    done = sum(n for status, n in counts.items() if status in JOB.terminal)
    shown = {COLOURS[status]: counts.get(status, 0) for status in _BAR_ORDER}
    return bar(shown, total).append(f"  {done}/{total} {noun}")


def bar(parts: Mapping[str, int], total: int, columns: int = BAR_COLUMNS) -> Text:
    """Parts of a whole in their colours; whatever is there at all gets at least its share rounded down."""
    text, filled, so_far = Text(), 0, 0
    for colour, n in parts.items():
        so_far += n
        end = min(columns, so_far * columns // max(1, total))
        text.append("━" * (end - filled), colour)
        filled = end
    return text.append("─" * (columns - filled), "bright_black")
