"""The no-op as a Windlass operation."""

from benchmarks.peers import noop as meter
from windlass import operation


@operation("noop")
async def noop(n: int | None = None, at: float | None = None) -> None:
    meter.started({"at": at})
