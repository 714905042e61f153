"""`batchwright ingest costs`: what models have cost, by tenant and model."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from batchwright.cli.flags import Config, DatabaseUrl, Json, OfTenant, open_part, run
from batchwright.cli.show import as_dict, number, print_json, print_table
from batchwright.inference.spending import KEPT_DAYS, LIST_MAX, Costs, Sums
from batchwright.ingest.money import show_amount
from batchwright.ingest.part import IngestPart


def costs(
    tenant: OfTenant = None,
    days: Annotated[int, typer.Option(min=1, max=KEPT_DAYS, help="Today and the days before it, in UTC.")] = 30,
    limit: Annotated[int, typer.Option(min=1, max=LIST_MAX, help="Maximum number to show.")] = 50,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Show what models have cost for documents and embeddings, by tenant and model."""

    async def go() -> Costs:
        async with open_part(IngestPart, database_url, config) as part:
            return await part.spending.costs(tenant, days=days, limit=limit)

    found = run(go())
    if json:
        print_json(as_dict(found))
    elif found.parts:
        _print(found)
    else:
        typer.echo(f"no model was called in the last {days} days, or only those in the workers, which cost nothing")


def _print(costs: Costs) -> None:
    rows = [(part.tenant, part.model, part.lane, part.sums) for part in costs.parts]
    if costs.has_more:
        rows.append(("…", "", "", Sums()))
    if len(rows) > 1:
        rows.append(("in all", "", "", costs.total))
    sums = [sums for *_, sums in rows]
    print_table(
        {
            "tenant": [Text(tenant) for tenant, *_ in rows],
            "model": [Text(model) for _, model, *_ in rows],
            "lane": [Text(lane) for _, _, lane, _ in rows],
            "calls": [Text(number(one.calls) if one.calls else "") for one in sums],
            "tokens in": [Text(number(one.prompt_tokens) if one.calls else "") for one in sums],
            "tokens out": [Text(number(one.completion_tokens) if one.calls else "") for one in sums],
            "cost": [Text(_cost(one)) for one in sums],
        },
        elastic=("model", "tenant"),
    )


def _cost(sums: Sums) -> str:
    if not sums.calls:
        return ""
    if not sums.unpriced:
        return f"${show_amount(sums.cost)}"
    if sums.unpriced == sums.calls:
        return "not known"
    return f"${show_amount(sums.cost)} and {number(sums.unpriced)} calls without a price"
