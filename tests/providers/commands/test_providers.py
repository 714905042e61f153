"""`batchwright providers`: what each can do, and what it lacks."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Inside
from tests.providers.commands.conftest import Shell


def test_every_provider_says_what_it_can_do(shell: Shell) -> None:
    found = {one["name"]: one for one in shell.json("providers")}
    assert len(found) == 12
    assert found["openai"]["task_types"] == ["completion"]
    assert (found["openai"]["can_cancel"], found["aws"]["can_cancel"]) == (True, False)
    assert found["sarvam"]["inputs_max"] == 20
    assert found["groq"]["timeout_hours"] > found["openai"]["timeout_hours"]
    assert {one["missing"] for name, one in found.items() if name != "aws"} == {None}
    printed = shell("providers")
    (line,) = [line for line in printed.splitlines() if line.startswith("openai ")]
    assert line.split()[1:7] == ["ready", "26", "h", "completion", "cancel,", "find"]


def test_a_provider_that_is_not_ready_says_what_it_lacks(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    code, out, err = inside("providers")
    assert (code, err) == (0, "")
    assert "! openai: the key of OpenAI is the environment variable OPENAI_API_KEY, which is not set\n" in out
    assert "! azure: azure needs either region, such as westeurope, or base_url\n" in out
