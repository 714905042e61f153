"""`batchwright simulate --providers`: what it prints and writes, and which flags go together."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from batchwright.simulator.run import running_process
from tests.cli.conftest import Cli, Inside


def simulate(inside: Inside, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, str, str]:
    """Run the simulator and stop it as soon as it serves."""
    monkeypatch.setattr("batchwright.cli.stop.Stop.listen", lambda stop: stop.ask(signal.SIGTERM))
    return inside("simulate", "--providers", "--port", "0", *flags)


def test_the_printed_settings_can_be_pasted(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = simulate(inside, monkeypatch, "--fault", "429:times=1", "--time-scale", "10")
    assert (code, err) == (0, "")
    banner, _, rest = out.partition("\n\n")
    assert "10 times as fast as real time" in banner
    assert "429:times=1" in banner
    tables, _, shell = rest.rpartition("# Written by batchwright")
    found = tomllib.loads(tables)
    assert len(found["providers"]) == 12
    assert found["tasks"] == {"poll_interval_seconds": 1.0}
    assert found["providers"]["openai"]["api_key_env"] == "SIMULATED_PROVIDER_KEY"
    assert "export SIMULATED_PROVIDER_KEY=simulated\n" in shell


def test_as_json_the_first_line_has_the_settings_and_the_last_one_the_counts(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = simulate(inside, monkeypatch, "--json", "--api-key", "mine")
    first, last = map(json.loads, out.splitlines())
    assert first["settings"]["providers.aws"]["region"] == "us-east-1"
    assert first["environment"]["AWS_ACCESS_KEY_ID"] == "mine"
    assert first["url"] != first["signed_url"]
    assert last["jobs"] == {}


def test_only_files_that_it_wrote_itself_are_overwritten(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for _ in range(2):
        assert simulate(inside, monkeypatch, "--write-config", "providers.toml")[0] == 0
    assert f"export BATCHWRIGHT_CONFIG={tmp_path / 'providers.toml'}\n" in (tmp_path / "providers.env").read_text()
    (tmp_path / "batchwright.toml").write_text("[tasks]\n")
    code, out, err = simulate(inside, monkeypatch, "--write-config", "batchwright.toml")
    assert (code, out) == (1, "")
    assert "exists already, and this command did not write it; name another file" in err
    assert (tmp_path / "batchwright.toml").read_text() == "[tasks]\n"
    assert not (tmp_path / "batchwright.env").exists()
    assert "is not a file" in simulate(inside, monkeypatch, "--write-config", "/dev/null")[2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--providers", "--model", "small"], "--model cannot be used with --providers"),
        (["--providers", "--no-prompt-faults"], "--prompt-faults cannot be used with --providers"),
        (["--run-seconds", "3"], "--run-time needs --providers"),
        (["--write-config", "x.toml"], "--write-config needs --providers"),
        (["--providers", "--fault", "odd"], "there is no kind 'odd'"),
        (["--providers", "--time-scale", "-1"], "speed is -1.0, but must be 0 or more"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(inside: Inside, flags: list[str], words: str) -> None:
    code, out, err = inside("simulate", *flags)
    assert (code, out) == (1, "")
    assert words in err


def test_buckets_are_reached_by_the_variables_alone(cli: Cli, tmp_path: Path) -> None:
    """A worker reaches them in the same way, because it has only its environment."""
    script = tmp_path / "buckets.py"
    script.write_text(BUCKETS)
    with running_process("--providers", "--write-config", str(tmp_path / "providers.toml"), api_key="mine"):
        command = ["bash", "-c", f". ./providers.env && {sys.executable} buckets.py"]
        done = subprocess.run(command, cwd=tmp_path, env=cli.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["gs://simulated ['a/one']", "s3://simulated ['a/one']"]


BUCKETS = """
import asyncio
import os
import sys
from batchwright.providers.buckets import open_bucket

async def data():
    yield b"bytes"

async def main():
    for root in ("gs://simulated", "s3://simulated"):
        bucket = open_bucket(root)
        await bucket.write("a/one", data)
        assert [part async for part in bucket.read("a/one")] == [b"bytes"]
        print(root, [found.key async for found in bucket.list("a")])
        await bucket.delete("a/one", "a/two")
        assert [found async for found in bucket.list("a")] == []

asyncio.run(main())
sys.stdout.flush()
os._exit(0)  # the threads of the store's client do not always survive the end of the interpreter
"""
