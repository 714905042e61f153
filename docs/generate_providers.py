"""The part of the page on providers that follows from their adapters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from batchwright.providers.contract import Adapter
from batchwright.providers.prices import list_source, listed_models
from batchwright.providers.registry import find_adapters
from batchwright.providers.settings import TaskSettings

PAGE = Path(__file__).parent / "providers.md"
_GENERATED = re.compile(r"(<!-- generated: providers -->\n).*?(<!-- end -->)", re.DOTALL)
Notes = Callable[[type], dict[str, str]]


def providers(notes_of: Notes) -> str:
    """The page, with new text between the marks."""
    kinds = list(find_adapters().values())
    lines = [
        "Generated from the adapters by `make docs`.\n",
        *_table("Abilities", kinds, _abilities),
        *_table("Limits", kinds, _limits),
        *_table("Prevention of duplicate jobs", kinds, _duplicates),
        *_table("Prices and credentials", kinds, _prices),
        f"The list is made from {list_source()}.\n",
        "## Settings of each provider\n",
    ]
    for kind in kinds:
        lines += _settings(kind, notes_of)
    written = "\n".join(lines)
    return _GENERATED.sub(lambda found: f"{found[1]}\n{written}\n{found[2]}", PAGE.read_text(encoding="utf-8"))


def _table(heading: str, kinds: list[type[Adapter]], row: Callable[[type[Adapter]], dict[str, str]]) -> list[str]:
    rows = [{"provider": f"`{kind.name}`", **row(kind)} for kind in kinds]
    names = list(rows[0])
    lines = [f"## {heading}\n", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return [*lines, *(f"| {' | '.join(one[name] for name in names)} |" for one in rows), ""]


def _abilities(kind: type[Adapter]) -> dict[str, str]:
    can = kind.abilities
    return {
        "service": kind.title,
        "tasks": ", ".join(sorted(can.task_types)),
        "cancel": _yes(can.can_cancel),
        "find a lost job": _yes(can.can_find),
        "results of a job cut short": _yes(can.keeps_partial_results),
        "shared lists": _yes(can.can_survey),
    }


def _limits(kind: type[Adapter]) -> dict[str, str]:
    can = kind.abilities
    return {
        "inputs of a job": _number(can.inputs_max),
        "bytes of an input": _size(can.request_bytes_max or can.input_bytes_max),
        "requests of a file": _number(can.requests_max) if "completion" in can.task_types else "",
        "default timeout": f"{max(can.timeout_hours, TaskSettings().task_timeout_hours):g} h",
        "results kept": "" if can.results_kept_hours is None else f"{can.results_kept_hours:g} h",
    }


def _duplicates(kind: type[Adapter]) -> dict[str, str]:
    return {"how": kind.abilities.duplicates, "settle time": f"{kind.abilities.settle_seconds:g} s"}


def _prices(kind: type[Adapter]) -> dict[str, str]:
    discount, models = kind.abilities.batch_discount, listed_models(kind.name)
    return {
        "prices": "your table" if not models else "the list" if models == 1 else f"the list, {models} models",
        "batch discount": "" if discount is None else f"{discount:.0%}",
        "credentials": _credentials(kind),
    }


def _credentials(kind: type[Adapter]) -> str:
    fields = {one.name: one.default for one in dataclasses.fields(kind.Settings)}
    variables = [f"`{value}`" for name, value in fields.items() if name.endswith("_env") and isinstance(value, str)]
    if variables:
        return ", ".join(variables)
    return "`GOOGLE_APPLICATION_CREDENTIALS`" if "service_account_file" in fields else "where AWS's own tools look"


def _settings(kind: type[Adapter], notes_of: Notes) -> list[str]:
    notes: dict[str, str] = {}
    for one in reversed(kind.Settings.__mro__):
        if dataclasses.is_dataclass(one):
            notes |= notes_of(one)
    lines = [f"### [providers.{kind.name}]\n", "| setting | default | meaning |", "|---|---|---|"]
    for setting in dataclasses.fields(kind.Settings):
        default = "required" if setting.default is dataclasses.MISSING else _shown(setting.default)
        lines.append(f"| `{setting.name}` | {default} | {notes.get(setting.name, '')} |")
    return [*lines, ""]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return f"`{value}`".lower()
    return "unset" if value in (None, "") else f"`{value!r}`".replace("'", '"')


def _yes(can: bool) -> str:
    return "yes" if can else "no"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    if value is None:
        return ""
    for unit, name in ((1 << 20, "MiB"), (10**9, "GB"), (10**6, "MB")):
        if value % unit == 0:
            return f"{value // unit:,} {name}"
    return f"{value:,}"
