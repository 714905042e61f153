"""Durations as people write them, on the command line and in settings."""

from __future__ import annotations

from typing import Any

import pytest

from batchwright.cli.flags import parse_time_span
from batchwright.durations import parse_duration, replace_durations
from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.settings import load_settings


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("5m", 300.0),
        ("1h", 3600.0),
        ("2d", 172_800.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("", None),
        ("soon", None),
        ("5y", None),
        ("-1s", None),
        ("1h30", None),
        ("٣s", None),
        ("9" * 5000 + "s", None),
    ],
)
def test_a_duration_is_numbers_with_units_and_a_bare_number_is_seconds(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def test_settings_take_durations_in_the_unit_of_their_names() -> None:
    given: dict[str, Any] = {
        "engine": {"lease_seconds": "1m", "rescue_jitter_seconds": 0.5},
        "retention": {"succeeded_days": "36h", "ended_days": 30},
        "tasks": {"task_timeout_hours": "2d"},
        "database": {"connect_timeout_seconds": "1m"},
        "global_inference_gateway": {"url": "http://a:1", "request_timeout": "2d", "headers": {"max_seconds": "5m"}},
    }
    found = load_settings(given, environment={"BATCHWRIGHT_WORKER_POLL_SECONDS_MAX": "3s"})
    assert (found.engine.lease_seconds, found.engine.rescue_jitter_seconds) == (60.0, 0.5)
    assert (found.retention.succeeded_days, found.retention.ended_days) == (1.5, 30.0)
    assert found.worker.poll_seconds_max == 3.0
    assert found.database.connect_timeout_seconds == 60
    assert found.tasks.task_timeout_hours == 48.0  # type: ignore[attr-defined]
    assert found.global_inference_gateway.request_timeout == 172_800.0
    assert dict(found.global_inference_gateway.headers) == {"max_seconds": "5m"}, "this is not one of our settings"


def test_a_value_that_is_not_a_duration_is_left_unchanged() -> None:
    given = {"name": "5m", "lease_seconds": "soon", "requests_per_minute": "5m", "n_seconds": 3, "x": {"days": "12"}}
    assert replace_durations(given) == given


def test_a_setting_that_is_not_a_duration_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigurationError, match=r"engine\.lease_seconds.*'soon'.*write 90s, 5m, 1h or 2d"):
        load_settings({"engine": {"lease_seconds": "soon"}}, environment={})


def test_a_flag_names_itself_its_value_and_its_range() -> None:
    assert parse_time_span("--delay", None) is None
    assert parse_time_span("--delay", "30") == 30.0
    assert parse_time_span("--last", "30", unit_seconds=86_400.0) == 30 * 86_400.0
    with pytest.raises(InvalidInput, match="--delay 'soon' is not a duration: write 90s, 5m, 1h or 2d"):
        parse_time_span("--delay", "soon")
    with pytest.raises(InvalidInput, match="--window 40d is out of range: use 1m to 30d"):
        parse_time_span("--window", "40d", least="1m", most="30d")
