"""The exit codes of commands."""

from __future__ import annotations

from batchwright.states import JobStatus

FAILED = 1
"""A failed job, or any error."""
CANCELLED = 3
SOME_FAILED = 4
"""A batch completed or expired, and some of its lines failed."""
INTERRUPTED = 130


def exit_code(status: JobStatus) -> int:
    """The exit code for a job or a pipeline that has ended."""
    return {JobStatus.SUCCEEDED: 0, JobStatus.CANCELLED: CANCELLED}.get(status, FAILED)
