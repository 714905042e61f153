"""CHUNKED: cuts the text. Each branch computes the chunks for itself; this step records the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.ingest.chunk import fingerprint
from batchwright.ingest.context import (
    CHUNKED,
    CONTENT_EXTRACTED,
    StepContext,
    chunk_settings,
    count_tokens,
    digest_of,
)
from batchwright.ingest.pipeline import step


def chunker(config: Mapping[str, Any]) -> str:
    """What the chunks depend on in addition to the text."""
    return fingerprint(chunk_settings(config))


@step(CHUNKED, after=CONTENT_EXTRACTED, fingerprint=chunker)
async def chunk(ctx: StepContext) -> dict[str, Any]:
    passages = await ctx.passages()
    return {"count": len(passages), "plan": digest_of(passages), "tokens": count_tokens(passages)}
