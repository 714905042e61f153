"""The class of an error decides what happens to the job, and foreign errors are mapped to a class."""

from __future__ import annotations

import json
import statistics
import uuid
from datetime import UTC, datetime
from types import SimpleNamespace

import pydantic
import pytest

from batchwright import operation
from batchwright.engine import policy
from batchwright.engine.catalog import MARK
from batchwright.engine.jobs import Claim
from batchwright.engine.outcomes import Snooze
from batchwright.errors import (
    DatabaseUnavailable,
    Fatal,
    InvalidInput,
    PayloadInvalid,
    RateLimited,
    RetryLater,
    SchemaInvalid,
    TooLarge,
    Transient,
)


class HttpError(Exception):
    def __init__(self, status_code, headers=None, name="status_code", on_response=True):
        super().__init__(f"HTTP {status_code}")
        response = SimpleNamespace(headers=headers or {}, **{name: status_code})
        if on_response:
            self.response = response
        else:
            self.headers = headers or {}
            setattr(self, name, status_code)


class Busy(OSError):
    pass


def claim(attempts=1, max_attempts=3):
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    id = uuid.uuid4()
    return Claim(
        id, 1, "x", "default", "default", 5, None, attempts, max_attempts, None, id, None, None, False, 0, None, None,
        None, moment, False, moment,
    )  # fmt: skip


def made(**options):
    @operation("x", **options)
    async def x() -> None: ...

    return getattr(x, MARK)


def validation_error():
    with pytest.raises(pydantic.ValidationError) as caught:
        pydantic.TypeAdapter(int).validate_python("x")
    return caught.value


def json_error():
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    return caught.value


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (TimeoutError(), Transient, "timeout"),
        (ConnectionRefusedError(), Transient, "connection"),
        (ConnectionResetError(), Transient, "connection"),
        (BrokenPipeError(), Transient, "connection"),
        (DatabaseUnavailable("away"), Transient, "connection"),
        (HttpError(429), RateLimited, None),
        (HttpError(429, name="status"), RateLimited, None),
        (HttpError(429, name="code", on_response=False), RateLimited, None),
        (HttpError(500), Fatal, "unexpected"),
        (HttpError(404), Fatal, "unexpected"),
        (validation_error(), SchemaInvalid, None),
        (json_error(), SchemaInvalid, None),
        (InvalidInput("odd"), SchemaInvalid, None),
        (PayloadInvalid("odd"), SchemaInvalid, None),
        (TooLarge("big"), SchemaInvalid, None),
        (ValueError("what"), Fatal, "unexpected"),
        (KeyError("what"), Fatal, "unexpected"),
        (SystemExit(1), Fatal, "unexpected"),
        (KeyboardInterrupt(), Fatal, "unexpected"),
        (MemoryError(), Fatal, "unexpected"),
        (Busy(), Fatal, "unexpected"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_foreign_errors_are_mapped_to_a_class(error, kind, code):
    verdict = policy.classify(error)
    assert type(verdict) is kind
    assert verdict.code == code


@pytest.mark.parametrize(
    "error", [RateLimited("a"), Transient("b"), SchemaInvalid("c"), Fatal("d", scope="item"), RetryLater("e")], ids=repr
)
def test_our_own_errors_keep_their_class(error):
    assert policy.classify(error) is error
    assert policy.classify(error, retry_on=(Exception,)) is error


def test_errors_in_retry_on_are_retried():
    assert type(policy.classify(Busy())) is Fatal
    assert type(policy.classify(Busy(), retry_on=(Busy,))) is Transient
    assert type(policy.classify(Busy(), retry_on=(OSError,))) is Transient, "subclasses too"
    assert type(policy.classify(ValueError(), retry_on=(Busy,))) is Fatal
    assert policy.react(claim(), made(retry_on=(Busy,)), Busy()).verb == "retry"
    assert policy.react(claim(), made(), Busy()).verb == "fail"


@pytest.mark.parametrize(
    ("error", "verb"),
    [
        (RateLimited(), "snooze"),
        (RetryLater("busy"), "snooze"),
        (Transient(), "retry"),
        (SchemaInvalid(), "fail"),
        (Fatal(), "fail"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_class_decides_the_verb(error, verb):
    assert policy.react(claim(), made(), error).verb == verb


def test_transient_is_retried_up_to_max_attempts_and_then_fails():
    verbs = [policy.react(claim(n, 3), made(), Transient("no")).verb for n in (1, 2, 3)]
    assert verbs == ["retry", "retry", "fail"]
    assert policy.react(claim(1, 1), made(), Transient("no")).values["error"]["kind"] == "transient"


def test_rate_limited_waits_as_asked_and_a_little_longer():
    waits = [policy.react(claim(), made(), RateLimited(retry_after=40)).values["delay_seconds"] for _ in range(200)]
    assert 40 <= min(waits) < max(waits) <= 50
    waits = [policy.react(claim(), made(), RateLimited()).values["delay_seconds"] for _ in range(200)]
    assert 5 <= min(waits) < max(waits) <= 6.25
    assert policy.react(claim(), made(), RateLimited(retry_after=-3)).values["delay_seconds"] == 0


@pytest.mark.parametrize(
    ("headers", "expected"),
    [({"Retry-After": "7"}, 7.0), ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, None), ({}, None), (None, None)],
)
def test_retry_after_is_read_from_the_response(headers, expected):
    assert policy.classify(HttpError(429, headers)).retry_after == expected


def test_backoff_grows_to_its_bound_with_full_jitter():
    x = made(backoff_seconds=2.0, backoff_seconds_max=20.0)
    for attempt, step in [(1, 2.0), (2, 4.0), (3, 8.0), (4, 16.0), (5, 20.0), (50, 20.0)]:
        waits = [policy.backoff(attempt, x) for _ in range(400)]
        assert min(waits) >= 0
        assert max(waits) <= step
        assert statistics.mean(waits) == pytest.approx(step / 2, rel=0.25), "full jitter, not a fixed step"


def test_an_unexpected_error_is_described_with_its_traceback():
    try:
        raise ValueError("a\x00b" + "x" * 10_000)
    except ValueError as error:
        described = policy.react(claim(), made(), error).values["error"]
    assert (described["kind"], described["code"], described["type"]) == ("fatal", "unexpected", "ValueError")
    assert described["message"].startswith("a\N{REPLACEMENT CHARACTER}b")
    assert len(described["message"]) == 4000
    assert "test_policy.py" in described["traceback"]
    assert "\x00" not in described["traceback"]


def test_our_own_errors_are_described_without_a_traceback():
    try:
        raise Fatal("no", code="broken", scope="item")
    except Fatal as error:
        described = policy.react(claim(), made(), error).values["error"]
    assert described == {"kind": "fatal", "code": "broken", "type": "Fatal", "message": "no", "scope": "item"}


def test_snoozes_and_results_become_settles():
    assert policy.snooze(claim(), Snooze(5, "x\x00")).values["reason"] == "x\N{REPLACEMENT CHARACTER}"
    assert policy.snooze(claim(), Snooze(5, progress=(1, 2))).values["progress_total"] == 2
    settle = policy.succeed(claim(), {"a": 1}, (1, 2))
    assert (settle.verb, settle.values["progress_current"]) == ("succeed", 1)


@pytest.mark.parametrize("size", [1024 * 1024 - 2, 1024 * 1024 - 1])
def test_a_result_has_a_limit_that_the_error_names(size):
    fits = size + 2 <= 1024 * 1024
    if fits:
        assert len(policy.storable("x" * size)) == 1024 * 1024
        return
    with pytest.raises(Fatal, match="1048577 bytes; the limit is 1048576") as caught:
        policy.storable("x" * size)
    assert caught.value.code == "result_too_large"
