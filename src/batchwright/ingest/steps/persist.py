"""PERSISTED: the rows of the new version, all of them in one transaction, if the branches agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.db.database import Session
from batchwright.errors import Fatal
from batchwright.inference.tokens import estimate_tokens
from batchwright.ingest.context import (
    CHUNKED,
    EMBEDDED,
    ENTITY_EXTRACTED,
    FETCHED,
    PERSISTED,
    Passage,
    StepContext,
    digest_of,
    plan_windows,
)
from batchwright.ingest.entities.mention import load_mentions
from batchwright.ingest.library import NewVersion
from batchwright.ingest.machine import Output
from batchwright.ingest.pipeline import step
from batchwright.ingest.results import OutputLost


def metadata(config: Mapping[str, Any]) -> str:
    """Includes the metadata of the run, because the rows of its documents contain it."""
    return f"persist:1 {sorted(config.get('metadata', {}).items())}"


@step(PERSISTED, after=(CHUNKED, EMBEDDED, ENTITY_EXTRACTED), fingerprint=metadata, is_reusable=False)
async def persist(ctx: StepContext) -> Output:
    passages = await ctx.passages()
    _check_agreement(ctx, passages)
    mentions = await _place_mentions(ctx, passages)
    chunks = [_chunk_row(passage) for passage in passages]
    fetched = ctx.outputs[FETCHED]
    new = NewVersion(
        document_id=ctx.item.document_id,
        collection_id=ctx.item.collection_id,
        item_id=ctx.item.id,
        generation=ctx.item.generation,
        recipe=ctx.run.recipe,
        sha256=fetched["sha256"],
        steps=ctx.machine.record(),
        metadata={**ctx.item.metadata, **(ctx.run.metadata or {})},
    )
    value: dict[str, Any] = {"chunks": len(chunks), "mentions": len(mentions)}

    async def write(session: Session) -> None:
        value["version_id"] = await ctx.tools.library.persist(new, chunks, mentions, session=session)

    return Output(value=value, write=write)


def _check_agreement(ctx: StepContext, passages: Sequence[Passage]) -> None:
    """Each branch has cut the text for itself. If the chunks differed, vectors would belong to the wrong words."""
    plans = {"PERSISTED": digest_of(passages)}
    plans |= {name: ctx.outputs[name]["plan"] for name in (CHUNKED, EMBEDDED)}
    if len(set(plans.values())) > 1:
        raise Fatal(
            f"the chunker made different chunks of one text for {', '.join(plans)}; it must be a pure function of the "
            "text and its settings",
            scope="item",
            code="nondeterministic_chunker",
        )


async def _place_mentions(ctx: StepContext, passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """Assign each mention of a window to the first passage that contains its beginning."""
    output = ctx.outputs[ENTITY_EXTRACTED]
    if output.get("skipped"):
        return []
    text = await ctx.text()
    windows = await ctx.compute(plan_windows, text, passages, ctx.config["entities"]["chunks"])
    answers = await ctx.tools.answers.find(ctx.item.tenant, output["fingerprint"], {window.hash for window in windows})
    if any(window.hash not in answers for window in windows):
        raise OutputLost(ENTITY_EXTRACTED)
    found = [
        {"type": one.type, "text": one.text, "char_start": window.start + one.start, "char_end": window.start + one.end}
        for window in windows
        for one in load_mentions(answers[window.hash])
    ]
    return list(_assign(found, passages))


def _assign(found: Sequence[Mapping[str, Any]], passages: Sequence[Passage]) -> Any:
    place = 0
    for mention in sorted(found, key=lambda one: one["char_start"]):
        while place + 1 < len(passages) and passages[place].chunk.end <= mention["char_start"]:
            place += 1
        yield {**mention, "number": passages[place].number}


def _chunk_row(passage: Passage) -> dict[str, Any]:
    chunk = passage.chunk
    return {
        "number": passage.number,
        "key": passage.key,
        "hash": passage.hash.hex(),
        "char_start": chunk.start,
        "char_end": chunk.end,
        "overlap": chunk.overlap,
        "page_first": chunk.page_first,
        "page_last": chunk.page_last,
        "section": list(chunk.section),
        "tokens": estimate_tokens(passage.text),
        "text": passage.text,
    }
