"""The spans of a batch, as in the table of llm-d's batch gateway."""

from __future__ import annotations

import pytest

from batchwright.batches import process
from batchwright.batches.journal.workspace import Workspace
from batchwright.batches.send import shard as execution
from batchwright.batches.send.shard import ShardRun
from batchwright.errors import StorageUnavailable
from batchwright.inference.gateway import Gateway
from batchwright.states import BatchStatus
from batchwright.telemetry import tracing
from batchwright.telemetry.tracing import parsed
from tests.batches.stage import request, staged
from tests.batches.test_endings import failing
from tests.batches.test_lifecycle import SLOW
from tests.support import raw
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


async def test_a_shard_is_a_span_from_claim_to_settle_with_its_uploads_and_downloads_inside(
    database_url, tmp_path, traced
):
    """Two machines that share a store: the second downloads what the first has uploaded."""
    parts = {
        "storage": {"url": f"file://{tmp_path / 'store'}"},
        "batches": {"checkpoint_seconds": 0.05, "shared_checkpoint_seconds": 0.05},
        "inference": {"concurrency": 10},
    }
    seen = []
    async with staged(database_url, tmp_path / "one", simulator=SLOW, **parts) as first:
        worker = first.work()
        id = await first.submit([request(f"r{n}") for n in range(60)], traceparent=PARENT)
        await first.until(id, lambda batch: batch.completed > 0)
        worker.stop()
        await first.workers.pop()[1]
        parts["global_inference_gateway"] = {"url": first.simulator.url}
        async with staged(database_url, tmp_path / "two", **parts) as second:
            send = Gateway.send

            async def note(self, asked):
                seen.append(asked.traceparent)
                return await send(self, asked)

            second.work()
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Gateway, "send", note)
                batch = await second.ended(id)
            settled = await raw(
                second.batchwright.queue,
                "SELECT extract(epoch FROM ts) FROM batchwright.job_event WHERE event = 'job.succeeded' ORDER BY id",
            )
    tracing.stop()
    assert batch.status is BatchStatus.COMPLETED
    shards = [span for span in traced.spans if span.name == "process-shard"]
    batches = {span.id for span in traced.spans if span.name == "process-batch"}
    assert len(shards) == 2
    assert {span.trace_id for span in shards} == {TRACE}
    assert {span.parent for span in shards} <= batches
    assert {(span.attributes["batch.id"], span.attributes["batch.shard"]) for span in shards} == {(id, 0)}
    one, two = sorted(shards, key=lambda span: span.began)
    inside = {shard.id: {span.name for span in traced.spans if span.parent == shard.id} for shard in shards}
    assert "storage.Store" in inside[one.id]
    assert {"storage.Store", "storage.Retrieve"} <= inside[two.id]
    assert two.ended / 1e9 >= float(settled[0][0]) - 0.01, "the span ends when the success is committed"
    assert {parsed(traceparent)[1] for traceparent in seen} == {two.id}, "the model server gets the trace"


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
    assert span.attributes["batch.re_enqueue.reason"] == "none"


async def test_whatever_is_re_enqueued_leaves_a_span_in_the_worker(database_url, tmp_path, traced, monkeypatch):
    """A batch and a shard whose store is unavailable, and a shard with an error."""
    for module in (execution, process):
        monkeypatch.setattr(module, "AWAY_SECONDS", 0.05)
    failing(monkeypatch, Workspace, "keep_plan", StorageUnavailable("away"))
    failing(monkeypatch, ShardRun, "_open_input", StorageUnavailable("away"))
    failing(monkeypatch, ShardRun, "_read_entries", RuntimeError("odd"))
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit([request("a")], traceparent=PARENT))
    tracing.stop()
    assert batch.status is BatchStatus.COMPLETED
    spans = [span for span in traced.spans if span.name == "re-enqueue"]
    assert [span.attributes["batch.re_enqueue.reason"] for span in spans] == ["away", "db_transient", "system_error"]
    assert {span.attributes["batch.id"] for span in spans} == {batch.id}
