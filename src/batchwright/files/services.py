"""The services of the file routes."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.files.store import Files
from batchwright.files.uploads import Uploads


@dataclass(frozen=True, slots=True)
class FileServices:
    """The services of one HTTP server."""

    files: Files
    uploads: Uploads
    bytes_max: int
    """Maximum size of a file."""
