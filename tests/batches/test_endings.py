"""Whatever goes wrong, a batch ends once, in the right state, and with every answer that it has."""

from __future__ import annotations

import asyncio
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from batchwright.batches import process
from batchwright.batches.journal.journal import scan
from batchwright.batches.journal.unregistered import UnregisteredAnswers
from batchwright.batches.journal.workspace import Workspace
from batchwright.batches.metrics import BatchCounts
from batchwright.batches.part import BatchesPart
from batchwright.batches.plan.planfile import PLANS, Entry, pack_entries
from batchwright.batches.send import shard as execution
from batchwright.batches.send.shard import ShardRun
from batchwright.batches.send.work import End, Work
from batchwright.batches.store import Batches, Ending
from batchwright.batches.upkeep.watchdog import Watchdog
from batchwright.errors import ConfigurationError, DatabaseUnavailable, StorageFull, StorageUnavailable
from batchwright.files.store import object_key
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.states import BatchStatus
from batchwright.storage import Store
from tests.batches.stage import request, staged
from tests.batches.test_lifecycle import SLOW
from tests.support import raw

HANGING = SimulatorSettings(any_model=Profile(), faults=("hang",))
ERROR = '{"code": "odd", "message": "m"}'
STOP = f"UPDATE batchwright.batch SET stop_reason = 'error', stop_at = now(), stop_error = '{ERROR}'"
LATE = "UPDATE batchwright.batch SET expires_at = now() - interval '1 second'"


def failing(monkeypatch, owner, name, error, *, times=1, when=lambda *_: True):
    """Let the first calls fail."""
    original = getattr(owner, name)
    left = times

    async def call(self, *args, **options):
        nonlocal left
        if left and when(*args):
            left -= 1
            raise error
        return await original(self, *args, **options)

    monkeypatch.setattr(owner, name, call)


# Stopping -----------------------------------------------------------------------------------------------------------


async def test_shards_that_are_rerun_after_an_error_do_not_keep_their_batch_open(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit([request("a")])
        await stage.batchwright.part(BatchesPart).batches.pause(id, tenant=None)
        stage.work()
        asleep = (
            "SELECT FROM batchwright.job WHERE job_type = 'batch.shard' AND status = 'QUEUED' AND run_after > now()"
        )
        async with asyncio.timeout(20):
            while not await raw(stage.batchwright.queue, asleep):
                await asyncio.sleep(0.02)
        await raw(stage.batchwright.queue, STOP)
        batch = await stage.ended(id, 20)
        assert (batch.status, batch.failed, batch.errors["data"][0]["code"]) == (BatchStatus.FAILED, 1, "odd")


async def test_after_an_error_requests_in_flight_still_end_with_the_window(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=HANGING) as stage:
        stage.work()
        id = await stage.submit([request("a")])
        async with asyncio.timeout(20):
            while not stage.simulator.stats()["in_flight"]:
                await asyncio.sleep(0.02)
        await raw(stage.batchwright.queue, STOP)
        await raw(stage.batchwright.queue, LATE)
        batch = await stage.ended(id, 20)
        assert (batch.status, batch.failed) == (BatchStatus.FAILED, 1)


async def test_a_cancellation_gets_its_grace_after_an_error_but_not_after_the_deadline(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        batches = stage.batchwright.part(BatchesPart).batches
        for reason, expected in (("error", "cancel"), ("deadline", "deadline")):
            id = await stage.submit([request("a")])
            await batches.begin(id, total=1, models=["small"], input_sha256="")
            await batches.stop(id, reason)
            batch = await batches.cancel(id, tenant=None)
            assert (batch.status, batch.stop_reason) == (BatchStatus.CANCELLING, expected)


async def test_shards_record_that_the_window_is_over_before_they_end(database_url, tmp_path, monkeypatch):
    """Otherwise their batch finds lines without an answer and does not know the reason."""

    async def nothing(*_):
        pass

    monkeypatch.setattr(Watchdog, "_help", nothing)
    away = DatabaseUnavailable("gone for a moment")
    failing(monkeypatch, Batches, "stop", away, when=lambda _, reason, *__: reason == "deadline")
    async with staged(database_url, tmp_path, simulator=HANGING) as stage:
        id = await stage.submit([request("a"), request("b")])
        await raw(stage.batchwright.queue, "UPDATE batchwright.batch SET expires_at = now() + interval '2 seconds'")
        stage.work()
        batch = await stage.ended(id, 20)
        assert (batch.status, batch.completed + batch.failed + batch.expired) == (BatchStatus.EXPIRED, 2)


async def test_a_worker_whose_clock_is_ahead_expires_nothing(database_url, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_now", lambda: datetime.now(UTC) + timedelta(days=2))
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit([request("a")]))
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 1)


async def test_a_batch_that_is_resumed_while_its_requests_end_continues_at_once(database_url, tmp_path):
    long = SimulatorSettings(any_model=Profile(decode_rate=2.0, output_sigma=0.0, max_running=1000))
    async with staged(database_url, tmp_path, simulator=long) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(15)])
        async with asyncio.timeout(20):
            while not stage.simulator.stats()["in_flight"]:
                await asyncio.sleep(0.02)
        await stage.batchwright.part(BatchesPart).batches.pause(id, tenant=None)
        shards = stage.batchwright.part(BatchesPart).runtime.shards
        async with asyncio.timeout(20):
            while not any(run._work.end is End.PAUSE for run in shards._sending):
                await asyncio.sleep(0.02)
        await stage.batchwright.part(BatchesPart).batches.resume(id, tenant=None)
        batch = await stage.ended(id, 20)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 15)


async def test_a_batch_that_is_resumed_while_its_shards_snooze_continues_soon(database_url, tmp_path, monkeypatch):
    """A shard that a worker still holds cannot be woken."""
    controls = Batches.controls

    async def then_resume(self, ids):
        found = await controls(self, ids)
        for one in found.values():
            if one.is_paused:
                await self.resume(one.id, tenant=None)
        return found

    monkeypatch.setattr(Batches, "controls", then_resume)
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit([request("a")])
        await stage.batchwright.part(BatchesPart).batches.pause(id, tenant=None)
        stage.work()
        batch = await stage.ended(id, 20)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 1)


# Stores and disks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "folder"), [("put_file", "batches/"), ("put", "files/")])
async def test_a_store_that_is_full_for_a_moment_only_delays_the_batch(
    database_url, tmp_path, monkeypatch, verb, folder
):
    monkeypatch.setattr(process, "AWAY_SECONDS", 0.05)
    async with staged(database_url, tmp_path, worker={"poll_seconds_max": 0.1}) as stage:
        id = await stage.submit([request("a")])
        full = StorageFull("no room")
        failing(monkeypatch, Store, verb, full, times=2, when=lambda key, *_: key.startswith(folder))
        stage.work()
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 1)


@pytest.mark.parametrize(
    ("owner", "name", "times"),
    [(Workspace, "fetch_input", 11), (ShardRun, "_open_input", 5), (UnregisteredAnswers, "recover_for_shard", 5)],
)
async def test_a_batch_that_has_sent_nothing_yet_waits_for_an_unavailable_store(
    database_url, tmp_path, monkeypatch, owner, name, times
):
    for module in (execution, process):
        monkeypatch.setattr(module, "AWAY_SECONDS", 0.01)
    failing(monkeypatch, owner, name, StorageUnavailable("away"), times=times)
    async with staged(database_url, tmp_path, worker={"poll_seconds_max": 0.1}) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit([request("a")]))
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 1)
        assert stage.simulator.asked(over=1)["count"] == 0
        said = "SELECT DISTINCT message FROM batchwright.job_event WHERE event = 'job.retry_later'"
        assert await raw(stage.batchwright.queue, said) == [("away",)]


async def test_answers_wait_for_an_unavailable_store(database_url, tmp_path, monkeypatch):
    parts = {"storage": {"url": f"file://{tmp_path}/store"}, "batches": {"shared_checkpoint_seconds": 60.0}}
    away = StorageUnavailable("away")
    failing(monkeypatch, Store, "put", away, times=8, when=lambda key, *_: "/segments/" in key)
    async with staged(database_url, tmp_path, **parts) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit([request(f"r{n}") for n in range(3)]))
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 3)
        assert stage.simulator.asked(over=1)["count"] == 0
        assert await raw(
            stage.batchwright.queue, "SELECT claims FROM batchwright.job WHERE job_type = 'batch.shard'"
        ) == [(1,)]


@pytest.mark.parametrize("harm", ["a file", "no right"])
async def test_a_worker_does_not_start_with_a_work_folder_that_it_cannot_use(database_url, tmp_path, monkeypatch, harm):
    folder = tmp_path / "work"
    if harm == "a file":
        folder.write_bytes(b"")
    else:
        monkeypatch.setattr("os.access", lambda path, mode: path != folder)
    async with staged(database_url, tmp_path) as stage:
        with pytest.raises(ConfigurationError, match=f"the work folder {folder} cannot be used: .*batches.work_dir"):
            stage.work()


@pytest.mark.thorough
async def test_when_the_work_folder_is_deleted_the_worker_sends_no_more_requests(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=SLOW, inference={"concurrency": 10}) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(200)])
        await stage.until(id, lambda batch: batch.completed > 0)
        shutil.rmtree(stage.batchwright.part(BatchesPart).workspace.folder(id))
        batch = await stage.ended(id)
        assert batch.status is BatchStatus.FAILED
        assert batch.errors["data"][0]["message"].endswith("were in the work folder of this machine, and are gone")
        assert stage.simulator.stats()["received"] < 100


async def test_answers_are_registered_at_the_end_although_another_write_is_still_under_way(
    database_url, tmp_path, monkeypatch
):
    monkeypatch.setattr(Work, "look", lambda _: None)
    parts = {"worker": {"stop_grace_seconds": 0.1}, "batches": {"checkpoint_seconds": 60.0}}
    async with staged(database_url, tmp_path, **parts) as stage:
        worker = stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(3)])
        async with asyncio.timeout(20):
            while sum(1 for path in tmp_path.glob("work/*/0.1.seg") for _ in scan(path)) < 3:
                await asyncio.sleep(0.02)
        worker.stop()
        await stage.workers[0][1]
        assert (await stage.get(id)).completed == 3


# Input and plan -----------------------------------------------------------------------------------------------------


async def test_a_truncated_input_fails_the_batch(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit([request("a"), request("b")])
        file = await stage.batchwright.part(BatchesPart).files.get(
            (await stage.get(id)).input_file_id, tenant="default"
        )
        path = stage.batchwright.store.local_path(file.key)
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
        stage.work()
        batch = await stage.ended(id)
        assert (batch.status, batch.errors["data"][0]["code"]) == (BatchStatus.FAILED, "input_damaged")
        assert stage.simulator.stats()["received"] == 0


@pytest.mark.parametrize("harm", ["gone", "cut", "odd"])
async def test_a_retry_of_a_damaged_error_file_fails(database_url, tmp_path, harm):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        lines = [request(f"r{n}", prompt=f"{n} [[fault:400:times=1]]") for n in range(4)]
        first = await stage.ended(await stage.submit(lines))
        path = stage.batchwright.store.local_path(object_key(first.error_file_id))
        data = path.read_bytes()
        path.write_bytes(data[: data.rindex(b"\n", 0, -1) + 1] if harm == "cut" else data.replace(b"r1", b"\xff\xff"))
        if harm == "gone":
            path.unlink()
        batch = await stage.ended(await stage.repeat(first))
        assert batch.status is BatchStatus.FAILED
        ((code, message),) = [(one["code"], one["message"]) for one in batch.errors["data"]]
        assert code == "input_damaged"
        assert message.startswith(f"The error file {first.error_file_id} of {first.id} ")


async def test_a_batch_with_all_its_answers_no_longer_needs_its_input(database_url, tmp_path, monkeypatch):
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit([request("a"), request("b", prompt="[[fault:400]]")])
        finalize = Batches.finalize

        async def without_input(self, id):
            file = await stage.batchwright.part(BatchesPart).files.get(
                (await stage.get(id)).input_file_id, tenant="default"
            )
            await stage.batchwright.store.delete(file.key)
            stage.batchwright.part(BatchesPart).workspace.input(id).unlink()
            return await finalize(self, id)

        monkeypatch.setattr(Batches, "finalize", without_input)
        stage.work()
        batch = await stage.ended(id)
        output, errors = await stage.results(batch)
        assert batch.status is BatchStatus.COMPLETED
        assert [line["custom_id"] for line in output + errors] == ["a", "b"]


async def test_files_of_an_earlier_planner_are_not_part_of_the_plan(database_url, tmp_path):
    """The earlier planner had a gateway for another model, and died before the batch began."""
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit([request("a")])
        plans = stage.batchwright.part(BatchesPart).workspace.folder(id) / PLANS
        plans.mkdir(parents=True)
        (plans / "other-00000000.plan").write_bytes(pack_entries([Entry(0, 10, 0)]))
        stage.work()
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 1)
        assert [
            one.key async for one in stage.batchwright.store.list(f"batches/{id}/plans", None) if "other" in one.key
        ] == []


async def test_a_plan_that_does_not_match_the_planned_number_of_lines_writes_no_files(
    database_url, tmp_path, monkeypatch
):
    async with staged(database_url, tmp_path) as stage:
        finalize = Batches.finalize

        async def miscount(self, id):
            await raw(stage.batchwright.queue, "UPDATE batchwright.batch SET total = total + 1")
            return await finalize(self, id)

        monkeypatch.setattr(Batches, "finalize", miscount)
        stage.work()
        batch = await stage.ended(await stage.submit([request("a")]))
        assert (batch.status, batch.manifest) == (BatchStatus.FAILED, None)
        assert batch.errors["data"][0]["message"].endswith("has 1 lines, and 2 were planned")


async def test_the_processing_time_runs_from_the_first_start_of_a_worker_to_the_end(
    database_url, tmp_path, monkeypatch
):
    took = []
    monkeypatch.setattr(BatchCounts, "ended", lambda self, *reason, **figures: took.append(figures["seconds"]))
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit([request("a")])
        await raw(stage.batchwright.queue, "UPDATE batchwright.batch SET taken_up_at = now() - interval '1 hour'")
        stage.work()
        assert (await stage.ended(id)).status is BatchStatus.COMPLETED
        assert (await stage.ended(await stage.submit(b"no json\n"))).status is BatchStatus.FAILED
    planned_twice, refused = took
    assert 3600 <= planned_twice < 3660
    assert 0 < refused < 60


@pytest.mark.parametrize(
    ("dead_claim", "recovered"), [("NULL", []), ("1", []), ("2", [(BatchStatus.FAILED, "cleaned_up")])]
)
async def test_a_batch_counts_as_recovered_only_if_its_last_worker_died(
    database_url, tmp_path, monkeypatch, dead_claim, recovered
):
    """The job was claimed twice before. A deploy, pause or snooze is not a death, and only the last claim counts."""
    seen = []
    monkeypatch.setattr(BatchCounts, "recovered", lambda self, *labels: seen.append(labels))
    async with staged(database_url, tmp_path) as stage:
        batch = await stage.get(await stage.submit([request("a")]))
        await stage.batchwright.part(BatchesPart).batches.fail(batch.id, Ending())
        await raw(stage.batchwright.queue, f"UPDATE batchwright.job SET claims = 2, dead_claim = {dead_claim}")
        stage.work()
        await stage.batchwright.wait(batch.job_id, timeout=30)
        assert seen == recovered
