"""The judge must find every kind of breach: here each promise of a batch is broken on purpose."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from uuid import UUID

import orjson
import pytest

from batchwright.batches.journal.envelopes import RequestIds
from tests.chaos.batch_client import Found, Request, workload
from tests.chaos.batch_fleet import Kill, Victim
from tests.chaos.batch_verdict import Evidence, Segment, judge, resumed
from tests.chaos.history import Event, History
from tests.chaos.test_verdict import job, told

A, B = UUID(int=1), UUID(int=2)
BATCH = "batch_" + 32 * "0"
REQUESTS = [Request(f"line-{n}", 100 * n, "small", fails=n == 3) for n in range(5)]


def test_a_clean_batch_is_no_breach():
    assert breaches(evidence()) == {}


def test_a_batch_that_failed_is_seen():
    assert "batches not completed" in breaches(evidence(row={"status": "failed"}))


def test_a_lost_line_is_seen():
    assert "lines lost" in breaches(evidence(output=[0, 1, 2]))


def test_a_line_in_both_files_and_one_that_is_there_twice_are_seen():
    assert "lines doubled" in breaches(evidence(errors=[1, 3]))
    assert "lines doubled" in breaches(evidence(output=[0, 1, 1, 2, 4]))


def test_a_line_in_the_wrong_file_is_seen():
    assert "lines in the wrong file" in breaches(evidence(output=[0, 1, 2, 3, 4], errors=[]))
    assert "lines in the wrong file" in breaches(evidence(output=[0, 1, 2], errors=[3, 4]))


def test_a_file_that_is_not_in_the_order_of_the_input_is_seen():
    assert "lines out of the input's order" in breaches(evidence(output=[0, 2, 1, 4]))


@pytest.mark.parametrize("change", [{"id": "batch_req_other"}, {"request_id": "batch_req_other"}, {"model": "large"}])
def test_an_answer_to_another_request_is_seen(change):
    lines = [line(REQUESTS[0], **change), *(line(REQUESTS[n]) for n in (1, 2, 4))]
    assert "answers of another request" in breaches(evidence(output_lines=lines))


def test_a_line_that_nobody_asked_for_is_seen():
    lines = [*(line(REQUESTS[n]) for n in (0, 1, 2, 4)), line(Request("stray", 900, "small", fails=False))]
    assert "answers of another request" in breaches(evidence(output_lines=lines))


@pytest.mark.parametrize("name", ["total", "completed", "failed", "expired", "cancelled", "input_tokens"])
def test_a_wrong_count_in_the_row_is_seen(name):
    assert "counts that differ" in breaches(evidence(row={name: 99}))


@pytest.mark.parametrize("where", ["manifest", "batch"])
def test_a_wrong_count_that_users_see_is_seen(where):
    found = evidence()
    counts = {"manifest": "counts", "batch": "request_counts"}[where]
    getattr(found.found, where)[counts]["completed"] = 99
    assert list(breaches(found)) == ["counts that differ"]


@pytest.mark.parametrize("name", ["output", "errors"])
def test_a_wrong_checksum_is_seen(name):
    found = evidence()
    found.found.manifest["sha256"][name] = "0" * 64
    assert list(breaches(found)) == ["checksums that differ"]


def test_a_line_that_the_cursor_showed_twice_not_at_all_or_otherwise_is_seen():
    for change in (lambda shown: shown + shown[:1], lambda shown: shown[1:], lambda shown: [b"{}\n", *shown[1:]]):
        found = evidence()
        found.found.shown = change(found.found.shown)
        assert list(breaches(found)) == ["lines that the cursor showed twice, otherwise or not"]


def test_a_line_that_a_zombie_has_registered_is_seen():
    found = evidence()
    found.segments = [*found.segments, Segment("0.1.1", 1, [100])]
    assert list(breaches(found)) == ["lines registered twice: a zombie's"]


def test_a_segment_that_holds_other_lines_than_it_says_is_seen():
    found = evidence()
    found.segments = [replace(found.segments[0], lines=4)]
    assert list(breaches(found)) == ["lines registered twice: a zombie's"]


def test_jobs_that_failed_or_never_ended_are_seen():
    for status in ("FAILED", "QUEUED"):
        found = evidence(history=told_by([job(A, status=status)], told(A)))
        assert "jobs not terminal, or failed" in breaches(found)


def test_a_settle_of_a_claim_that_was_rescued_is_seen():
    events = told(A, ["job.enqueued", "job.started", "job.rescued", "job.succeeded"])
    assert "zombie writes accepted" in breaches(evidence(history=told_by([job(A, attempts=0)], events)))


def test_a_second_batch_and_an_odd_answer_are_seen():
    found = evidence()
    found.found.batches = 2
    found.found.breaches.append(("GET /v1/batches", "500"))
    assert list(breaches(found)) == ["files or batches made twice", "answers that nobody should get"]


# Time to resume ---------------------------------------------------------------------------------------------------


def test_the_time_until_a_shard_is_free_and_started_again_counts_from_the_kill():
    times = measured(rescued_at=14.0, started_at=15.0)
    assert (times.rescued, times.started["plain"]) == ([4.0], [5.0])


def test_a_shard_that_waits_behind_others_of_its_model_is_counted_apart():
    times = measured(rescued_at=14.0, started_at=40.0, neighbour=(5.0, 39.0))
    assert (times.rescued, dict(times.started)) == ([4.0], {"in line": [30.0]})


def test_what_met_a_killed_postgresql_is_counted_apart():
    times = measured(rescued_at=14.0, started_at=15.0, outages=[(8.0, 9.0)])
    assert (times.rescued, dict(times.started)) == ([], {"restart": [5.0]})


def test_a_kill_that_left_nobody_awake_is_counted_apart():
    times = measured(rescued_at=14.0, started_at=15.0, other_awake_from=12.0)
    assert (times.rescued, dict(times.started)) == ([], {"nobody": [5.0]})


def test_a_shard_that_a_stopped_worker_had_lost_before_it_was_killed_is_not_counted():
    times = measured(rescued_at=9.0, started_at=15.0)
    assert (times.rescued, dict(times.started)) == ([], {})


def test_the_next_answer_is_the_first_that_was_not_there_at_the_kill():
    times = measured(rescued_at=14.0, started_at=15.0, samples=[(9.0, 1), (10.1, 3), (10.2, 3), (12.0, 4)])
    assert times.answered == [2.0]


def measured(*, rescued_at, started_at, neighbour=None, outages=(), other_awake_from=0.0, samples=()):
    """Worker 7 is killed at 10 s, worker 8 lives."""
    dead = Victim("worker", SimpleNamespace(pid=7), 0.0, ready_at=0.0, killed_at=10.0, ended_at=10.0)
    other = Victim("worker", SimpleNamespace(pid=8), 0.0, ready_at=other_awake_from)
    events = [
        Event(1, A, 1.0, "job.started", "RUNNING", 1, 1, "host:7:boot"),
        Event(2, A, rescued_at, "job.rescued", "QUEUED", 1, 0, "host:7:boot"),
        Event(3, A, started_at, "job.started", "RUNNING", 2, 1, "host:8:boot"),
    ]
    if neighbour is not None:
        events += [
            Event(4, B, neighbour[0], "job.started", "RUNNING", 1, 1, "host:8:boot"),
            Event(5, B, neighbour[1], "job.succeeded", "SUCCEEDED", 1, 1, "host:8:boot"),
        ]
    fleet = SimpleNamespace(everybody=[dead, other])
    monkey = SimpleNamespace(kills=[Kill(10.0, "worker", "in_progress", 7)], outages=list(outages))
    jobs = [job(A, queue="shard/small"), job(B, queue="shard/small")]
    return resumed(told_by(jobs, events), fleet, monkey, samples, lease_seconds=3.0)


# The workload -----------------------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_file_and_every_line_is_where_it_says():
    made = workload(200, 7)
    assert made == workload(200, 7)
    assert made.data != workload(200, 8).data
    for request in made.requests:
        found = orjson.loads(made.data[request.offset :].split(b"\n", 1)[0])
        assert (found["custom_id"], found["body"]["model"]) == (request.custom_id, request.model)
        assert ("[[fault:400]]" in found["body"]["messages"][1]["content"]) is request.fails
    assert {request.fails for request in made.requests} == {True, False}


def evidence(*, row=None, output=(0, 1, 2, 4), errors=(3,), output_lines=None, history=None):
    """A batch of five lines, of which one was made to fail."""
    good = output_lines if output_lines is not None else [line(REQUESTS[n]) for n in output]
    bad = [line(REQUESTS[n], status=400) for n in errors]
    counts = {"total": 5, "completed": len(good), "failed": len(bad)}
    tokens = {"input_tokens": 2 * len(good), "output_tokens": 3 * len(good)}
    data = [b"".join(good), b"".join(bad)]
    digests = [hashlib.sha256(one).hexdigest() if one else None for one in data]
    found = Found(
        batch={"request_counts": dict(counts), "usage": dict(tokens)},
        manifest={
            "counts": {**counts, "expired": 0, "cancelled": 0},
            "sha256": dict(zip(("output", "errors"), digests, strict=True)),
        },
        batches=1,
        files=1,
        output=data[0],
        errors=data[1],
        shown=[*bad, *good],
    )
    said = {"id": BATCH, "status": "completed", **counts, "expired": 0, "cancelled": 0, **tokens, **(row or {})}
    segments = [Segment("0.1.0", 5, [request.offset for request in REQUESTS])]
    return Evidence(REQUESTS, found, said, segments, history or told_by([job(A)], told(A)))


def line(request, *, status=200, **change):
    ids = RequestIds(BATCH)
    id, sent = ids.in_files(request.offset), ids.on_the_wire(request.offset)
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    body = {"model": change.get("model", request.model), "usage": usage} if status == 200 else {"error": {}}
    response = {"status_code": status, "request_id": change.get("request_id", sent), "body": body}
    envelope = {"id": change.get("id", id), "custom_id": request.custom_id, "response": response, "error": None}
    return orjson.dumps(envelope) + b"\n"


def told_by(jobs, events):
    return History({one.id: one for one in jobs}, events, Counter())


def breaches(found):
    return {name: breach for name, breach in judge(found).items() if breach}
