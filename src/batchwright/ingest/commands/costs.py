"""`batchwright ingest costs`: what models have cost, by tenant and model."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.text import Text

from batchwright.cli.flags import Config, DatabaseUrl, Json, OfTenant, open_part, parse_time_span, run
from batchwright.cli.show import as_dict, number, print_json, print_table
from batchwright.inference.spending import KEPT_DAYS, LIST_MAX, Costs, Sums
from batchwright.ingest.money import show_amount
from batchwright.ingest.part import IngestPart

_DAY_SECONDS = 86_400.0


def costs(
    tenant: OfTenant = None,
    last: Annotated[
        str, typer.Option("--last", "--days", metavar="DURATION", help="Days to count, including today, in UTC.")
    ] = "30d",
    limit: Annotated[int, typer.Option(min=1, max=LIST_MAX, help="Maximum number of rows to show.")] = 50,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Show what models have cost for documents and embeddings, by tenant and model."""
    seconds = parse_time_span("--last", last, least="1d", most=f"{KEPT_DAYS}d", unit_seconds=_DAY_SECONDS)
    days = math.ceil((seconds or 0.0) / _DAY_SECONDS)

    async def go() -> Costs:
        async with open_part(IngestPart, database_url, config) as part:
            return await part.spending.costs(tenant, days=days, limit=limit)

    found = run(go())
    if json:
        print_json(as_dict(found))
    elif found.parts:
        _print(found)
    else:
        typer.echo(f"no model server was called in the last {days} days; models in the workers cost nothing", err=True)


def _print(costs: Costs) -> None:
    rows = [(part.tenant, part.model, part.lane, part.sums) for part in costs.parts]
    if costs.has_more:
        rows.append(("…", "", "", Sums()))
    if len(rows) > 1:
        rows.append(("total", "", "", costs.total))
    sums = [sums for *_, sums in rows]
    print_table(
        {
            "tenant": [Text(tenant) for tenant, *_ in rows],
            "lane": [Text(lane) for _, _, lane, _ in rows],
            "calls": [Text(number(one.calls) if one.calls else "") for one in sums],
            "tokens in": [Text(number(one.prompt_tokens) if one.calls else "") for one in sums],
            "tokens out": [Text(number(one.completion_tokens) if one.calls else "") for one in sums],
            "cost": [Text(_cost(one)) for one in sums],
            "model": [Text(model) for _, model, *_ in rows],
        },
        elastic=("tenant", "model"),
    )


def _cost(sums: Sums) -> str:
    if not sums.calls:
        return ""
    if not sums.unpriced:
        return f"${show_amount(sums.cost)}"
    if sums.unpriced == sums.calls:
        return "unknown"
    return f"${show_amount(sums.cost)} and {number(sums.unpriced)} calls without a price"
