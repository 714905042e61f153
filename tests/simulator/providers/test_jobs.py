"""The job model: the stage of a job by the clock, and its results."""

import pytest

from batchwright.simulator.providers.faults import Faults
from batchwright.simulator.providers.jobs import Clock, Item, Job, Stage


def job(count=4, *rules, texts=(), **values):
    items = [Item(str(n), None, texts[n] if n < len(texts) else "") for n in range(count)]
    faults = Faults(rules).of_job("openai", "")
    times = {"queue_seconds": 10, "run_seconds": 100, "cancel_seconds": 5, "created_at": 0, "begun_at": 0}
    return Job(id="j", provider="openai", number=1, trace="", items=items, faults=faults, **{**times, **values})


def statuses(one, now):
    return [outcome.status for outcome in one.outcomes(now)]


def test_a_job_waits_runs_and_ends():
    one = job()
    assert [one.stage(now) for now in (0, 9, 10, 109, 110)] == ["queued", "queued", "running", "running", "succeeded"]
    assert [statuses(one, now).count(200) for now in (0, 10, 35, 60, 110)] == [0, 0, 1, 2, 4]


def test_a_job_that_was_not_started_stays_new():
    assert job(begun_at=None).stage(10**9) is Stage.NEW


def test_markers_in_the_input_fail_an_item():
    one = job(4, texts=["x", "say [[fail]] now", "a__fail_500__.wav", "failure"])
    assert statuses(one, 110) == [200, 400, 500, 200]
    assert (one.counts(110).succeeded, one.counts(110).failed, one.counts(110).pending) == (2, 2, 0)


def test_a_cancelled_job_keeps_what_was_finished_when_it_was_cancelled():
    one = job()
    one.cancel(60)
    assert [one.stage(now) for now in (60, 64, 65)] == ["cancelling", "cancelling", "cancelled"]
    assert statuses(one, 1000) == [200, 200, 0, 0]
    one.cancel(2000)
    assert one.cancelled_at == 60


def test_a_job_that_has_ended_is_not_cancelled():
    one = job()
    one.cancel(110)
    assert one.stage(200) is Stage.SUCCEEDED


def test_a_job_that_is_slower_than_its_window_expires_with_what_it_has():
    one = job(4, window_seconds=60)
    assert [one.stage(59), one.stage(60)] == [Stage.RUNNING, Stage.EXPIRED]
    assert statuses(one, 1000) == [200, 200, 0, 0]


def test_no_time_at_all_is_enough():
    assert statuses(job(2, queue_seconds=0, run_seconds=0), 0) == [200, 200]


@pytest.mark.parametrize(
    ("rule", "ids"),
    [
        ("missing", "123"),
        ("duplicate", "00123"),
        ("shuffled", "3210"),
        ("empty", ""),
        ("expired", "01"),
        ("expired:share=0.75", "012"),
        ("failed", ""),
    ],
)
def test_results_are_changed_as_the_fault_requires(rule, ids):
    assert "".join(one.item.id for one in job(4, rule).delivered(110)) == ids


def test_results_can_contain_an_unknown_id_and_a_broken_line():
    one = job(2, "stranger", "malformed")
    assert [outcome.item.id for outcome in one.delivered(110)] == ["0", "1", "stranger"]
    assert one.lines([b"12345678", b"abc"]) == b"1234\nabc\n"


def test_partial_fails_every_second_item_or_the_given_share():
    assert statuses(job(4, "partial"), 110) == [200, 400, 200, 400]
    one = job(3, "partial:every=1:status=500:message=no credit")
    assert [(outcome.status, outcome.message) for outcome in one.outcomes(110)] == 3 * [(500, "no credit")]


def test_an_unknown_status_is_shown_only_while_the_job_runs():
    one, words = job(1, "unknown_status:code=POLISHING"), {Stage.QUEUED: "q", Stage.SUCCEEDED: "s"}
    assert [one.word(now, words) for now in (0, 10, 110)] == ["q", "POLISHING", "s"]


def test_lag_and_the_clock():
    assert job(1, "lag:seconds=7").listed_at == 7
    clock = Clock(100.0)
    clock.advance(5)
    assert clock.now() == 105
    clock.set(3)
    assert clock.now() == 3
