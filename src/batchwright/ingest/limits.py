"""The limits of one extraction. Each has its own error, so that users know which one to raise."""

from __future__ import annotations

from dataclasses import dataclass, fields

from batchwright.errors import ConfigurationError

MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one extraction; the defaults allow a book of a thousand pages and stop a decompression bomb."""

    cpu_seconds: int = 60
    """Processor time in seconds. It stops a parser that loops, even on a busy machine."""
    document_bytes: int = 100 * MEGABYTE
    """Size of the document as it is stored."""
    memory_bytes: int = 1_024 * MEGABYTE
    """Address space of the process, about 100 MB of which is Python itself."""
    nesting: int = 4
    """Levels of attachments inside attachments."""
    output_bytes: int = 50 * MEGABYTE
    """Size of the extracted text with its segments."""
    pages: int = 5_000
    """Number of pages, slides or sheets."""
    seconds: float = 120.0
    """Elapsed time in seconds. It stops a parser that waits for something."""
    unpacked_bytes: int = 500 * MEGABYTE
    """Sum of the sizes of all files in an archive or in a mail."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ConfigurationError(f"the limit {field.name} is {getattr(self, field.name)}; it must be above 0")
