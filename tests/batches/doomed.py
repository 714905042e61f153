"""A worker process that kills itself at a given point: `python -m tests.batches.doomed BRIEF`.

The brief is JSON: the settings, and optionally `at` ("module:Class.method"), `when` ("before" or "after") and `call`,
the number of the call at which it dies. With `cancel`, a batch's id, it is a client that cancels the batch.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import os
import signal
import sys
from typing import Any

from batchwright.app import AsyncBatchwright
from batchwright.batches.part import BatchesPart
from batchwright.settings import settings_of
from tests.perturb import perturbed_process


def doom(at: str, when: str, call: int) -> None:
    module, _, path = at.partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    calls = 0

    def count() -> bool:
        nonlocal calls
        calls += 1
        return calls == call

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(original)
    async def later(*args: Any, **kwargs: Any) -> Any:
        last = count()
        if last and when == "before":
            die()
        answer = await original(*args, **kwargs)
        if last:
            die()
        return answer

    @functools.wraps(original)
    def now(*args: Any, **kwargs: Any) -> Any:
        last = count()
        if last and when == "before":
            die()
        answer = original(*args, **kwargs)
        if last:
            die()
        return answer

    setattr(owner, name, later if inspect.iscoroutinefunction(original) else now)


async def main(brief: dict[str, Any]) -> None:
    if "at" in brief:
        doom(brief["at"], brief["when"], brief["call"])
    async with AsyncBatchwright(settings=settings_of(brief["settings"])) as batchwright:
        if "cancel" in brief:
            await batchwright.part(BatchesPart).batches.cancel(brief["cancel"], tenant=None)
            return
        worker = batchwright.worker()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        await worker.run()


if __name__ == "__main__":
    with perturbed_process("doomed"):
        asyncio.run(main(json.loads(sys.argv[1])))
    os._exit(0)
