"""What the official clients do with models."""

from __future__ import annotations

import openai
import pytest

from tests.conformance.conftest import SLOW, Client


async def test_models_are_listed_and_retrieved(client: Client) -> None:
    found = await client.all(client.raw.models.list)
    assert SLOW in [model.id for model in found]
    model = await client(client.raw.models.retrieve, SLOW)
    assert model in found
    assert (model.object, type(model.created), type(model.owned_by)) == ("model", int, str)
    with pytest.raises(openai.NotFoundError) as refused:
        await client(client.raw.models.retrieve, "meta/unknown")
    assert refused.value.code == "model_not_found"
