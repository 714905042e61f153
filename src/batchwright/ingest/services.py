"""What the routes of documents work with."""

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
"""Estimates that one server makes at the same time: each reads documents, in processes of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestServices:
    """Of one HTTP server."""

    collections: Collections
    core: Core
    export: Export
    items: Items
    part: IngestPart
    runs: Runs
    search: Search
    submission: Submission
    estimating: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ESTIMATES_MAX))
