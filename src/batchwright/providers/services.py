"""The services that the routes of tasks use."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.core import Core
from batchwright.files.store import Files
from batchwright.providers.directory import Directory
from batchwright.providers.jobs import RemoteJobs
from batchwright.providers.submission import Submission
from batchwright.providers.tasks import Tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskServices:
    """The services of one HTTP server."""

    core: Core
    directory: Directory
    files: Files
    jobs: RemoteJobs
    submission: Submission
    tasks: Tasks
