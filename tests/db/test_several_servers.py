"""A URL that names several servers: Batchwright uses the one that accepts writes, before and after a failover."""

from __future__ import annotations

import asyncio

import pytest

from batchwright import NewJob
from batchwright.app import VERSION
from batchwright.db.check import Level, check_database
from batchwright.db.database import Blocking, Database, Pool, complete
from batchwright.db.doorbell import Doorbell, Ring, listen
from batchwright.db.migrate import migrate
from batchwright.engine.queue import EngineSettings, Queue
from batchwright.operations.registry import Registry
from batchwright.states import JobStatus
from tests.chaos.replicas import Cluster, temporary_folder
from tests.db.test_outage import held_operation, until
from tests.support import DATABASE, finished, put, working


@pytest.fixture(scope="module")
def cluster():
    """A primary with an asynchronous standby."""
    with temporary_folder() as folder, Cluster(folder, "asynchronous") as cluster:
        database = Blocking(DATABASE, cluster.url)
        complete(migrate(database, VERSION))
        database.close()
        cluster.catch_up()
        yield cluster


async def test_a_standby_is_an_error_with_its_remedy(cluster):
    _, standby = cluster.servers
    async with Pool(DATABASE, standby.url) as pool:
        (found,) = [one for one in await check_database(pool, DATABASE) if one.name == "server"]
    assert found.level is Level.ERROR
    assert found.text.endswith(", a standby that accepts no writes")
    assert found.remedy == "connect to the primary; with several hosts in the URL, add target_session_attrs=read-write"


async def test_jobs_leases_doorbell_and_checks_move_to_the_server_that_was_promoted(cluster):
    held, begun, may_end = held_operation()
    rings: list[Ring] = []
    async with Pool(DATABASE, cluster.url) as pool:
        queue = Queue(Database(pool), EngineSettings(lease_seconds=6.0))
        listening = asyncio.create_task(listen(DATABASE, cluster.url, rings.append))
        async with working(pool, held, engine=queue.settings) as worker:
            (id,) = await put(queue, NewJob(held), operations=Registry([held]))
            await begun.wait()
            await asyncio.to_thread(cluster.catch_up)
            await asyncio.to_thread(cluster.fail_over, 0.5)
            await until(lambda: worker.lease.failures == 0)
            async with Pool(DATABASE, cluster.url):
                pass  # a new pool finds the server, too
            await ring(pool, rings)
            may_end.set()
            job = await finished(queue, id)
            findings = await check_database(pool, DATABASE)
        listening.cancel()
    assert (job.status, job.result, job.claims, job.rescues) == (JobStatus.SUCCEEDED, "kept", 1, 0)
    assert [one for one in findings if one.level is not Level.OK] == []


async def ring(pool, rings):
    """The first rings after a failover may find nobody: who listens has to connect again."""
    doorbell = Doorbell(pool)
    while "after" not in {ring.queue for ring in rings}:
        doorbell.ring(["after"])
        await asyncio.sleep(0.02)
    await doorbell.close()
