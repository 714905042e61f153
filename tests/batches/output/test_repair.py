"""A batch that ended without its files gets them later, if its answers still exist."""

from __future__ import annotations

from typing import Any

import pytest

from batchwright.batches.journal.journal import scan
from batchwright.batches.output.finalize import Finalizer
from batchwright.batches.output.repair import repair
from batchwright.batches.output.verify import verify
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batch, Batches
from batchwright.db.check import Level
from batchwright.errors import Conflict, StorageError, StorageUnavailable
from batchwright.states import BatchStatus
from tests.batches.stage import Stage, given_up, request, staged

LINES = [request("a"), request("b", prompt="[[fault:400:code=odd]]"), request("c")]


async def broken(stage: Stage, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]] = LINES) -> Batch:
    async def away(*_: object) -> None:
        raise StorageUnavailable("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(Finalizer, "write", away)
        stage.work()
        batch = await given_up(stage, patched, await stage.submit(lines))
    assert (batch.status, batch.manifest, batch.output_file_id) == (BatchStatus.FAILED, None, None)
    return batch


async def mend(stage: Stage, batch: Batch, **options: Any) -> Batch:
    batchwright = stage.batchwright
    return await repair(
        batchwright.part(BatchesPart).batches,
        batchwright.part(BatchesPart).files,
        batchwright.part(BatchesPart).workspace,
        batch.id,
        **options,
    )


async def test_answers_become_files_and_the_batch_stays_failed(database_url, tmp_path, monkeypatch):
    async with staged(database_url, tmp_path) as stage:
        batch = await mend(stage, await broken(stage, monkeypatch))
        assert batch.status is BatchStatus.FAILED
        output, errors = await stage.results(batch)
        assert [line["custom_id"] for line in output] == ["a", "c"]
        assert [line["custom_id"] for line in errors] == ["b"]
        assert (batch.completed, batch.failed, batch.error_summary) == (2, 1, {"odd": [1, "b"]})
        assert {one.level for one in await verify(stage.batchwright.part(BatchesPart).files, batch)} == {Level.OK}
        assert stage.simulator.asked(over=1)["count"] == 0


async def test_lines_without_an_answer_are_said_to_have_failed(database_url, tmp_path, monkeypatch):
    async with staged(database_url, tmp_path) as stage:
        batch = await broken(stage, monkeypatch)
        await stage.batchwright.pool.rows(
            "DELETE FROM batchwright.batch_segment WHERE batch_id = %(id)s", {"id": batch.id}
        )
        for _, _, path in stage.batchwright.part(BatchesPart).workspace.journals(batch.id):
            path.unlink()
        batch = await mend(stage, batch)
        output, errors = await stage.results(batch)
        assert output == []
        assert {line["error"]["code"] for line in errors} == {"batch_failed"}
        assert (batch.completed, batch.failed) == (0, 3)


async def test_answers_that_nobody_registered_are_found_in_the_journals_of_this_machine(
    database_url, tmp_path, monkeypatch
):
    async with staged(database_url, tmp_path) as stage:
        batch = await broken(stage, monkeypatch)
        await stage.batchwright.pool.rows(
            "DELETE FROM batchwright.batch_segment WHERE batch_id = %(id)s", {"id": batch.id}
        )
        ((_, _, path),) = stage.batchwright.part(BatchesPart).workspace.journals(batch.id)
        with path.open("ab") as journal:
            journal.write(path.read_bytes()[:60] + bytes(100))
        batch = await mend(stage, batch)
        output, errors = await stage.results(batch)
        assert [line["custom_id"] for line in output + errors] == ["a", "c", "b"]
        assert {one.level for one in await verify(stage.batchwright.part(BatchesPart).files, batch)} == {Level.OK}


async def test_lost_answers_do_not_prevent_the_repair_of_the_others(database_url, tmp_path, monkeypatch):
    async with staged(database_url, tmp_path) as stage:
        batch = await broken(stage, monkeypatch, [request("a", model="one"), request("b", model="two")])
        (_, _, path), _ = stage.batchwright.part(BatchesPart).workspace.journals(batch.id)
        path.unlink()
        output, errors = await stage.results(await mend(stage, batch))
        assert [line["custom_id"] for line in output] == ["b"]
        assert [(line["custom_id"], line["error"]["code"]) for line in errors] == [("a", "batch_failed")]


@pytest.mark.parametrize("place", ["the line", "the length"])
async def test_a_damaged_answer_does_not_prevent_the_repair_of_the_others(database_url, tmp_path, monkeypatch, place):
    lines = [request(f"r{n}", model=f"m{n // 4}") for n in range(8)]
    async with staged(database_url, tmp_path) as stage:
        batch = await broken(stage, monkeypatch, lines)
        (_, _, path), _ = stage.batchwright.part(BatchesPart).workspace.journals(batch.id)
        second = list(scan(path))[1]
        data = bytearray(path.read_bytes())
        data[second.end - 9 if place == "the line" else second.position + 6] ^= 1
        path.write_bytes(data)
        batch = await mend(stage, batch)
        output, errors = await stage.results(batch)
        assert len(output) == (7 if place == "the line" else 5), "after a wrong length no further record can be found"
        assert {line["error"]["code"] for line in errors} == {"batch_failed"}
        assert {one.level for one in await verify(stage.batchwright.part(BatchesPart).files, batch)} == {Level.OK}


async def test_a_repair_is_refused_while_answers_are_on_another_machine(database_url, tmp_path, monkeypatch):
    async with staged(database_url, tmp_path) as stage:
        batch = await broken(stage, monkeypatch)
        await stage.batchwright.pool.rows("UPDATE batchwright.batch_segment SET host = 'other' RETURNING id")
        with pytest.raises(StorageError, match="in the work folder of another machine"):
            await mend(stage, batch)
        assert (await stage.get(batch.id)).manifest is None


async def test_an_interrupted_repair_changes_nothing_and_can_be_repeated(database_url, tmp_path, monkeypatch):
    async def dies(*_: object) -> None:
        raise RuntimeError("the process died")

    async with staged(database_url, tmp_path) as stage:
        batch = await broken(stage, monkeypatch)
        with monkeypatch.context() as patched:
            patched.setattr(Finalizer, "add_files", dies)
            with pytest.raises(RuntimeError):
                await mend(stage, batch)
        assert (await stage.get(batch.id)).manifest is None
        assert (await mend(stage, batch)).manifest is not None


async def test_of_two_repairs_at_the_same_time_one_is_refused(database_url, tmp_path, monkeypatch):
    async with staged(database_url, tmp_path) as stage:
        batch = await broken(stage, monkeypatch)
        write = Finalizer.write

        async def overtaken(finalizer: Finalizer, *arguments: Any) -> Any:
            with monkeypatch.context() as patched:
                patched.setattr(Finalizer, "write", write)
                await mend(stage, batch)
            return await write(finalizer, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(Finalizer, "write", overtaken)
            with pytest.raises(Conflict, match="another process has just repaired it"):
                await mend(stage, batch)
        assert len(await stage.batchwright.part(BatchesPart).files.list("default", purpose="batch_output")) == 2


async def test_a_repair_during_which_the_collector_removes_the_answers_is_refused(database_url, tmp_path, monkeypatch):
    async with staged(database_url, tmp_path) as stage:
        batch = await broken(stage, monkeypatch)
        segments = Batches.segments

        async def overtaken(batches: Batches, id: str, **options: Any) -> Any:
            rows, params = stage.batchwright.pool.rows, {"id": id}
            await rows("UPDATE batchwright.batch SET segments_gone_at = now() WHERE id = %(id)s RETURNING id", params)
            await rows("DELETE FROM batchwright.batch_segment WHERE batch_id = %(id)s RETURNING id", params)
            for _, _, path in stage.batchwright.part(BatchesPart).workspace.journals(id):
                path.unlink()
            return await segments(batches, id, **options)

        monkeypatch.setattr(Batches, "segments", overtaken)
        with pytest.raises(Conflict, match="its answers were removed on "):
            await mend(stage, batch)
        assert (await stage.get(batch.id)).manifest is None
        assert await stage.batchwright.part(BatchesPart).files.list("default", purpose="batch_output") == []


async def test_a_batch_that_cannot_be_repaired_says_why(database_url, tmp_path, monkeypatch):
    async with staged(database_url, tmp_path) as stage:
        batch = await broken(stage, monkeypatch)
        rows = stage.batchwright.pool.rows
        await rows(
            "UPDATE batchwright.batch SET segments_gone_at = now() WHERE id = %(id)s RETURNING id", {"id": batch.id}
        )
        with pytest.raises(Conflict, match="its answers were removed on "):
            await mend(stage, batch)
        await rows(
            "UPDATE batchwright.batch SET segments_gone_at = NULL WHERE id = %(id)s RETURNING id", {"id": batch.id}
        )
        await rows("DELETE FROM batchwright.file WHERE id = %(id)s RETURNING id", {"id": batch.input_file_id})
        with pytest.raises(Conflict, match="data that it needs was removed"):
            await mend(stage, batch)
        done = await stage.ended(await stage.submit(LINES))
        with pytest.raises(Conflict, match="Cannot repair a batch with status 'completed'"):
            await mend(stage, done)
        refused = await stage.ended(await stage.submit([LINES[0], LINES[0]]))
        with pytest.raises(Conflict, match="nothing of it was sent, so nothing was answered"):
            await mend(stage, refused)
