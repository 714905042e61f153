"""CONTENT_EXTRACTED: the canonical text of the document, read in a separate process that may crash without harm."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from batchwright.errors import ConfigurationError, Fatal, NotFound
from batchwright.ingest.context import CONTENT_EXTRACTED, FETCHED, StepContext
from batchwright.ingest.limits import Limits
from batchwright.ingest.pipeline import step
from batchwright.ingest.results import OutputLost
from batchwright.ingest.sandbox import Sandbox
from batchwright.ingest.text import CanonicalText
from batchwright.private import open_private

VERSION = "extract:1"
"""Raise this number when an extractor gives a different text for the same document."""


@step(CONTENT_EXTRACTED, after=FETCHED, fingerprint=VERSION)
async def extract(ctx: StepContext) -> dict[str, Any]:
    fetched = ctx.outputs[FETCHED]
    limits = Limits(**ctx.config["limits"])
    with ctx.folder() as folder:
        path = await _find_bytes(ctx, fetched.get("blob_key"), folder)
        async with ctx.tools.sandboxes.take() as sandbox:
            text = await _extract(sandbox, path, fetched.get("name") or ctx.item.name, limits)
    key = ctx.object_key(f"{text.digest}.text")
    packed = await ctx.compute(msgspec.msgpack.encode, text)
    await ctx.tools.store.put(key, lambda: _once(packed))
    return {"text_key": key, "digest": text.digest, **_describe(text)}


async def _extract(sandbox: Sandbox, path: Path, name: str, limits: Limits) -> CanonicalText:
    try:
        return await sandbox.extract(path, name=name, limits=limits)
    except ConfigurationError as error:  # the message says what to install; other documents do not wait for that
        raise Fatal(str(error), scope="item", code="extractor_missing") from None


async def _find_bytes(ctx: StepContext, key: str | None, folder: Path) -> Path:
    """The file in the store itself if that is a folder of this machine, else a copy."""
    if key is None:
        raise OutputLost(FETCHED)
    if (path := ctx.tools.store.local_path(key)) is not None:
        if not path.exists():
            raise OutputLost(FETCHED)
        return path
    path = folder / "document"
    try:
        with open_private(path, "wb") as file:
            async for piece in ctx.tools.store.get(key):
                await asyncio.to_thread(file.write, piece)
    except NotFound:
        raise OutputLost(FETCHED) from None
    return path


def _describe(text: CanonicalText) -> dict[str, Any]:
    return {
        "format": text.format,
        "pages": len(text.pages),
        "sections": len(text.sections),
        "characters": len(text.text),
        "warnings": list(text.warnings),
    }


async def _once(data: bytes) -> Any:
    yield data
