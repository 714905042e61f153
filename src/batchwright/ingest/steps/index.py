"""INDEXED: the new version replaces the old one in one commit, so that search always finds exactly one."""

from __future__ import annotations

from typing import Any

from batchwright.db.database import Session
from batchwright.ingest.context import EMBEDDED, INDEXED, PERSISTED, StepContext
from batchwright.ingest.machine import Output
from batchwright.ingest.pipeline import step
from batchwright.ingest.results import OutputLost


@step(INDEXED, after=PERSISTED, is_reusable=False)
async def index(ctx: StepContext) -> Output:
    version_id = ctx.outputs[PERSISTED]["version_id"]
    embedded = ctx.outputs[EMBEDDED]
    chunks = await ctx.tools.library.chunks(version_id)
    if not chunks:
        raise OutputLost(PERSISTED)
    answers = await ctx.tools.answers.find(ctx.item.tenant, embedded["fingerprint"], {hash for _, hash in chunks})
    if any(hash not in answers for _, hash in chunks):
        raise OutputLost(EMBEDDED)
    space = await ctx.tools.spaces.ensure(
        ctx.item.collection_id,
        fingerprint=embedded["fingerprint"],
        model=embedded["model"],
        dimensions=embedded["dimensions"],
    )
    vectors = {id: answers[hash] for id, hash in chunks}
    value: dict[str, Any] = {"version_id": version_id, "vectors": space.index}

    async def write(session: Session) -> None:
        value["replaced"] = await ctx.tools.library.go_live(
            ctx.item.document_id,
            version_id,
            name=ctx.item.name,
            space=space,
            vectors=vectors,
            session=session,
        )

    return Output(value=value, write=write)
