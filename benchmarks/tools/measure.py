"""Small measurements that are usable on a shared machine."""

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

CALIBRATION_ROUNDS = 5
CALIBRATION_STEPS = 1_000_000


def calibrate() -> float:
    """Milliseconds that a fixed loop takes by the clock; it grows when others use the machine."""
    return statistics.median(loop_milliseconds() for _ in range(CALIBRATION_ROUNDS))


def loop_milliseconds() -> float:
    before = time.perf_counter()
    total = 0
    for step in range(CALIBRATION_STEPS):
        total += step
    return (time.perf_counter() - before) * 1000


def family(pid: int) -> list[psutil.Process]:
    """A process and everything under it."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def cpu_seconds(process: psutil.Process) -> float:
    """Processor seconds of one living process, all its threads, and its children that ended; 0.0 when it is gone."""
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return times.user + times.system + times.children_user + times.children_system
    return 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed."""
    ordered = sorted(values)
    rank = max(0, -(-len(ordered) * percent // 100) - 1)
    return ordered[int(rank)]


def kill(processes: Sequence[psutil.Process]) -> None:
    """Ends what is left of processes that we started; psutil does not confuse a reused pid with theirs."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
