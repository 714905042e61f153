"""Names for the jobs of Batchwright's own operations in messages: people submit batches, not `batch.process`."""

from __future__ import annotations

_WORK = {
    "batch.process": "batches",
    "batch.provider_shard": "batches",
    "batch.shard": "batches",
    "ingest.gather": "documents",
    "ingest.item": "documents",
    "ingest.run": "documents",
    "provider.task": "tasks",
    "batch.webhook": "webhooks",
}
_NEEDS = {
    "batches": "; a worker runs batches if it has a model server: batchwright up --url http://127.0.0.1:8000, or "
    "the setting global_inference_gateway.url"
}


_LIBRARY = frozenset({"compute_embeddings", "compute_embeddings.batch"})
"""Operations that come with Batchwright, and that people may submit."""


def is_own(job_type: str) -> bool:
    """Whether an operation is the user's own, not one that comes with Batchwright."""
    return job_type not in _WORK and job_type not in _LIBRARY


def name_of_work(job_type: str) -> str | None:
    """What people call such jobs; None for operations of users."""
    return _WORK.get(job_type)


def why_no_worker(job_type: str, queue: str) -> str:
    """The message that no worker runs such a job, with what a worker needs to do so."""
    work = name_of_work(job_type)
    if work is None:
        return f"no live worker knows the operation {job_type!r} and serves the queue {queue!r}"
    return f"no live worker runs {work}{_NEEDS.get(work, '')}"
