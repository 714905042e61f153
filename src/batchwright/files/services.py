"""What the routes of files work with."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.files.store import Files
from batchwright.files.uploads import Uploads


@dataclass(frozen=True, slots=True)
class FileServices:
    """Of one HTTP server."""

    files: Files
    uploads: Uploads
    bytes_max: int
    """The largest file that is taken."""
