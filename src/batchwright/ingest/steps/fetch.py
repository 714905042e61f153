"""FETCHED: a copy of the document's current bytes in our own store."""

from __future__ import annotations

from typing import Any

from batchwright.ingest.context import FETCHED, StepContext
from batchwright.ingest.machine import Live
from batchwright.ingest.pipeline import step
from batchwright.ingest.sources import NotModified


@step(FETCHED, after=(), is_reusable=False)
async def fetch(ctx: StepContext) -> dict[str, Any]:
    """Copy the source, so that every later step reads the same bytes even if the source changes."""
    etag = ctx.live.etag if ctx.live is not None and _may_be_unchanged(ctx, ctx.live) else None
    with ctx.folder() as folder:
        fetched = await ctx.tools.sources.fetch(
            ctx.item.source, folder / "document", etag=etag, roots=ctx.config.get("roots")
        )
        if isinstance(fetched, NotModified):
            assert ctx.live is not None
            return {"sha256": ctx.live.sha256, "etag": fetched.etag}
        key = ctx.object_key(f"{ctx.item.id}-{ctx.item.generation}.source")
        await ctx.tools.store.put_file(key, fetched.path)
    return {
        "sha256": fetched.sha256,
        "etag": fetched.etag,
        "size": fetched.size,
        "media_type": fetched.media_type,
        "name": fetched.name,
        "blob_key": key,
    }


def _may_be_unchanged(ctx: StepContext, live: Live) -> bool:
    """Whether to ask the source if it has changed; otherwise its bytes are needed anyway."""
    return live.recipe == ctx.run.recipe and not ctx.config.get("force")
