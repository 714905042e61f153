"""The judge must find every kind of breach: here each promise is broken on purpose."""

from collections import Counter
from types import SimpleNamespace
from uuid import UUID

import pytest

from tests.chaos.history import Event, History
from tests.chaos.verdict import judge
from tests.chaos.workload import Ledger

A, B, C = (UUID(int=n) for n in (1, 2, 3))
WELL = ["job.enqueued", "job.started", "job.succeeded"]
STATUS = {"job.enqueued": "QUEUED", "job.started": "RUNNING", "job.succeeded": "SUCCEEDED", "job.rescued": "QUEUED"}


def test_a_clean_history_is_no_breach():
    assert breaches([job(A), job(B)], told(A) + told(B)) == {}


def test_a_zombie_is_seen_when_it_settles_a_claim_that_was_rescued():
    events = told(A, ["job.enqueued", "job.started", "job.rescued", "job.succeeded"])
    assert "zombie writes accepted" in breaches([job(A, attempts=0)], events)


def test_a_zombie_is_seen_when_it_settles_under_an_older_claim():
    events = told(A, ["job.enqueued", "job.started", "job.rescued", "job.started", "job.succeeded"])
    events[-1] = events[-1]._replace(claim=1)
    assert "zombie writes accepted" in breaches([job(A, claims=2)], events)


def test_a_late_word_of_a_zombie_is_seen():
    events = [*told(A), Event(99, A, 0.0, "chaos.plain.begun", None, 1, 1, "w")]
    assert "zombie writes accepted" in breaches([job(A)], events)


def test_a_second_ending_is_seen():
    assert "zombie writes accepted" in breaches([job(A)], told(A, [*WELL, "job.succeeded"]))


def test_a_row_that_differs_from_its_history_is_seen():
    assert "histories that are no legal path to their row" in breaches([job(A, claims=2)], told(A))


@pytest.mark.parametrize("effects", [0, 2])
def test_a_doubled_and_a_missing_effect_are_seen(effects):
    found = breaches([job(A, job_type="chaos.write")], told(A), effects={A: effects})
    assert "write= effects doubled, missing or of nobody" in found


def test_lost_and_unfinished_jobs_are_seen():
    ledger = Ledger(enqueued={A, B})
    found = breaches([job(A, status="QUEUED", claims=0, attempts=0)], told(A, ["job.enqueued"]), ledger=ledger)
    assert {"jobs lost", "jobs not terminal"} <= found.keys()


def test_an_innocent_that_was_parked_is_seen():
    found = breaches([job(A, status="FAILED", code="poison")], told(A))
    assert "innocent jobs parked" in found


def test_two_jobs_that_have_one_key_at_a_time_are_seen():
    first, second = told(A), told(B)
    woven = [first[0], second[0], first[1], second[1], first[2], second[2]]
    events = [event._replace(id=place) for place, event in enumerate(woven)]
    found = breaches([job(A, exclusive_key="k"), job(B, exclusive_key="k")], events)
    assert list(found) == ["two jobs of one key at a time"]


def test_the_same_key_of_two_tenants_is_two_keys():
    first, second = told(A), told(B)
    woven = [first[0], second[0], first[1], second[1], first[2], second[2]]
    events = [event._replace(id=place) for place, event in enumerate(woven)]
    assert breaches([job(A, exclusive_key="k"), job(B, exclusive_key="k", tenant="ada")], events) == {}


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_rerun_begins_with_no_attempts(attempt):
    first = told(A, ["job.enqueued", "job.started"])
    failed = Event(3, A, 0.0, "job.failed", "FAILED", 1, 1, "w")
    rerun = Event(4, A, 0.0, "job.rerun", "QUEUED", 1, attempt, None)
    again = [Event(5, A, 0.0, "job.started", "RUNNING", 2, 1, "w"), Event(6, A, 0.0, WELL[2], "SUCCEEDED", 2, 1, "w")]
    found = breaches([job(A, claims=2)], [*first, failed, rerun, *again])
    assert list(found) == ["histories that are no legal path to their row"] * attempt


def test_a_doubled_link_of_a_chain_is_seen():
    links = [job(id, job_type="chaos.chain", payload=link(step)) for id, step in ((A, 1), (B, 3), (C, 3))]
    found = breaches(links, told(A) + told(B) + told(C))
    assert "chained jobs missing or doubled" in found


def test_a_wrong_counter_and_a_missing_child_are_seen():
    payload = {"width": 2, "on_join": "close", "allow_failures": 0}
    parent = job(A, job_type="chaos.parent", payload=payload, waits=1, children_failed=1, progress_total=2)
    leaf = {"index": 0, "fails": False, "writes": False}
    child = job(B, job_type="chaos.leaf", payload=leaf, parent_job_id=A, round=1)
    found = breaches([parent, child], told(A) + told(B))
    assert {"parents whose counters or ending are wrong", "children missing or doubled"} <= found.keys()


@pytest.mark.parametrize("waits_again", [True, False])
def test_a_parent_with_failed_children_may_succeed_only_if_it_had_joined_before_its_rerun(waits_again):
    """It joined because of a deadline; then it was cancelled and rerun, and the rerun removed the deadline."""
    payload = {"width": 1, "on_join": "resume", "allow_failures": 0}
    result = {"round": 1, "succeeded": 0, "total": 1, "distinct": 1}
    parent = job(A, job_type="chaos.parent", payload=payload, result=result, waits=1, children_failed=1, claims=2)
    parent.progress_total = 1
    leaf = {"index": 0, "fails": True, "writes": False}
    child = job(B, job_type="chaos.leaf", payload=leaf, parent_job_id=A, round=1, status="CANCELLED")
    life = [
        ("job.enqueued", "QUEUED", 0), ("job.started", "RUNNING", 1), ("job.waited", "RUNNING", 1),
        ("job.joined", "QUEUED", 1), ("job.cancelled", "CANCELLED", 1),
        ("job.rerun", "RUNNING" if waits_again else "QUEUED", 1), *[("job.joined", "QUEUED", 1)] * waits_again,
        ("job.started", "RUNNING", 2), ("job.succeeded", "SUCCEEDED", 2),
    ]  # fmt: skip
    events = [Event(place, A, 0.0, name, status, claim, 1, "w") for place, (name, status, claim) in enumerate(life)]
    found = breaches([parent, child], events, ledger=Ledger(cancelled={B}))
    assert ("parents whose counters or ending are wrong" in found) is waits_again


def test_a_cancel_that_nobody_asked_for_is_seen():
    assert "jobs cancelled by nobody" in breaches([job(A, status="CANCELLED")], told(A))


def link(step):
    return {"chain": "c", "step": step, "steps": 3, "seconds": 0.0}


def told(id, names=WELL):
    """Events as the engine writes them: each start adds a claim, and each rescue gives an attempt back."""
    events, claim, attempt = [], 0, 0
    for place, name in enumerate(names):
        claim += name == "job.started"
        attempt += (name == "job.started") - (name == "job.rescued")
        events.append(Event(id.int * 100 + place, id, float(place), name, STATUS[name], claim, attempt, "w"))
    return events


def job(id, **columns):
    nothing = ("result", "code", "reason", "locked_by", "exclusive_key", "parent_job_id", "round", "progress_total")
    row = dict.fromkeys((*nothing, "idempotency_key", "deadline"))
    row |= {
        "id": id,
        "job_type": "chaos.plain",
        "status": "SUCCEEDED",
        "payload": {},
        "priority": 5,
        "tenant": "default",
    }
    row |= {"attempts": 1, "max_attempts": 3, "claims": 1, "waits": 0, "children_open": 0, "children_failed": 0}
    return SimpleNamespace(**row | columns)


def breaches(jobs, events, *, effects=None, ledger=None):
    history = History({one.id: one for one in jobs}, events, Counter(effects or {}))
    return {name: found for name, found in judge(history, ledger or Ledger()).items() if found}
