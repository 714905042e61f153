"""One contestant, one run: fresh database, its own processes, everything counted."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg

from benchmarks.peers import noop
from benchmarks.tools import measure
from benchmarks.tools.server import Server, pinned_horizon

POLL_SECONDS = 0.02
STOP_SECONDS = 5.0
STDERR_CHARACTERS = 600
WARM_UP_JOBS = 10


class RunError(Exception):
    """A contestant that did not finish; the message goes into the table instead of a figure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """What a peer's `describe` says. `unavailable` is the reason when it cannot run at all."""

    jobs: int = 0
    jobs_quick: int = 0
    module: str
    name: str
    package: str = ""
    processes: int = 0
    settings: str = ""
    unavailable: str = ""
    unfinished: dict[str, str] = field(default_factory=dict)
    variants: tuple[str, ...] = ()
    version: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Figures of one throughput run; PostgreSQL's processor time is None on a server that is elsewhere.

    `disk_bytes` is what a finished job takes without dead rows; None where other rows are in the way.
    """

    calibration_after: float
    calibration_before: float
    disk_bytes: float | None
    enqueue_postgres_us: float | None
    enqueue_python_us: float
    enqueue_rate: float
    enqueue_wal_bytes: float
    jobs: int
    name: str
    postgres_us: float | None
    python_us: float
    rate: float
    round: int
    variant: str
    wal_bytes: float

    @property
    def cpu_us(self) -> float | None:
        return None if self.postgres_us is None else self.postgres_us + self.python_us


def describe(module: str) -> Contestant:
    try:
        answer = call(module, "describe", seconds=60)
    except RunError as error:
        return Contestant(module=module, name=module, unavailable=str(error))
    answer["variants"] = tuple(answer.get("variants", ()))
    return Contestant(module=module, **answer)


def throughput(
    server: Server,
    contestant: Contestant,
    variant: str,
    jobs: int,
    *,
    finished_rows: int = 0,
    limit_seconds: float,
    pinned: bool = False,
    round_number: int = 1,
) -> Run:
    calibration_before = measure.calibrate()
    with server.database() as url, tempfile.TemporaryDirectory(prefix="bench-meter-") as folder:
        command = Command(contestant.module, url, variant, limit_seconds)
        command("migrate")
        if finished_rows and not command("history", finished_rows)["jobs"]:
            raise RunError("keeps no finished rows")
        server.checkpoint()
        disk_before, wal_before, cpu_before = server.disk_bytes(url), server.wal_bytes(), server.cpu_seconds()
        enqueued = command("enqueue", jobs)
        cpu_enqueued, wal_enqueued = server.cpu_seconds(), server.wal_bytes()
        server.scalar("VACUUM ANALYZE", url)
        with pinned_horizon(url) if pinned else nullcontext():
            spent = drain(server, contestant, command, Path(folder), jobs)
        calibration_after = measure.calibrate()
        is_alone = not (finished_rows or pinned)
        disk_bytes = (compact_bytes(server, url) - disk_before) / jobs if is_alone else None
    return Run(
        calibration_after=calibration_after,
        calibration_before=calibration_before,
        disk_bytes=disk_bytes,
        enqueue_postgres_us=per_job(cpu_before, cpu_enqueued, jobs),
        enqueue_python_us=enqueued["cpu_seconds"] / jobs * 1e6,
        enqueue_rate=jobs / enqueued["seconds"],
        enqueue_wal_bytes=(wal_enqueued - wal_before) / jobs,
        jobs=jobs,
        name=contestant.name,
        round=round_number,
        variant=variant,
        **spent,
    )


def compact_bytes(server: Server, url: str) -> int:
    """The size of a database without dead rows, whose space the next rows reuse."""
    server.scalar("VACUUM FULL", url)
    return server.disk_bytes(url)


def start_latencies(
    server: Server, contestant: Contestant, variant: str, jobs: int, *, limit_seconds: float
) -> list[float]:
    """Seconds from just before the enqueue call to the first line of the operation, on idle workers."""
    with server.database() as url, tempfile.TemporaryDirectory(prefix="bench-meter-") as folder:
        command = Command(contestant.module, url, variant, limit_seconds)
        command("migrate")
        with crew(contestant, command, Path(folder)) as workers:
            command("latency", WARM_UP_JOBS)
            wait_started(workers, Path(folder), WARM_UP_JOBS, limit_seconds)
            noop.forget_latencies(Path(folder))
            command("latency", jobs)
            wait_started(workers, Path(folder), WARM_UP_JOBS + jobs, limit_seconds)
        return noop.latencies(Path(folder))


@dataclass(frozen=True, slots=True)
class Command:
    """A peer's command line with the database and the variant filled in."""

    module: str
    url: str
    variant: str
    limit_seconds: float

    def __call__(self, name: str, jobs: int = 0) -> dict[str, Any]:
        return call(self.module, *self.arguments(name, jobs), seconds=self.limit_seconds)

    def arguments(self, name: str, jobs: int = 0) -> list[str]:
        return [name, "--url", self.url, "--variant", self.variant, "--jobs", str(jobs)]


def call(module: str, *arguments: str, seconds: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command_line(module, *arguments), capture_output=True, check=False, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"`{arguments[0]}` took longer than {seconds:g} s") from None
    if done.returncode != 0:
        raise RunError(f"`{arguments[0]}` failed: {last_line(done.stderr)}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def command_line(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def drain(server: Server, contestant: Contestant, command: Command, folder: Path, jobs: int) -> dict[str, float | None]:
    """Runs the workers until every job is settled in the database."""
    wal_before = server.wal_bytes()
    with crew(contestant, command, folder) as workers:
        baseline = wait_first(server, workers, folder, command.limit_seconds)
        wait_started(workers, folder, jobs, command.limit_seconds)
        wait_settled(contestant, command)
        finished_at, cpu_after = time.time(), server.cpu_seconds()
        readings = noop.readings(folder)
        python_seconds = worker_cpu_seconds(workers, readings, baseline.workers)
    started = sum(reading.started for reading in readings)
    if started != jobs:
        raise RunError(f"started {started:,} operations for {jobs:,} jobs")
    return {
        "postgres_us": per_job(baseline.postgres, cpu_after, max(1, jobs - baseline.started)),
        "python_us": python_seconds / jobs * 1e6,
        "rate": jobs / (finished_at - min(reading.first_at for reading in readings)),
        "wal_bytes": (server.wal_bytes() - wal_before) / jobs,
    }


@contextmanager
def crew(contestant: Contestant, command: Command, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The worker processes, ended one by one when the block ends."""
    environment = {**os.environ, noop.FOLDER_VARIABLE: str(folder)}
    workers: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        for index in range(contestant.processes):
            errors = stack.enter_context((folder / f"{index}.stderr").open("w+"))
            workers.append(
                subprocess.Popen(
                    command_line(command.module, *command.arguments("work")),
                    env=environment,
                    stderr=errors,
                    stdout=subprocess.DEVNULL,
                    text=True,
                )
            )
        try:
            yield workers
        finally:
            stop(workers)


def stop(workers: list[subprocess.Popen[str]]) -> None:
    family = processes(workers)
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(timeout=max(0.1, deadline - time.monotonic()))
    measure.kill(family)
    for worker in workers:
        worker.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """Processor seconds at the first sign of work, and how many jobs had started by then.

    Imports and connecting come before it. `workers` counts for processes that run no operations themselves (a
    supervisor); the others know their own first operation exactly.
    """

    postgres: float | None
    started: int
    workers: dict[int, float]


def wait_first(server: Server, workers: list[subprocess.Popen[str]], folder: Path, limit_seconds: float) -> Baseline:
    wait_started(workers, folder, 1, limit_seconds)
    return Baseline(
        postgres=server.cpu_seconds(),
        started=sum(reading.started for reading in noop.readings(folder)),
        workers={process.pid: measure.cpu_seconds(process) for process in processes(workers)},
    )


def wait_started(workers: list[subprocess.Popen[str]], folder: Path, jobs: int, limit_seconds: float) -> None:
    """Waits until this number of operations has begun."""
    deadline = time.monotonic() + limit_seconds
    while (started := sum(reading.started for reading in noop.readings(folder))) < jobs:
        if time.monotonic() > deadline:
            raise RunError(f"started {started:,} of {jobs:,} jobs in {limit_seconds:g} s")
        check_alive(workers, folder)
        time.sleep(POLL_SECONDS)


def wait_settled(contestant: Contestant, command: Command) -> None:
    deadline = time.monotonic() + command.limit_seconds
    options = f"-c statement_timeout={int(command.limit_seconds * 1000)}"
    with psycopg.connect(command.url, autocommit=True, options=options) as connection:
        while True:
            asked_at = time.monotonic()
            try:
                row = connection.execute(contestant.unfinished[command.variant]).fetchone()
            except psycopg.errors.QueryCanceled:
                raise RunError(f"counting its unsettled jobs takes more than {command.limit_seconds:g} s") from None
            if row is None or not row[0]:
                return
            if asked_at > deadline:
                raise RunError(f"{row[0]:,} jobs were started but never settled")
            # An expensive query (Awa's view takes 60 ms) runs less often, so that it costs little.
            time.sleep(max(POLL_SECONDS, 3 * (time.monotonic() - asked_at)))


def worker_cpu_seconds(
    workers: list[subprocess.Popen[str]], readings: list[noop.Reading], resting: dict[int, float]
) -> float:
    """Processor seconds since each process's first operation: imports and connecting are not the queue."""
    first = {**resting, **{reading.pid: reading.first_cpu_seconds for reading in readings}}
    return sum(measure.cpu_seconds(each) - first.get(each.pid, 0.0) for each in processes(workers))


def processes(workers: list[subprocess.Popen[str]]) -> list[psutil.Process]:
    return [process for worker in workers for process in measure.family(worker.pid)]


def check_alive(workers: list[subprocess.Popen[str]], folder: Path) -> None:
    for index, worker in enumerate(workers):
        if worker.poll() is not None:
            raise RunError(f"a worker ended by itself: {last_line((folder / f'{index}.stderr').read_text())}")


def per_job(before: float | None, after: float | None, jobs: int) -> float | None:
    return None if before is None or after is None else (after - before) / jobs * 1e6


def last_line(text: str) -> str:
    """The last line that mentions an error, or else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()]
    return [*lines, *telling, "no message"][-1 if not lines else -2][:STDERR_CHARACTERS]
