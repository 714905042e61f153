"""The operation of tasks, light enough for processes that only submit: what does the work is loaded when it runs."""

from __future__ import annotations

from typing import Any

from batchwright.engine.context import Context
from batchwright.engine.jobs import NewJob
from batchwright.operations.decorator import operation
from batchwright.providers.tasks import PROCESS, QUEUE, NewTask


@operation(PROCESS, queue=QUEUE, max_attempts=10, backoff_seconds=1.0, backoff_seconds_max=300.0)
async def run_task(ctx: Context, task_id: str) -> Any:
    """Bring a task to its providers, wait for them, and bring the results home."""
    from batchwright.providers.process import TaskRunner

    return await ctx.service(TaskRunner).run(ctx, task_id)


def task_job(new: NewTask, *, must_be_served: bool = False) -> NewJob:
    """The job that drives a new task; one that must be served is refused while no worker has ever run tasks."""
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
