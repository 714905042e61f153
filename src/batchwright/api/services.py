"""The services that routes use: the core and what the server adds to it, built once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request

from batchwright.access.gate import Gate
from batchwright.access.settings import ApiSettings
from batchwright.api.streams import StreamPlaces
from batchwright.core import Core
from batchwright.engine.event_streams import EventStreams
from batchwright.engine.exposition import Exposition
from batchwright.part import Served
from batchwright.telemetry.metrics import Counts

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that the engine's routes may use; the routes of a part also have the part's own services."""

    core: Core
    counts: Counts
    """The metrics of this process."""
    exposition: Exposition
    event_streams: EventStreams
    gate: Gate
    served: Sequence[Served]
    """The services of the parts."""
    settings: ApiSettings
    stream_places: StreamPlaces
    version: str


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


def service(request: Request, kind: type[T]) -> T:
    """The service that a part provides for its routes."""
    for served in services(request).served:
        if isinstance(served.services, kind):
            return served.services
    raise AssertionError(f"no part serves a {kind.__name__}")
