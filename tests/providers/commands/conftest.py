"""Fixtures: the command line with simulated providers, and a worker in a separate process."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from batchwright.simulator.run import Remote, running_process
from tests.cli.conftest import Cli, Inside, cli, inside
from tests.providers.task_stage import chat_lines

__all__ = ["cli", "inside"]


class Shell:
    """A shell in which the variables of the simulator are set."""

    def __init__(self, cli: Cli, inside: Inside, simulator: Remote, folder: Path) -> None:
        self.cli = cli
        self.run = inside
        self.simulator = simulator
        self.folder = folder

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """The output of a command."""
        found, out, err = self.run(*arguments)
        assert found == code, (out, err)
        return out

    def refused(self, *arguments: str, code: int = 1) -> str:
        """The error line of a command that is refused."""
        found, out, err = self.run(*arguments)
        assert (found, out, len(err.splitlines())) == (code, "", 1), (out, err)
        return err

    def json(self, *arguments: str) -> Any:
        return self.run.json(*arguments)

    def write(self, name: str, data: bytes = b"RIFF") -> str:
        (self.folder / name).write_bytes(data)
        return name

    def write_chat(self, *words: str, name: str = "requests.jsonl") -> str:
        return self.write(name, chat_lines(*words))

    def jobs(self, provider: str | None = None) -> list[dict[str, Any]]:
        """Jobs at the simulated providers."""
        query = "" if provider is None else f"?provider={provider}"
        found: list[dict[str, Any]] = self.simulator.call("GET", f"/simulator/jobs{query}")["jobs"]
        return found

    def count(self, table: str) -> int:
        ((count,),) = self.cli.rows(f"SELECT count(*) FROM batchwright.{table}")
        assert isinstance(count, int)
        return count


def read_exports(text: str) -> dict[str, str]:
    """Read `export` lines like a shell."""
    words = [shlex.split(line) for line in text.splitlines() if line.startswith("export ")]
    return dict(word.split("=", 1) for _, word in words)


@pytest.fixture
def open_shell(
    cli: Cli, inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Shell]]:
    """A function that opens a shell with simulated providers, started with these flags."""
    with ExitStack() as stack:

        def open_one(*flags: str, **variables: str) -> Shell:
            written = tmp_path / "providers.toml"
            simulator = stack.enter_context(running_process("--providers", "--write-config", str(written), *flags))
            exports = read_exports(written.with_suffix(".env").read_text())
            exports |= {"BATCHWRIGHT_DATABASE_FOLDER": str(tmp_path / "data"), **variables}
            for name, value in exports.items():
                monkeypatch.setenv(name, value)
            cli.environment |= {**exports, "BATCHWRIGHT_TASKS_POLL_INTERVAL_SECONDS": "0.1"}
            (tmp_path / "data").mkdir(exist_ok=True)
            return Shell(cli, inside, simulator, tmp_path)

        yield open_one


@pytest.fixture
def shell(open_shell: Callable[..., Shell]) -> Shell:
    """A shell with providers whose jobs end at once."""
    return open_shell("--queue-seconds", "0", "--run-seconds", "0")


@pytest.fixture
def worker(shell: Shell) -> Iterator[None]:
    with shell.cli.start("worker"):
        yield
