"""Samples taken every minute: counts of all processes become rates, and old samples are removed."""

from datetime import timedelta

import pytest

from batchwright import NewJob
from batchwright.engine.metrics import WORKER_METRICS, CountsWriter, WorkerCounts
from batchwright.engine.samples import DAY, HOUR, KEPT_SECONDS, SQL, Samples, figures_of
from batchwright.engine.upkeep import Upkeep
from batchwright.telemetry.metrics import Counts, Metric, Sampled
from tests.engine.planning import nodes, plan, touched
from tests.support import make_worker, put, raw

SEEN = Metric("seen_total", "Seen.", ("model", "kind"), sampled=Sampled("requests", "model"))
TIMED = Metric("timed_seconds", "Timed.", ("model",), "histogram", (1.0,), sampled=Sampled("requests", "model"))
LOAD = Metric("load", "Load.", ("model",), "gauge", sampled=Sampled("in_flight", "model"))
METRICS = (*WORKER_METRICS, SEEN, TIMED, LOAD)


def test_counts_are_summed_by_one_label_and_over_metrics():
    counts = Counts([SEEN, TIMED, LOAD])
    counts.add("seen_total", 2, ("a", "x"))
    counts.add("seen_total", 3, ("a", "y"))
    counts.add("seen_total", 1, ("b", "x"))
    counts.observe_all("timed_seconds", [0.5, 7.0], ("a",))
    counts.set_all("load", {("a",): 4})
    flat = counts.flat()
    assert figures_of(METRICS, flat, "counter", "histogram") == {"jobs": {}, "requests": {"a": 7.0, "b": 1.0}}
    assert figures_of(METRICS, flat, "gauge") == {"in_flight": {"a": 4}}


async def test_rates_are_differences_over_all_processes(queue, clock):
    samples = Samples(queue.database)
    counts = [WorkerCounts([SEEN]), WorkerCounts([SEEN])]
    writers = [CountsWriter(queue.database, name, each) for name, each in zip(("w1", "w2"), counts, strict=True)]
    await put(queue, NewJob("noop", queue="mail"), NewJob("noop", queue="mail"))
    start = await clock.advance(queue, 0)
    for minute in range(3):
        for each, writer in zip(counts, writers, strict=True):
            each.add("seen_total", 30 * minute, ("a", "x"))
            await writer.write()
        await samples.take(METRICS)
        await clock.advance(queue, 60)
    first, second = await samples.read(HOUR)
    assert (first.at, first.seconds) == (start + timedelta(seconds=60), 60.0)
    assert (first.rate("requests"), second.rate("requests", "a")) == (1.0, 2.0)
    assert second.rate("requests", "b") == second.rate("nothing") == 0.0
    assert (second.levels["due"], second.levels["queues"], second.levels["workers"]) == (2, {"mail": 2}, 0)


async def test_a_day_is_read_in_steps_and_a_missing_sample_is_covered_by_the_next(queue, clock):
    samples = Samples(queue.database)
    counts = WorkerCounts([SEEN])
    writer = CountsWriter(queue.database, "w1", counts)
    await clock.advance(queue, 0)
    for _ in range(4):
        counts.add("seen_total", 1200, ("a", "x"))
        await writer.write()
        await samples.take(METRICS)
        await clock.advance(queue, 1200)
    found = await samples.read(DAY)
    assert [(point.seconds, point.rate("requests")) for point in found] == [(1200.0, 1.0)] * 3
    assert await samples.read(HOUR) == [point for point in found if point.at > found[-1].at - timedelta(hours=1)][1:]


async def test_old_samples_are_removed_and_a_counter_that_fell_gives_no_rate(queue, clock):
    samples = Samples(queue.database)
    await samples.take(METRICS)
    await clock.advance(queue, KEPT_SECONDS + 1)
    counts = WorkerCounts([SEEN])
    counts.add("seen_total", 60, ("a", "x"))
    await CountsWriter(queue.database, "w1", counts).write()
    await samples.take(METRICS)
    assert await raw(queue, "SELECT count(*) FROM batchwright.sample") == [(1,)]
    await raw(queue, "DELETE FROM batchwright.worker_counts RETURNING worker")
    await clock.advance(queue, 60)
    await samples.take(METRICS)
    (point,) = await samples.read(HOUR)
    assert point.rate("requests") == 0.0


async def test_upkeep_takes_a_sample(pool, queue):
    worker = make_worker(pool)
    await put(queue, NewJob("noop"))
    await worker.run_once()
    await worker.close()
    await Upkeep(queue, worker._processes, worker._operations, metrics=METRICS).run_all()
    ((totals,),) = await raw(queue, "SELECT totals FROM batchwright.sample")
    assert totals["jobs"] == {"succeed": 1}


@pytest.mark.parametrize("period", [HOUR, DAY])
def test_charts_read_one_sample_per_step(crowd, period):
    crowd.execute(
        "INSERT INTO batchwright.sample SELECT now() - n * interval '1 minute', '{}', '{}' "
        "FROM generate_series(0, 11000) AS n"
    )
    crowd.execute("ANALYZE batchwright.sample")
    found = plan(crowd, "read", source=SQL, run=True, seconds=period.seconds, steps=period.steps)
    assert found["Actual Rows"] >= period.steps
    assert not [node for node in nodes(found) if node["Node Type"] == "Seq Scan"]
    assert touched(found) < 5 * period.steps
