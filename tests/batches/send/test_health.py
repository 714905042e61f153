"""How a process records whether its model servers answer."""

from __future__ import annotations

from batchwright.batches.send.health import Health
from batchwright.inference.answers import Answer, Failure, Reply, classify


def answer(status: int | None = 200, body: bytes = b"{}", failure: Failure | None = None, detail: str = "") -> Answer:
    return classify(Reply(status=status, body=body, failure=failure, detail=detail), now=0.0)


LATE = answer(None, b"", Failure.TIMEOUT, "too late")
BUSY = answer(503, b'{"error": {"message": "loading"}}')
REFUSED = answer(401, b'{"detail": "no key"}')


def test_nobody_waits_before_the_first_request_is_sent() -> None:
    health = Health(0.0)
    assert health.silent_seconds(100.0) == 0.0
    health.sent(100.0)
    health.sent(105.0)
    assert health.silent_seconds(110.0) == 10.0


def test_failures_since_the_last_answer_are_counted_with_the_first_message_of_each_kind() -> None:
    health = Health(0.0)
    health.sent(0.0)
    for one in (LATE, BUSY, BUSY, answer(503, b'{"error": {"message": "still loading"}}')):
        health.failed(one, 1.0)
    busy, late = health.complaints()
    assert (busy.short, busy.words, late.short, late.words) == ("3 answered 503", "loading", "1 timed out", "too late")
    assert health.silent_seconds(5.0) == 5.0
    health.succeeded(6.0)
    assert (health.complaints(), health.refusals(), health.silent_seconds(7.0)) == ([], (), 1.0)
    health.failed(LATE, 8.0)
    assert [one.short for one in health.complaints()] == ["1 timed out"]


def test_a_final_refusal_is_an_answer_that_is_remembered_until_a_request_succeeds() -> None:
    health = Health(0.0)
    health.sent(0.0)
    health.failed(REFUSED, 4.0)
    assert (health.silent_seconds(4.0), health.complaints()) == (0.0, [])
    assert [(one.status, one.words) for one in health.refusals()] == [(401, "no key")]
    health.succeeded(5.0)
    assert health.refusals() == ()


def test_the_number_of_kinds_of_refusals_is_limited() -> None:
    health = Health(0.0)
    for status in range(400, 499):
        health.failed(answer(status), 1.0)
    assert len(health.refusals()) == 20
