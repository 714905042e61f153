"""Runs the tests of workers, batches, tasks and the API in the perturbed mode, with one seed after the other.

python -m tests.perturbed.run [--minutes 30] [--seed N] [pytest's arguments]

It ends when the time is over, or at the first failure, with the seed and the command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from tests import perturb

PATHS = (
    "tests/access",
    "tests/api",
    "tests/batches",
    "--ignore=tests/batches/commands",  # like tests/cli: most of them start processes, which are not perturbed
    "tests/conformance",
    "tests/engine",
    "tests/files",
    "tests/operations",
    "tests/perturbed",
    "tests/providers/test_doubts.py",
    "tests/providers/test_tasks.py",
    "tests/providers/test_tasks_ends.py",
    "tests/webhooks",
)


def run_round(seed: int, until: float, arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Run all tests once; return pytest's exit code, and the commands that repeat failed tests."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-q", "-x", *arguments]
    with tempfile.NamedTemporaryFile("r") as failures:
        values = {
            perturb.FAILURES: failures.name,
            perturb.LONG: "1",
            perturb.SEED: str(seed),
            perturb.UNTIL: str(until),
        }
        code = subprocess.run(command, env={**os.environ, **values}, check=False).returncode
        return code, failures.read().splitlines()


def say(*lines: str) -> None:
    sys.stdout.write("perturbed: " + "\n".join(lines) + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.perturbed.run", description="Tests in the perturbed mode.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to go on with other seeds")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000), help="the first seed")
    options, others = parser.parse_known_args()
    has_paths = any(not argument.startswith("-") for argument in others)
    until = time.time() + 60 * options.minutes
    seed = options.seed
    while time.time() < until:
        say(f"seed {seed}, {(until - time.time()) / 60:.1f} minutes left")
        code, commands = run_round(seed, until, [*others, *(() if has_paths else PATHS)])
        if code != 0:
            say(f"failed with seed {seed}; repeat all of it with `make test-perturbed SEED={seed}`, or", *commands)
            return code
        seed += 1
    say(f"nothing failed with the seeds {options.seed} to {seed - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
