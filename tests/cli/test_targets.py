"""Where results are written: complete files, and everything that is not a regular file."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from batchwright.cli.targets import open_target, refuse_same
from batchwright.errors import InvalidInput

WRITE = """
import sys
from pathlib import Path
from batchwright.cli.targets import open_target
with open_target("--output", Path("out.jsonl")).replace() as stream:
    stream.write(b"half")
    stream.flush()
    print("written", flush=True)
    sys.stdin.read()
"""
READ_ONLY = """
import os, subprocess
from pathlib import Path
from batchwright.cli.targets import open_target
subprocess.run(["mount", "-t", "tmpfs", "none", "."], check=True)
os.chdir(os.getcwd())
found = open_target("--output", Path("out.jsonl"))
subprocess.run(["mount", "-o", "remount,ro", "."], check=True)
with found.replace() as stream:
    stream.write(b"line")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path: Path | str, data: bytes = b"line\n") -> None:
    with open_target("--output", Path(path)).replace() as stream:
        stream.write(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_gets_its_name_only_when_it_is_complete(folder: Path) -> None:
    (folder / "out").write_bytes(b"before")
    with open_target("--output", Path("out")).replace() as stream:
        stream.write(b"after")
        stream.flush()
        assert (folder / "out").read_bytes() == b"before"
    assert (folder / "out").read_bytes() == b"after"
    with pytest.raises(KeyboardInterrupt), open_target("--output", Path("out")).replace() as stream:
        raise KeyboardInterrupt
    assert ((folder / "out").read_bytes(), names(folder)) == (b"after", ["out"])


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_followed_and_stays(folder: Path, is_there: bool) -> None:
    (folder / "real").mkdir()
    if is_there:
        (folder / "real" / "out").write_bytes(b"before")
    (folder / "link").symlink_to("real/out")
    put("link")
    assert (folder / "link").is_symlink()
    assert (folder / "real" / "out").read_bytes() == b"line\n"
    assert names(folder / "real") == ["out"]


def test_a_pipe_waits_for_its_reader_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(folder / "pipe")
    writer = threading.Thread(target=put, args=["pipe"])
    writer.start()
    said = ""
    while "\n" not in said:  # the test's timeout bounds this
        said += capsys.readouterr().err
    assert said == "waiting for a reader of pipe\n"
    assert (folder / "pipe").read_bytes() == b"line\n"
    writer.join(30)
    assert (folder / "pipe").is_fifo()
    assert names(folder) == ["pipe"]


def test_a_pipe_whose_reader_has_exited_is_an_error(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    found = open_target("--output", Path("pipe"))
    os.close(reader)
    with pytest.raises(InvalidInput, match="pipe cannot be written: Broken pipe"), found.replace() as stream:
        stream.write(b"line")


def test_a_file_that_the_shell_has_opened_is_appended_to(folder: Path) -> None:
    with (folder / "out").open("wb") as opened:
        opened.write(b"head\n")
        opened.flush()
        number = (folder / "out").stat().st_ino
        put(f"/dev/fd/{opened.fileno()}")
    assert (folder / "out").read_bytes() == b"head\nline\n"
    assert (folder / "out").stat().st_ino == number


def test_folders_and_sockets_are_refused(folder: Path) -> None:
    (folder / "there").mkdir()
    (folder / "link").symlink_to("there")
    for name in ("there", "link"):
        with pytest.raises(InvalidInput, match=f"--output {name} is a folder; name a file in it"):
            open_target("--output", Path(name))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
    with pytest.raises(InvalidInput, match="--output socket is a socket"):
        open_target("--output", Path("socket"))
    (folder / "loop").symlink_to("loop")
    with pytest.raises(InvalidInput, match="--output loop cannot be written: Too many levels of symbolic links"):
        open_target("--output", Path("loop"))
    assert names(folder) == ["link", "loop", "socket", "there"]


def test_one_file_or_one_pipe_cannot_take_both(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    (folder / "link").symlink_to("file")
    for one, other in (("pipe", "pipe"), ("file", "link")):
        with pytest.raises(InvalidInput, match="--output and --errors are the same file"):
            refuse_same(open_target("--output", Path(one)), open_target("--errors", Path(other)))
    os.close(reader)
    refuse_same(open_target("--output", Path("-")), open_target("--errors", Path("-")))


def test_a_name_that_has_become_something_else_meanwhile_is_not_replaced(folder: Path) -> None:
    found = open_target("--output", Path("out"))
    os.mkfifo(folder / "out")
    with pytest.raises(InvalidInput, match="it is no longer a file"), found.replace():
        pass
    assert (folder / "out").is_fifo()
    assert names(folder) == ["out"]


# What is left behind ------------------------------------------------------------------------------------------------


def test_the_draft_of_a_killed_process_is_removed_by_the_next_and_one_in_use_is_not(folder: Path) -> None:
    def start() -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", WRITE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"written\n"
        return child

    strange = [
        ".out.jsonl.tmp",
        ".out.jsonl.0123456789ab.tmp.bak",
        ".out.jsonl.nothexdigits.tmp",
        ".other.0123456789ab.tmp",
    ]
    for name in strange:
        (folder / name).touch()
    killed, alive = start(), start()
    drafts = set(names(folder)) - set(strange)
    assert len(drafts) == 2
    with killed, alive:
        killed.send_signal(signal.SIGKILL)
        killed.wait(30)
        put("out.jsonl", b"mine")
        left = set(names(folder)) - set(strange) - {"out.jsonl"}
        assert len(left) == 1
        alive.communicate(b"", 30)
        assert alive.returncode == 0
    assert names(folder) == sorted([*strange, "out.jsonl"])
    assert (folder / "out.jsonl").read_bytes() == b"half"


def test_a_draft_that_another_process_took_for_abandoned_is_created_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may check it between its creation and its lock."""
    from batchwright.cli import targets

    flock, removed = targets.fcntl.flock, []

    def late(file: int, how: int) -> None:
        if not removed:
            removed.extend(folder.glob(".out.*.tmp"))
            removed[0].unlink()
        flock(file, how)

    monkeypatch.setattr(targets.fcntl, "flock", late)
    put("out")
    assert len(removed) == 1
    assert names(folder) == ["out"]


def test_a_clean_up_that_fails_does_not_hide_why_nothing_could_be_written(folder: Path) -> None:
    (folder / "results").mkdir()
    found = open_target("--output", Path("results/out"))
    shutil.rmtree(folder / "results")
    (folder / "results").touch()
    with pytest.raises(InvalidInput, match="out cannot be written: Not a directory"), found.replace():
        pass


def test_a_read_only_file_system_is_an_error_without_a_traceback_of_the_clean_up(folder: Path) -> None:
    alone = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system of our own can be mounted here")
    done = subprocess.run([*alone, sys.executable, "-c", READ_ONLY], capture_output=True, text=True, check=False)
    *_, last = done.stderr.splitlines()
    assert last.endswith(f"{folder}/out.jsonl cannot be written: Read-only file system"), done.stderr
    assert "During handling of the above exception" not in done.stderr


def test_a_file_that_is_replaced_stays_as_private_as_it_was_and_a_new_one_follows_the_umask(folder: Path) -> None:
    (folder / "mine").write_bytes(b"before")
    (folder / "mine").chmod(0o600)
    before = os.umask(0o027)
    try:
        with open_target("--output", Path("mine")).replace() as stream:
            stream.write(b"after")
            assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600, 0o600]
        put("new")
    finally:
        os.umask(before)
    assert (folder / "mine").stat().st_mode & 0o777 == 0o600
    assert (folder / "new").stat().st_mode & 0o777 == 0o640
