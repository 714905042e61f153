"""500 clients follow events on few connections while a worker runs at full speed: each sees everything once."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import resource
import time
from datetime import UTC, datetime

import pytest

from batchwright import Context, NewJob, operation
from batchwright.states import JobStatus
from tests.api.streaming import Stream, serving

JOBS, CLIENTS_EACH, CLIENTS_ON_ONE = 40, 10, 100
EVENTS = 50
POOL_SIZE = 4
NOOPS = 3_000
ID = re.compile(rb"^id: (\d+)$", re.MULTILINE)
TS = re.compile(rb'"ts":"([^"]+)"')


def operations():
    """`chatter` tells something each time when `noop` has run so and so often: both go on until the end."""
    milestones = [asyncio.Event() for _ in range(EVENTS)]
    ran = itertools.count(1)

    @operation("noop")
    async def noop() -> None:
        place, rest = divmod(next(ran) * EVENTS, NOOPS)
        if rest < EVENTS:
            milestones[place - 1].set()

    @operation("chatter")
    async def chatter(ctx: Context) -> None:
        for step, milestone in enumerate(milestones):
            await milestone.wait()
            ctx.emit("step", f"step {step} of {EVENTS}", step=step)

    return chatter, noop


@pytest.fixture(autouse=True)
def descriptors():
    """Two for each client, and some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2_048:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_048), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Client:
    """Follows a job to its end; `drops` times it hangs up in between, and comes back where it was."""

    def __init__(self, url, id, dice, drops):
        self.id = id
        self.seen = []
        self.delays = []
        self.connections = 0
        self._url = url
        self._places = sorted(dice.sample(range(EVENTS), drops))

    async def run(self):
        while True:
            stream = await Stream.open(self._url, self.id, last_id=self.seen[-1] if self.seen else None)
            self.connections += 1
            async with stream:
                if stream.status == 204:
                    return self
                assert stream.status == 200, await stream.body()
                if await self._read(stream):
                    return self

    async def _read(self, stream):
        """Whether the end was reached."""
        text, is_past = b"", True
        while chunk := await stream.chunk():
            whole, _, text = (text + chunk).rpartition(b"\n\n")
            self.seen += map(int, ID.findall(whole))
            if not is_past and (found := TS.findall(whole)):
                sent = datetime.fromisoformat(found[-1].decode())
                self.delays.append((datetime.now(UTC) - sent).total_seconds())
            is_past = is_past and b"id: " not in whole
            if self._places and len(self.seen) >= self._places[0]:
                self._places.pop(0)
                return False
            if b"event: end" in whole:
                return True
        raise AssertionError(f"the server hung up on a follower of job {self.id}")


async def measure_waits(pool, until):
    """How long anybody had to wait for a connection."""
    waits = []
    while not until.is_set():
        began = time.perf_counter()
        await pool.rows("SELECT 1")
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(0.01)
    return waits


@pytest.mark.thorough
@pytest.mark.timeout(90)
async def test_500_clients_see_every_event_once_while_a_worker_runs_at_full_speed(database_url):
    dice = random.Random(500)
    chatter, noop = operations()
    settings = {"database": {"url": database_url, "pool_size": POOL_SIZE}, "worker": {"concurrency": 200}}
    async with serving(database_url, chatter, noop, **settings) as (batchwright, server):
        worker = batchwright.worker()
        working = asyncio.create_task(worker.run())
        await worker.started.wait()
        ids = await batchwright.enqueue([NewJob(chatter, priority=1) for _ in range(JOBS + 1)])
        followed = [id for id in ids[1:] for _ in range(CLIENTS_EACH)] + [ids[0]] * CLIENTS_ON_ONE
        assert len(followed) == 500
        clients = [Client(server.url, id, dice, dice.randrange(1, 6) * (n % 3 == 0)) for n, id in enumerate(followed)]
        over = asyncio.Event()
        waiting = asyncio.create_task(measure_waits(batchwright.pool, over))
        began, cpu = time.perf_counter(), time.process_time()
        runs = [asyncio.create_task(client.run()) for client in clients]
        await batchwright.enqueue([NewJob(noop) for _ in range(NOOPS)])
        await asyncio.gather(*runs)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        over.set()
        waits = await waiting
        stats = batchwright.pool._pool.get_stats()
        worker.stop()
        await working
        for id in ids:
            events = [event.id for event in await batchwright.queue.events(id)]
            assert len(events) == EVENTS + 3
            assert all(client.seen == events for client in clients if client.id == id)
            assert (await batchwright.get(id)).status is JobStatus.SUCCEEDED
        assert server._services.event_streams.followers == 0
    delivered = sum(len(client.seen) for client in clients)
    delays = sorted(delay for client in clients for delay in client.delays)
    reconnected = sum(client.connections - 1 for client in clients)
    print(  # noqa: T201 - the figures, for whoever asks with -s
        f"\n{delivered} events delivered to 500 clients in {took:.1f} s ({delivered / took:.0f}/s), "
        f"{reconnected} reconnects; {NOOPS} jobs ran beside; "
        f"CPU of server, worker and clients {cpu:.1f} s; from write to client p50 {delays[len(delays) // 2]:.2f} s, "
        f"p99 {delays[len(delays) * 99 // 100]:.2f} s; longest wait for a connection {max(waits):.3f} s"
    )
    assert reconnected >= 160
    assert stats.get("requests_errors", 0) == 0
    assert max(waits) < 5, "nobody may come near the pool's timeout of 10 s"
