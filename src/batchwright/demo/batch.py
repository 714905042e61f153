"""`batchwright demo`: a batch over three simulated models and two workers, one of which is killed.

simulated model server, PostgreSQL, two workers ─▶ a file of requests ─▶ a batch ─▶ SIGKILL after a third
─▶ the other worker takes over ─▶ a check of the requests that the server got, the tokens saved, and the manifest
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from batchwright.app import AsyncBatchwright
from batchwright.batches.commands.watch import Lines, OnLook, View, begin_view, follow, show_live
from batchwright.batches.local import SenderLoad, Silence
from batchwright.batches.output.verify import verify
from batchwright.batches.part import BatchesPart
from batchwright.batches.plan.shards import Shard
from batchwright.batches.store import Batch, NewBatch
from batchwright.batches.submission import create, store_input
from batchwright.cli.show import number, size
from batchwright.db.database import Pool
from batchwright.demo.report import Report, print_report
from batchwright.demo.requests import CACHE_BLOCKS, MODELS, input_order_share, write_requests
from batchwright.demo.stage import (
    LEASE_SECONDS,
    LOOK_SECONDS,
    SQL,
    WORKERS,
    Say,
    Tethered,
    fetch_jobs,
    make_say,
    own_environment,
    own_folder,
    read_clock,
    run_workers,
    show_dashboard,
    wait_until_ready,
)
from batchwright.engine.jobs import DEFAULT_TENANT, Job, JobId
from batchwright.engine.views import JobFilter
from batchwright.errors import BatchwrightError
from batchwright.settings import load_settings
from batchwright.simulator import Remote, running_process
from batchwright.simulator.bodies import CHAT
from batchwright.simulator.prefix_cache import BLOCK_TOKENS
from batchwright.states import JobStatus

_KILL_AT = 1 / 3
_IN_FLIGHT_MAX = 16
"""Requests that one worker may have in flight to one model."""
_OUTPUT_TOKENS = 20
_SAMPLES = 2
_SAMPLE_BYTES = 64 * 1024
_SECONDS_MAX = 120.0
_REQUESTS_PER_SECOND_MIN = 10.0
_SETTINGS = """\
[database]
folder = "{folder}"

[api]
port = 0

[engine]
lease_seconds = {lease}
rescue_jitter_seconds = 0.5

[worker]
stop_grace_seconds = 5

[batches]
checkpoint_seconds = 0.25

[inference]
concurrency = {concurrency}
model_concurrency_max = {in_flight}

[global_inference_gateway]
url = "{url}"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a worker held when it was killed, and when another worker got the first answer for it."""

    pid: int
    shards: int
    in_flight: int
    takeover_seconds: float | None


@dataclass(slots=True)
class Server:
    """The simulated model server; we poll its number of requests in flight."""

    remote: Remote
    in_flight: int = 0

    def load(self) -> SenderLoad:
        return SenderLoad(self.in_flight, None)

    def silence(self) -> Silence:
        return Silence(0.0)

    def trouble(self) -> str | None:
        return None

    def advice(self) -> str | None:
        return None

    async def stats(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.remote.stats)

    async def watch(self) -> None:
        """Poll the server, until cancelled."""
        while True:
            with contextlib.suppress(OSError):  # `Stage.check` reports that the server is gone
                self.in_flight = (await self.stats())["in_flight"]
            await asyncio.sleep(5 * LOOK_SECONDS)

    async def count_aborted(self) -> int:
        """Number of requests whose client is gone, as soon as it no longer changes."""
        before = -1
        while (found := int((await self.stats())["aborted"]["total"])) != before:
            before = found
            await asyncio.sleep(LOOK_SECONDS)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Everything that runs for the demo."""

    batchwright: AsyncBatchwright
    server: Server
    crew: Sequence[Tethered]
    folder: Path
    killed: set[int] = field(default_factory=set)

    @property
    def part(self) -> BatchesPart:
        return self.batchwright.part(BatchesPart)

    async def batch(self, id: str) -> Batch:
        return await self.part.batches.get(id, tenant=None)

    def check(self) -> None:
        """Raise an error if a process other than the killed worker has ended."""
        if (code := self.server.remote.process.poll()) is not None:
            raise BatchwrightError(f"the simulated model server has ended with {code}")
        for one in self.crew:
            if one.has_ended and one.process.pid not in self.killed:
                raise BatchwrightError(f"a worker of the demo has ended unexpectedly: {one.last_lines()}")

    async def kill(self, pid: int) -> None:
        (victim,) = [one for one in self.crew if one.process.pid == pid]
        self.killed.add(pid)
        victim.process.kill()
        await victim.process.wait()


async def run_batch(requests: int, out: Console, *, keep: bool = False) -> Report:
    say = make_say(out)
    say("Batchwright demo", "bold")
    with own_folder() as folder, _start_simulator(say) as remote:
        environment = own_environment(folder, _settings_text(folder, remote.url))
        say(f"starting its own PostgreSQL in {folder}", "")
        async with (
            AsyncBatchwright(settings=load_settings(environment=environment)) as batchwright,
            _start_workers(environment, folder) as crew,
            show_dashboard(batchwright, say) as dashboard,
        ):
            await wait_until_ready(batchwright, crew)
            say(f"{WORKERS} worker processes are ready, with leases of {LEASE_SECONDS} s", "")
            stage = Stage(batchwright=batchwright, server=Server(remote), crew=crew, folder=folder)
            report = await _run_and_report(stage, requests, out, say)
            print_report(report, out)
            if keep:
                await dashboard.stay()
            return report


def _settings_text(folder: Path, url: str) -> str:
    return _SETTINGS.format(
        folder=folder / "postgres",
        lease=LEASE_SECONDS,
        concurrency=_IN_FLIGHT_MAX * len(MODELS),
        in_flight=_IN_FLIGHT_MAX,
        url=url,
    )


@contextlib.contextmanager
def _start_simulator(say: Say) -> Iterator[Remote]:
    models = [argument for model in MODELS for argument in ("--model", f"{model.name}:{model.profile}")]
    lengths = ("--output-tokens", str(_OUTPUT_TOKENS), "--cache-blocks", str(CACHE_BLOCKS))
    with running_process(*models, *lengths) as remote:
        say(f"a simulated model server is up on {remote.url}: no model runs, and it costs nothing", "")
        names = ", ".join(f"{model.name} (as {model.profile})" for model in MODELS)
        say(f"  {names}, with prefix caches of {number(BLOCK_TOKENS * CACHE_BLOCKS)} tokens", "")
        yield remote


@contextlib.asynccontextmanager
async def _start_workers(environment: dict[str, str], folder: Path) -> AsyncIterator[Sequence[Tethered]]:
    """Start the workers. Nothing replaces a worker that dies: the other one does its work."""
    async with contextlib.AsyncExitStack() as stack:
        names = [f"worker-{place}" for place in range(1, WORKERS + 1)]
        yield [await stack.enter_async_context(run_workers(environment, folder, name)) for name in names]


# The batch --------------------------------------------------------------------------------------------------------


async def _run_and_report(stage: Stage, requests: int, out: Console, say: Say) -> Report:
    """Run the batch, from the input file to the report."""
    path = stage.folder / "requests.jsonl"
    prompts = await asyncio.to_thread(write_requests, path, requests)
    batch = await _submit(stage.part, path)
    what = f"{number(requests)} requests in random order, with {number(prompts)} long system prompts among them"
    say(f"submitted a batch of {size(path.stat().st_size)}: {what}", "")
    batch, loss = await _watch_and_kill(stage, batch, out, say, _SECONDS_MAX + requests / _REQUESTS_PER_SECOND_MIN)
    return await _report(stage, batch, loss, requests, path)


async def _submit(part: BatchesPart, path: Path) -> Batch:
    most = part.settings.file_bytes_max
    file = await store_input(part.files, path, tenant=DEFAULT_TENANT, bytes_max=most)
    new = NewBatch(tenant=DEFAULT_TENANT, endpoint=CHAT, input_file_id=file.id, completion_window="24h")
    batch, _ = await create(part.batches, part.core.catalog, new, must_be_served=True)
    part.core.doorbell.ring([batch.queue])
    return batch


async def _watch_and_kill(stage: Stage, batch: Batch, out: Console, say: Say, most: float) -> tuple[Batch, Loss]:
    """The ended batch, and what the kill cost. If one of the two tasks fails, the other is cancelled."""
    view = await begin_view(stage.part, batch.id, sending=stage.server)
    watching = asyncio.create_task(stage.server.watch())
    showing = asyncio.create_task(_show(stage, view, out))
    killing = asyncio.create_task(_kill_and_see(stage, batch, say))
    try:
        async with asyncio.timeout(most):
            return await asyncio.gather(showing, killing)
    except TimeoutError as error:
        raise BatchwrightError(f"the batch {batch.id} has not ended within {most:g} s") from error
    finally:
        for task in (watching, showing, killing):
            task.cancel()
        await asyncio.gather(watching, showing, killing, return_exceptions=True)


async def _show(stage: Stage, view: View, out: Console) -> Batch:
    if out.is_terminal and not out.quiet:
        with show_live(view, out) as draw:
            return await follow(stage.part, view, _check_each_time(stage, draw))
    return await follow(stage.part, view, _check_each_time(stage, (lambda _: None) if out.quiet else Lines()))


def _check_each_time(stage: Stage, on_look: OnLook) -> OnLook:
    def look(view: View) -> None:
        stage.check()
        on_look(view)

    return look


# The kill ---------------------------------------------------------------------------------------------------------


async def _kill_and_see(stage: Stage, batch: Batch, say: Say) -> Loss:
    pid = await _choose_victim(stage, batch)
    at = await read_clock(stage.batchwright)
    await stage.kill(pid)
    # Read them after the kill: until then, the worker may still end a shard and claim another.
    holdings = await _find_holdings(stage.batchwright, JobId(batch.job_id))
    held = holdings.pop(pid, [])
    others = sum(map(len, holdings.values()))
    in_flight = await stage.server.count_aborted()
    had = f"it held {_shards_text(len(held))}, and {in_flight} of its requests were in flight"
    say(f"✗ killed worker {pid} with SIGKILL: {had}", "bold red")
    rest = f"continues with {_shards_text(others)}" if others else "has no shard, and waits until the lease expires"
    say(f"  nothing replaces it; the other worker {rest}", "red")
    seconds = await _wait_for_takeover(stage, batch.id, held, at)
    if seconds is not None:
        first = f"its first answer for them came {seconds:.1f} s after the kill"
        say(f"✓ the lease expired: the other worker has taken over, and {first}", "bold green")
    return Loss(pid=pid, shards=len(held), in_flight=in_flight, takeover_seconds=seconds)


async def _wait_for_takeover(stage: Stage, batch_id: str, held: Sequence[Job], since: datetime) -> float | None:
    """Seconds until a later claim of one of these shards had an answer; None if the batch ended without one."""
    lost = [(Shard(**job.payload), job.claims) for job in held]
    while True:
        has_ended = (await stage.batch(batch_id)).has_ended
        seconds = await read_takeover(stage.batchwright.pool, batch_id, lost, since)
        if seconds is not None or has_ended:
            return seconds
        await asyncio.sleep(LOOK_SECONDS)


async def read_takeover(pool: Pool, batch_id: str, lost: Sequence[tuple[Shard, int]], since: datetime) -> float | None:
    """Seconds from `since` to the first answer that a later claim registered; None if there is none.

    `lost` is the shards that the dead worker held, each with the number of its claim.
    """
    params = {
        "batch_id": batch_id,
        "since": since,
        "shards": [shard.number for shard, _ in lost],
        "journals": [shard.journal_number(claim) for shard, claim in lost],
        "ends": [replace(shard, round=shard.round + 1).journal_number(0) for shard, _ in lost],
    }
    seconds: float | None
    ((seconds,),) = await pool.rows(SQL["taken_over"], params)
    return seconds


async def _choose_victim(stage: Stage, batch: Batch) -> int:
    """Wait for a third of the batch; returns the process id of the worker that then holds the most shards."""
    while True:
        now = await stage.batch(batch.id)
        held = await _find_holdings(stage.batchwright, JobId(batch.job_id))
        if now.has_ended:
            raise BatchwrightError("the batch ended before a worker could be killed; use a larger --requests")
        if held and now.total and now.done >= now.total * _KILL_AT:
            return max(held, key=lambda pid: len(held[pid]))
        await asyncio.sleep(LOOK_SECONDS)


async def _find_holdings(batchwright: AsyncBatchwright, id: JobId) -> dict[int, list[Job]]:
    """Shards in progress, by the process that holds them."""
    held: dict[int, list[Job]] = {}
    for job in await fetch_jobs(batchwright, JobFilter(statuses=(JobStatus.RUNNING,), parent_job_id=id)):
        if job.locked_by is not None:
            held.setdefault(int(job.locked_by.split(":")[-2]), []).append(job)
    return held


def _shards_text(n: int) -> str:
    return f"{n} shard{'' if n == 1 else 's'}"


# The report -------------------------------------------------------------------------------------------------------


async def _report(stage: Stage, batch: Batch, loss: Loss, requests: int, path: Path) -> Report:
    asked = await asyncio.to_thread(stage.server.remote.asked)
    served = await asyncio.to_thread(stage.server.remote.asked, over=1, by="served")
    ((adopted,),) = await stage.batchwright.pool.rows(SQL["adopted"])
    with path.open("rb") as file:
        input_sha256 = await asyncio.to_thread(lambda: hashlib.file_digest(file, "sha256").hexdigest())
    return Report(
        requests=requests,
        batch_id=batch.id,
        status=batch.status,
        completed=batch.completed,
        failed=batch.done - batch.completed,
        asked=asked["total"],
        asked_distinct=asked["distinct"],
        asked_again=asked["repeated"],
        answered_again=served["repeated"],
        in_flight_max=stage.batchwright.settings.inference.concurrency,
        killed_pid=loss.pid,
        killed_shards=loss.shards,
        killed_in_flight=loss.in_flight,
        answers_adopted=adopted,
        lease_seconds=LEASE_SECONDS,
        takeover_seconds=loss.takeover_seconds,
        prompt_tokens=batch.input_tokens,
        cached_tokens=batch.cached_tokens,
        completion_tokens=batch.output_tokens,
        input_order_share=await asyncio.to_thread(input_order_share, path),
        seconds=_duration(batch),
        manifest=batch.manifest,
        input_sha256=input_sha256,
        findings=await verify(stage.part.files, batch) if batch.manifest is not None else [],
        samples=await _read_samples(stage.part, batch.output_file_id),
    )


def _duration(batch: Batch) -> float:
    assert batch.ended_at is not None, "it was followed to its end"
    return (batch.ended_at - batch.created_at).total_seconds()


async def _read_samples(part: BatchesPart, output_file_id: str | None) -> list[str]:
    """The first lines of the output file."""
    if output_file_id is None:
        return []
    file = await part.files.get(output_file_id, tenant=None)
    head = b"".join([chunk async for chunk in part.files.content(file, 0, min(file.bytes, _SAMPLE_BYTES))])
    return [line.decode(errors="replace") for line in head.splitlines()[:_SAMPLES]]
