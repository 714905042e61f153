"""What the routes work with: the core and what the server adds to it, put together once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request

from batchwright.access.gate import Gate
from batchwright.access.settings import ApiSettings
from batchwright.core import Core
from batchwright.engine.event_streams import EventStreams
from batchwright.engine.exposition import Exposition
from batchwright.part import Served
from batchwright.telemetry.metrics import Counts

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that a route of the engine may use; routes of a part have services of their own beside it."""

    core: Core
    counts: Counts
    """What this process counts for itself."""
    exposition: Exposition
    event_streams: EventStreams
    gate: Gate
    served: Sequence[Served]
    """What the parts have brought."""
    settings: ApiSettings
    version: str


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


def service(request: Request, kind: type[T]) -> T:
    """What a part has brought for its routes."""
    for served in services(request).served:
        if isinstance(served.services, kind):
            return served.services
    raise AssertionError(f"no part serves a {kind.__name__}")
