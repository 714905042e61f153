"""Fixtures: the real command line, in separate processes, on the test's database."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import orjson
import psycopg
import pytest

from batchwright.commands import main
from tests.cli.stage import Stage, staged

SAMPLE = str(Path(__file__).with_name("sample.py"))
SECONDS_MAX = 45.0
SETTINGS = {"BATCHWRIGHT_API_PORT": "0", "BATCHWRIGHT_WORKER_STOP_GRACE_SECONDS": "0.3"}


class Running:
    """A running command, whose output a test can wait for."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self.said = ""
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until(self, pattern: str) -> re.Match[str]:
        """Wait until a line of the output matches, including earlier lines."""
        deadline = time.monotonic() + SECONDS_MAX
        while (found := re.search(pattern, self.said)) is None:
            try:
                self.said += self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                pytest.fail(f"{pattern!r} was not said within {SECONDS_MAX:g} s, but:\n{self.said}")
        return found

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        return self.process.wait(SECONDS_MAX)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(SECONDS_MAX)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line)


class Cli:
    """`batchwright …` with one environment."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
        self.environment = {**kept, **SETTINGS, "BATCHWRIGHT_DATABASE_URL": url}

    def __call__(
        self, *arguments: str, input: str = "", code: int | None = 0, seconds: float = SECONDS_MAX
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; None as `code` accepts any."""
        done = subprocess.run(
            self._command(arguments),
            capture_output=True,
            cwd=self.folder,
            env=self.environment,
            input=input,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert code is None or done.returncode == code, done
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def json(self, *arguments: str, **options: Any) -> Any:
        return orjson.loads(self(*arguments, "--json", **options).stdout)

    @contextlib.contextmanager
    def start(self, *arguments: str) -> Iterator[Running]:
        """Run a command beside the test; it is killed if it still runs at the end of the block."""
        process = subprocess.Popen(
            self._command(arguments),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        running = Running(process)
        try:
            yield running
        finally:
            running.kill()

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(sql, values).fetchall()

    def until(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Repeat a query until there are rows."""
        deadline = time.monotonic() + SECONDS_MAX
        with psycopg.connect(self.url, autocommit=True) as connection:
            while not (rows := connection.execute(sql, values).fetchall()):
                assert time.monotonic() < deadline, f"no rows after {SECONDS_MAX:g} s: {sql}"
                time.sleep(0.02)
        return rows

    def begun(self, id: str, event: str) -> None:
        self.until("SELECT FROM batchwright.job_event WHERE job_id = %s AND event = %s", id, event)

    def _command(self, arguments: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-P", "-m", "batchwright", *arguments]


@pytest.fixture
def cli(tmp_path: Path, database_url: str) -> Cli:
    return Cli(tmp_path, database_url)


@pytest.fixture
def empty_cli(tmp_path: Path, empty_database_url: str) -> Cli:
    """On a database without a schema."""
    return Cli(tmp_path, empty_database_url)


class Inside:
    """`batchwright …` in the test's own process, which is faster; for commands that print and exit."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """The exit code, standard output and standard error."""
        self._monkeypatch.setattr(sys, "argv", ["batchwright", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = self._capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, out, err

    def json(self, *arguments: str) -> Any:
        code, out, err = self(*arguments, "--json")
        assert (code, err) == (0, "")
        return orjson.loads(out)


@pytest.fixture
def inside(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, database_url: str
) -> Iterator[Inside]:
    for name in [name for name in os.environ if name.startswith("BATCHWRIGHT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHWRIGHT_DATABASE_URL", database_url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    signals = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    yield Inside(capsys, monkeypatch)
    root.handlers[:] = handlers
    root.setLevel(level)
    for number, handler in signals.items():
        signal.signal(number, handler)


@pytest.fixture
def publish(database_url: str) -> None:
    """Publish the sample's operations, as an earlier worker would have."""
    from batchwright.db.database import Blocking, Database, complete
    from batchwright.engine.catalog import Catalog
    from batchwright.operations.registry import Registry
    from tests.cli import sample
    from tests.support import DATABASE

    registry = Registry([sample.greet, sample.linger, sample.block, sample.sulk, sample.fail, sample.family])
    database = Blocking(DATABASE, database_url)
    complete(Catalog(Database(database), registry).publish("the test"))
    database.close()


@pytest.fixture
def stage(database_url: str, publish: None) -> Iterator[Stage]:
    """Jobs in any state, with the sample's operations known."""
    with staged(database_url) as stage:
        yield stage
