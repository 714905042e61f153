"""The estimated end of a batch, and its cost."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from batchwright.batches.progress import DeadlineRisk, Forecast, forecast
from batchwright.batches.store import Batch, Pace
from batchwright.inference.prices import Price, cost
from batchwright.states import BatchStatus

NOW = datetime(2026, 12, 24, 18, tzinfo=UTC)


def batch(**values: Any) -> Batch:
    """A batch of a hundred lines, half of them answered, with an hour left."""
    nothing = {field.name: None for field in dataclasses.fields(Batch)}
    counts = {"total": 100, "completed": 40, "failed": 10, "expired": 0, "cancelled": 0}
    standing = {"status": BatchStatus.IN_PROGRESS, "expires_at": NOW + timedelta(hours=1)}
    return Batch(**{**nothing, **counts, **standing, **values})


def seconds(n: float) -> timedelta:
    return timedelta(seconds=n)


@pytest.mark.parametrize(
    ("rate", "left", "risk"),
    [
        (1.0, 3600, DeadlineRisk.NONE),
        (1.0, 67, DeadlineRisk.NONE),
        (1.0, 66, DeadlineRisk.LOW),
        (1.0, 50, DeadlineRisk.LOW),
        (1.0, 49, DeadlineRisk.HIGH),
        (1.0, -5, DeadlineRisk.HIGH),
    ],
)
def test_the_risk_is_the_needed_time_as_a_share_of_the_time_left(rate: float, left: float, risk: DeadlineRisk) -> None:
    found = forecast(batch(expires_at=NOW + seconds(left)), Pace(rate, NOW))
    assert found == Forecast(NOW + seconds(50), risk)


@pytest.mark.parametrize(
    ("rate", "silent", "is_known"), [(5.0, 9.0, True), (5.0, 11.0, False), (0.05, 59.0, True), (0.05, 61.0, False)]
)
def test_while_no_answers_arrive_no_end_is_estimated(rate: float, silent: float, is_known: bool) -> None:
    found = forecast(batch(expires_at=NOW + seconds(1)), Pace(rate, NOW, silent_seconds=silent))
    assert (found.eta is not None, found.risk) == (is_known, DeadlineRisk.HIGH)


def test_a_batch_with_all_its_answers_ends_now() -> None:
    assert forecast(batch(completed=90), Pace(1.0, NOW)) == Forecast(NOW, DeadlineRisk.NONE)
    assert forecast(batch(completed=200), Pace(1.0, NOW)).eta == NOW


def test_the_slowest_pace_still_has_a_date() -> None:
    found = forecast(batch(), Pace(1e-12, NOW))
    assert found == Forecast(NOW + timedelta(days=365), DeadlineRisk.HIGH)


@pytest.mark.parametrize(
    "values",
    [
        {"status": BatchStatus.VALIDATING},
        {"status": BatchStatus.CANCELLING},
        {"status": BatchStatus.COMPLETED},
        {"paused_at": NOW},
        {"stop_reason": "deadline"},
    ],
)
def test_nothing_is_estimated_for_a_batch_that_does_not_run(values: dict[str, Any]) -> None:
    assert forecast(batch(**values), Pace(1.0, NOW)) == Forecast(None, None)


def test_without_a_pace_nothing_is_estimated() -> None:
    assert forecast(batch(), None) == forecast(batch(), Pace(None, NOW)) == Forecast(None, None)


def test_the_deadline_does_not_count_while_files_are_written() -> None:
    assert forecast(batch(status=BatchStatus.FINALIZING), None) == Forecast(None, DeadlineRisk.NONE)


PRICES = {"small": Price(input=1.0, cached=0.25, output=2.0), "large": Price(input=10.0, output=20.0)}


@pytest.mark.parametrize(
    ("usage", "prices", "total"),
    [
        ({"small": {"input": 1_000_000, "cached": 400_000, "output": 500_000}}, PRICES, 0.6 + 0.1 + 1.0),
        ({"large": {"input": 1_000_000, "cached": 400_000, "output": 0}}, PRICES, 10.0),
        ({"small": {"input": 1_000_000}, "large": {"output": 100_000}}, PRICES, 1.0 + 2.0),
        ({"small": {"input": 100, "cached": 1_000_000}}, PRICES, 100 * 0.25 / 1_000_000),
        ({"other": {"input": 1_000_000}}, {**PRICES, "*": Price(input=3.0)}, 3.0),
        ({"other": {"input": 1}}, PRICES, None),
        ({"other": {"input": 0, "output": 0}}, PRICES, 0.0),
        ({}, PRICES, 0.0),
        ({"small": {"input": 1}}, {}, None),
        ({}, {}, None),
    ],
)
def test_the_cost_is_that_of_all_tokens_or_unknown(
    usage: dict[str, dict[str, int]], prices: dict[str, Price], total: float | None
) -> None:
    found = cost(usage, prices)
    assert found is None if total is None else found == pytest.approx(total)
