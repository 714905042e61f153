from __future__ import annotations

import asyncio

import pytest

from batchwright.db.retry import retry_deadlocks, retry_unavailable
from batchwright.errors import DatabaseUnavailable, Deadlock


class Flaky:
    """A call that fails this many times before it succeeds."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.calls = 0
        self._failures = failures
        self._error = error

    async def __call__(self, *, session: object = None) -> str:
        self.calls += 1
        if self.calls <= self._failures:
            raise self._error
        return "answer"


@pytest.fixture
def pauses(monkeypatch):
    """Records the requested pauses, without waiting."""
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return asked


async def test_a_victim_of_deadlocks_runs_again():
    flaky = Flaky(3, Deadlock("victim"))
    assert await retry_deadlocks(flaky)() == "answer"
    assert flaky.calls == 4


async def test_a_victim_in_the_callers_transaction_is_left_to_the_caller():
    flaky = Flaky(1, Deadlock("victim"))
    with pytest.raises(Deadlock):
        await retry_deadlocks(flaky)(session=object())
    assert flaky.calls == 1


async def test_a_deadlock_that_repeats_too_often_is_an_error():
    flaky = Flaky(1000, Deadlock("victim"))
    with pytest.raises(Deadlock):
        await retry_deadlocks(flaky)()
    assert flaky.calls == 10


async def test_a_call_without_an_answer_is_made_again(pauses):
    error = DatabaseUnavailable("gone")
    told: list[Exception] = []
    assert await retry_unavailable(Flaky(2, error), tries_max=3, on_failure=told.append) == "answer"
    assert told == [error, error]
    assert len(pauses) == 2


async def test_the_last_try_raises(pauses):
    flaky = Flaky(1000, DatabaseUnavailable("gone"))
    with pytest.raises(DatabaseUnavailable):
        await retry_unavailable(flaky, tries_max=4)
    assert (flaky.calls, len(pauses)) == (4, 3)


@pytest.mark.parametrize("error", [Deadlock("victim"), ValueError("wrong")])
async def test_other_errors_are_raised_at_once(pauses, error):
    flaky = Flaky(1, error)
    with pytest.raises(type(error)):
        await retry_unavailable(flaky)
    assert (flaky.calls, pauses) == (1, [])


async def test_an_outage_of_any_length_is_waited_for(pauses):
    assert await retry_unavailable(Flaky(5000, DatabaseUnavailable("gone"))) == "answer"
    assert len(pauses) == 5000
    assert 0.05 <= min(pauses) <= max(pauses) <= 1.0
