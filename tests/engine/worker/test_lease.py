"""A worker that is cut off from the database stops its jobs before other workers may claim them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace

import psutil
import pytest

from batchwright import Context, NewJob, operation
from batchwright.app import AsyncBatchwright
from batchwright.db.database import Blocking, Database, Pool
from batchwright.engine.queue import EngineSettings, Queue
from batchwright.engine.upkeep import Round, Upkeep
from batchwright.engine.worker.lease import Holder, Lease
from batchwright.engine.worker.processes import Processes
from batchwright.operations.registry import Registry
from batchwright.states import JobStatus
from tests.engine import deadly
from tests.silence import silenceable
from tests.support import BASIC, DATABASE, make_worker, noop, put, put_one, raw, take_one, working

ENGINE = EngineSettings(lease_seconds=2.0, rescue_jitter_seconds=0.0)


@contextlib.asynccontextmanager
async def linked(database_url):
    """A link that the test can silence, and a pool that connects through it."""
    async with silenceable(database_url) as link, Pool(DATABASE, link.url) as pool:
        yield link, pool


@pytest.fixture
async def child(database_url):
    """How a worker of these operations starts its children."""
    async with AsyncBatchwright(database_url=database_url, operations=deadly.OPERATIONS) as batchwright:
        yield batchwright._child_program()


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_worker_that_is_cut_off_stops_before_another_gets_its_job_and_undoes_the_counted_death(
    pool, queue, database_url, child, tmp_path
):
    """No socket is closed and no call fails: the connection only falls silent."""
    inside: set[str] = set()
    overlaps: list[set[str]] = []
    begun: asyncio.Queue[str] = asyncio.Queue()

    @operation("alone")
    async def alone(ctx: Context) -> None:
        inside.add(ctx.worker)
        if len(inside) > 1:
            overlaps.append(set(inside))
        begun.put_nowait(ctx.worker)
        try:
            await asyncio.Event().wait()
        finally:
            inside.discard(ctx.worker)

    known, pid_file = Registry([alone, deadly.hangs]), tmp_path / "pid"
    async with asyncio.timeout(60), linked(database_url) as (link, far):
        jobs = (NewJob(alone, exclusive_key="k"), NewJob(alone, exclusive_key="k"))
        id, _ = await put(queue, *jobs, operations=known)
        (hanging,) = await put(queue, NewJob("cpu.hangs", {"file": str(pid_file)}), operations=known)
        async with working(far, alone, deadly.hangs, engine=ENGINE, child=child, stop_grace_seconds=0.1) as cut_off:
            assert await begun.get() == cut_off.id
            while not pid_file.exists() or not (pid := pid_file.read_text()):
                await asyncio.sleep(0.01)
            async with working(pool, alone, engine=ENGINE, stop_grace_seconds=0.1) as other:
                with link.silence():
                    while (await queue.get(hanging)).status is JobStatus.RUNNING:
                        await asyncio.sleep(0.01)
                    assert not lives(int(pid)), "its process must end before others may claim the job"
                    assert await begun.get() == other.id
                    assert overlaps == []
                    assert cut_off.counts.total("leases_lost_total") == 2
                    assert (await queue.get(id)).rescues == 1
                while (await queue.get(id)).rescues:
                    await asyncio.sleep(0.01)


def almost_over(database_url, key):
    """The lease thread of a worker whose claim is about to expire."""
    heard = []
    mine = SimpleNamespace(leased_until=time.monotonic())
    blocking = Blocking(DATABASE, database_url)
    lease = Lease(
        Queue(Database(blocking), ENGINE),
        "w1",
        Holder(
            held=lambda: {} if heard else {key: mine},
            claims_under_way=lambda: (0, 0),
            on_news=heard.append,
        ),
        close_database=blocking.close,
    )
    return lease, heard, blocking


@pytest.mark.parametrize("is_database_away", [True, False])
async def test_only_a_worker_that_got_no_answer_from_the_database_undoes_the_counted_death(
    queue, clock, database_url, is_database_away
):
    """If the process itself hung, e.g. in a C call of the job, the job may be the cause."""
    id = await put_one(queue)
    claim = await take_one(queue)
    key = (id, claim.claim)
    lease, heard, blocking = almost_over(database_url, key)
    lease.failures = int(is_database_away)
    lease.judge()
    lease.judge()
    assert heard == [{key: None}], "the loss is reported once"
    await clock.advance(queue, 100)
    assert [rescued.id for rescued in await queue.rescue()] == [id]
    lease.look()
    job = await queue.get(id)
    assert (job.status, job.rescues) == (JobStatus.QUEUED, 0 if is_database_away else 1)
    blocking.close()


async def test_a_job_that_was_stopped_in_time_and_not_rescued_yet_is_released(queue, database_url):
    id = await put_one(queue)
    claim = await take_one(queue)
    lease, _, blocking = almost_over(database_url, (id, claim.claim))
    lease.failures = 1
    lease.judge()
    lease.look()
    job, last = await queue.get(id), (await queue.events(id))[-1]
    assert (job.status, job.attempts, job.rescues) == (JobStatus.QUEUED, 0, 0)
    assert (last.event, last.message) == ("job.released", "the worker was cut off from the database")
    blocking.close()


async def test_a_claim_whose_answer_arrives_after_its_lease_starts_no_job(pool, queue):
    worker = make_worker(pool, noop, engine=ENGINE)
    await put_one(queue)
    claim = await take_one(queue, worker=worker.id)
    worker._runner.open()
    assert not worker._start([claim], asked=time.monotonic() - ENGINE.lease_seconds)
    assert worker._runner.held == {}
    assert worker._start([claim], asked=time.monotonic())
    assert worker._runner.held
    await worker.close()


async def test_a_rescued_job_starts_without_waiting_for_a_poll(pool, queue, child):
    """The worker itself may rescue it, another worker, which rings, or the run whose process died."""
    ran, waits_for_a_ring = asyncio.Event(), asyncio.Event()

    @operation("patient")
    async def patient() -> None:
        ran.set()

    async def rest(seconds: float) -> None:
        waits_for_a_ring.set()
        await worker._wake.wait()
        worker._scan_soon()  # a late commit may lie before a watermark, which is not the subject of this test

    known = Registry([patient, deadly.dies])
    (id,) = await put(queue, NewJob(patient, delay_seconds=3600), operations=known)
    async with (
        asyncio.timeout(30),
        working(pool, patient, deadly.dies, engine=ENGINE, child=child) as worker,
        working(pool, noop, engine=ENGINE),
    ):
        worker._wait_for_wake = rest
        worker._wake.set()
        await waits_for_a_ring.wait()
        await raw(
            queue,
            "UPDATE batchwright.job SET status = 'RUNNING', locked_by = 'dead', locked_at = now(), claims = 1,"
            " lease_until = now() - interval '1 minute', run_after = now(), attempts = 1 WHERE id = %(id)s",
            id=id,
        )
        await ran.wait()
        (dying,) = await put(queue, NewJob(deadly.dies), operations=known)
        worker._wake.set()
        while (await queue.get(dying)).claims < 2:
            await asyncio.sleep(0.01)
        worker.stop()
    assert (await queue.get(id)).status is JobStatus.SUCCEEDED


async def slow(session):
    await session.rows("SET LOCAL statement_timeout = '1ms'")
    await session.rows("SELECT pg_sleep(60)")


async def broken(session):
    await session.rows("SELECT pg_terminate_backend(pg_backend_pid())")


@pytest.mark.parametrize(("run", "rescues"), [(slow, 1), (broken, 0)])
async def test_a_lost_connection_suspends_rescues_and_a_slow_database_does_not(queue, pool, clock, run, rescues):
    id = await put_one(queue)
    await take_one(queue)
    worker = make_worker(pool, noop, queue=queue)
    keeper = Upkeep(queue, Processes(None, 1), BASIC, [Round("trouble", 3600.0, run)])
    await keeper.run_all()
    await clock.advance(queue, 100)
    await keeper.run_due()
    assert (await queue.get(id)).rescues == rescues
    await worker.close()
