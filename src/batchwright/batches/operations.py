"""The operations of batches. Processes that only submit import this too, so the code that runs them is loaded later."""

from __future__ import annotations

from typing import Any

from batchwright.batches.plan.shards import Shard
from batchwright.batches.store import PROCESS, PROVIDER_QUEUE, PROVIDER_SHARD, QUEUE, SHARD, SHARD_QUEUE, NewBatch
from batchwright.engine.context import Context
from batchwright.engine.jobs import NewJob
from batchwright.operations.decorator import operation


@operation(PROCESS, queue=QUEUE, max_attempts=10, backoff_seconds=1.0, backoff_seconds_max=60.0)
async def process_batch(ctx: Context, batch_id: str) -> Any:
    """Plan a batch, wait for its shards, and write its files."""
    from batchwright.batches.process import Processor

    return await ctx.service(Processor).run(ctx, batch_id)


@operation(SHARD, queue=SHARD_QUEUE, max_attempts=5, backoff_seconds=1.0, backoff_seconds_max=60.0)
async def send_shard(ctx: Context, shard: Shard) -> Any:
    """Send the requests of one slice of a batch's plan."""
    from batchwright.batches.send.runner import ShardRunner

    return await ctx.service(ShardRunner).run(ctx, shard)


@operation(PROVIDER_SHARD, queue=PROVIDER_QUEUE, max_attempts=10, backoff_seconds=1.0, backoff_seconds_max=60.0)
async def send_provider_shard(ctx: Context, shard: Shard) -> Any:
    """Let an outside provider answer the requests of one slice of a batch's plan, in one job there."""
    from batchwright.batches.send.runner import ShardRunner

    return await ctx.service(ShardRunner).run(ctx, shard)


def process_job(new: NewBatch, *, must_be_served: bool = False) -> NewJob:
    """The job that drives a new batch. With `must_be_served` it is refused while no worker has ever run batches."""
    return NewJob(
        PROCESS if must_be_served else process_batch,
        {"batch_id": new.id},
        queue=new.queue,
        tenant=new.tenant,
        priority=new.priority,
        traceparent=new.traceparent,
        owner=new.id,
        id=new.job_id,
    )
