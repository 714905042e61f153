"""Runs operations: on the event loop, in threads, or in separate processes.

Python cannot end a thread. A thread that runs past its time limit is abandoned: its job is settled without it, its
result is dropped, and another thread takes its place. A worker with too many abandoned threads must be restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from batchwright.engine.context import Context
from batchwright.engine.jobs import Claim
from batchwright.engine.operation import Operation
from batchwright.engine.outcomes import Verb
from batchwright.engine.worker.processes import Processes

log = logging.getLogger(__name__)

Reason = Literal["cancelled", "lost", "timeout", "stop"]
_ABANDONED_LEAST = 4
"""Number of abandoned threads that a worker with few slots tolerates."""


@dataclass(slots=True, eq=False)
class Running:
    """A claim together with its running operation."""

    claim: Claim
    operation: Operation
    leased_until: float
    """By the monotonic clock; the lease thread extends it."""
    context: Context | None = None
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    kill: Callable[[], object] | None = None
    call: Future[Any] | None = None
    """Its call in a thread."""
    reason: Reason | None = None
    ended: float | None = None
    """When the operation returned; an exception or interruption is handled at once."""
    settling: bool = False
    is_over: bool = False
    """Its settle is in progress, together with others; its operation has ended."""
    is_forgotten: bool = False
    settled_by: Verb | None = None
    """The verb that was committed for it."""


class Executor:
    """Calls operations in the way that their kind requires."""

    def __init__(self, processes: Processes, threads_max: int) -> None:
        self._processes = processes
        self._abandoned: dict[Future[Any], str] = {}
        """Calls in threads whose jobs were settled without them, with the names of their operations."""
        self._abandoned_max = max(threads_max, _ABANDONED_LEAST)
        # While fewer threads than the limit are abandoned, every job that has a slot finds a thread.
        self._threads = ThreadPoolExecutor(threads_max + self._abandoned_max, "batchwright-operation")

    @property
    def has_abandoned(self) -> bool:
        """Whether abandoned threads still run; the interpreter would wait for them at exit."""
        return bool(self._abandoned)

    @property
    def broken(self) -> str | None:
        """Why this process should be restarted."""
        if len(self._abandoned) < self._abandoned_max:
            return None
        listed = ", ".join(f"{name} ({n})" for name, n in Counter(self._abandoned.values()).most_common())
        return f"{len(self._abandoned)} threads did not end within the time limits of their operations: {listed}"

    def abandon(self, running: Running) -> bool:
        """Stop waiting for a thread; returns whether it still runs. The caller cancels the task that waits for it."""
        call = running.call
        if call is None or call.cancel() or call.done():
            return False
        self._abandoned[call] = running.operation.name
        loop = asyncio.get_running_loop()

        def report_end(call: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits for the result
                loop.call_soon_threadsafe(self._note_end, call)

        call.add_done_callback(report_end)
        return True

    def _note_end(self, call: Future[Any]) -> None:
        name = self._abandoned.pop(call)
        log.info("a thread of the operation %s has ended after its time limit; its result is refused", name)

    async def call(self, running: Running, context: Context, arguments: dict[str, Any]) -> Any:
        """Returns what the operation returns; raises what it raises, or Died if its process died."""
        operation = running.operation
        match operation.kind:
            case "async":
                return await operation.function(**arguments)
            case "thread":
                call = functools.partial(contextvars.copy_context().run, _call_in_thread, running, arguments)
                running.call = self._threads.submit(call)
                return await asyncio.wrap_future(running.call)
            case "process":
                return await self._processes.perform(operation, running.claim, context, running)

    async def close(self) -> None:
        await self._processes.close()
        self._threads.shutdown(wait=False)


def _call_in_thread(running: Running, arguments: Mapping[str, Any]) -> Any:
    """A future cannot carry StopIteration, so convert it to RuntimeError, as Python itself does."""
    if running.reason is not None:  # interrupted while it waited for a thread, or for the counts of its children
        raise asyncio.CancelledError
    try:
        return running.operation.function(**arguments)
    except StopIteration as error:
        raise RuntimeError("the operation raised StopIteration") from error
