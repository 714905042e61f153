"""The limit of open files, raised at the start of programs."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from batchwright.cli import descriptors
from batchwright.cli.descriptors import raise_descriptor_limit

LIMIT = """
import resource
from batchwright.cli.commands import serve

async def main():
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return 0

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 700))
serve._run(main(), serve.Settings())
"""


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1_024, 4_096, 4_096),
        (1_024, 1_000_000, 65_536),
        (1_024, resource.RLIM_INFINITY, 65_536),
        (100_000, 1_000_000, 100_000),
        (512, 512, 512),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_is_raised_to_the_hard_one_but_not_beyond_a_maximum(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, then: int
) -> None:
    now = [soft, hard]

    def put(_: int, limits: tuple[int, int]) -> None:
        now[:] = limits

    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(descriptors.resource, "setrlimit", put)
    assert raise_descriptor_limit() == then
    assert now == [then, hard]


def test_programs_raise_it_when_they_start() -> None:
    found = subprocess.run([sys.executable, "-c", LIMIT], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "700", found.stderr
