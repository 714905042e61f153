"""Tables for people, goals for machines."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """`value` is None when it could not be measured; such a goal is not met."""

    name: str
    goal: str
    value: float | None
    met: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def at_least(name: str, bound: float, value: float | None, unit: str = "") -> Goal:
    return Goal(name=name, goal=f">= {bound:,g}{unit}", value=value, met=value is not None and value >= bound)


def at_most(name: str, bound: float, value: float | None, unit: str = "") -> Goal:
    return Goal(name=name, goal=f"<= {bound:,g}{unit}", value=value, met=value is not None and value <= bound)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is left-aligned text, the others are right-aligned."""
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    lines = [headings, ["-" * width for width in widths], *rows]
    return "\n".join(line(cells, widths) for cells in lines)


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()


def goal_table(goals: Sequence[Goal]) -> str:
    rows = [[goal.name, goal.goal, number(goal.value), verdict(goal)] for goal in goals]
    return table(["goal", "wanted", "measured", ""], rows)


def verdict(goal: Goal) -> str:
    if goal.value is None:
        return "not measured"
    return "met" if goal.met else "NOT MET"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def note(name: str, text: str) -> str:
    return textwrap.fill(f"{name}: {text}", width=110, initial_indent="* ", subsequent_indent="  ")
