"""The spans of a batch, as the source's table has them."""

from __future__ import annotations

from batchwright.states import BatchStatus
from batchwright.telemetry import tracing
from tests.batches.stage import request, staged
from tests.batches.test_lifecycle import SLOW
from tests.telemetry.test_tracing import ERROR, collector, environment, traced

__all__ = ["collector", "environment", "traced"]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


async def test_a_batch_is_one_trace_from_its_submission_to_the_model_server(database_url, tmp_path, traced):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit([request(f"r{n}") for n in range(3)], traceparent=PARENT))
    tracing.stop()
    assert batch.status is BatchStatus.COMPLETED
    runs = [span for span in traced.spans if span.name == "process-batch"]
    assert {span.trace_id for span in runs} == {TRACE}
    for span in runs:
        assert span.attributes["batch.id"] == batch.id
        assert (span.attributes["tenant.id"], span.attributes["file.id"]) == ("default", batch.input_file_id)
    last = runs[-1].attributes
    assert last["batch.output_file.id"] == batch.output_file_id
    assert "batch.error_file.id" not in last
    assert [last[f"batch.request.{name}"] for name in ("total", "completed", "failed")] == [3, 3, 0]
    inside = {span.name for span in traced.spans if span.parent in {run.id for run in runs}}
    assert "storage.Store" in inside


async def test_the_span_of_a_batch_that_failed_says_why(database_url, tmp_path, traced):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit(b"no json\n"))
    tracing.stop()
    assert batch.status is BatchStatus.FAILED
    (span,) = [span for span in traced.spans if span.name == "process-batch"]
    assert (span.status.code, span.status.message) == (ERROR, batch.errors["data"][0]["message"])


async def test_a_shard_that_is_given_back_leaves_a_linked_span(database_url, tmp_path, traced):
    async with staged(database_url, tmp_path, simulator=SLOW) as stage:
        worker = stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(300)], traceparent=PARENT)
        await stage.until(id, lambda batch: batch.completed > 0)
        worker.stop()
        _, task = stage.workers.pop()
        await task
    tracing.stop()
    (span,) = [span for span in traced.spans if span.name == "re-enqueue"]
    assert span.trace_id != TRACE
    assert [link.partition("-")[0] for link in span.links] == [TRACE]
    assert span.attributes["batch.id"] == id
