"""A foreign part with features that letters.py of docs/parts.md lacks. Tests install it and do not import it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from batchwright import Context, operation
from batchwright.engine.upkeep import Round
from batchwright.engine.worker.duty import Duty, Site
from batchwright.part import Part
from batchwright.telemetry.metrics import LabelLimit, LabelLimits, Metric

QUEUE = "parcels"
METRICS = (
    Metric("parcels_total", "Parcels that were carried.", ("town",)),
    Metric("parcel_rounds_total", "Rounds of the carriers."),
)


class Carriers:
    def __init__(self, counts: Any) -> None:
        self.counts = counts


@operation("parcel.carry", queue=QUEUE)
async def carry(ctx: Context, town: str) -> str:
    ctx.service(Carriers).counts.add("parcels_total", 1, (town,))
    return f"carried to {town}"


@operation("parcel.weigh", cpu=True)
def weigh(grams: int) -> int:
    return grams * 2


class Demand:
    """Runs parcels on demand, without slots of the worker."""

    operations = ("parcel.carry",)
    broken = None

    def queues(self) -> list[str]:
        return [QUEUE]

    def serves(self, queue: str) -> bool:
        return queue == QUEUE

    def wanted(self, queue: str, priority: int, running: int) -> int:
        return max(0, 2 - running)

    def listen(self, on_demand: Callable[[], None]) -> None:
        pass


class ParcelsPart(Part):
    name = "parcels"
    metrics = METRICS
    operations = ("parcels:carry", "parcels:weigh")
    routers = ("parcels_web:router",)
    pages = ("parcels_web:pages",)

    def label_limits(self) -> LabelLimits:
        return {"town": LabelLimit(named=frozenset({"Ulm"}), others_max=1)}

    def work(self, site: Site) -> Duty:
        async def walk(session: Any) -> None:
            site.counts.add("parcel_rounds_total")

        async def close() -> None:
            os.write(2, b"the carriers went home\n")

        rounds = [Round("parcels", 1.0, walk)]
        return Duty(services=[Carriers(site.counts)], demand=Demand(), rounds=rounds, close=close)
