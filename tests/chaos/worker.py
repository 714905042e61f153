"""A worker process of the chaos run: `python -m tests.chaos.worker FOLDER LEASE_SECONDS`.

It writes its id and its counts to standard output, one JSON object per line, and exits when its standard input is
closed, so that a killed harness leaves no process behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import orjson
import uvloop

from batchwright.app import AsyncBatchwright
from batchwright.db.database import DatabaseSettings
from batchwright.engine.queue import EngineSettings
from batchwright.engine.worker.worker import Worker, WorkerSettings
from batchwright.errors import DatabaseUnavailable
from batchwright.settings import Settings
from batchwright.telemetry.logs import configure_logs
from tests.chaos.operations import OPERATIONS
from tests.support import make_settings

CONCURRENCY = 16
_COUNTED = {
    "fenced": "writes_fenced_total",
    "leases_lost": "leases_lost_total",
    "poisoned": "jobs_poisoned_total",
    "rescued": "jobs_rescued_total",
}
_SAY_SECONDS = 0.25


def settings(folder: str, lease_seconds: float) -> Settings:
    return make_settings(
        database=DatabaseSettings(folder=folder),
        engine=EngineSettings(lease_seconds=lease_seconds),
        worker=WorkerSettings(concurrency=CONCURRENCY, processes_max=1, stop_grace_seconds=10.0),
    )


def main() -> None:
    configure_logs("INFO", "json")
    threading.Thread(target=_end_with_the_harness, daemon=True).start()
    folder, lease_seconds = sys.argv[1], float(sys.argv[2])
    uvloop.run(_work(AsyncBatchwright(settings=settings(folder, lease_seconds), operations=OPERATIONS)))
    os._exit(0)  # a thread that still waits for standard input must not keep the process alive


def _end_with_the_harness() -> None:
    sys.stdin.buffer.read()
    os._exit(3)


async def _work(batchwright: AsyncBatchwright) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    while not stopping.is_set():
        try:
            async with batchwright:
                await _run(batchwright.worker(), stopping)
            return
        except DatabaseUnavailable:  # it went away before we had begun; a supervisor would start us again as well
            await asyncio.sleep(0.2)


async def _run(worker: Worker, stopping: asyncio.Event) -> None:
    running = asyncio.create_task(worker.run())
    while not running.done():
        _say(worker)
        if stopping.is_set():
            worker.stop()
        await asyncio.wait([running], timeout=_SAY_SECONDS)
    _say(worker)
    await running


def _say(worker: Worker) -> None:
    counts = {name: worker.counts.total(metric) for name, metric in _COUNTED.items()}
    line = orjson.dumps({"id": worker.id, "counts": counts})
    os.write(1, line + b"\n")


if __name__ == "__main__":
    main()
