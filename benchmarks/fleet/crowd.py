"""Many idle workers in one process, each as `batchwright worker` has it: a client, a pool and a worker of its own.

    python -m benchmarks.fleet.crowd COUNT

The settings come from the environment. It prints a line when all workers have started, and ends when its standard input
does: at once, for the database goes away with them.
"""

import asyncio
import os
import sys

from batchwright import AsyncBatchwright
from batchwright.settings import Settings, load_settings

STARTING_MAX = 4


async def main(count: int) -> None:
    settings, turns = load_settings(), asyncio.Semaphore(STARTING_MAX)

    async def start() -> asyncio.Task[bool]:
        async with turns:
            return await start_worker(settings)

    workers = await asyncio.gather(*(start() for _ in range(count)))
    print("ready", flush=True)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([ended, *workers], return_when=asyncio.FIRST_COMPLETED)
    os._exit(0 if ended.done() else 1)


async def start_worker(settings: Settings) -> asyncio.Task[bool]:
    client = await AsyncBatchwright(settings=settings).open()
    worker = client.worker()
    running = asyncio.create_task(worker.run())
    started = asyncio.create_task(worker.started.wait())
    await asyncio.wait([running, started], return_when=asyncio.FIRST_COMPLETED)
    if not worker.started.is_set():
        await running
    return running


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
