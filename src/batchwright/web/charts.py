"""Charts, rendered on the server as SVG: lines over time, bars, sparklines, and graphs of stages.

Colours are classes (`series-1` … `series-6`, `status-failed`), so the style sheet sets them for both colour schemes.
Each chart has a text alternative for screen readers. Times on axes carry `data-time`: the script shows them in the
viewer's time zone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from markupsafe import Markup, escape

from batchwright.web.formats import NONE, compact, number

_WIDTH, _HEIGHT = 480, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 6, 8, 22
_TICKS_X = 4
_TICKS_Y = 3
_SHORT = timedelta(minutes=10)
"""Below this span, minutes do not tell the ticks of an axis apart."""
SERIES_MAX = 6

Point = tuple[datetime, float | None]
"""A value at a point in time; None leaves a gap in the line."""


class Series(NamedTuple):
    """A line, with its name for the legend."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Node:
    """A box of a graph: its label, its progress, and its link."""

    id: str
    label: str
    note: str = ""
    status: str = "queued"
    """A class of the style sheet: queued, running, succeeded, failed or cancelled."""
    share: float | None = None
    """Progress from 0 to 1."""
    href: str | None = None


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    unit: str = "",
    begin: datetime | None = None,
    end: datetime | None = None,
    height: int = _HEIGHT,
    top: float | None = None,
) -> Markup:
    """Lines over time, from 0 up; an area under the line if there is only one.

    >>> line_chart([Series("jobs", samples)], label="Jobs per second over the last hour", unit="jobs/s")
    """
    moments = [moment for one in series for moment, _ in one.points]
    values = [value for one in series for _, value in one.points if value is not None]
    if not moments or not values:
        return _nothing(label, height)
    frame = _Frame(begin or min(moments), end or max(moments), _ceiling(max([*values, top or 0.0])), height)
    lines = [_line(one, n, frame, is_filled=len(series) == 1) for n, one in enumerate(series[:SERIES_MAX], 1)]
    latest = ", ".join(f"{one.name} {_last(one)}" for one in series)
    sentence = f"{label}: at most {compact(max(values))} {unit}, now {latest}".replace("  ", " ")
    body = Markup("").join([*_axes(frame), *lines])
    return _svg(body, sentence, _WIDTH, height, "chart") + _legend(series)


def spark(values: Sequence[float | None], *, label: str, width: int = 120, height: int = 28) -> Markup:
    """A small line without axes."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return _nothing(label, height, width=width)
    top = max(known) or 1.0
    step = width / (len(values) - 1)
    place = [(n * step, height - 2 - (height - 4) * value / top) for n, value in enumerate(values) if value is not None]
    path = Markup('<path class="line series-1" d="{}"/>').format(_path(place))
    return _svg(path, f"{label}: now {compact(known[-1])}, at most {compact(top)}", width, height, "spark")


def bars(rows: Sequence[tuple[str, float]], *, label: str, words: Mapping[str, str] | None = None) -> Markup:
    """Horizontal bars with their names, as shares of a whole. `words` replaces the number as a bar's label."""
    if not rows:
        return _nothing(label, 40)
    most = max(value for _, value in rows) or 1.0
    cells = [
        Markup(
            '<tr><th scope="row">{}</th><td class="share"><svg viewBox="0 0 100 8" preserveAspectRatio="none" '
            'aria-hidden="true"><rect class="series-1" width="{:.2f}" height="8"/></svg></td>'
            '<td class="num">{}</td></tr>'
        ).format(name, 100 * value / most, (words or {}).get(name, number(value)))
        for name, value in rows
    ]
    return Markup('<table class="bars"><caption>{}</caption>{}</table>').format(label, Markup("").join(cells))


def graph(nodes: Sequence[Node], edges: Sequence[tuple[str, str]], *, label: str) -> Markup:
    """Stages from left to right, each a box with its state; lines connect a stage to the next ones."""
    ranks = _ranks(nodes, edges)
    columns: dict[int, list[Node]] = {}
    for node in nodes:
        columns.setdefault(ranks[node.id], []).append(node)
    wide, high, gap_x, gap_y = 180, 56, 48, 20
    tallest = max((len(column) for column in columns.values()), default=1)
    width = len(columns) * (wide + gap_x) - gap_x + 4
    height = tallest * (high + gap_y) - gap_y + 4
    places = {
        node.id: (
            2 + rank * (wide + gap_x),
            2 + row * (high + gap_y) + (tallest - len(column)) * (high + gap_y) / 2,
        )
        for rank, column in columns.items()
        for row, node in enumerate(column)
    }
    lines = [
        _edge(places[source], places[target], wide, high) for source, target in edges if ranks[source] < ranks[target]
    ]
    boxes = [_box(node, places[node.id], wide, high) for node in nodes]
    sentence = f"{label}: " + "; ".join(f"{node.label} {node.note}".strip() for node in nodes)
    picture = _svg(Markup("").join([*lines, *boxes]), sentence, width, height, "graph", is_fixed=True)
    return Markup('<div class="scroll" tabindex="0" role="group" aria-label="{}">{}</div>').format(label, picture)


# ------------------------------------------------------------------------------------------------------------------


class _Frame(NamedTuple):
    begin: datetime
    end: datetime
    top: float
    height: int

    def x(self, moment: datetime) -> float:
        span = (self.end - self.begin).total_seconds() or 1.0
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (moment - self.begin).total_seconds() / span

    def y(self, value: float) -> float:
        return self.height - _BOTTOM - (self.height - _TOP - _BOTTOM) * min(value, self.top) / self.top


def _line(series: Series, n: int, frame: _Frame, *, is_filled: bool) -> Markup:
    pieces: list[list[tuple[float, float]]] = [[]]
    for moment, value in series.points:
        if value is None:
            pieces.append([])
        elif frame.begin <= moment <= frame.end:
            pieces[-1].append((frame.x(moment), frame.y(value)))
    drawn = []
    for piece in filter(None, pieces):
        path = _path(piece)
        if is_filled:
            floor = frame.y(0)
            area = f"{path}L{piece[-1][0]:.1f} {floor:.1f}L{piece[0][0]:.1f} {floor:.1f}Z"
            drawn.append(Markup('<path class="area series-{}" d="{}"/>').format(n, area))
        drawn.append(Markup('<path class="line series-{}" d="{}"/>').format(n, path))
    return Markup("").join(drawn)


def _path(places: Sequence[tuple[float, float]]) -> str:
    if len(places) == 1:  # a single point would be invisible
        places = [(places[0][0] - 1, places[0][1]), places[0]]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _axes(frame: _Frame) -> list[Markup]:
    drawn = []
    for n in range(_TICKS_Y + 1):
        value = frame.top * n / _TICKS_Y
        y = frame.y(value)
        drawn.append(Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(_LEFT, y, _WIDTH - _RIGHT))
        drawn.append(
            Markup('<text x="{}" y="{:.1f}" class="axis-y">{}</text>').format(_LEFT - 6, y + 4, compact(value))
        )
    span = frame.end - frame.begin
    unit, shape = ("day", "%m-%d") if span.days >= 2 else ("hour", "%H:%M")
    if span < _SHORT:
        unit, shape = "second", "%H:%M:%S"
    for n in range(_TICKS_X):
        moment = frame.begin + span * n / (_TICKS_X - 1)
        anchor = "start" if n == 0 else "end" if n == _TICKS_X - 1 else "middle"
        drawn.append(
            Markup('<text x="{:.1f}" y="{}" class="axis-x {}" data-time="{}" data-stamp="{}">{}</text>').format(
                frame.x(moment),
                frame.height - 6,
                anchor,
                unit,
                moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
                f"{moment.astimezone(UTC):{shape}}",
            )
        )
    return drawn


def _legend(series: Sequence[Series]) -> Markup:
    if len(series) < 2:
        return Markup("")
    items = [
        Markup(
            '<li><svg viewBox="0 0 12 12" class="shape" aria-hidden="true">'
            '<path class="line series-{}" d="M0 6H12"/></svg>{}</li>'
        ).format(n, one.name)
        for n, one in enumerate(series[:SERIES_MAX], 1)
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


def _last(series: Series) -> str:
    return next((compact(value) for _, value in reversed(series.points) if value is not None), "unknown")


def _ceiling(value: float) -> float:
    """The next round number: 1.5, 3, 6, 9 or 15 times a power of ten."""
    if value <= 0:
        return 3.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1.5, 3.0, 6.0, 9.0) if step * power >= value), 15.0 * power)


def _ranks(nodes: Sequence[Node], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """How many stages precede each one; a cycle stops where it would repeat."""
    ranks = {node.id: 0 for node in nodes}
    for _ in nodes:
        for source, target in edges:
            if ranks[target] <= ranks[source] < len(nodes) - 1:
                ranks[target] = ranks[source] + 1
    kept = {rank: n for n, rank in enumerate(sorted(set(ranks.values())))}
    return {id: kept[rank] for id, rank in ranks.items()}


def _edge(source: tuple[float, float], target: tuple[float, float], wide: float, high: float) -> Markup:
    x1, y1 = source[0] + wide, source[1] + high / 2
    x2, y2 = target[0], target[1] + high / 2
    middle = (x1 + x2) / 2
    return Markup('<path class="edge" d="M{:.0f} {:.0f}C{:.0f} {:.0f} {:.0f} {:.0f} {:.0f} {:.0f}"/>').format(
        x1, y1, middle, y1, middle, y2, x2, y2
    )


def _box(node: Node, place: tuple[float, float], wide: float, high: float) -> Markup:
    x, y = place
    body = Markup(
        '<rect class="box" x="{x:.0f}" y="{y:.0f}" width="{w}" height="{h}" rx="6"/>'
        '<rect class="done" x="{x:.0f}" y="{d:.0f}" width="{s:.1f}" height="4" rx="2"/>'
        '<text class="name" x="{t:.0f}" y="{n:.0f}">{label}</text>'
        '<text class="note" x="{t:.0f}" y="{m:.0f}">{note}</text>'
    ).format(
        x=x,
        y=y,
        w=wide,
        h=high,
        d=y + high - 4,
        s=wide * (node.share or 0.0),
        t=x + 12,
        n=y + 23,
        m=y + 41,
        label=_fit(node.label, 22),
        note=_fit(node.note, 24),
    )
    group = Markup('<g class="node status-{}"><title>{} {}</title>{}</g>').format(
        node.status, node.label, node.note, body
    )
    return Markup('<a href="{}">{}</a>').format(node.href, group) if node.href else group


def _fit(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _svg(body: Markup, sentence: str, width: float, height: float, kind: str, *, is_fixed: bool = False) -> Markup:
    size = Markup(' width="{:.0f}" height="{:.0f}"').format(width, height) if is_fixed else ""
    # A graph contains links, which the role of an image would hide.
    role = "group" if kind == "graph" else "img"
    return Markup('<svg class="{}" viewBox="0 0 {:.0f} {:.0f}"{} role="{}" aria-label="{}">{}</svg>').format(
        kind, width, height, size, role, sentence, body
    )


def _nothing(label: str, height: int, *, width: int = _WIDTH) -> Markup:
    words = Markup('<text x="{}" y="{}" class="nothing">{}</text>').format(
        width / 2, height / 2 + 4, "no samples yet" if width > 200 else NONE
    )
    return _svg(words, f"{escape(label)}: no samples yet", width, height, "chart" if width > 200 else "spark")
