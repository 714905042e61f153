"""Operations that run in processes of their own: they die, hang, and write their process id into files."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from batchwright import Context, NewJob, Wait, operation


@operation("cpu.pid", cpu=True)
def pid() -> int:
    return os.getpid()


@operation("cpu.dies", cpu=True)
def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@operation("cpu.hangs", cpu=True)
def hangs(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    time.sleep(60)


@operation("cpu.times_out", cpu=True, timeout_seconds=0.3, max_attempts=1)
def times_out(file: str) -> None:
    hangs(file)


@operation("cpu.raises", cpu=True)
def raises(name: str) -> None:
    raise {"ConnectionError": ConnectionError, "EOFError": EOFError, "ValueError": ValueError}[name]("its own")


@operation("cpu.counts", cpu=True)
def counts(folder: str) -> int:
    """Return how many jobs this one saw running at the same time."""
    mine = Path(folder) / str(os.getpid())
    mine.touch()
    time.sleep(0.1)
    seen = len(list(Path(folder).iterdir()))
    mine.unlink()
    return seen


@operation("cpu.emits", cpu=True)
def emits(ctx: Context, bad: bool) -> str:
    ctx.emit("fine", "it says", _progress_current=1, _progress_total=2)
    if bad:
        ctx.emit("bad", thing=lambda: 0)
    return "bad" if bad else "good"


@operation("cpu.sums", cpu=True)
def sums(ctx: Context) -> Wait | int:
    if ctx.joined is None:
        return Wait([NewJob("innocent", {"n": n}) for n in (1, 2, 3)], on_join="resume")
    return sum(child.result for child in ctx.joined)


@operation("poison", max_attempts=3)
async def poison() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@operation("innocent")
async def innocent(n: int) -> int:
    return n


@operation("endless")
async def endless(file: str) -> None:
    Path(file).touch()
    await asyncio.Event().wait()


OPERATIONS = [pid, dies, hangs, times_out, raises, counts, emits, sums, poison, innocent, endless]
