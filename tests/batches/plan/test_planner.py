"""A large file is planned in a process of its own, with the same result as in a thread."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from batchwright.batches.plan import planner
from batchwright.batches.plan.plan import Rules
from batchwright.states import BatchStatus
from tests.batches.stage import CHAT, jsonl, request, staged

RULES = Rules(endpoint=CHAT)


@pytest.fixture
def input(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl([request(f"r{n}", model=f"m{n % 3}") for n in range(100)]))
    return path


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_process_of_its_own_makes_the_same_plan_as_a_thread(tmp_path, input):
    near = await planner.make(input, RULES, tmp_path / "near", size=0)
    apart = await planner.make(input, RULES, tmp_path / "apart", size=planner.APART_BYTES)
    assert near == apart == planner.Planned(total=100, requests={"m0": 34, "m1": 33, "m2": 33})
    assert files(tmp_path / "near") == files(tmp_path / "apart")


async def test_it_reports_the_same_problems_and_writes_no_plan(tmp_path, input):
    input.write_bytes(b"no json\n" + jsonl([request("twice"), request("twice")]))
    near = await planner.make(input, RULES, tmp_path / "near", size=0)
    apart = await planner.make(input, RULES, tmp_path / "apart", size=planner.APART_BYTES)
    assert near == apart
    assert [problem["line"] for problem in apart.problems["data"]] == [1, 3]
    assert not (tmp_path / "apart").exists()


async def test_the_death_of_a_planner_is_an_error_that_can_be_retried(tmp_path, input, monkeypatch):
    child = tmp_path / "killed"
    child.write_text(f"#!{sys.executable}\nimport os\nos.kill(os.getpid(), {signal.SIGKILL:d})\n")
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    with pytest.raises(OSError, match="ended with exit code -9"):
        await planner.make(input, RULES, tmp_path / "plan", size=planner.APART_BYTES)


@pytest.fixture
async def child(monkeypatch):
    """The planner's process, once it has started."""
    begun = asyncio.get_running_loop().create_future()
    start = asyncio.create_subprocess_exec

    async def spy(*command, **options):
        begun.set_result(await start(*command, **options))
        return begun.result()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spy)
    return begun


async def test_a_planner_is_killed_when_the_caller_is_cancelled(tmp_path, child):
    os.mkfifo(tmp_path / "endless")
    asked = planner.make(tmp_path / "endless", RULES, tmp_path / "plan", size=planner.APART_BYTES)
    waiting = asyncio.create_task(asked)
    process = await child
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert process.returncode == -signal.SIGKILL


async def test_a_planner_ends_with_its_worker(tmp_path, child):
    os.mkfifo(tmp_path / "endless")
    asked = planner.make(tmp_path / "endless", RULES, tmp_path / "plan", size=planner.APART_BYTES)
    waiting = asyncio.create_task(asked)
    process = await child
    process.stdin.close()
    with pytest.raises(OSError, match="ended with exit code 1"):
        await waiting


async def test_a_planner_ignores_sigterm(tmp_path, child):
    """A stop of the service signals all its processes. The worker may use its grace for the plan, or the batch loses an
    attempt."""
    os.mkfifo(tmp_path / "pipe")
    asked = planner.make(tmp_path / "pipe", RULES, tmp_path / "plan", size=planner.APART_BYTES)
    waiting = asyncio.create_task(asked)
    process = await child
    with await asyncio.to_thread((tmp_path / "pipe").open, "wb"):
        process.send_signal(signal.SIGTERM)
    with pytest.raises(OSError, match="ended with exit code 1"):  # because a pipe cannot be planned
        await waiting


async def test_a_planner_gets_no_signals_from_its_workers_terminal(tmp_path, child):
    os.mkfifo(tmp_path / "endless")
    asked = planner.make(tmp_path / "endless", RULES, tmp_path / "plan", size=planner.APART_BYTES)
    waiting = asyncio.create_task(asked)
    process = await child
    assert os.getsid(process.pid) == process.pid
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_planner_imports_nothing_from_the_folder_in_which_its_worker_was_started(tmp_path, input, monkeypatch):
    (tmp_path / "pickle.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    planned = await planner.make(input, RULES, tmp_path / "plan", size=planner.APART_BYTES)
    assert planned.total == 100


async def test_a_batch_that_is_planned_in_another_process_completes(database_url, tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "APART_BYTES", 0)
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit([request(f"r{n}") for n in range(20)])
        stage.work()
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 20)
