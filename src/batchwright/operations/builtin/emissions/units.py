"""`unit_sync`: updates the table of units from a CSV file, and recomputes the totals that depend on a changed unit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchwright.db.database import Session
from batchwright.engine.context import Context
from batchwright.engine.jobs import NewJob
from batchwright.engine.outcomes import Done
from batchwright.errors import RetryLater
from batchwright.operations.builtin.emissions import store
from batchwright.operations.builtin.emissions.payload import DataPath, Word
from batchwright.operations.builtin.emissions.recalc import emission_recalc
from batchwright.operations.builtin.emissions.report import counted, refuse_empty, report_bad
from batchwright.operations.builtin.emissions.rows import UNIT_COLUMNS, Unit, parse_unit
from batchwright.operations.builtin.emissions.small import Loaded, load
from batchwright.operations.builtin.emissions.store import DatasetKey
from batchwright.operations.decorator import operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a file changes, and which totals depend on it."""

    added: list[str]
    changed: list[str]
    retired: list[str]
    modules: list[tuple[str, int]]


@operation("unit_sync", exclusive_key=("data_type", "target", "method"), retry_on=(OSError,))
async def unit_sync(
    ctx: Context, path: DataPath, data_type: Word = "units", target: Word = "units", method: Word = "csv"
) -> Done:
    """Make the units match a CSV (code, dimension, to_base, name): add, change and retire.

    A retired unit accepts no new rows, and old rows keep it. A file with bad rows retires nothing, because a unit
    that seems to be missing may be in one of them.
    """
    key = DatasetKey(kind="units", module=None, data_type=data_type, target=target, method=method, year=None)
    pool = await store.opened(ctx)
    loaded: Loaded[Unit] = await asyncio.to_thread(load, path, ctx.tenant, UNIT_COLUMNS, parse_unit, _unique)
    refuse_empty(loaded.file, len(loaded.rows), loaded.problems)
    report_bad(ctx, loaded.bad, loaded.problems)
    plan = await _plan(pool, ctx.tenant, loaded)

    async def write(connection: Any) -> None:
        session = store.Written(connection)
        await store.lock_units(session, ctx.tenant)
        if await _plan(session, ctx.tenant, loaded) != plan:
            raise RetryLater("other files became current meanwhile", delay_seconds=0.1)
        id = await store.record(session, ctx, key, loaded.file, len(loaded.rows), loaded.problems)
        await store.put_units(session, ctx.tenant, id, loaded.rows, plan.retired)

    return Done(
        {
            "added": len(plan.added),
            "changed": len(plan.changed),
            "retired": len(plan.retired),
            **counted(len(loaded.rows), loaded.bad, loaded.problems),
        },
        write=write,
        then=[_recalc(module, year) for module, year in plan.modules],
    )


async def _plan(session: Session, tenant: str, loaded: Loaded[Unit]) -> Plan:
    known = await store.units(session, tenant)
    return Plan(
        added=[unit.code for unit in loaded.rows if unit.code not in known or known[unit.code].is_retired],
        changed=(changed := _changed(known, loaded.rows)),
        retired=[] if loaded.problems else _gone(known, loaded.rows),
        modules=await store.modules_using(session, tenant, changed),
    )


def _changed(known: dict[str, Unit], found: Sequence[Unit]) -> list[str]:
    """Units whose conversion changed; a new name changes no total."""
    return [
        unit.code
        for unit in found
        if (old := known.get(unit.code)) and (old.dimension, old.to_base) != (unit.dimension, unit.to_base)
    ]


def _gone(known: dict[str, Unit], found: Sequence[Unit]) -> list[str]:
    named = {unit.code for unit in found}
    return sorted(code for code, unit in known.items() if code not in named and not unit.is_retired)


def _recalc(module: str, year: int) -> NewJob:
    return NewJob(emission_recalc, {"module": module, "year": year}, on_held="coalesce")


def _unique(unit: Unit) -> tuple[str, str]:
    return "code", unit.code
