"""Where operations run: on the event loop, in threads, or in processes of their own."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from batchwright.engine.context import Context
from batchwright.engine.jobs import Claim
from batchwright.engine.operation import Operation
from batchwright.engine.outcomes import Verb
from batchwright.engine.worker.processes import Processes

Reason = Literal["cancelled", "lost", "timeout", "stop"]


@dataclass(slots=True, eq=False)
class Running:
    """A claim together with what runs for it."""

    claim: Claim
    operation: Operation
    leased_until: float
    """By the monotonic clock; the lease thread moves it on."""
    context: Context | None = None
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    kill: Callable[[], object] | None = None
    reason: Reason | None = None
    ended: float | None = None
    """When the operation returned; what it raised or was interrupted by is dealt with at once."""
    settling: bool = False
    is_over: bool = False
    """Its settle is on the way, together with others; nothing runs for it any more."""
    is_forgotten: bool = False
    settled_by: Verb | None = None
    """The verb that was committed for it."""


class Executor:
    """Calls operations in the way that their kind asks for."""

    def __init__(self, processes: Processes, threads_max: int) -> None:
        self._processes = processes
        self._threads = ThreadPoolExecutor(threads_max, thread_name_prefix="batchwright-operation")

    async def call(self, running: Running, context: Context, arguments: dict[str, Any]) -> Any:
        """What the operation returns; raises what it raises, or Died when its process did."""
        operation = running.operation
        match operation.kind:
            case "async":
                return await operation.function(**arguments)
            case "thread":
                loop = asyncio.get_running_loop()
                call = functools.partial(contextvars.copy_context().run, _call_in_thread, running, arguments)
                return await loop.run_in_executor(self._threads, call)
            case "process":
                return await self._processes.perform(operation, running.claim, context, running)

    async def close(self) -> None:
        await self._processes.close()
        self._threads.shutdown(wait=False)


def _call_in_thread(running: Running, arguments: Mapping[str, Any]) -> Any:
    """A future cannot carry StopIteration, so it goes as what Python itself makes of it."""
    if running.reason is not None:  # it was interrupted while it waited for its children's counts or for a thread
        raise asyncio.CancelledError
    try:
        return running.operation.function(**arguments)
    except StopIteration as error:
        raise RuntimeError("the operation raised StopIteration") from error
