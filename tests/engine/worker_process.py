"""A worker process for tests: `python -m tests.engine.worker_process URL LEASE_SECONDS`, until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys

from batchwright.app import AsyncBatchwright
from batchwright.db.database import DatabaseSettings
from batchwright.engine.queue import EngineSettings
from batchwright.engine.worker.worker import WorkerSettings
from tests.engine.deadly import OPERATIONS
from tests.perturb import perturbed_process
from tests.support import make_settings


async def main(url: str, lease_seconds: float) -> None:
    settings = make_settings(
        database=DatabaseSettings(url=url),
        engine=EngineSettings(lease_seconds=lease_seconds, rescue_jitter_seconds=0.0),
        worker=WorkerSettings(concurrency=10, poll_seconds_max=0.2, stop_grace_seconds=0.5),
    )
    async with AsyncBatchwright(settings=settings, operations=OPERATIONS) as batchwright:
        worker = batchwright.worker()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        await worker.run()


if __name__ == "__main__":
    with perturbed_process("worker"):
        asyncio.run(main(sys.argv[1], float(sys.argv[2])))
