"""Closing the terminal stops what Ctrl-C would stop, and all processes that it started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import SAMPLE, SETTINGS
from tests.conftest import roomy_folder
from tests.terminal import SECONDS_MAX, processes_of, terminal, wait_until

BATCHWRIGHT = [sys.executable, "-P", "-m", "batchwright"]


@pytest.fixture
def reachable_folder() -> Iterator[Path]:
    """A folder that the system user of root's PostgreSQL can enter."""
    folder = Path(tempfile.mkdtemp(prefix="batchwright-hangup-", dir=roomy_folder()))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
    return kept | SETTINGS


def test_a_demo_leaves_neither_its_database_nor_its_workers_nor_its_folder(
    environment: dict[str, str], reachable_folder: Path
) -> None:
    """The demo has no signal handlers of its own: SIGHUP arrives as KeyboardInterrupt."""
    environment["TMPDIR"] = str(reachable_folder)
    with terminal([*BATCHWRIGHT, "demo", "--pipeline"], reachable_folder, environment):
        wait_until(lambda: list(reachable_folder.glob("batchwright-demo-*/*.log")))
        assert processes_of(reachable_folder)
    assert processes_of(reachable_folder) == []
    assert list(reachable_folder.glob("batchwright-*")) == []


@pytest.mark.thorough
def test_up_stops_its_workers_and_the_embedded_database(environment: dict[str, str], reachable_folder: Path) -> None:
    environment["BATCHWRIGHT_DATABASE_FOLDER"] = str(reachable_folder / "data")
    environment["BATCHWRIGHT_API_SOCKET"] = str(reachable_folder / "api.sock")
    with terminal([*BATCHWRIGHT, "up", SAMPLE], reachable_folder, environment) as up:
        wait_until((reachable_folder / "api.sock").is_socket)
    assert up.returncode == 0
    assert processes_of(reachable_folder) == []
    assert not (reachable_folder / "data" / "data" / "postmaster.pid").exists()
    assert not (reachable_folder / "api.sock").exists()


def test_under_nohup_a_command_continues_until_it_is_stopped(environment: dict[str, str]) -> None:
    """If SIGHUP counted as a first signal, the next one would end the command at once."""
    command = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *BATCHWRIGHT, "simulate", "--port", "0", "--json"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        try:
            assert b"http://" in running.stdout.readline()
            running.send_signal(signal.SIGHUP)
            running.send_signal(signal.SIGTERM)
            assert running.wait(SECONDS_MAX) == 0
        finally:
            running.kill()
