"""Run a command on a terminal of its own, then close the terminal while the command runs."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

SECONDS_MAX = 60.0
# The process already leads its session, so the first terminal that it opens becomes its controlling terminal.
_TAKE_TERMINAL = "import os, sys; os.open(sys.argv[1], os.O_RDWR); os.execvp(sys.argv[2], sys.argv[2:])"


@contextlib.contextmanager
def terminal(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Close the terminal at the end of the block. The kernel sends SIGHUP; we send it again, as a shell would."""
    end, its_end = pty.openpty()
    in_terminal = [sys.executable, "-c", _TAKE_TERMINAL, os.ttyname(its_end), *command]
    with subprocess.Popen(
        in_terminal,
        cwd=folder,
        env=environment,
        start_new_session=True,
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        umask=0,
    ) as process:
        try:
            os.close(its_end)
            yield process
            os.close(end)
            process.send_signal(signal.SIGHUP)
            process.wait(SECONDS_MAX)
        finally:
            process.kill()


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.02)


def processes_of(folder: Path) -> list[str]:
    """The command lines of the running processes that name this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line:
                found.append(line)
    return found
