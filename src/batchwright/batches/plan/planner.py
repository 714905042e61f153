"""Plans an input file: a small one in a thread, a large one in a process of its own.

Checking 200 MB of lines takes a second of CPU time and about 400 bytes per line. In a thread of the worker, this would
slow down the requests that it sends meanwhile, and the worker would keep the memory for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from batchwright.batches.plan import plan
from batchwright.batches.plan.plan import Rules
from batchwright.engine.worker.processes import end_with_parent, see_the_end

T = TypeVar("T")
APART_BYTES = 32 * 1024 * 1024
"""A file of this size is worth the quarter of a second that a process takes to start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The result for a file: a plan in its folder, or problems and no plan."""

    problems: dict[str, Any] | None = None
    total: int = 0
    requests: Mapping[str, int] = field(default_factory=dict)
    """Requests of each model; those for models without a gateway are only in the total."""

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted(self.requests))


async def make(input: Path, rules: Rules, folder: Path, *, size: int) -> Planned:
    return await run_apart(_make, input, rules, folder, size=size)


async def run_apart(function: Callable[..., T], *args: Any, size: int) -> T:
    """Run work on a file of this size: in a thread, or in a process if it is large. All arguments must be picklable."""
    if size < APART_BYTES:
        return await asyncio.to_thread(function, *args)
    return await _run_in_process(function, *args)


def _make(input: Path, rules: Rules, folder: Path) -> Planned:
    draft = plan.read(input, rules)
    if draft.problems.total:
        return Planned(problems=draft.problems.as_json())
    plans = plan.write(draft, folder, rules.providers)
    return Planned(total=draft.total, requests={model: len(one.entries) for model, one in plans.items()})


async def _run_in_process(function: Callable[..., T], *args: Any) -> T:
    """Raises OSError if the process dies, for example when memory runs out; only this batch is affected."""
    command = (sys.executable, "-P", "-m", __name__)
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with contextlib.suppress(ConnectionError, RuntimeError):  # the second is uvloop's; see the exit code
            child.stdin.write(pickle.dumps((function, args)))
            await child.stdin.drain()
        said = await child.stdout.read()
        await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await see_the_end(child)
    if child.returncode != 0:
        raise ChildProcessError(f"the process that read {args[0].name} ended with exit code {child.returncode}")
    result: T = pickle.loads(said)  # noqa: S301 (our own child)
    return result


def _run_child() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a signal to all processes of a service is meant for the worker
    function, args = pickle.load(sys.stdin.buffer)  # noqa: S301 (our own parent)
    end_with_parent(signal.SIGKILL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    sys.stdout.buffer.write(pickle.dumps(function(*args)))


def _exit_with_parent() -> None:
    """Exit when the parent dies, which closes its end of the pipe: another process may then write the same plan."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    from batchwright.batches.plan.planner import _run_child as run  # pickles name the module, not __main__

    run()
