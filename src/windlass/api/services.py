"""What the routes work with: the engine's parts, put together once."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from windlass.api.access import Gate
from windlass.api.settings import ApiSettings
from windlass.batches.files import Files
from windlass.batches.results import Results
from windlass.batches.settings import BatchSettings
from windlass.batches.store import Batches
from windlass.db.doorbell import Doorbell
from windlass.engine.bulk import Bulk
from windlass.engine.catalog import Catalog
from windlass.engine.exposition import Exposition
from windlass.engine.feeds import Feeds
from windlass.engine.queue import Queue
from windlass.engine.schedules import Schedules
from windlass.engine.views import Views
from windlass.telemetry.metrics import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that a route may use."""

    settings: ApiSettings
    batch_settings: BatchSettings
    has_gateways: bool
    """Whether this process knows a model server to send batches to, as workers of its configuration will."""
    version: str
    queue: Queue
    catalog: Catalog
    doorbell: Doorbell
    views: Views
    bulk: Bulk
    schedules: Schedules
    feeds: Feeds
    gate: Gate
    counts: Counts
    exposition: Exposition
    files: Files
    batches: Batches
    results: Results


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found
