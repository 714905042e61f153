"""The no-op as a Batchwright operation."""

from batchwright import operation
from benchmarks.peers import noop as meter


@operation("noop")
async def noop(n: int | None = None, at: float | None = None) -> None:
    meter.started({"at": at})
