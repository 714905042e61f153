"""A shell starts background processes with signals ignored; processes that tests start must still receive them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS_MAX = 120.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_a_process_that_a_test_starts_receives_signals(number):
    code = "import signal, sys; print(signal.getsignal(int(sys.argv[1])) == signal.SIG_IGN)"
    command = [sys.executable, "-c", code, str(int(number))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_processes_receive_signals_although_the_tests_run_in_the_background_of_a_shell():
    """`nohup` ignores SIGHUP, and `&` SIGINT and SIGQUIT."""
    one = f"{Path(__file__).relative_to(ROOT)}::{test_a_process_that_a_test_starts_receives_signals.__name__}"
    command = f"trap '' HUP; {sys.executable} -m pytest -q -n0 -p no:cacheprovider {one} & wait $!"
    # A separate run with its own name: with ours, it would remove the folder of our server at its end.
    environment = {name: value for name, value in os.environ.items() if name != "BATCHWRIGHT_TEST_RUN"}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": SECONDS_MAX}
    run = subprocess.run(["sh", "-c", command], check=False, **options)
    assert (run.returncode, "3 passed" in run.stdout) == (0, True), run.stdout
