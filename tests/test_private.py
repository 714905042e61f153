"""Shared machines: what Batchwright writes is private, also in folders that were open before, and closing the terminal
leaves nothing running."""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from batchwright.batches.journal.workspace import JOURNAL
from batchwright.db.as_user import can_run
from batchwright.simulator import running_process
from tests.batches.commands.cases import write
from tests.batches.stage import request
from tests.conftest import roomy_folder, skip
from tests.terminal import SECONDS_MAX, terminal, wait_until

PYTHONS = (Path(sys.executable).resolve(), Path("/usr/bin/python3"))
OPEN = 0o755
# Run as another user: list folders, and open everything below the roots and every path given on standard input.
LOOK = """
import os, socket, stat, sys
def look(path):
    mode = os.lstat(path).st_mode
    if stat.S_ISDIR(mode):
        os.listdir(path)
    elif stat.S_ISSOCK(mode):
        socket.socket(socket.AF_UNIX).connect(path)
    elif not stat.S_ISLNK(mode):
        open(path, "rb").close()
found = set(sys.stdin.read().splitlines())
for root in sys.argv[1:]:
    for folder, folders, names in os.walk(root):
        found.update(os.path.join(folder, name) for name in folders + names)
for path in sorted(found):
    try:
        look(path)
    except OSError:
        continue
    print(path)
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """Three folders that every user may enter, and what was found below them at several moments."""

    base: Path
    public: dict[str, list[str]] = field(default_factory=dict)
    """By moment: paths whose mode gives other users or the group any access."""
    seen: dict[str, list[str]] = field(default_factory=dict)
    """By moment: paths that another user could read; empty where no second user is available."""
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def folders(self) -> list[Path]:
        return [self.base / name for name in ("data", "files", "work")]

    def look(self, moment: str) -> None:
        paths = [path for folder in self.folders for path in folder.rglob("*")]
        modes = {path: path.lstat().st_mode for path in paths if os.path.lexists(path)}
        others = stat.S_IRWXG | stat.S_IRWXO
        self.counted[moment] = len(modes)
        self.public[moment] = [str(path) for path, mode in modes.items() if mode & others and not stat.S_ISLNK(mode)]
        if (other := second_user()) is not None:
            self.seen[moment] = other.look(modes, *self.folders)


class SecondUser(NamedTuple):
    uid: int
    gid: int
    python: Path

    def look(self, told: Iterable[Path], *roots: Path) -> list[str]:
        """The paths, of those below `roots` and those in `told`, that this user can read."""
        done = subprocess.run(
            [self.python, "-I", "-S", "-c", LOOK, *roots],
            input="\n".join(map(str, told)),
            capture_output=True,
            text=True,
            cwd="/",
            user=self.uid,
            group=self.gid,
            extra_groups=[],
            check=True,
            timeout=SECONDS_MAX,
        )
        return done.stdout.splitlines()


@functools.cache
def second_user() -> SecondUser | None:
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    owner = nobody.pw_uid, nobody.pw_gid
    return next((SecondUser(*owner, python) for python in PYTHONS if can_run(python, owner)), None)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """A machine on which a batch and documents were run, with an embedded PostgreSQL and a umask of 0."""
    base = Path(tempfile.mkdtemp(prefix="batchwright-private-", dir=roomy_folder()))
    found = Machine(base)
    try:
        base.chmod(OPEN)
        for folder in found.folders:
            folder.mkdir()
            folder.chmod(OPEN)
        _run_all(found)
        yield found
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _run_all(machine: Machine) -> None:
    data, files, work = machine.folders
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
    environment = kept | {
        "BATCHWRIGHT_BATCHES_CHECKPOINT_SECONDS": "0.1",
        "BATCHWRIGHT_BATCHES_WORK_DIR": str(work),
        "BATCHWRIGHT_DATABASE_FOLDER": str(data),
        "BATCHWRIGHT_STORAGE_URL": f"file://{files}",
        "BATCHWRIGHT_WORKER_STOP_GRACE_SECONDS": "1",
    }
    batchwright = [sys.executable, "-P", "-m", "batchwright"]

    def run(*arguments: str) -> str:
        options = {"cwd": machine.base, "env": environment, "umask": 0, "timeout": SECONDS_MAX, "text": True}
        done = subprocess.run([*batchwright, *arguments], capture_output=True, check=False, **options)
        assert done.returncode == 0, done
        return done.stdout

    write(machine.base / "in.jsonl", [request(f"r{n}", model="slow", max_tokens=1) for n in range(40)])
    with running_process("--model", "slow:instant") as server:
        server.change("slow", decode_rate=5.0, decode_rate_total=10_000.0, max_running=1000)
        command = [*batchwright, "batch", "run", "in.jsonl", "--url", server.url]
        with terminal([*command, "--max-in-flight", "2"], machine.base, environment):
            wait_until(lambda: any(path.stat().st_size for path in work.rglob(f"*{JOURNAL}")))
            machine.look("while a batch runs")
        machine.look("after the terminal was closed")
        server.change("slow", decode_rate=1000.0)
        run("batch", "run", "in.jsonl", "--url", server.url)
    papers = machine.base / "papers"
    papers.mkdir()
    (papers / "a.txt").write_text("The ferry to Halvick was late again.")
    run("ingest", "run", str(papers), "--collection", "papers")
    machine.look("after batches and documents")


def test_files_made_in_open_folders_are_private_and_closing_the_terminal_stops_the_database(machine: Machine) -> None:
    assert not (machine.base / "data" / "data" / "postmaster.pid").exists()
    assert machine.public == {moment: [] for moment in machine.public}
    assert min(machine.counted.values()) > 900, "the files of the database were not looked at"
    assert {folder.stat().st_mode & 0o777 for folder in machine.folders} == {OPEN}, "their modes were changed"
    see_that_a_second_user_finds_nothing(machine)


def see_that_a_second_user_finds_nothing(machine: Machine) -> None:
    if (other := second_user()) is None:
        skip("looking as a second user needs root, and a Python that this user can run")
    assert other is not None
    assert machine.seen == {moment: [] for moment in machine.public}
    canary = machine.base / "canary"
    canary.write_text("readable")
    canary.chmod(0o644)
    assert str(canary) in other.look([], machine.base), "the second user cannot even read a readable file"
