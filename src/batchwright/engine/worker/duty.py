"""What parts of Batchwright do in a worker process, combined into one object for the worker."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from batchwright.engine.metrics import WorkerCounts
from batchwright.engine.queue import Queue
from batchwright.engine.upkeep import Round
from batchwright.engine.worker.lanes import Demand
from batchwright.errors import InvalidInput
from batchwright.plugins import load
from batchwright.telemetry.metrics import LabelLimits, Metric

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """What one part does in one worker process."""

    services: Sequence[object] | Callable[[], Sequence[object]] = ()
    """Services that its operations get by class, `ctx.service(Kind)`; a function creates them at the first request."""
    demand: Demand | None = None
    """Jobs that the part takes by its own capacity, outside the worker's slots."""
    rounds: Sequence[Round] = ()
    """Its upkeep rounds."""
    close: Callable[[], Awaitable[None]] | None = None
    """Called when the worker ends, after its last job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a worker offers to a part."""

    counts: WorkerCounts
    queue: Queue
    queues: Sequence[str] | None
    """The queues that the worker serves; None for all of them."""
    ring: Callable[[Iterable[str]], None] = lambda queues: None
    """Tells the other workers that these queues have jobs."""
    worker: str = ""
    """The id of the worker."""

    def serves(self, queue: str) -> bool:
        return self.queues is None or queue in self.queues


class WorkerPart(Protocol):
    """The part of `Part` that a worker uses."""

    @property
    def metrics(self) -> Any: ...

    def label_limits(self) -> LabelLimits: ...

    def work(self, site: Site) -> Duty | None: ...


class Duties:
    """The duties of all parts in one worker process."""

    def __init__(self, parts: Sequence[WorkerPart], site: Site, offers: Sequence[object]) -> None:
        self._duties = [duty for part in parts if (duty := part.work(site)) is not None]
        self._services = list(offers)
        self._late: list[Callable[[], Sequence[object]]] = []
        for duty in self._duties:
            if callable(duty.services):
                self._late.append(functools.cache(duty.services))
            else:
                self._services += duty.services
        demands = [duty.demand for duty in self._duties if duty.demand is not None]
        self.demand: Demand | None = _Demands(demands) if demands else None

    @property
    def rounds(self) -> list[Round]:
        return [round for duty in self._duties for round in duty.rounds]

    def service(self, kind: type[T]) -> T:
        """The service that an operation requests."""
        late = (service for make in self._late for service in make())
        for service in itertools.chain(self._services, late):
            if isinstance(service, kind):
                return service
        raise InvalidInput(f"this worker has no service {kind.__name__}", param="service")

    async def close(self) -> None:
        """Close in reverse order; one that fails does not stop the others."""
        async with contextlib.AsyncExitStack() as stack:
            for duty in self._duties:
                if duty.close is not None:
                    stack.push_async_callback(duty.close)


class _Demands:
    """The demands of several parts combined; each queue belongs to the first part that serves it."""

    def __init__(self, demands: Sequence[Demand]) -> None:
        self._demands = demands

    @property
    def operations(self) -> Sequence[str]:
        return [name for demand in self._demands for name in demand.operations]

    def queues(self) -> list[str]:
        return [queue for demand in self._demands for queue in demand.queues()]

    def serves(self, queue: str) -> bool:
        return any(demand.serves(queue) for demand in self._demands)

    def wanted(self, queue: str, priority: int, running: int) -> int:
        if self.broken is not None:
            return 0
        return next(self._serving(queue)).wanted(queue, priority, running)

    def _serving(self, queue: str) -> Iterator[Demand]:
        return (demand for demand in self._demands if demand.serves(queue))

    @property
    def broken(self) -> str | None:
        return next((demand.broken for demand in self._demands if demand.broken is not None), None)

    def listen(self, on_demand: Callable[[], None]) -> None:
        for demand in self._demands:
            demand.listen(on_demand)


def metrics_of(parts: Sequence[WorkerPart]) -> list[Metric]:
    """The metrics of all parts."""
    return [metric for part in parts for metric in load(part.metrics)]


def label_limits_of(parts: Sequence[WorkerPart]) -> LabelLimits:
    """The limits of all labels; different parts have different labels."""
    return {label: limit for part in parts for label, limit in part.label_limits().items()}
