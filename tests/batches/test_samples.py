"""Samples are stored while a batch runs: answers, tokens, the limit, and requests in flight."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from batchwright.batches import store
from batchwright.batches.part import BatchesPart
from batchwright.batches.samples import KEPT_SECONDS, BatchSample, eta_range, together
from batchwright.batches.store import Pace
from batchwright.states import BatchStatus
from tests.batches.stage import Stage, request, staged
from tests.batches.test_progress import batch as batch_of

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def sample(seconds: int, lines: int, **values: Any) -> BatchSample:
    given = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "limit": None, "in_flight": None, "failed": 0}
    at = NOW - timedelta(seconds=seconds)
    return BatchSample(**{"model": "m", "at": at, "seconds": 10, "completed": lines, **given, **values})


async def read(stage: Stage, id: str) -> list[BatchSample]:
    return await stage.batchwright.part(BatchesPart).samples.read(id)


async def test_a_larger_batch_leaves_samples_by_model_with_the_limit(database_url, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SMALL_MAX", 5)
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}", model=("small", "large")[n % 2]) for n in range(40)])
        batch = await stage.ended(id)
        found = await read(stage, id)
        assert {one.model for one in found} == {"small", "large"}
        assert (sum(one.completed for one in found), sum(one.failed for one in found)) == (40, 0)
        assert sum(one.input_tokens for one in found) == batch.input_tokens > 0
        assert sum(one.output_tokens for one in found) == batch.output_tokens > 0
        assert all(one.limit is not None and one.limit >= 1 and one.in_flight is not None for one in found)
        assert batch.progress_by_model == {
            model: {"total": 20, "completed": 20, "failed": 0} for model in ("large", "small")
        }
        await stage.batchwright.pool.rows(
            "UPDATE batchwright.batch_sample SET at = at - make_interval(secs => %(kept)s)", {"kept": KEPT_SECONDS + 60}
        )
        samples_of_all = stage.batchwright.part(BatchesPart).samples
        async with stage.batchwright.queue.database.transaction() as session:
            assert await samples_of_all.round().run(session) is False
        assert await read(stage, id) == []


async def test_a_small_and_quick_batch_leaves_none(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(5)])
        await stage.ended(id)
        assert await read(stage, id) == []


def test_samples_of_several_models_are_summed_for_each_step():
    found = together([sample(10, 3, limit=4), sample(0, 1), sample(10, 5, model="n", limit=2, in_flight=1)])
    assert [(one.lines, one.limit, one.in_flight) for one in found] == [(8, 6, 1), (1, None, None)]


def test_the_range_of_the_estimated_end_grows_with_changes_of_the_pace():
    batch = batch_of(status=BatchStatus.IN_PROGRESS, total=1_000, completed=590)
    pace = Pace(10.0, NOW)
    steady = [sample(10 * n, 100) for n in range(8, -1, -1)]
    assert eta_range(batch, pace, steady) == (NOW + timedelta(seconds=40), NOW + timedelta(seconds=40))
    wild = [sample(10 * n, 50 if n % 2 else 200) for n in range(8, -1, -1)]
    found = eta_range(batch, pace, wild)
    assert found is not None
    assert (found.earliest, found.latest) == (NOW + timedelta(seconds=20), NOW + timedelta(seconds=80))
    assert eta_range(batch, pace, steady[-4:]) is None, "three whole steps are too few"
    assert eta_range(batch, None, steady) is None
    assert eta_range(batch_of(status=BatchStatus.IN_PROGRESS, total=1_000, paused_at=NOW), pace, steady) is None
