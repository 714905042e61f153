"""What models have cost, over HTTP: for the caller's tenant; with the scope `admin`, for another tenant or for all."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from fastapi import APIRouter, Query, Request
from pydantic import Field

from batchwright.api.access import Reader
from batchwright.api.errors import documented
from batchwright.api.routes import OrjsonRoute
from batchwright.api.schemas import Answer
from batchwright.api.services import service
from batchwright.inference.spending import KEPT_DAYS, LIST_MAX, Costs, Spent, Sums
from batchwright.ingest.services import IngestServices

router = APIRouter(prefix="/v1/ingest", route_class=OrjsonRoute, tags=["ingest"])


class SumsView(Answer):
    """Total usage and cost of the calls."""

    calls: int
    unpriced: int = Field(description="Calls whose cost is not known, because the model has no price.")
    prompt_tokens: int
    completion_tokens: int
    cost: float = Field(description="In dollars, without the `unpriced` calls.")

    @classmethod
    def of(cls, sums: Sums) -> Self:
        return cls(
            calls=sums.calls,
            unpriced=sums.unpriced,
            prompt_tokens=sums.prompt_tokens,
            completion_tokens=sums.completion_tokens,
            cost=float(sums.cost),
        )


class SpentView(Answer):
    """What one tenant has spent on one model."""

    tenant: str
    model: str
    lane: str = Field(description="`realtime` or `batch`.")
    sums: SumsView

    @classmethod
    def of(cls, spent: Spent) -> Self:
        return cls(tenant=spent.tenant, model=spent.model, lane=spent.lane, sums=SumsView.of(spent.sums))


class CostsView(Answer):
    """What was spent on models for documents and embeddings."""

    object: Literal["ingest.costs"] = "ingest.costs"
    days: int = Field(description="Number of days, including today, in UTC.")
    total: SumsView
    data: list[SpentView] = Field(description="By tenant, model and lane, the most expensive first.")
    has_more: bool

    @classmethod
    def of(cls, costs: Costs) -> Self:
        parts = [SpentView.of(part) for part in costs.parts]
        return cls(days=costs.days, total=SumsView.of(costs.total), data=parts, has_more=costs.has_more)


@router.get("/costs", responses=documented(), summary="Show what models have cost, by tenant and model")
async def get_costs(
    request: Request,
    caller: Reader,
    days: Annotated[int, Query(ge=1, le=KEPT_DAYS, description="Number of days, including today, in UTC.")] = 30,
    limit: Annotated[int, Query(ge=1, le=LIST_MAX, description="Maximum number to return.")] = 100,
) -> CostsView:
    """The sums include every model call as soon as its answer is stored."""
    app = service(request, IngestServices)
    return CostsView.of(await app.part.spending.costs(caller.tenant, days=days, limit=limit))
