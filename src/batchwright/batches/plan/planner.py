"""Plans an input file: a small one in a thread, a large one in a process of its own.

Checking 200 MB of lines takes a second of processor time and some 400 bytes per line. In a thread both would be the
worker's: what it sends meanwhile would slow down, and the memory would stay with it long after.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.batches.plan import plan
from batchwright.batches.plan.plan import Rules
from batchwright.engine.worker.processes import end_with_parent, see_the_end

APART_BYTES = 32 * 1024 * 1024
"""A file of this size is worth the quarter of a second that a process takes to start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What became of a file: a plan in its folder, or problems and no plan."""

    problems: dict[str, Any] | None = None
    total: int = 0
    models: tuple[str, ...] = ()


async def make(input: Path, rules: Rules, folder: Path, *, size: int) -> Planned:
    if size < APART_BYTES:
        return await asyncio.to_thread(_make, input, rules, folder)
    return await _make_apart(input, rules, folder)


def _make(input: Path, rules: Rules, folder: Path) -> Planned:
    draft = plan.read(input, rules)
    if draft.problems.total:
        return Planned(problems=draft.problems.as_json())
    plans = plan.write(draft, folder, rules.providers)
    return Planned(total=draft.total, models=tuple(sorted(plans)))


async def _make_apart(input: Path, rules: Rules, folder: Path) -> Planned:
    """OSError if the process dies, as it does when memory runs out; nobody but this batch is harmed."""
    command = (sys.executable, "-P", "-m", __name__)
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with contextlib.suppress(ConnectionError, RuntimeError):  # the latter is uvloop's; the exit code tells
            child.stdin.write(pickle.dumps((input, rules, folder)))
            await child.stdin.drain()
        said = await child.stdout.read()
        await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await see_the_end(child)
    if child.returncode != 0:
        raise ChildProcessError(f"the process that planned {input.name} ended with exit code {child.returncode}")
    planned: Planned = pickle.loads(said)  # noqa: S301 (our own child)
    return planned


def _run_child() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whoever stops all processes of a service means the worker
    asked = pickle.load(sys.stdin.buffer)  # noqa: S301 (our own parent)
    end_with_parent(signal.SIGKILL)
    threading.Thread(target=_wait_for_the_end, daemon=True).start()
    sys.stdout.buffer.write(pickle.dumps(_make(*asked)))


def _wait_for_the_end() -> None:
    """Of the parent. Its end of the pipe stays open while it lives; nobody else may then be writing the same plan."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    from batchwright.batches.plan.planner import _run_child as run  # pickles name the module, not __main__

    run()
