"""Fixtures: the command line with a folder of documents, in the test's process or in a separate one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, Inside, cli, inside

__all__ = ["cli", "inside"]

ROOT = Path(__file__).parents[3]
SETTINGS = {
    "BATCHWRIGHT_INGEST_EMBEDDING_MODEL": "hash",
    "BATCHWRIGHT_INGEST_SANDBOXES": "1",
}


class Shell:
    """A shell whose current folder contains a folder `papers`."""

    def __init__(self, cli: Cli, inside: Inside, folder: Path) -> None:
        self.cli = cli
        self.run = inside
        self.folder = folder

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """The output of a command of documents."""
        found, out, err = self.run("ingest", *arguments)
        assert found == code, (found, out, err)
        return out

    def errors(self, *arguments: str, code: int = 0) -> str:
        """What it prints on standard error."""
        found, out, err = self.run("ingest", *arguments)
        assert found == code, (found, out, err)
        return err

    def refused(self, *arguments: str) -> str:
        """The error line of a command that is refused."""
        found, out, err = self.run("ingest", *arguments)
        assert (found, out, len(err.splitlines())) == (1, "", 1), (found, out, err)
        return err

    def json(self, *arguments: str) -> Any:
        return self.run.json("ingest", *arguments)

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / "papers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def detach(self, *arguments: str) -> str:
        """The id of a new run that no process works on."""
        return self("run", "papers", "-c", "papers", "--detach", *arguments).strip()

    def item(self, run: str, name: str) -> dict[str, Any]:
        (found,) = [one for one in self.json("items", run) if one["name"] == name]
        assert isinstance(found, dict)
        return found


@pytest.fixture
def shell(cli: Cli, inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    settings = {**SETTINGS, "BATCHWRIGHT_DATABASE_FOLDER": str(tmp_path / "data")}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    cli.environment |= settings
    (tmp_path / "papers").mkdir()
    return Shell(cli, inside, tmp_path)


@pytest.fixture
def provider(shell: Shell) -> Iterator[Callable[..., None]]:
    """Write a configuration with a model server that has prices."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ingest.fake_provider", "--port", "0"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())

        def configure(more: str = "") -> None:
            (shell.folder / "batchwright.toml").write_text(
                f'[global_inference_gateway]\nurl = "http://127.0.0.1:{port}"\n{more}\n'
                '[ingest.prices."embedder"]\ninput = 2.0\noutput = 0.0\n'
            )

        configure()
        yield configure
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
