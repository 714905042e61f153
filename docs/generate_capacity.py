"""The tables of the capacity page: what saved figures of benchmarks mean for N workers, jobs and requests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.db.database import DatabaseSettings
from batchwright.engine.retention import RetentionSettings
from batchwright.files.store import INPUT_KEPT_SECONDS

PAGE = Path(__file__).parent / "capacity.md"
_GENERATED = re.compile(r"<!-- generated: ([a-z ]+) -->\n.*?<!-- end -->", re.DOTALL)
FIGURES = Path(__file__).parents[1] / "benchmarks" / "figures"
BENCHMARKS = ("idle", "queue", "batch", "scale", "thousand")
NOT_MEASURED = "not measured"
DAY_SECONDS = 86_400
FILE_DAYS = INPUT_KEPT_SECONDS / DAY_SECONDS
JOB_DAYS = RetentionSettings().succeeded_days
CONNECTIONS_MAX = DatabaseSettings().pool_size + 2

PEAK = 2
BUSY = 0.7
ANSWER_SECONDS, IN_FLIGHT = 10, 300
REQUEST_BYTES, ANSWER_BYTES = 4_000, 1_000
RUN_SECONDS, SLOTS = 1, 100
POOLED = 100
REQUESTS = (10**5, 10**6, 10**7, 10**8, 10**9)
JOBS = (1, 100, 1_000, 10_000)
FLEETS = (100, 300, 1_000)
SHARED = (1, 2, 4, 8)

Runs = Mapping[str, Mapping[str, Any]]
Number = float | None


def read_runs(folder: Path = FIGURES) -> dict[str, dict[str, Any]]:
    files = {name: folder / f"{name}.json" for name in BENCHMARKS}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def capacity(runs: Runs | None = None) -> str:
    """The page, with new text between the marks.

    A figure that no run has measured appears as "not measured", and so does everything that depends on it.
    """
    tables = make_tables(read_runs() if runs is None else runs)
    return _GENERATED.sub(
        lambda mark: "\n".join((f"<!-- generated: {mark[1]} -->\n", *tables[mark[1]], "<!-- end -->")),
        PAGE.read_text(encoding="utf-8"),
    )


def make_tables(runs: Runs) -> dict[str, list[str]]:
    """By the name of their mark."""
    known = {each.name: each.value(runs) for each in COEFFICIENTS}
    requests = [calculate_requests(known, per_day) for per_day in REQUESTS]
    jobs = [calculate_jobs(known, per_second) for per_second in JOBS]
    return {
        "sources": _sources(runs),
        "coefficients": _coefficients(runs),
        "shares": _shares(runs),
        "assumptions": _table(["assumption", "value"], ASSUMPTIONS),
        "requests": _fleet_table("requests per day", requests),
        "request storage": _request_storage(requests),
        "jobs": _fleet_table("jobs/s", jobs),
        "job storage": _job_storage(jobs),
        "limits": _table(["resource", "limit"], [[limit.name, limit.shown] for limit in LIMITS]),
        "breaks": _breaks(requests, jobs),
        "thousand": _thousand(runs),
        "behind": _behind(runs),
    }


# Arithmetic -----------------------------------------------------------------------------------------------------


def given(function: Callable[..., float], *values: Number) -> Number:
    """The result of the function for these values; None if one of them is not known."""
    return None if any(value is None for value in values) else function(*values)


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One number that the page calculates with: `scale` times a figure of a benchmark."""

    name: str
    meaning: str
    benchmark: str
    figure: str
    show: Callable[[float], str]
    scale: float = 1.0

    def value(self, runs: Runs) -> Number:
        found = runs.get(self.benchmark, {}).get("figures", {}).get(self.figure)
        return None if found is None else found * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one load needs: cores, rates and the network at the peak, sizes by day."""

    what: str
    per_second: float
    in_flight: float
    workers: Number
    worker_cores: Number
    worker_bytes: Number
    cores: Number
    connections: Number
    connection_bytes: Number
    log_per_second: Number
    log_per_day: Number
    disk_per_day: Number
    disk_kept: Number
    store_per_day: Number = None
    store_kept: Number = None
    written_per_second: Number = None
    network_per_second: Number = None


def calculate_requests(known: Mapping[str, Number], per_day: float) -> Needs:
    peak = PEAK * per_day / DAY_SECONDS
    in_flight = peak * ANSWER_SECONDS
    work_cores = given(lambda us: peak * us / 1e6, known["request_worker_us"])
    workers = given(
        lambda share, cores: max(1, math.ceil(in_flight / (IN_FLIGHT * share / 100)), math.ceil(cores / BUSY)),
        known["share"],
        work_cores,
    )
    each = (known["busy_core"], known["busy_log"])
    kept = per_day * (REQUEST_BYTES + ANSWER_BYTES)
    return Needs(
        what=f"{per_day:,}",
        per_second=peak,
        in_flight=in_flight,
        disk_per_day=given(lambda size: per_day * size, known["request_disk"]),
        disk_kept=given(lambda size: per_day * size * FILE_DAYS, known["request_disk"]),
        store_per_day=kept,
        store_kept=kept * FILE_DAYS,
        written_per_second=given(lambda size: peak * size, known["request_written"]),
        network_per_second=peak * (REQUEST_BYTES + ANSWER_BYTES),
        **_of_workers(known, workers, work_cores),
        **_of_postgres(known, workers, each, peak, per_day, (known["request_postgres_us"], known["request_log"])),
    )


def calculate_jobs(known: Mapping[str, Number], per_second: float) -> Needs:
    per_day = per_second * DAY_SECONDS
    in_flight = per_second * RUN_SECONDS
    work_cores = given(lambda us: per_second * us / 1e6, known["job_python_us"])
    workers = given(lambda cores: max(1, math.ceil(in_flight / SLOTS), math.ceil(cores / BUSY)), work_cores)
    each = (known["idle_core"], known["idle_log"])
    postgres_us = given(lambda enqueue, run: enqueue + run, known["enqueue_postgres_us"], known["job_postgres_us"])
    return Needs(
        what=f"{per_second:,}",
        per_second=per_second,
        in_flight=in_flight,
        disk_per_day=given(lambda size: per_day * size, known["job_disk"]),
        disk_kept=given(lambda size: per_day * size * JOB_DAYS, known["job_disk"]),
        **_of_workers(known, workers, work_cores),
        **_of_postgres(known, workers, each, per_second, per_day, (postgres_us, known["job_log"])),
    )


def _of_workers(known: Mapping[str, Number], workers: Number, work_cores: Number) -> dict[str, Number]:
    connections = given(lambda n, each: math.ceil(n * each), workers, known["idle_connections"])
    return {
        "workers": workers,
        "worker_cores": given(lambda n, idle, work: n * idle + work, workers, known["worker_core"], work_cores),
        "worker_bytes": given(lambda n, each: n * each, workers, known["worker_bytes"]),
        "connections": connections,
        "connection_bytes": given(lambda n, each: n * each, connections, known["connection_bytes"]),
    }


def _of_postgres(
    known: Mapping[str, Number],
    workers: Number,
    each: tuple[Number, Number],
    peak: float,
    per_day: float,
    work: tuple[Number, Number],
) -> dict[str, Number]:
    """CPU and log: of upkeep, of each worker per second, and of each request or job."""
    (each_core, each_log), (work_us, work_log) = each, work
    core = given(lambda n, upkeep, each: upkeep + n * each, workers, known["idle_core_all"], each_core)
    log = given(lambda n, upkeep, each: upkeep + n * each, workers, known["idle_log_all"], each_log)
    return {
        "cores": given(lambda all_day, us: all_day + peak * us / 1e6, core, work_us),
        "log_per_second": given(lambda all_day, each: all_day + peak * each, log, work_log),
        "log_per_day": given(lambda all_day, each: DAY_SECONDS * all_day + per_day * each, log, work_log),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How much of one resource the PostgreSQL server has that the page compares all loads with."""

    name: str
    need: Callable[[Needs], Number]
    amount: float
    shown: str


def find_breaks(needs: Needs) -> str:
    """The limits that this load exceeds, the most exceeded one first; or the limit that it is closest to."""
    shares = [(limit, given(lambda need, limit=limit: need / limit.amount, limit.need(needs))) for limit in LIMITS]
    measured = sorted(((share, limit.name) for limit, share in shares if share is not None), reverse=True)
    unknown = [limit.name for limit, share in shares if share is None]
    over = [f"{name} ({_factor(share)})" for share, name in measured if share > 1]
    said = [f"**{', then '.join(over)}**"] if over else []
    if not over and measured:
        share, name = measured[0]
        said.append(f"nothing; the closest is {name} ({_factor(share)})")
    if unknown:
        said.append(f"{NOT_MEASURED}: {', '.join(unknown)}")
    return "; ".join(said)


def _factor(share: float) -> str:
    return f"{share:.1f} times" if share > 1 else f"{100 * share:.2g} %"


# Numbers as people read them ------------------------------------------------------------------------------------


def show(value: Number, form: Callable[[float], str]) -> str:
    return NOT_MEASURED if value is None else form(value)


def count(value: float) -> str:
    """The value with three digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    rounded = round(value, 2 - math.floor(math.log10(abs(value))))
    return f"{rounded:,.{digits}f}".rstrip("0").rstrip(".") if digits else f"{rounded:,.0f}"


def whole(value: float) -> str:
    return f"{math.ceil(value):,}"


def size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{count(value)} {unit}"
        value /= 1000
    return f"{count(value)} TB"


def rate(value: float) -> str:
    return f"{size(value)}/s"


def unit(text: str) -> Callable[[float], str]:
    return lambda value: f"{count(value)} {text}"


# The parts of the page ------------------------------------------------------------------------------------------


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _sources(runs: Runs) -> list[str]:
    lines = _table(["benchmark", "machine", "PostgreSQL", "load", "run"], (_source(name, runs) for name in BENCHMARKS))
    if any(run["is_quick"] for run in runs.values()):
        lines.append("**A quick run is short, and its figures are rough.**\n")
    return lines


def _source(name: str, runs: Runs) -> list[str]:
    if name not in runs:
        return [f"`make bench-{name}`", NOT_MEASURED, "", "", ""]
    machine = runs[name]["machine"]
    cells = [f"{machine['processors']} cores, {machine['memory']}", machine["postgresql"], machine["load"]]
    return [f"`make bench-{name}`", *cells, "quick" if runs[name]["is_quick"] else "full"]


def _coefficients(runs: Runs) -> list[str]:
    rows = (
        [
            f"`{each.name}`",
            each.meaning,
            show(each.value(runs), each.show),
            f"`bench-{each.benchmark}`, `{each.figure}`",
        ]
        for each in COEFFICIENTS
    )
    return _table(["name", "meaning", "value", "source"], rows)


def _shares(runs: Runs) -> list[str]:
    found = runs.get("scale", {}).get("figures", {})
    rows = ([f"{workers}", show(found.get(f"share_{workers}"), unit("%"))] for workers in SHARED)
    return _table(["workers", "requests per second, share of the ideal"], rows)


def _fleet_table(first: str, scales: Sequence[Needs]) -> list[str]:
    headings = [first, "per second, peak", "in flight", "workers", "their cores", "their memory", "PostgreSQL cores"]
    headings += ["connections: idle, at most", "with a pooler", "memory of idle connections"]
    rows = (
        [
            each.what,
            count(each.per_second),
            whole(each.in_flight),
            show(each.workers, whole),
            show(each.worker_cores, count),
            show(each.worker_bytes, size),
            show(each.cores, count),
            f"{show(each.connections, whole)}, {show(given(lambda n: n * CONNECTIONS_MAX, each.workers), whole)}",
            show(given(lambda n: min(n, POOLED), each.connections), whole),
            show(each.connection_bytes, size),
        ]
        for each in scales
    )
    return _table(headings, rows)


def _request_storage(scales: Sequence[Needs]) -> list[str]:
    headings = ["requests per day", "log, peak", "log per day", "PostgreSQL's disk per day", "kept"]
    headings += ["files in the store per day", "kept", "workers write, peak", "network of model servers, peak"]
    rows = (
        [
            each.what,
            show(each.log_per_second, rate),
            *(show(value, size) for value in (each.log_per_day, each.disk_per_day, each.disk_kept)),
            *(show(value, size) for value in (each.store_per_day, each.store_kept)),
            *(show(value, rate) for value in (each.written_per_second, each.network_per_second)),
        ]
        for each in scales
    )
    return _table(headings, rows)


def _job_storage(scales: Sequence[Needs]) -> list[str]:
    rows = (
        [
            each.what,
            show(each.log_per_second, rate),
            *(show(value, size) for value in (each.log_per_day, each.disk_per_day, each.disk_kept)),
        ]
        for each in scales
    )
    return _table(["jobs/s", "log", "log per day", "PostgreSQL's disk per day", "kept"], rows)


def _breaks(requests: Sequence[Needs], jobs: Sequence[Needs]) -> list[str]:
    rows = [[f"{each.what} requests per day", find_breaks(each)] for each in requests]
    rows += [[f"{each.what} jobs/s", find_breaks(each)] for each in jobs]
    return _table(["load", "exceeded limits"], rows)


def _thousand(runs: Runs) -> list[str]:
    found = runs.get("thousand", {}).get("figures", {})
    rows = []
    for fleet in FLEETS:
        pairs = ((f"{name}_{fleet}", f"expected_{name}_{fleet}") for name in ("transactions", "core_percent"))
        cells = [show(found.get(name), count) for pair in pairs for name in pair]
        rows.append([f"{fleet:,}", *cells, show(found.get(f"connections_{fleet}"), whole)])
    return _table(["workers", "transactions/s", "expected", "PostgreSQL, % of a core", "expected", "connections"], rows)


def _behind(runs: Runs) -> list[str]:
    found = runs.get("thousand", {}).get("figures", {})
    columns = {
        "behind_workers": ("workers", whole),
        "behind_clients": ("connections to PgBouncer", whole),
        "behind_connections": ("sessions of PostgreSQL", whole),
        "behind_wait_ms": ("mean wait for a session, ms", count),
        "behind_transactions": ("transactions/s", count),
        "behind_core_percent": ("PostgreSQL, % of a core", count),
        "behind_pooler_core_percent": ("PgBouncer, % of a core", count),
    }
    row = [show(found.get(name), form) for name, (_, form) in columns.items()]
    return _table([label for label, _ in columns.values()], [row])


COEFFICIENTS = (
    Coefficient("idle_transactions", "transactions of an idle worker", "idle", "transactions", unit("/s")),
    Coefficient("idle_core", "cores of PostgreSQL for an idle worker", "idle", "core_percent", count, 0.01),
    Coefficient(
        "idle_core_all",
        "cores of PostgreSQL for upkeep, once for all workers",
        "idle",
        "common_core_percent",
        count,
        0.01,
    ),
    Coefficient("idle_connections", "connections of an idle worker", "idle", "connections", count),
    Coefficient(
        "connection_bytes",
        "memory of PostgreSQL for a connection, without shared memory",
        "idle",
        "connection_bytes",
        size,
    ),
    Coefficient("idle_log", "write-ahead log of an idle worker", "idle", "wal_bytes", rate),
    Coefficient("idle_log_all", "write-ahead log of upkeep, once for all workers", "idle", "common_wal_bytes", rate),
    Coefficient("worker_bytes", "resident memory of an idle worker process", "idle", "worker_bytes", size),
    Coefficient("worker_core", "cores of an idle worker process", "idle", "worker_core_percent", count, 0.01),
    Coefficient(
        "job_postgres_us", "CPU of PostgreSQL for a job, from claim to end", "queue", "postgres_us", unit("µs")
    ),
    Coefficient(
        "enqueue_postgres_us", "CPU of PostgreSQL to enqueue a job", "queue", "enqueue_postgres_us", unit("µs")
    ),
    Coefficient(
        "job_python_us", "CPU of the worker for a job, without your operation", "queue", "python_us", unit("µs")
    ),
    Coefficient(
        "enqueue_python_us", "CPU of the program that enqueues a job", "queue", "enqueue_python_us", unit("µs")
    ),
    Coefficient("job_log", "write-ahead log of a job, from enqueue to end", "queue", "wal_bytes", size),
    Coefficient("job_disk", "disk of a finished job: row, events, indexes; no dead rows", "queue", "disk_bytes", size),
    Coefficient("job_rate", "jobs per second in that run", "queue", "rate", unit("/s")),
    Coefficient(
        "request_worker_us",
        "CPU of the worker for a request: plan, send, write files",
        "batch",
        "worker_us",
        unit("µs"),
    ),
    Coefficient("request_postgres_us", "CPU of PostgreSQL for a request", "batch", "postgres_all", unit("µs")),
    Coefficient("request_log", "write-ahead log of a request", "batch", "wal_bytes", size),
    Coefficient("request_rows", "rows inserted, updated or deleted for a request", "batch", "rows", count),
    Coefficient("request_disk", "growth of the database by a request", "batch", "database_bytes", size),
    Coefficient(
        "request_written", "bytes a worker writes for a request: journal and files", "batch", "written_bytes", size
    ),
    Coefficient("request_rate", "requests per second of one worker in that run", "batch", "rate", unit("/s")),
    Coefficient(
        "busy_core", "cores of PostgreSQL for a worker that has requests", "scale", "busy_core_percent", count, 0.01
    ),
    Coefficient("busy_log", "write-ahead log of a worker that has requests", "scale", "busy_wal_bytes", rate),
    Coefficient(
        "share", "requests per second of one batch on eight workers, share of the ideal", "scale", "share", unit("%")
    ),
)

ASSUMPTIONS = (
    ("peak of requests", f"{PEAK} times the average of the day"),
    ("time of an answer", f"{ANSWER_SECONDS} s"),
    ("requests in flight per worker", f"{IN_FLIGHT} (`inference.concurrency`)"),
    ("a request and its answer", f"{size(REQUEST_BYTES)} and {size(ANSWER_BYTES)}"),
    ("files are kept", f"{FILE_DAYS:g} days"),
    ("time of a job, almost all of it spent waiting", f"{RUN_SECONDS} s"),
    ("jobs at once per worker", f"{SLOTS} (`worker.concurrency`)"),
    ("jobs are kept", f"{JOB_DAYS:g} days (`retention.succeeded_days`)"),
    ("CPU of a worker", f"at most {100 * BUSY:g} % of a core"),
    ("connections of a busy worker", f"at most {CONNECTIONS_MAX} (`database.pool_size` and 2)"),
    ("sessions of a pooler", f"at most {POOLED}"),
)

LIMITS = (
    Limit(
        name="processors",
        need=lambda needs: needs.cores,
        amount=16 * BUSY,
        shown=f"16 cores, at most {100 * BUSY:g} % busy",
    ),
    Limit(
        name="connections",
        need=lambda needs: given(lambda n: n * CONNECTIONS_MAX, needs.workers),
        amount=500,
        shown="500, if all workers are busy",
    ),
    Limit(name="disk", need=lambda needs: needs.disk_kept, amount=2e12, shown=size(2e12)),
    Limit(name="write-ahead log", need=lambda needs: needs.log_per_second, amount=50e6, shown=rate(50e6)),
)
