"""What a script can tell from the exit code of a command."""

from __future__ import annotations

from batchwright.states import JobStatus

FAILED = 1
"""Also any error."""
CANCELLED = 3
SOME_FAILED = 4
"""A batch was run to its end, or to that of its window, and some of its lines failed."""
INTERRUPTED = 130


def exit_code(status: JobStatus) -> int:
    """For a job, or a pipeline, that has ended."""
    return {JobStatus.SUCCEEDED: 0, JobStatus.CANCELLED: CANCELLED}.get(status, FAILED)
