"""Lists, counts and metrics over a million jobs and ten million events."""

import contextlib
import io
import re
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from batchwright import AsyncBatchwright
from batchwright.cli.commands.jobs import fetch_newest
from batchwright.engine import metrics
from batchwright.engine.jobs import JobId
from batchwright.engine.upkeep import SQL as UPKEEP
from batchwright.engine.views import JobFilter
from batchwright.states import JobStatus
from benchmarks.fleet.idle import migrate
from benchmarks.tools import report
from benchmarks.tools.sections import Ground

NAME = "lists"
TITLE = "Lists, counts and metrics"
SECONDS_MAX = 1_500.0
JOBS = 1_000_000
EVENTS = 10
TIMES = 5
MILLISECONDS_MAX = 100.0
LIMITED_MILLISECONDS_MAX = 1_000.0
LIMITED = frozenset(
    (
        "job list --type (few)",
        "job list --queue (none)",
        "job list --code",
        "job list --status failed --type",
        "job list --status succeeded",
        "/metrics: all",
        "/metrics: depths",
    )
)
"""Queries that no index serves: they read up to a limit that they state, 100,000 jobs."""
ROOT = JobId(UUID(int=1))
"""A parent with a fifth of all jobs as its children."""
SETTINGS = f"""
    {JOBS:,} jobs that have ended, of 11 tenants in 20 queues, 6 % of them FAILED and none of those among the newest
    tenth, {EVENTS} events each, a parent with a fifth of them as its children, and 4,000 open jobs that are older than
    all others ("past"); then {JOBS:,} more that are due, half of them in one queue ("backlog"). Each question is asked
    {TIMES} times after one that is not counted, through the functions that the CLI and the HTTP API call; the figure is
    the median.
"""
Question = Callable[[], Awaitable[object]]


async def measure(ground: Ground) -> dict[str, Any]:
    jobs, events = ground.pick(JOBS, 50_000), ground.pick(EVENTS, 2)
    with ground.server.database() as url:
        await migrate(url)
        run(url, "history.sql", jobs=jobs, events=events)
        ground.tell("  the history is loaded")
        past = await ask_all(url)
        run(url, "backlog.sql", jobs=jobs)
        ground.tell("  the backlog is loaded")
        return {"past": past, "backlog": await ask_all(url)}


def run(url: str, file: str, **sizes: int) -> None:
    text = Path(__file__).with_name(file).read_text()
    for name, size in sizes.items():
        text = re.sub(rf"(?<!:):{name}\b", str(size), text)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(text.encode())
        connection.execute("VACUUM ANALYZE")


async def ask_all(url: str) -> dict[str, float]:
    async with AsyncBatchwright(database_url=url) as client:
        with contextlib.redirect_stderr(io.StringIO()):  # searches say how far they have looked
            return {name: await ask(question) for name, question in questions(client).items()}


async def ask(question: Question) -> float:
    await question()
    taken = []
    for _ in range(TIMES):
        began = time.perf_counter()
        await question()
        taken.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(taken), 1)


def questions(client: AsyncBatchwright) -> dict[str, Question]:
    return {**listing(client), **counting(client), **measuring(client)}


def listing(client: AsyncBatchwright) -> dict[str, Question]:
    """A page of 50, as `job list` and `GET /v1/jobs` read it."""
    filters = {
        "": JobFilter(),
        "--tenant": JobFilter(tenant="tenant_3"),
        **{f"--status {one.lower()}": JobFilter(statuses=(one,)) for one in JobStatus},
        "--status failed --tenant": JobFilter(statuses=(JobStatus.FAILED,), tenant="tenant_3"),
        "--status failed --type": JobFilter(statuses=(JobStatus.FAILED,), job_type="rare"),
        "--status failed --code": JobFilter(statuses=(JobStatus.FAILED,), error_code="code_3"),
        "--status queued --queue": JobFilter(statuses=(JobStatus.QUEUED,), queue="queue_7"),
        "--status queued --status running": JobFilter(statuses=(JobStatus.QUEUED, JobStatus.RUNNING)),
        "--type (few)": JobFilter(job_type="rare"),
        "--queue": JobFilter(queue="queue_7"),
        "--queue (none)": JobFilter(queue="nowhere"),
        "--code": JobFilter(error_code="code_3"),
        "--parent": JobFilter(parent_job_id=ROOT),
        "--parent --status failed": JobFilter(parent_job_id=ROOT, statuses=(JobStatus.FAILED,)),
        "--pipeline": JobFilter(pipeline_id=ROOT),
    }
    return {
        f"job list {name}".strip(): lambda wanted=wanted: fetch_newest(client, wanted, 50)
        for name, wanted in filters.items()
    }


def counting(client: AsyncBatchwright) -> dict[str, Question]:
    known = [f"type_{n}" for n in range(10)]
    return {
        "inbox": lambda: client.views.inbox(),
        "inbox --tenant": lambda: client.views.inbox(tenant="tenant_3"),
        "queue list": lambda: client.views.queues(),
        "queue list --tenant": lambda: client.views.queues_of_tenant("tenant_3"),
        "worker list": lambda: client.views.workers(),
        "operation list": lambda: client.views.operations(),
        "pipeline show": lambda: client.views.pipeline(ROOT),
        "job show: children": lambda: client.queue.count_children(ROOT),
        "job show: events": lambda: client.queue.latest_events(ROOT, limit=10),
        "children, a page": lambda: client.queue.children_after(ROOT, 1, UUID(int=0)),
        "pipeline cancel: what is open": lambda: client.views.open_members(ROOT, limit=200),
        "types that no worker knows": lambda: client.queue.unknown_types(known),
    }


def measuring(client: AsyncBatchwright) -> dict[str, Question]:
    database = client.queue.database
    limits = {"queues_max": 200, "jobs_max": metrics._JOBS_MAX}
    standing = ("depths", "taken", "failed")
    return {
        "/metrics: all": lambda: metrics.read_standing(database),
        **{f"/metrics: {name}": lambda name=name: database.ask(metrics.SQL[name], limits) for name in standing},
        "/metrics: counted": lambda: metrics.read_counts(database),
        "upkeep: look": lambda: database.ask(UPKEEP["look"], {"soon_seconds": 3.0}),
    }


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    found = []
    for stage in ("past", "backlog"):
        asked = (figures or {}).get(stage, {})
        plain = max((taken for name, taken in asked.items() if name not in LIMITED), default=None)
        limited = max((taken for name, taken in asked.items() if name in LIMITED), default=None)
        found.append(report.at_most(f"slowest question, {stage}", MILLISECONDS_MAX, plain, " ms"))
        found.append(report.at_most(f"slowest up to a stated limit, {stage}", LIMITED_MILLISECONDS_MAX, limited, " ms"))
    return found


def tables(figures: dict[str, Any]) -> str:
    rows = [[name, f"{past:.1f}", f"{figures['backlog'][name]:.1f}"] for name, past in figures["past"].items()]
    return report.table(["milliseconds", "past", "with a backlog"], rows)
