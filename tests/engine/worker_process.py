"""A worker process for tests: `python -m tests.engine.worker_process URL LEASE_SECONDS`, until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys

from tests.engine.deadly import OPERATIONS
from windlass.app import AsyncWindlass
from windlass.db.database import DatabaseSettings
from windlass.engine.queue import EngineSettings
from windlass.engine.worker import WorkerSettings
from windlass.settings import Settings


async def main(url: str, lease_seconds: float) -> None:
    settings = Settings(
        database=DatabaseSettings(url=url),
        engine=EngineSettings(lease_seconds=lease_seconds, rescue_jitter_seconds=0.0),
        worker=WorkerSettings(concurrency=10, poll_seconds_max=0.2, stop_grace_seconds=0.5),
    )
    async with AsyncWindlass(settings=settings, operations=OPERATIONS) as windlass:
        worker = windlass.worker()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        await worker.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
