"""The variants of `make chaos-hosts`, if the kernel allows network namespaces."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.hosts import VARIANTS
from tests.chaos.hosts_stage import PROGRAMS, why_refused
from tests.conftest import skip

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 150


@pytest.fixture(scope="module")
def namespaces():
    """A missing program can be installed. A refusal by the kernel is a skip, even if everything is required."""
    if sys.platform != "linux":
        pytest.skip("only Linux has network namespaces")
    for program in PROGRAMS:
        if shutil.which(program) is None:
            skip(f"`{program}` is not installed")
    if (reason := why_refused()) is not None:
        pytest.skip(f"this user may not make network namespaces here: {reason}")


@pytest.mark.thorough
@pytest.mark.chaos
@pytest.mark.timeout(SECONDS_MAX + 30)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_completes_although_a_host_is_cut_off(namespaces, variant):
    command = [sys.executable, "-m", "tests.chaos.hosts", "--seed", "2026", "--variant", variant]
    done = subprocess.run(command, capture_output=True, check=False, cwd=ROOT, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
