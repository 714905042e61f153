"""A distant database works; errors distinguish one that is too slow from one without free connections."""

from __future__ import annotations

import dataclasses

import pytest

from batchwright.db.database import Pool
from batchwright.errors import DatabaseUnavailable
from tests.db.far import far_away
from tests.support import DATABASE


async def test_a_database_200_ms_away_is_reached_and_measured(database_url):
    async with far_away(database_url, 0.125) as far, Pool(DATABASE, far) as pool:
        assert pool.route.answer_seconds >= 0.25
        assert await pool.rows("SELECT 1") == [(1,)]


async def test_the_error_for_an_answer_that_is_too_slow_contains_the_measured_time(database_url, monkeypatch):
    monkeypatch.setattr("batchwright.db.sessions._ANSWER_SECONDS_MAX", 0.1)
    said = r"gave no answer within 0\.1 s; connecting took [1-9]?\d\.\d\d s, and 0 answers before it up to 0\.00 s each"
    async with far_away(database_url, 0.1) as far:
        with pytest.raises(DatabaseUnavailable, match=said) as caught:
            await Pool(DATABASE, far).open()
    assert "ouncer" not in str(caught.value)


async def test_a_connection_that_takes_too_long_names_the_limit_and_its_setting(database_url):
    settings = dataclasses.replace(DATABASE, connect_timeout_seconds=2)
    async with far_away(database_url, 30.0) as far:
        with pytest.raises(
            DatabaseUnavailable, match=r"no connection .* within 2 s .* database\.connect_timeout_seconds"
        ):
            await Pool(settings, far).open()
