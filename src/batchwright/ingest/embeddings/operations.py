"""The operations of `compute_embeddings`. Importing it is cheap for processes that only submit: the rest loads on use.

compute_embeddings ── Wait ──▶ compute_embeddings.batch, many ── the last one resumes it ──▶ one file
"""

from __future__ import annotations

from typing import Any

from batchwright.engine.context import Context
from batchwright.errors import StorageUnavailable
from batchwright.ingest.embeddings.payloads import BATCH, COMPUTE, QUEUE, ComputeEmbeddings, EmbedBatch
from batchwright.operations.decorator import operation


@operation(COMPUTE, queue=QUEUE, max_attempts=5, retry_on=(StorageUnavailable,))
async def compute_embeddings(ctx: Context, request: ComputeEmbeddings) -> Any:
    """Compute a vector for every row of a file or a table, in batches, and write one file with all of them."""
    from batchwright.ingest.embeddings.process import EmbeddingCoordinator

    return await ctx.service(EmbeddingCoordinator).run(ctx, request)


@operation(BATCH, queue=QUEUE, max_attempts=10, backoff_seconds_max=120.0, retry_on=(StorageUnavailable,))
async def embed_batch(ctx: Context, batch: EmbedBatch) -> Any:
    """Compute the vectors of one batch."""
    from batchwright.ingest.embeddings.batch import BatchRunner

    return await ctx.service(BatchRunner).run(ctx, batch)
