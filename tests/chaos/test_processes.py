"""What chaos has found about processes, one case each: they die at the worst moment, and the jobs are not to blame."""

import asyncio
import os
import select
import sys
from types import SimpleNamespace

import pytest

from batchwright import AsyncBatchwright, Context
from batchwright.engine.processes import Processes
from batchwright.states import JobStatus
from tests.chaos.operations import cpu
from tests.support import noop, put_one, raw, take

SILENT = SimpleNamespace(emit=lambda *_: None, progress=lambda *_: None)


@pytest.fixture
async def batchwright(database_url):
    async with AsyncBatchwright(database_url=database_url, operations=[cpu, noop]) as batchwright:
        yield batchwright


@pytest.fixture
async def processes(batchwright):
    processes = Processes(batchwright._child_program(), 1)
    yield processes
    await processes.close()


async def test_a_suspect_is_not_parked_because_the_worker_that_sent_it_away_was_killed(queue, batchwright):
    id = await put_one(queue)
    await raw(queue, "UPDATE batchwright.job SET rescues = 2 WHERE id = %(id)s", id=id)
    reader, writer = os.pipe()
    os.close(reader)  # as the kernel does when the worker that holds it is killed
    program = batchwright._child_program()
    process = await asyncio.create_subprocess_exec(
        *(*program.command, "isolate", str(id)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=writer,
        stderr=sys.stderr,
        env={**os.environ, **program.environment},
    )
    os.close(writer)
    assert await process.wait() == 0
    job = await queue.get(id)
    assert (job.status, job.rescues, job.locked_by) == (JobStatus.SUCCEEDED, 0, None)


async def test_a_child_that_died_while_idle_is_not_given_the_next_job(queue, batchwright, processes):
    assert await perform(queue, batchwright, processes) == 0
    (child,) = processes._idle
    child.process.kill()
    await child.process.wait()
    assert await perform(queue, batchwright, processes) == 0


async def test_a_child_killed_while_its_answer_is_on_the_way_is_not_given_the_next_job(queue, batchwright, processes):
    """As it happens to a worker that was stopped, finds its lease lost and the answer in the pipe at once."""
    running = SimpleNamespace(kill=None)
    performing = asyncio.create_task(perform(queue, batchwright, processes, running))
    while not processes._busy:
        await asyncio.sleep(0.01)
    (child,) = processes._busy
    pipe = child.process._transport.get_pipe_transport(1).get_extra_info("pipe")
    assert select.select([pipe], [], [], 30)[0], "the answer is written, and this loop has not read it yet"
    running.kill()
    assert await performing == 0
    assert not processes._idle
    assert await perform(queue, batchwright, processes) == 0


async def perform(queue, batchwright, processes, running=None):
    """No rounds: the child says nothing before its answer."""
    await batchwright.enqueue("chaos.cpu", {"rounds": 0})
    (claim,) = await take(queue, types=["chaos.cpu"])
    operation = batchwright.operations.get("chaos.cpu")
    return await processes.perform(operation, claim, Context(claim, SILENT), running or SimpleNamespace(kill=None))
