"""`factor_ingest`: a CSV file of emission factors, and one recalculation for each module that it names."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from batchwright.engine.context import Context
from batchwright.engine.jobs import NewJob
from batchwright.engine.outcomes import Done
from batchwright.operations.builtin.emissions import store
from batchwright.operations.builtin.emissions.payload import KEY, DataPath, Word, Year
from batchwright.operations.builtin.emissions.recalc import emission_recalc
from batchwright.operations.builtin.emissions.report import counted, refuse_empty, report_bad
from batchwright.operations.builtin.emissions.rows import FACTOR_COLUMNS, Factor, parse_factor
from batchwright.operations.builtin.emissions.small import Loaded, load
from batchwright.operations.builtin.emissions.store import DatasetKey
from batchwright.operations.decorator import operation


@operation("factor_ingest", exclusive_key=KEY, retry_on=(OSError,))
async def factor_ingest(
    ctx: Context,
    path: DataPath,
    year: Year,
    module: Word | None = None,
    data_type: Word = "factors",
    target: Word = "factors",
    method: Word = "csv",
) -> Done:
    """Read a CSV of factors (module, activity, unit, kg_co2e_per_unit) for one year.

    The file is complete for the modules that it names: it replaces all their factors of the year. With `module` it
    may name only that module.
    """
    key = DatasetKey(kind="factors", module=module, data_type=data_type, target=target, method=method, year=year)
    pool = await store.opened(ctx)
    parse = functools.partial(parse_factor, module=module, units=await store.units(pool, ctx.tenant))
    loaded: Loaded[Factor] = await asyncio.to_thread(load, path, ctx.tenant, FACTOR_COLUMNS, parse, _unique)
    refuse_empty(loaded.file, len(loaded.rows), loaded.problems)
    report_bad(ctx, loaded.bad, loaded.problems)

    async def write(connection: Any) -> None:
        session = store.Written(connection)
        await store.lock_factors(session, ctx.tenant, year)
        id = await store.record(session, ctx, key, loaded.file, len(loaded.rows), loaded.problems)
        await store.put_factors(session, ctx.tenant, year, id, loaded.rows)

    modules = sorted({factor.module for factor in loaded.rows})
    return Done(
        {"modules": modules, **counted(len(loaded.rows), loaded.bad, loaded.problems)},
        write=write,
        then=[NewJob(emission_recalc, {"module": name, "year": year}, on_held="coalesce") for name in modules],
    )


def _unique(factor: Factor) -> tuple[str, tuple[str, str]]:
    return "activity", (factor.module, factor.activity)
