"""Cases that chaos has found: processes die at the worst moment, and their jobs are not at fault."""

import asyncio
import os
import select
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from batchwright import AsyncBatchwright, Context
from batchwright.engine.worker.processes import Processes, see_the_end
from batchwright.states import JobStatus
from tests.chaos.operations import cpu, plain
from tests.support import noop, put_one, raw, take

SILENT = SimpleNamespace(emit=lambda *_: None, progress=lambda *_: None)


@pytest.fixture
async def batchwright(database_url):
    async with AsyncBatchwright(database_url=database_url, operations=[cpu, noop, plain]) as batchwright:
        yield batchwright


@pytest.fixture
async def processes(batchwright):
    processes = Processes(batchwright._child_program(), 1)
    yield processes
    await processes.close()


@asynccontextmanager
async def isolated(program, id, **pipes):
    process = await asyncio.create_subprocess_exec(
        *(*program.command, "isolate", str(id)),
        stderr=sys.stderr,
        env={**os.environ, **program.environment},
        **pipes,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_suspect_is_not_parked_because_the_worker_that_sent_it_away_was_killed(queue, batchwright):
    """Both ends of the pipes are closed, as the kernel does when their worker dies."""
    id = await put_one(queue)
    await raw(queue, "UPDATE batchwright.job SET rescues = 2 WHERE id = %(id)s", id=id)
    reader, writer = os.pipe()
    os.close(reader)
    pipes = {"stdin": asyncio.subprocess.DEVNULL, "stdout": writer}
    async with isolated(batchwright._child_program(), id, **pipes) as process, asyncio.timeout(30):
        os.close(writer)
        assert await process.wait() == 0
    job = await queue.get(id)
    assert job.status in (JobStatus.SUCCEEDED, JobStatus.QUEUED)
    assert (job.locked_by, job.error) == (None, None)


async def test_a_job_that_runs_alone_is_given_back_when_its_workers_process_dies(queue, batchwright):
    """Otherwise it would keep its job, and everything that the job has open, until it ends by itself."""
    id = await batchwright.enqueue(plain, {"seconds": 600.0})
    await raw(queue, "UPDATE batchwright.job SET rescues = 2 WHERE id = %(id)s", id=id)
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    async with isolated(batchwright._child_program(), id, **pipes) as process, asyncio.timeout(30):
        await process.stdout.readexactly(4)  # it has claimed the job
        while (await queue.get(id)).message is None:
            await asyncio.sleep(0.02)
        process.stdin.close()
        assert await process.wait() == 0
    job = await queue.get(id)
    assert (job.status, job.rescues, job.locked_by, job.attempts) == (JobStatus.QUEUED, 2, None, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
async def test_the_kernel_tells_a_child_that_its_parent_was_killed(tmp_path):
    """Even if the pipe stays open, because another process has a copy of it."""
    told = tmp_path / "told"
    child = (
        "import signal, pathlib; from batchwright.engine.worker.processes import end_with_parent; "
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
        "end_with_parent(signal.SIGTERM); print('ready', flush=True); "
        f"signal.sigwait([signal.SIGTERM]); pathlib.Path({str(told)!r}).write_text('told')"
    )
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    command = (sys.executable, "-c", parent)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        assert await process.stdout.readline() == b"ready\n"
        process.kill()
        await process.wait()
        while not told.exists():
            await asyncio.sleep(0.02)


async def test_a_child_that_died_while_idle_is_not_given_the_next_job(queue, batchwright, processes):
    assert await perform(queue, batchwright, processes) == 0
    (child,) = processes._idle
    child.process.kill()
    await child.process.wait()
    assert await perform(queue, batchwright, processes) == 0


async def test_a_child_killed_while_its_answer_is_on_the_way_is_not_given_the_next_job(queue, batchwright, processes):
    """This happens to a worker that was stopped: it finds its lease lost and the answer in the pipe together."""
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
    assert child.process.returncode is not None, "nobody would have waited for it"
    assert await perform(queue, batchwright, processes) == 0


async def test_a_killed_process_is_not_left_behind_by_whoever_is_cancelled_while_it_dies():
    """The loop may close right after that: the end of a process that still ran would never be noticed."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    seeing = asyncio.create_task(see_the_end(process))
    for _ in range(3):
        await asyncio.sleep(0)
        seeing.cancel()
    process.kill()
    with pytest.raises(asyncio.CancelledError):
        await seeing
    assert process.returncode is not None


async def test_a_job_that_runs_alone_is_given_back_before_its_worker_has_stopped(
    queue, batchwright, processes, monkeypatch
):
    monkeypatch.setattr("batchwright.engine.worker.processes._RELEASE_SECONDS", 60.0)
    id = await batchwright.enqueue(plain, {"seconds": 600.0})
    await raw(queue, "UPDATE batchwright.job SET rescues = 2 WHERE id = %(id)s", id=id)
    isolating = asyncio.create_task(processes.isolate(id))
    while (await queue.get(id)).message is None:
        await asyncio.sleep(0.02)
    isolating.cancel()
    await asyncio.gather(isolating, return_exceptions=True)
    await processes.close()
    assert (await queue.get(id)).status is JobStatus.QUEUED


async def perform(queue, batchwright, processes, running=None):
    """Without rounds, the child sends nothing before its answer."""
    await batchwright.enqueue("chaos.cpu", {"rounds": 0})
    (claim,) = await take(queue, types=["chaos.cpu"])
    operation = batchwright.operations.get("chaos.cpu")
    return await processes.perform(operation, claim, Context(claim, SILENT), running or SimpleNamespace(kill=None))
