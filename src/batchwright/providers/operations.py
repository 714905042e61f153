"""The operation for tasks. Importing it is cheap for processes that only submit: the working code loads on use."""

from __future__ import annotations

from typing import Any

from batchwright.engine.context import Context
from batchwright.engine.jobs import NewJob
from batchwright.operations.decorator import operation
from batchwright.providers.tasks import PROCESS, QUEUE, NewTask


@operation(PROCESS, queue=QUEUE, max_attempts=10, backoff_seconds=1.0, backoff_seconds_max=300.0)
async def run_task(ctx: Context, task_id: str) -> Any:
    """Send a task to its providers, wait for them, and fetch the results."""
    from batchwright.providers.process import TaskRunner

    return await ctx.service(TaskRunner).run(ctx, task_id)


def task_job(new: NewTask, *, must_be_served: bool = False) -> NewJob:
    """The job that drives a new task. A task that must be served is refused if no worker has ever run tasks."""
    return NewJob(
        PROCESS if must_be_served else run_task,
        {"task_id": new.id},
        queue=new.queue,
        tenant=new.tenant,
        priority=new.priority,
        traceparent=new.traceparent,
        owner=new.id,
        id=new.job_id,
    )
