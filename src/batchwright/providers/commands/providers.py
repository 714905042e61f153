"""`batchwright providers`: lists providers, what they can do, and what they lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from batchwright.cli.flags import Config, DatabaseUrl, Json, open_part, run
from batchwright.cli.show import console, number, print_json, print_table, size
from batchwright.providers.contract import Abilities
from batchwright.providers.jobs import Hold
from batchwright.providers.part import ProvidersPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A provider, as this process sees it."""

    name: str
    title: str
    abilities: Abilities
    timeout_hours: float
    missing: str | None
    hold: Hold | None

    @property
    def state(self) -> Text:
        if self.hold is not None:
            return Text("held", "red")
        return Text("not ready", "yellow") if self.missing is not None else Text("ready", "green")


def providers(json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """List providers: what they do, their limits, and whether they are ready.

    A provider is held while it refuses its credential: its work waits, and Batchwright retries it. To try the
    credentials now, run batchwright check.
    """

    async def go() -> list[Row]:
        async with open_part(ProvidersPart, database_url, config) as part:
            directory, holds = part.directory, await part.jobs.holds()
            return [
                Row(
                    name=name,
                    title=directory.kind(name).title,
                    abilities=directory.abilities(name),
                    timeout_hours=directory.timeout_hours(name),
                    missing=directory.missing(name),
                    hold=holds.get(name),
                )
                for name in directory.names
            ]

    rows = run(go())
    if json:
        print_json([_as_json(row) for row in rows])
    else:
        _print_rows(rows)


def _as_json(row: Row) -> dict[str, Any]:
    """The same JSON as GET /v1/providers."""
    can = row.abilities
    return {
        "name": row.name,
        "title": row.title,
        "task_types": sorted(can.task_types),
        "can_cancel": can.can_cancel,
        "can_find": can.can_find,
        "deduplicates": can.deduplicates,
        "inputs_max": can.inputs_max,
        "requests_max": can.requests_max,
        "request_bytes_max": can.request_bytes_max,
        "timeout_hours": row.timeout_hours,
        "missing": row.missing,
        "held": row.hold and row.hold.message,
    }


def _print_rows(rows: Sequence[Row]) -> None:
    print_table(
        {
            "name": [Text(row.name) for row in rows],
            "state": [row.state for row in rows],
            "timeout": [Text(f"{row.timeout_hours:g} h") for row in rows],
            "tasks": [Text(", ".join(sorted(row.abilities.task_types))) for row in rows],
            "can": [Text(_can(row.abilities)) for row in rows],
            "limits": [Text(_limits(row.abilities)) for row in rows],
        },
        elastic=("limits",),
    )
    out = console()
    for row in rows:
        if row.hold is not None:
            out.print(Text.assemble((f"✗ {row.name}: ", "red"), f"held: {row.hold.message}"), soft_wrap=True)
        elif row.missing is not None:
            out.print(Text.assemble((f"! {row.name}: ", "yellow"), row.missing), soft_wrap=True)


def _can(can: Abilities) -> str:
    return ", ".join(word for word, is_so in (("cancel", can.can_cancel), ("find", can.can_find)) if is_so)


def _limits(can: Abilities) -> str:
    inputs = None if "completion" in can.task_types else can.inputs_max
    parts = [
        inputs and f"{number(inputs)} input{'s' if inputs > 1 else ''}",
        can.input_bytes_max and f"{size(can.input_bytes_max)} each",
        can.requests_max and f"{number(can.requests_max)} requests",
        can.request_bytes_max and size(can.request_bytes_max),
    ]
    return ", ".join(part for part in parts if part)
