"""A batch waits for an unavailable store and for a full disk, and says so meanwhile."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
from contextlib import contextmanager, suppress

import pytest

from batchwright.batches import process
from batchwright.batches.journal.journal import Journal
from batchwright.batches.output.finalize import Finalizer
from batchwright.batches.output.repair import repair
from batchwright.batches.output.verify import verify
from batchwright.batches.part import BatchesPart
from batchwright.batches.send import disk, runner
from batchwright.batches.send import shard as execution
from batchwright.batches.send.shard import ShardRun
from batchwright.db.check import Level
from batchwright.errors import StorageFull, StorageUnavailable
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.states import BatchStatus
from batchwright.storage import Store
from tests.batches.stage import given_up, request, staged
from tests.batches.test_endings import failing
from tests.conftest import skip
from tests.support import raw

MIB = 1024 * 1024
QUICK = SimulatorSettings(any_model=Profile(decode_rate=1000.0, output_sigma=0.0, max_running=1000))
LINES = [request(f"r{n}") for n in range(6)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    for module in (execution, process):
        monkeypatch.setattr(module, "AWAY_SECONDS", 0.05)
    monkeypatch.setattr(execution, "NO_ROOM_SECONDS", 0.05)
    monkeypatch.setattr(runner, "NOTE_SECONDS", 0.05)


async def waiting(stage, id):
    return await stage.until(id, lambda batch: batch.waits_for is not None)


# The store ----------------------------------------------------------------------------------------------------------


async def test_a_store_that_is_unavailable_while_the_files_are_written_only_delays_the_batch(
    database_url, tmp_path, monkeypatch, caplog
):
    """The store fails more often than the job has attempts: the window limits the wait, not the attempts."""
    failing(monkeypatch, Finalizer, "write", StorageUnavailable("503 Slow Down"), times=15)
    async with staged(database_url, tmp_path, worker={"poll_seconds_max": 0.1}) as stage:
        stage.work()
        with caplog.at_level(logging.WARNING):
            id = await stage.submit(LINES)
            seen = await waiting(stage, id)
            batch = await stage.ended(id)
        output, errors = await stage.results(batch)
        assert (batch.status, len(output), errors) == (BatchStatus.COMPLETED, 6, [])
        assert seen.status is BatchStatus.FINALIZING
        assert seen.waits_for == "the store is unavailable: 503 Slow Down"
        assert batch.waits_for is None
        said = [one.message for one in caplog.records if "503 Slow Down" in one.message]
        assert said == [f"batch {id} waits: 503 Slow Down"]
        ((attempts,),) = await raw(
            stage.batchwright.queue, "SELECT attempts FROM batchwright.job WHERE job_type = 'batch.process'"
        )
        assert attempts == 1


@pytest.mark.parametrize(
    ("how", "status", "counts"),
    [("cancel", BatchStatus.CANCELLED, (1, 5)), ("deadline", BatchStatus.EXPIRED, (1, 5)), ("end", None, (6, 0))],
)
async def test_a_batch_whose_files_can_never_be_written_still_ends_in_the_same_state(
    database_url, tmp_path, monkeypatch, how, status, counts
):
    """All answers are kept, and a repair writes the files once the store is back."""
    slow = SimulatorSettings(any_model=Profile(decode_rate=1000.0, max_running=1000), faults=("hang:1:match=hang",))
    lines = [request("r0"), *(request(f"r{n}", prompt="hang" if how != "end" else None) for n in range(1, 6))]
    async with staged(database_url, tmp_path, simulator=slow, batches={"cancel_grace_seconds": 0.1}) as stage:
        with monkeypatch.context() as patched:
            failing(patched, Finalizer, "write", StorageUnavailable("away"), times=1_000_000)
            stage.work()
            id = await stage.submit(lines)
            await stage.until(id, lambda batch: batch.completed >= 1)
            if how == "cancel":
                await stage.batchwright.part(BatchesPart).batches.cancel(id, tenant=None)
            if how == "deadline":
                await raw(stage.batchwright.queue, "UPDATE batchwright.batch SET expires_at = now()")
            batch = await given_up(stage, patched, id)
        assert batch.status is (status or BatchStatus.FAILED)
        assert (batch.completed, batch.done - batch.completed) == counts
        assert (batch.output_file_id, batch.manifest) == (None, None)
        assert [one["code"] for one in batch.errors["data"]] == ["files_not_written"]
        repaired = await repair(
            stage.batchwright.part(BatchesPart).batches,
            stage.batchwright.part(BatchesPart).files,
            stage.batchwright.part(BatchesPart).workspace,
            id,
        )
        output, errors = await stage.results(repaired)
        assert (repaired.status, len(output), len(errors)) == (batch.status, *counts)
        assert {one.level for one in await verify(stage.batchwright.part(BatchesPart).files, repaired)} == {Level.OK}


async def test_a_store_that_is_unavailable_while_answers_arrive_is_waited_for_and_nothing_is_sent_twice(
    database_url, tmp_path, monkeypatch, caplog
):
    parts = {
        "storage": {"url": f"file://{tmp_path / 'store'}"},
        "batches": {"checkpoint_seconds": 0.05, "shared_checkpoint_seconds": 0.05},
    }
    async with staged(database_url, tmp_path, simulator=QUICK, **parts) as stage:
        id = await stage.submit(LINES)
        away = StorageUnavailable("503 Slow Down")
        failing(monkeypatch, Store, "put", away, times=8, when=lambda key, *_: "/segments/" in key)
        with caplog.at_level(logging.WARNING):
            stage.work()
            seen = await waiting(stage, id)
            batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 6)
        assert seen.waits_for == "the store is unavailable: 503 Slow Down"
        assert stage.simulator.asked(over=1)["count"] == 0
        assert sum("503" in one.message for one in caplog.records) == 1


# The disk -----------------------------------------------------------------------------------------------------------


async def test_an_answer_without_room_on_the_disk_is_kept_until_there_is_some(database_url, tmp_path, monkeypatch):
    """The request is not sent again."""
    append, refusals = Journal.append_all, 0

    def often_full(self, *args, **kwargs):
        nonlocal refusals
        if refusals < 20:
            refusals += 1
            raise StorageFull(os.strerror(errno.ENOSPC))
        append(self, *args, **kwargs)

    monkeypatch.setattr(Journal, "append_all", often_full)
    monkeypatch.setattr("batchwright.batches.send.sender.FULL_SECONDS", 0.01)
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit(LINES))
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 6)
        assert (refusals, stage.simulator.asked(over=1)["count"]) == (20, 0)


async def test_nothing_is_sent_without_room_for_its_answer_and_the_batch_says_why(database_url, tmp_path, monkeypatch):
    free = 0
    monkeypatch.setattr(disk, "LOOK_SECONDS", 0.0)
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        stage.batchwright.part(BatchesPart).runtime.dispatcher.disk._measure = lambda _: free
        id = await stage.submit(LINES)
        seen = await waiting(stage, id)
        assert seen.waits_for.startswith("no room on the disk: the disk of the work folder ")
        assert "has 0 MiB left, and 64 are needed to keep answers" in seen.waits_for
        assert stage.simulator.stats()["received"] == 0
        free = 10**12
        batch = await stage.ended(id)
        assert (batch.status, batch.completed, batch.waits_for) == (BatchStatus.COMPLETED, 6, None)


async def test_requests_stop_when_the_disk_fills_up(database_url, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr("batchwright.batches.send.sender.FULL_SECONDS", 0.01)
    slow = SimulatorSettings(any_model=Profile(decode_rate=100.0, output_sigma=0.0, max_running=1000))
    async with staged(database_url, tmp_path, simulator=slow, inference={"concurrency": 10}) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(60)])
        await stage.until(id, lambda batch: batch.completed > 0)
        stage.batchwright.part(BatchesPart).runtime.dispatcher.disk._measure = lambda _: 0
        await waiting(stage, id)
        sent = stage.simulator.stats()["received"]
        await stage.until(id, lambda batch: batch.completed == sent)
        assert stage.simulator.stats()["received"] == sent < 60
        stage.batchwright.part(BatchesPart).runtime.dispatcher.disk._measure = lambda _: 10**12
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 60)
        assert stage.simulator.asked(over=1)["count"] == 0


async def test_a_disk_without_room_for_the_input_is_waited_for(database_url, tmp_path, monkeypatch):
    failing(monkeypatch, ShardRun, "_open_input", OSError(errno.ENOSPC, "No space left on device"), times=6)
    async with staged(database_url, tmp_path, worker={"poll_seconds_max": 0.1}) as stage:
        stage.work()
        id = await stage.submit(LINES)
        seen = await waiting(stage, id)
        assert seen.waits_for == "no room on the disk: [Errno 28] No space left on device"
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 6)


@contextmanager
def small_disk(folder, size):
    """A file system of its own."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        skip("only root can mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


async def test_a_disk_that_fills_up_while_every_slot_is_taken_is_noted(database_url, tmp_path, monkeypatch):
    """New requests wait for a slot, and the slots wait for room, so the failed writes must report it."""
    slow = SimulatorSettings(any_model=Profile(decode_rate=100.0, output_sigma=0.0, max_running=1000))
    async with staged(database_url, tmp_path, simulator=slow, inference={"concurrency": 10}) as stage:
        stage.work()
        append, is_full = Journal.append_all, True

        def refusing(self, *arguments):
            if is_full:
                raise StorageFull("no space left")
            append(self, *arguments)

        monkeypatch.setattr(Journal, "append_all", refusing)
        id = await stage.submit([request(f"r{n}") for n in range(30)])
        assert "no space left" in (await waiting(stage, id)).waits_for
        is_full = False
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 30)
        assert stage.simulator.asked(over=1)["count"] == 0


async def test_a_work_disk_that_is_really_full_is_waited_for_and_no_answer_is_paid_twice(database_url, tmp_path):
    """Another program fills the disk while requests are in flight, and later frees it."""
    slow = SimulatorSettings(any_model=Profile(decode_rate=100.0, output_sigma=0.0, max_running=1000))
    with small_disk(tmp_path / "small", "24m") as work:
        parts = {"batches": {"checkpoint_seconds": 0.1, "work_dir": str(work), "work_dir_reserve": 1}}
        async with staged(database_url, tmp_path, simulator=slow, inference={"concurrency": 10}, **parts) as stage:
            stage.work()
            id = await stage.submit([request(f"r{n}") for n in range(80)])
            await stage.until(id, lambda batch: batch.completed > 0)
            with (work / "ballast").open("wb") as ballast, suppress(OSError):
                while True:
                    ballast.write(bytes(64 * 1024))
                    ballast.flush()
            await waiting(stage, id)
            (work / "ballast").unlink()
            batch = await stage.ended(id)
            output, errors = await stage.results(batch)
            assert (batch.status, len(output), errors) == (BatchStatus.COMPLETED, 80, [])
            assert stage.simulator.asked(over=1)["count"] == 0


async def test_a_batch_that_waits_for_the_store_before_it_is_planned_expires_in_time(
    database_url, tmp_path, monkeypatch
):
    failing(monkeypatch, process.Run, "_plan", StorageUnavailable("away"), times=1_000_000)
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        id = await stage.submit(LINES)
        await waiting(stage, id)
        await raw(stage.batchwright.queue, "UPDATE batchwright.batch SET expires_at = now()")
        async with asyncio.timeout(10):
            batch = await stage.ended(id)
        assert (batch.status, batch.total) == (BatchStatus.EXPIRED, 0)
