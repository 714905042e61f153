"""The operation that every contestant runs: it only counts that it ran.

Each worker process keeps three numbers in a memory-mapped file that the harness reads, so that
watching the progress of a run costs the database nothing and costs every contestant the same.
"""

import functools
import mmap
import os
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "BENCH_METER_FOLDER"
CELLS = struct.Struct("3d")
LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One worker process: jobs started, and when and after how much processor time the first one was."""

    pid: int
    started: int
    first_at: float
    first_cpu_seconds: float


def started(payload: Mapping[str, Any]) -> None:
    """Counts one start; a payload with `at` (time.time() of its enqueueing) also records its latency."""
    now = time.time()
    with LOCK:
        meter().count(payload, now)


def readings(folder: Path) -> list[Reading]:
    found = []
    for path in folder.glob("*.meter"):
        content = path.read_bytes()
        if len(content) == CELLS.size:
            count, first_at, first_cpu = CELLS.unpack(content)
            found.append(
                Reading(pid=int(path.stem), started=int(count), first_at=first_at, first_cpu_seconds=first_cpu)
            )
    return found


def latencies(folder: Path) -> list[float]:
    """Seconds from enqueue to start, of every timed job of a run."""
    return [float(line) for path in folder.glob("*.latencies") for line in path.read_text().splitlines()]


def forget_latencies(folder: Path) -> None:
    for path in folder.glob("*.latencies"):
        os.truncate(path, 0)


class Meter:
    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}.meter"
        with path.open("w+b") as file:
            file.truncate(CELLS.size)
            self.cells = memoryview(mmap.mmap(file.fileno(), CELLS.size)).cast("d")
        self.cells[1] = time.time()
        self.cells[2] = time.process_time()
        self.latencies = path.with_suffix(".latencies").open("a", buffering=1)

    def count(self, payload: Mapping[str, Any], now: float) -> None:
        at = payload.get("at")
        if at is not None:
            self.latencies.write(f"{now - at:.6f}\n")
        self.cells[0] += 1


@functools.cache
def meter() -> Meter:
    return Meter(Path(os.environ[FOLDER_VARIABLE]))
