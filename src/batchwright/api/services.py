"""What the routes work with: the engine's parts, put together once."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from batchwright.api.access import Gate
from batchwright.api.settings import ApiSettings
from batchwright.batches.files import Files
from batchwright.batches.models import Models
from batchwright.batches.results import Results
from batchwright.batches.seal import Seal
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Batches
from batchwright.batches.uploads import Uploads
from batchwright.db.doorbell import Doorbell
from batchwright.engine.bulk import Bulk
from batchwright.engine.catalog import Catalog
from batchwright.engine.exposition import Exposition
from batchwright.engine.feeds import Feeds
from batchwright.engine.queue import Queue
from batchwright.engine.schedules import Schedules
from batchwright.engine.views import Views
from batchwright.telemetry.metrics import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that a route may use."""

    settings: ApiSettings
    batch_settings: BatchSettings
    has_gateways: bool
    """Whether this process knows a model server to send batches to, as workers of its configuration will."""
    passthrough_headers: frozenset[str]
    """Headers of creators that go to the model server with each request of their batch."""
    seal: Seal
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
    uploads: Uploads
    batches: Batches
    results: Results
    models: Models


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found
