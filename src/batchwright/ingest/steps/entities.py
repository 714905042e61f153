"""ENTITY_EXTRACTED: the entities in the text, window by window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.inference.calls import ENTITIES
from batchwright.ingest.context import CONTENT_EXTRACTED, ENTITY_EXTRACTED, StepContext, plan_windows
from batchwright.ingest.pipeline import step
from batchwright.ingest.steps.chunk import chunker


def extractor(config: Mapping[str, Any]) -> str:
    entities = config["entities"]
    return f"{chunker(config)} {entities['chunks']} {entities['fingerprint']}"


@step(ENTITY_EXTRACTED, after=CONTENT_EXTRACTED, fingerprint=extractor)
async def extract_entities(ctx: StepContext) -> dict[str, Any]:
    model = ctx.tools.models.extractor(ctx.config)
    if model is None:
        return {"skipped": True}
    passages = await ctx.passages()
    windows = await ctx.compute(plan_windows, await ctx.text(), passages, ctx.config["entities"]["chunks"])
    texts = {window.hash: window.text for window in windows}
    known = await ctx.tools.answers.find(ctx.item.tenant, model.fingerprint, texts)
    await ctx.tools.answers.touch(ctx.item.tenant, model.fingerprint, known)
    missing = {hash: text for hash, text in texts.items() if hash not in known}
    if missing:
        await ctx.tools.requests.answer(ctx, ENTITIES, model, missing)
    return {"windows": len(windows), "fingerprint": model.fingerprint, "model": model.model, "asked": len(missing)}
