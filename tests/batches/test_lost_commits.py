"""A database that has lost its last commits, in a failover or a crash: stored answers are found again."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from batchwright.batches.journal.journal import scan
from batchwright.batches.journal.segments import Segments
from batchwright.batches.output.repair import repair
from batchwright.batches.output.verify import verify
from batchwright.batches.part import BatchesPart
from batchwright.batches.plan.shards import Shard, last_journal_number
from batchwright.batches.store import Batches, Position, Registration
from batchwright.batches.tally import Tally
from batchwright.db.check import Level
from batchwright.errors import Conflict
from batchwright.files.store import object_key
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.states import BatchStatus
from tests.batches.stage import request, staged
from tests.batches.test_recovery import LEASE, doomed
from tests.support import raw

SLOW = SimulatorSettings(any_model=Profile(decode_rate=100.0, output_sigma=0.0, max_running=1000))
SLOWER = SimulatorSettings(any_model=Profile(decode_rate=30.0, output_sigma=0.0, max_running=1000))
"""Slow enough that commits are lost in the middle of a shard, even on a busy machine."""
REQUESTS = 120
LINES = [request(f"r{n}") for n in range(REQUESTS)]
LOSE = """
WITH lost AS (DELETE FROM batchwright.batch_segment WHERE seq >= %(kept)s RETURNING batch_id, lines)
UPDATE batchwright.batch
SET completed = completed - (SELECT coalesce(sum(lines), 0) FROM lost), input_tokens = 0, output_tokens = 0,
    usage_by_model = '{}'
RETURNING completed
"""
"""Undoes the commits that registered the later ranges."""
FORGET = "UPDATE batchwright.job SET status = 'QUEUED', claims = 0, attempts = 0, locked_by = NULL, lease_until = NULL"


def shared(folder, store):
    return {
        "storage": {"url": f"file://{store}"},
        "batches": {"work_dir": str(folder), "checkpoint_seconds": 0.05, "shared_checkpoint_seconds": 0.05},
        "inference": {"concurrency": 20},
    }


async def complete(stage, batch):
    """Check that the batch has every answer in its files."""
    output, errors = await stage.results(batch)
    assert (batch.status, errors) == (BatchStatus.COMPLETED, [])
    assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(REQUESTS)]
    assert {one.level for one in await verify(stage.batchwright.part(BatchesPart).files, batch)} == {Level.OK}


@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_worker_registers_again_what_the_database_has_lost(database_url, tmp_path, is_shared):
    parts = shared(tmp_path / "one", tmp_path / "store")
    parts = parts if is_shared else {"inference": parts["inference"], "batches": {"checkpoint_seconds": 0.05}}
    async with staged(database_url, tmp_path, simulator=SLOWER, **parts) as stage:
        stage.work()
        id = await stage.submit(LINES)
        await stage.until(id, lambda batch: batch.completed >= 40)
        ((left,),) = await raw(stage.batchwright.queue, LOSE, kept=1)
        assert left < 60
        batch = await stage.ended(id)
        await complete(stage, batch)
        assert (batch.completed, batch.resends, stage.simulator.asked(over=1)["count"]) == (REQUESTS, 0, 0)
        gaps = """SELECT count(*) FROM (
            SELECT start_byte, lag(end_byte, 1, 0::bigint) OVER (PARTITION BY shard, claim ORDER BY seq) AS before
            FROM batchwright.batch_segment) AS one WHERE start_byte <> before"""
        assert await raw(stage.batchwright.queue, gaps) == [(0,)]


async def test_a_shard_whose_claim_was_lost_is_resumed_on_another_machine_from_what_is_stored(database_url, tmp_path):
    one, two = shared(tmp_path / "one", tmp_path / "store"), shared(tmp_path / "two", tmp_path / "store")
    async with staged(database_url, tmp_path, simulator=SLOW, **one, **LEASE) as first:
        id = await first.submit(LINES)
        async with doomed(first, tmp_path) as process:
            await first.until(id, lambda batch: batch.completed >= 60)
            process.kill()
            await process.wait()
        await raw(first.batchwright.queue, LOSE, kept=0)
        await raw(first.batchwright.queue, f"{FORGET} WHERE job_type = 'batch.shard'")
        shutil.rmtree(tmp_path / "one")
        stored = {found.offset for path in tmp_path.glob("store/batches/*/segments/*/*.seg") for found in scan(path)}
        asked = first.simulator.stats()["received"]
        parts = {**two, "global_inference_gateway": {"url": first.simulator.url}, **LEASE}
        async with staged(database_url, tmp_path, **parts) as second:
            second.work()
            batch = await second.ended(id)
            await complete(second, batch)
        assert first.simulator.stats()["received"] - asked == REQUESTS - len(stored) <= 60
        assert batch.completed == REQUESTS


async def test_the_end_of_a_batch_finds_stored_answers_before_it_sends_any_again(database_url, tmp_path, monkeypatch):
    finalize = Batches.finalize

    async def after_a_failover(self, id):
        await raw(self.queue, LOSE, kept=0)
        for _, _, path in stage.batchwright.part(BatchesPart).workspace.journals(id):
            path.unlink()
        return await finalize(self, id)

    monkeypatch.setattr(Batches, "finalize", after_a_failover)
    async with staged(database_url, tmp_path, **shared(tmp_path / "one", tmp_path / "store")) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit(LINES))
        await complete(stage, batch)
        assert (batch.completed, batch.resends, stage.simulator.asked(over=1)["count"]) == (REQUESTS, 0, 0)
        assert batch.usage_by_model["small"]["output"] == batch.output_tokens == 4 * REQUESTS


async def test_a_batch_that_failed_because_answers_were_missing_is_repaired_from_stored_ones(
    database_url, tmp_path, monkeypatch
):
    """Batches that an earlier version has ended are like this: their files contain lines with batch_failed."""
    finalize = Batches.finalize

    async def nothing(*_, **__):
        return {}

    async def after_a_failover(self, id):
        await raw(self.queue, LOSE, kept=0)
        for _, _, path in stage.batchwright.part(BatchesPart).workspace.journals(id):
            path.unlink()
        return await finalize(self, id)

    async with staged(database_url, tmp_path, **shared(tmp_path / "one", tmp_path / "store")) as stage:
        with monkeypatch.context() as patched:
            patched.setattr(Batches, "finalize", after_a_failover)
            patched.setattr(Segments, "find_unregistered", nothing)
            patched.setattr("batchwright.batches.store.RESENDS_MAX", 0)
            stage.work()
            batch = await stage.ended(await stage.submit(LINES))
        assert (batch.status, batch.errors["data"][0]["code"]) == (BatchStatus.FAILED, "answers_missing")
        assert (batch.completed, batch.error_summary["batch_failed"][0]) == (0, REQUESTS)
        batchwright = stage.batchwright
        fixed = await repair(
            batchwright.part(BatchesPart).batches,
            batchwright.part(BatchesPart).files,
            batchwright.part(BatchesPart).workspace,
            batch.id,
        )
        output, errors = await stage.results(fixed)
        assert (fixed.status, len(output), errors) == (BatchStatus.FAILED, REQUESTS, [])
        assert {one.level for one in await verify(batchwright.part(BatchesPart).files, fixed)} == {Level.OK}
        assert fixed.output_file_id != batch.output_file_id
        with pytest.raises(Conflict, match="its files are written, and no further answer was found"):
            await repair(
                batchwright.part(BatchesPart).batches,
                batchwright.part(BatchesPart).files,
                batchwright.part(BatchesPart).workspace,
                batch.id,
            )
        assert await batchwright.store.head(object_key(fixed.output_file_id)) is not None


# Registering --------------------------------------------------------------------------------------------------------


def tally(lines: int) -> Tally:
    return Tally(lines=lines, completed=lines)


async def held(stage):
    """A batch whose shard a worker holds; returns the first range of its journal."""
    id = await stage.submit(LINES)
    await raw(stage.batchwright.queue, "UPDATE batchwright.batch SET status = 'in_progress', in_progress_at = now()")
    batch = await stage.get(id)
    claim = await stage.batchwright.queue.claim_job("w1", batch.job_id, ["batch.process"])
    assert claim is not None
    return Registration(
        batch_id=id, shard=0, claim=1, seq=0, host="h", key=None, start=0, end=100, tally=tally(3), model="small",
        job_id=batch.job_id, job_claim=claim.claim, worker="w1",
    )  # fmt: skip


async def test_ranges_of_a_journal_are_registered_without_gaps_or_not_at_all(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        batches = stage.batchwright.part(BatchesPart).batches
        first = await held(stage)
        second = replace(first, seq=1, start=100, end=180, tally=tally(2))
        third = replace(first, seq=2, start=180, end=250, tally=tally(1))
        assert await batches.register([third]) == (set(), {third.name: Position(0, 0)})
        assert await batches.register([first]) == ({first.name}, {})
        assert await batches.register([third]) == (set(), {third.name: Position(1, 100)})
        odd = replace(second, start=90)
        assert await batches.register([odd]) == (set(), {odd.name: Position(1, 100)})
        other = replace(first, shard=1)
        assert await batches.register([third, other]) == ({other.name}, {third.name: Position(1, 100)})
        for _ in range(2):
            assert await batches.register([second]) == ({second.name}, {}), (
                "a repetition after a doubtful commit is accepted"
            )
        assert await batches.register([third]) == ({third.name}, {})
        longer = replace(second, end=200)
        assert await batches.register([longer]) == (set(), {longer.name: Position(3, 250)}), (
            "another range with the same number is not a repetition"
        )
        elsewhere = replace(second, host="another")
        assert await batches.register([elsewhere]) == (set(), {elsewhere.name: Position(3, 250)})
        assert (await stage.get(first.batch_id)).completed == 9


async def test_a_claim_number_that_was_assigned_twice_belongs_to_the_second_worker(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        batches, queue = stage.batchwright.part(BatchesPart).batches, stage.batchwright.queue
        ours = await held(stage)
        await raw(queue, FORGET)
        again = await queue.claim_job("w2", ours.job_id, ["batch.process"])
        assert again.claim == ours.job_claim
        assert await batches.register([ours]) == (set(), {})
        assert await queue.release([(ours.job_id, ours.job_claim)], "w1", "a zombie") == 0
        theirs = replace(ours, worker="w2")
        assert await batches.register([theirs]) == ({theirs.name}, {})
        assert await queue.release([(ours.job_id, ours.job_claim)], "w2", "its worker") == 1


def test_every_claim_of_every_round_has_a_journal_of_its_own():
    first = Shard(batch_id="b", model="m", number=0, start=0, count=1)
    numbers = [replace(first, round=round).journal_number(claim) for round in range(4) for claim in (1, 2, 999)]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] < last_journal_number(1)
