"""The services that the HTTP routes of documents use."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchwright.core import Core
    from batchwright.ingest.collections import Collections
    from batchwright.ingest.export import Export
    from batchwright.ingest.items import Items
    from batchwright.ingest.part import IngestPart
    from batchwright.ingest.runs import Runs
    from batchwright.ingest.search import Search
    from batchwright.ingest.submission import Submission

ESTIMATES_MAX = 2
"""Maximum number of simultaneous estimates on one server: each reads documents in separate processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestServices:
    """The services of one HTTP server."""

    collections: Collections
    core: Core
    export: Export
    items: Items
    part: IngestPart
    runs: Runs
    search: Search
    submission: Submission
    estimating: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ESTIMATES_MAX))
