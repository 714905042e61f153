"""Lines are found by their custom_id, request beside answer, while the batch runs and after its end."""

from __future__ import annotations

import orjson

from batchwright.batches.output.lookup import Lookup
from batchwright.batches.part import BatchesPart
from batchwright.batches.services import BatchServices
from batchwright.part import Server
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.telemetry.metrics import Counts
from tests.batches.stage import Stage, request, staged

SLOWLY = SimulatorSettings(any_model=Profile(decode_rate=20.0, output_sigma=0.0))


def services(stage: Stage) -> BatchServices:
    part = stage.batchwright.part(BatchesPart)
    served = part.serve(Server(counts=Counts(()), store=stage.batchwright.store)).services
    assert isinstance(served, BatchServices)
    return served


def shown(found: Lookup) -> list[tuple[str, str | None, str | None]]:
    """For each line: its custom_id, the custom_id of its request, and the custom_id of its answer."""
    return [
        (
            line.custom_id,
            *(None if one is None else orjson.loads(one)["custom_id"] for one in (line.request, line.answer)),
        )
        for line in found.lines
    ]


async def test_a_line_is_found_with_its_answer_while_the_batch_runs_and_afterwards(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=SLOWLY) as stage:
        lines = [request(f"line-{n}", prompt="line-7 is only in a prompt") for n in range(30)]
        lines.append(request('odd "id" é', prompt="quotes"))
        id = await stage.submit(lines)
        search = services(stage).lines
        before = await search.find(await stage.get(id), "line-7")
        assert shown(before) == [("line-7", "line-7", None)]
        stage.work()
        running = await stage.until(id, lambda batch: batch.completed >= 1)
        found = await search.find(running, "line-", limit=50)
        assert len(found.lines) == 30
        assert sum(line.answer is not None for line in found.lines) > 0
        batch = await stage.ended(id)
        exact = await search.find(batch, "line-1", is_exact=True)
        assert (shown(exact), exact.is_complete) == ([("line-1", "line-1", "line-1")], True)
        some = await search.find(batch, "line-1", limit=5)
        assert [one for one, _, _ in shown(some)] == ["line-1", *(f"line-{n}" for n in range(10, 14))]
        assert all(answer == one for one, _, answer in shown(some))
        assert not some.is_complete
        odd = 'odd "id" é'
        assert shown(await search.find(batch, odd, is_exact=True)) == [(odd, odd, odd)]
        assert shown(await search.find(batch, "nobody")) == []
        (offset,) = [line.offset for line in exact.lines]
        assert offset is not None
        assert orjson.loads(exact.lines[0].request or b"")["body"]["model"] == "small"


async def test_without_its_input_a_line_is_found_among_the_answers(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(3)])
        batch = await stage.ended(id)
        await stage.batchwright.pool.rows("DELETE FROM batchwright.file WHERE purpose = 'batch'")
        found = await services(stage).lines.find(batch, "r2")
        assert found.input_gone
        assert shown(found) == [("r2", None, "r2")]


async def test_errors_are_shown_with_example_lines(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        id = await stage.submit([request("good"), request("bad", max_tokens=-1)])
        batch = await stage.ended(id)
        (code, (count, sample)) = next(iter(batch.error_summary.items()))
        assert (count, sample) == (1, "bad"), code
        found = await services(stage).lines.find_errors(batch, [sample, "nobody"])
        assert orjson.loads(found["bad"])["custom_id"] == "bad"
        assert len(found) == 1


async def test_answers_in_a_shared_store_are_found_while_the_batch_runs(database_url, tmp_path, monkeypatch):
    shared = {"storage": {"url": f"file://{tmp_path / 'shared'}"}, "batches": {"shared_checkpoint_seconds": 0.1}}
    async with staged(database_url, tmp_path, simulator=SLOWLY, **shared) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(30)])
        running = await stage.until(id, lambda batch: batch.completed >= 1)
        search = services(stage).lines
        monkeypatch.setattr(type(search._segments), "find_journal", lambda self, segment: None)
        found = await search.find(running, "r", limit=50)
        assert sum(line.answer is not None for line in found.lines) > 0
        assert all(answer in (None, custom_id) for custom_id, _, answer in shown(found))
        assert not found.answers_elsewhere


async def test_answers_that_were_just_removed_do_not_fail_a_search(database_url, tmp_path, monkeypatch):
    shared = {"storage": {"url": f"file://{tmp_path / 'shared'}"}, "batches": {"shared_checkpoint_seconds": 0.1}}
    async with staged(database_url, tmp_path, simulator=SLOWLY, **shared) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(30)])
        running = await stage.until(id, lambda batch: batch.completed >= 1)
        search = services(stage).lines
        for journal in (tmp_path / "gone.seg", None):  # a journal that is removed before it is opened, then an object
            monkeypatch.setattr(type(search._segments), "find_journal", lambda self, segment, path=journal: path)
            if journal is None:
                segments = await search._batches.segments(id)
                await stage.batchwright.store.delete(*[one.key for one in segments if one.key])
                monkeypatch.setattr(type(search._batches), "segments", returns(segments))
            found = await search.find(running, "r", limit=50)
            assert [line.answer for line in found.lines] == [None] * 30


def returns(value):
    async def call(*args, **options):
        return value

    return call


async def test_a_stored_file_is_searched_block_by_block(database_url, tmp_path, monkeypatch):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(50)])
        batch = await stage.ended(id)
        search = services(stage).lines
        monkeypatch.setattr(type(stage.batchwright.store), "local_path", lambda self, key: None)
        monkeypatch.setattr(type(search._workspace), "input", lambda self, batch_id: tmp_path / "absent")
        found = await search.find(batch, "r49", is_exact=True)
        assert shown(found) == [("r49", "r49", "r49")]
