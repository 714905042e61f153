"""Tables that fit any terminal: no column is left out, and only elastic columns are cut.

Fixed columns hold what a reader must not lose: ids, statuses, counts and times. They keep their width. Elastic columns
share what is left, and are cut with …. Where a row does not fit into one line, its last columns follow in an indented
line, each value with the name of its column:

    id                                    status     tries  age
      type · queue · message
    019a9999-1234-7000-8000-123456789abc  FAILED     3/3    3 h
      resize_image · queue gpu · handler_error: the file is no image

A pipe has no width, so nothing is cut or moved there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import chop_cells
from rich.text import Text

Columns = Mapping[str, Sequence[Text]]

_GAP = 2
_SEPARATOR = " · "
_INDENT = 2
_ELASTIC_MIN = 16
_NUMBER = re.compile(r"[<$]?[\d.,]*[%+]?")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    cells: Sequence[Text]
    natural: int
    """The width at which nothing is cut."""
    is_elastic: bool

    @property
    def least(self) -> int:
        return min(self.natural, max(_ELASTIC_MIN, len(self.name))) if self.is_elastic else self.natural

    @property
    def is_number(self) -> bool:
        return all(_NUMBER.fullmatch(cell.plain) for cell in self.cells)


def table_lines(
    columns: Columns,
    width: int | None,
    *,
    elastic: Sequence[str] = ("message",),
    has_header: bool = True,
    indent: int = 0,
) -> list[Text]:
    """The lines of a table, each at most `width` columns wide; None means as wide as needed."""
    shown = [_measure(name, cells, name in elastic, has_header) for name, cells in columns.items() if any(cells)]
    room = None if width is None else max(_ELASTIC_MIN, width - indent)
    first, rest = _split(shown, _GAP, room)
    lines: list[Text] = []
    if has_header:
        lines += _aligned(first, [Text(column.name, "bold") for column in first], room)
        lines += fact_lines([Text(column.name, "bold") for column in rest], room or 0)
    for row in range(len(shown[0].cells) if shown else 0):
        lines += _aligned(first, [column.cells[row] for column in first], room)
        lines += _flowing(rest, row, room)
    return [_indented(line, indent) for line in lines]


def _measure(name: str, cells: Sequence[Text], is_elastic: bool, has_header: bool) -> _Column:
    clean = [_on_one_line(cell) for cell in cells]
    natural = max(len(name) if has_header else 0, *(cell.cell_len for cell in clean))
    return _Column(name, clean, natural, is_elastic)


def _on_one_line(cell: Text) -> Text:
    """Control characters, which may come from anywhere, would break the table or change the terminal."""
    if _UNPRINTABLE.search(cell.plain) is None:
        return cell
    return Text(_UNPRINTABLE.sub(" ", cell.plain).strip(), cell.style)


def _split(columns: Sequence[_Column], gap: int, room: int | None) -> tuple[Sequence[_Column], Sequence[_Column]]:
    """The columns that fit into one line, at least one of them, and the others."""
    if room is None:
        return columns, ()
    used = 0
    for place, column in enumerate(columns):
        used += column.least + (gap if place else 0)
        if place and used > room:
            return columns[:place], columns[place:]
    return columns, ()


def _aligned(columns: Sequence[_Column], cells: Sequence[Text], room: int | None) -> list[Text]:
    widths = _fit(columns, _GAP, room)
    if room is not None and widths and widths[0] > room:  # then it is the only one, and must not be cut
        return [Text(piece, cells[0].style) for piece in chop_cells(cells[0].plain, room)]
    line = Text()
    for place, (column, cell, width) in enumerate(zip(columns, cells, widths, strict=True)):
        cut = _cut_to(cell, width)
        space = " " * (width - cut.cell_len)
        line.append(" " * _GAP if place else "")
        line.append(space).append_text(cut) if column.is_number else line.append_text(cut).append(space)
    line.rstrip()
    return [line]


def _flowing(columns: Sequence[_Column], row: int, room: int | None) -> Iterator[Text]:
    """The values of a row that did not fit into its first line, without those that are empty."""
    there = [column for column in columns if column.cells[row]]
    facts: Sequence[_Column] = [
        _labelled(column, row, is_named=column not in (columns[0], columns[-1])) for column in there
    ]
    while facts and room is not None:
        line, facts = _split(facts, len(_SEPARATOR), room - _INDENT)
        widths = _fit(line, len(_SEPARATOR), room - _INDENT)
        if widths[0] > room - _INDENT:
            cell = line[0].cells[0]
            yield from (_indented(Text(piece, cell.style), _INDENT) for piece in chop_cells(cell.plain, room - _INDENT))
        else:
            cells = [_cut_to(fact.cells[0], width) for fact, width in zip(line, widths, strict=True)]
            yield _indented(Text(_SEPARATOR).join(cells), _INDENT)


def _labelled(column: _Column, row: int, *, is_named: bool) -> _Column:
    cell = Text(f"{column.name} ", "bright_black").append_text(column.cells[row]) if is_named else column.cells[row]
    return _Column(column.name, [cell], cell.cell_len, column.is_elastic)


def _fit(columns: Sequence[_Column], gap: int, room: int | None) -> list[int]:
    """Widths that fit into the room: the widest elastic column is cut first."""
    widths = [column.natural for column in columns]
    if room is None:
        return widths
    while (excess := sum(widths) + gap * (len(widths) - 1) - room) > 0:
        cuttable = [at for at, column in enumerate(columns) if widths[at] > column.least]
        if not cuttable:
            break
        widest = max(cuttable, key=lambda at: widths[at])
        others = [widths[at] for at in cuttable if at != widest]
        floor = max(columns[widest].least, min(max(others, default=0), widths[widest] - 1))
        widths[widest] = max(floor, widths[widest] - excess)
    return widths


def _indented(line: Text, indent: int) -> Text:
    return Text(" " * indent, no_wrap=True, overflow="ignore").append_text(line)


# Lines of live views -------------------------------------------------------------------------------------------------


def head_lines(name: Text, facts: Sequence[Text], width: int) -> list[Text]:
    """A name, which may be cut, and facts about it, which may not; in two lines if one is too short."""
    joined = Text(_SEPARATOR).join(facts)
    room = width - joined.cell_len - _GAP
    if room >= min(name.cell_len, _ELASTIC_MIN):
        return [_cut_to(name, room).append(" " * _GAP).append_text(joined)]
    return [_cut_to(name, width), *fact_lines(facts, width)]


def fact_lines(facts: Sequence[Text], width: int, *, indent: int = _INDENT) -> list[Text]:
    """`12 completed · 3 failed · 4.5 requests/s`, with line breaks only between facts."""
    lines: list[Text] = []
    for fact in facts:
        if lines and lines[-1].cell_len + len(_SEPARATOR) + fact.cell_len <= width:
            lines[-1].append(_SEPARATOR).append_text(fact)
        else:
            lines.append(Text(" " * indent).append_text(_cut_to(fact, width - indent)))
    return lines


def split_facts(text: str, style: str = "") -> list[Text]:
    return [Text(fact, style) for fact in text.split(_SEPARATOR)]


def _cut_to(text: Text, width: int) -> Text:
    cut = text.copy()
    cut.truncate(max(1, width), overflow="ellipsis")
    return cut
