"""`batchwright demo --pipeline`: a parent with children, a killed worker, and a check that nothing was lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchwright.app import AsyncBatchwright
from batchwright.cli.commands.watch import Lines, follow, watch_live
from batchwright.demo.stage import (
    LEASE_SECONDS,
    LOOK_SECONDS,
    SQL,
    WORKERS,
    Say,
    fetch_jobs,
    make_say,
    own_environment,
    own_folder,
    read_clock,
    run_workers,
    show_dashboard,
    wait_until_ready,
)
from batchwright.engine.jobs import JobId
from batchwright.engine.views import JobFilter
from batchwright.errors import BatchwrightError
from batchwright.settings import load_settings
from batchwright.states import JOB, JobStatus

_OPERATIONS = "batchwright.demo.operations"
_KILL_AT = 0.3
_END_SECONDS = 30.0
_SETTINGS = """\
[database]
folder = "{folder}"

[api]
port = 0

[engine]
lease_seconds = {lease}
rescue_jitter_seconds = 0.5

[worker]
concurrency = 6
stop_grace_seconds = 5
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The figures of the database at the end."""

    children: int
    succeeded: int
    effects: int
    distinct_effects: int
    starts: int
    rescued: int
    rescue_seconds: float | None
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.succeeded == self.effects == self.distinct_effects == self.children


async def run_pipeline(children: int, out: Console, *, keep: bool = False) -> Tally:
    say = make_say(out)
    say("Batchwright demo", "bold")
    with own_folder() as folder:
        environment = own_environment(folder, _SETTINGS.format(folder=folder / "postgres", lease=LEASE_SECONDS))
        say(f"starting its own PostgreSQL in {folder}", "")
        async with AsyncBatchwright(settings=load_settings(environment=environment)) as batchwright:
            await batchwright.pool.rows(SQL["make_effects"])
            arguments = ("--processes", str(WORKERS), _OPERATIONS)
            async with (
                run_workers(environment, folder, "workers", *arguments) as supervisor,
                show_dashboard(batchwright, say) as dashboard,
            ):
                await wait_until_ready(batchwright, [supervisor])
                say(f"{WORKERS} worker processes are ready, with leases of {LEASE_SECONDS} s", "")
                tally = await _run_and_report(batchwright, children, out, say)
                _print_tally(tally, out)
                if keep:
                    await dashboard.stay()
    return tally


async def _run_and_report(batchwright: AsyncBatchwright, children: int, out: Console, say: Say) -> Tally:
    """Run the pipeline, from the submission of its first job to the end of its last."""
    began = time.monotonic()
    id = await batchwright.enqueue("demo.plan", {"children": children})
    say(f"submitted a pipeline: one parent, {children} children, and a report when they are done", "")
    killer = asyncio.create_task(_kill_and_see(batchwright, id, children, say))
    try:
        await _show(batchwright, id, out)
        killed_at = await asyncio.wait_for(killer, _END_SECONDS)
    except TimeoutError as error:
        raise BatchwrightError("the pipeline ended before a worker could be killed; use a larger --children") from error
    finally:
        killer.cancel()
    for job in await fetch_jobs(batchwright, JobFilter(pipeline_id=id, job_type="demo.report")):
        await batchwright.wait(job.id, timeout=_END_SECONDS)
    return await _count(batchwright, id, children, killed_at, time.monotonic() - began)


async def _show(batchwright: AsyncBatchwright, id: JobId, out: Console) -> None:
    if out.quiet:
        await follow(batchwright, id, lambda *_: None)
    elif out.is_terminal:
        await watch_live(batchwright, id, out)
    else:
        await follow(batchwright, id, Lines())


async def _kill_and_see(batchwright: AsyncBatchwright, id: JobId, children: int, say: Say) -> datetime:
    """Kill a worker. Returns the time of the kill."""
    worker = await _choose(batchwright, id, children)
    pid = int(worker.split(":")[-2])
    os.kill(pid, signal.SIGKILL)
    at = await read_clock(batchwright)
    held = (await _find_holders(batchwright, id))[worker]
    say(f"✗ killed worker {pid} with SIGKILL while it held {held} jobs; a new worker takes its place", "bold red")
    held_still = held
    while held_still:
        await asyncio.sleep(LOOK_SECONDS)
        held_still = (await _find_holders(batchwright, id))[worker]
    say("✓ its lease expired: its jobs are back in the queue, and no attempt is used up", "bold green")
    return at


async def _choose(batchwright: AsyncBatchwright, id: JobId, children: int) -> str:
    """The worker with the most open children, after some of the children have ended."""
    while True:
        counts = await batchwright.queue.count_children(id)
        if sum(n for status, n in counts.items() if status in JOB.terminal) >= children * _KILL_AT:
            holders = await _find_holders(batchwright, id)
            if holders:
                return holders.most_common(1)[0][0]
        await asyncio.sleep(LOOK_SECONDS)


async def _find_holders(batchwright: AsyncBatchwright, id: JobId) -> Counter[str]:
    running = await fetch_jobs(batchwright, JobFilter(statuses=(JobStatus.RUNNING,), parent_job_id=id))
    return Counter(job.locked_by for job in running if job.locked_by is not None)


async def _count(batchwright: AsyncBatchwright, id: JobId, children: int, killed_at: datetime, took: float) -> Tally:
    counts = await batchwright.queue.count_children(id)
    ((effects, distinct),) = await batchwright.pool.rows(SQL["effects"])
    ((starts, rescued),) = await batchwright.pool.rows(SQL["events"], {"id": id})
    ((rescued_at,),) = await batchwright.pool.rows(SQL["rescued_at"])
    return Tally(
        children=children,
        succeeded=counts.get(JobStatus.SUCCEEDED, 0),
        effects=effects,
        distinct_effects=distinct,
        starts=starts,
        rescued=rescued,
        rescue_seconds=None if rescued_at is None else (rescued_at - killed_at).total_seconds(),
        seconds=took,
    )


def _print_tally(tally: Tally, out: Console) -> None:
    table = Table(show_header=False, title="Result", title_justify="left", title_style="bold")
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row("children that succeeded", f"{tally.succeeded} of {tally.children}")
    table.add_row(
        "rows they wrote, each in the commit of its success", f"{tally.effects}, {tally.distinct_effects} distinct"
    )
    table.add_row("starts of children", f"{tally.starts}")
    table.add_row("rescued from the killed worker", f"{tally.rescued}")
    if tally.rescue_seconds is not None:
        table.add_row(f"all of them back in the queue (lease {LEASE_SECONDS} s)", f"after {tally.rescue_seconds:.1f} s")
    table.add_row("time of the pipeline", f"{tally.seconds:.1f} s")
    table.add_row("throughput", f"{tally.children / tally.seconds:.1f} children/s")
    out.print(table)
    if tally.is_right:
        out.print(Text("✓ A worker died, and nothing was lost or done twice.", "bold green"))
    else:
        out.print(Text("✗ The numbers do not add up: this is a bug in Batchwright.", "bold red"))
