"""The operations of documents. Importing it is cheap for processes that only submit: the rest loads on use."""

from __future__ import annotations

from typing import Any

from batchwright.engine.context import Context
from batchwright.engine.jobs import NewJob
from batchwright.ingest.items import ITEM_JOB
from batchwright.ingest.runs import GATHER_JOB, QUEUE, RUN_JOB, NewRun
from batchwright.operations.decorator import operation


@operation(RUN_JOB, queue=QUEUE, max_attempts=10, backoff_seconds=1.0, backoff_seconds_max=300.0)
async def run_documents(ctx: Context, run_id: str) -> Any:
    """List the sources of a run, wait for its documents, and end it."""
    from batchwright.ingest.coordinator import Coordinator

    return await ctx.service(Coordinator).run(ctx, run_id)


@operation(ITEM_JOB, queue=QUEUE, max_attempts=10, backoff_seconds=1.0, backoff_seconds_max=300.0)
async def run_item(ctx: Context, item_id: str) -> Any:
    """Run the steps of a document."""
    from batchwright.ingest.process import ItemRunner

    return await ctx.service(ItemRunner).run(ctx, item_id)


@operation(GATHER_JOB, queue=QUEUE, max_attempts=10, backoff_seconds=1.0, backoff_seconds_max=300.0)
async def gather_requests(ctx: Context, run_id: str) -> Any:
    """Put the requests of a run into batches, and collect their answers."""
    from batchwright.ingest.gather import Gatherer

    return await ctx.service(Gatherer).run(ctx, run_id)


def run_job(new: NewRun, *, must_be_served: bool = False) -> NewJob:
    """The job of a new run. With `must_be_served` it is refused if no worker has ever run documents."""
    return NewJob(
        RUN_JOB if must_be_served else run_documents,
        {"run_id": new.id},
        queue=QUEUE,
        tenant=new.tenant,
        priority=new.priority,
        traceparent=new.traceparent,
        owner=new.id,
        id=new.job_id,
    )
