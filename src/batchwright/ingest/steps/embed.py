"""EMBEDDED: a vector for each passage. Each tenant pays for equal passages once, even after a crash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.inference.calls import EMBEDDING
from batchwright.ingest.context import CONTENT_EXTRACTED, EMBEDDED, StepContext, digest_of
from batchwright.ingest.pipeline import step
from batchwright.ingest.steps.chunk import chunker


def embedder(config: Mapping[str, Any]) -> str:
    """The passages, and the model with its settings."""
    return f"{chunker(config)} {config['embedding']['fingerprint']}"


@step(EMBEDDED, after=CONTENT_EXTRACTED, fingerprint=embedder)
async def embed(ctx: StepContext) -> dict[str, Any]:
    passages = await ctx.passages()
    model = ctx.tools.models.embedder(ctx.config)
    texts = {passage.hash: passage.text for passage in passages}
    known = await ctx.tools.answers.find(ctx.item.tenant, model.fingerprint, texts)
    missing = {hash: text for hash, text in texts.items() if hash not in known}
    await ctx.tools.answers.touch(ctx.item.tenant, model.fingerprint, known)
    if missing:
        await ctx.tools.requests.answer(ctx, EMBEDDING, model, missing)
        known |= await ctx.tools.answers.find(ctx.item.tenant, model.fingerprint, missing)
    return {
        "count": len(passages),
        "plan": digest_of(passages),
        "fingerprint": model.fingerprint,
        "model": model.model,
        "dimensions": len(next(iter(known.values()))) // 4,
        "asked": len(missing),
    }
