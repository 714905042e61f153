"""Models over HTTP, as OpenAI's clients expect them."""

from __future__ import annotations

import difflib
from typing import Annotated

from fastapi import APIRouter, Path, Request

from batchwright.api.access import Reader
from batchwright.api.errors import Refusal, documented
from batchwright.api.openai import OpenAIRoute
from batchwright.api.schemas import Text
from batchwright.api.services import service
from batchwright.batches.models import Model, ModelsUnknown
from batchwright.batches.services import BatchServices
from batchwright.batches.views import ModelList, ModelView

router = APIRouter(prefix="/v1/models", route_class=OpenAIRoute, tags=["models"])


@router.get("", responses=documented(), summary="List the models that batches can use")
async def list_models(request: Request, caller: Reader) -> ModelList:
    """Those that have a gateway here or at a worker; where one gateway serves all models, those that it lists."""
    return ModelList(data=[ModelView.model_validate(model) for model in await _find_models(request)])


@router.get("/{id:path}", responses=documented(404), summary="Show a model")
async def get_model(
    request: Request, caller: Reader, id: Annotated[Text, Path(min_length=1, max_length=500)]
) -> ModelView:
    found = await _find_models(request)
    for model in found:
        if model.id == id:
            return ModelView.model_validate(model)
    close = difflib.get_close_matches(id, [model.id for model in found], n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    raise Refusal(f"The model '{id}' does not exist.{hint}", status=404, code="model_not_found", param="model")


async def _find_models(request: Request) -> list[Model]:
    try:
        return await service(request, BatchServices).models.find()
    except ModelsUnknown as error:
        raise Refusal(str(error), status=503, code="unavailable", headers={"Retry-After": "5"}) from error
