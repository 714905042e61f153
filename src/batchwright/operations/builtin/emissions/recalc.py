"""`emission_recalc`: the totals of a module and year, from its current files, factors and units."""

from __future__ import annotations

import decimal
from collections import Counter
from decimal import Decimal
from typing import Any, Literal

from batchwright.engine.context import Context
from batchwright.engine.outcomes import Done
from batchwright.errors import Fatal
from batchwright.operations.builtin.emissions import store
from batchwright.operations.builtin.emissions.payload import KEY, Word, Year
from batchwright.operations.builtin.emissions.store import Total
from batchwright.operations.decorator import operation

TOTALS_MAX = 50_000
_ACTIVITIES_SHOWN = 10
_EXACT = decimal.Context(prec=200)


@operation("emission_recalc", exclusive_key=KEY, on_held="coalesce")
async def emission_recalc(
    ctx: Context,
    module: Word,
    year: Year,
    data_type: Literal["recalc"] = "recalc",
    target: Literal["totals"] = "totals",
    method: Literal["computed"] = "computed",
) -> Done:
    """Recompute the totals of a module and year; rows without a factor are counted and reported.

    Files that arrive while it runs request another run, which starts after this one.
    """
    pool = await store.opened(ctx)
    totals = await store.compute(pool, ctx.tenant, module, year, TOTALS_MAX + 1)
    if len(totals) > TOTALS_MAX:
        raise Fatal(
            f"{module} {year} has more than {TOTALS_MAX:,} pairs of organisation unit and activity; "
            "use coarser organisation units",
            code="too_many_totals",
        )
    _report_missing(ctx, totals)

    async def write(connection: Any) -> None:
        await store.replace_totals(store.Written(connection), ctx, module, year, totals)

    return Done(_result(totals), write=write)


def _report_missing(ctx: Context, totals: list[Total]) -> None:
    missing: Counter[str] = Counter()
    for total in totals:
        missing[total.activity] += total.rows_without_factor
    first = [{"activity": activity, "rows": rows} for activity, rows in missing.most_common(_ACTIVITIES_SHOWN) if rows]
    if first:
        ctx.emit(
            "emission_recalc.no_factor",
            f"{missing.total():,} rows have no factor in their dimension, such as those of {first[0]['activity']!r}",
            level="warning",
            rows=missing.total(),
            first=first,
        )


def _result(totals: list[Total]) -> dict[str, Any]:
    amount = Decimal(0)
    for total in totals:
        amount = _EXACT.add(amount, total.kg_co2e or Decimal(0))
    return {
        "kg_co2e": str(amount),
        "rows": sum(total.rows for total in totals),
        "rows_without_factor": sum(total.rows_without_factor for total in totals),
        "totals": sum(total.kg_co2e is not None for total in totals),
    }
