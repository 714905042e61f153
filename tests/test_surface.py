"""Public names stay as promised: removing one breaks users, and adding one is a new promise."""

from __future__ import annotations

import json

import pytest

from batchwright.errors import ConfigurationError
from batchwright.settings import load_settings
from tests.surface import LIST, differences, every_setting, surface, variable


async def test_every_public_name_is_as_it_was_promised(database_url, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = differences(json.loads(LIST.read_text(encoding="utf-8")), await surface(database_url))
    hint = "if that is on purpose: python -m tests.surface > tests/surface.json"
    assert not found, "\n".join(["the surface has changed:", *found, hint])


def test_a_difference_is_shown_as_a_line_of_its_own():
    promised, found = {"python": ["a", "b"], "sql": ["t"]}, {"python": ["b", "c"], "http": ["GET /"]}
    assert differences(promised, found) == [
        "python: gone  a",
        "python: added c",
        "sql: gone  t",
        "http: added GET /",
    ]


def test_every_setting_is_known_by_its_environment_variable():
    """No value is valid, so the first error must be about a value; an error about a name would mean it is unknown."""
    variables = {variable(setting): "{}" for setting, _ in every_setting()}
    with pytest.raises(ConfigurationError, match=r"^the setting "):
        load_settings(environment=variables)
