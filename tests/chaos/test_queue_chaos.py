"""The short form of `make chaos-queue`."""

import pytest

from tests.chaos.queue import SHORT, as_text, run

SECONDS = 12.0
DRAIN_SECONDS = 100.0


@pytest.mark.chaos
@pytest.mark.timeout(240)
async def test_nothing_is_lost_doubled_or_stuck_while_workers_and_the_database_die():
    result = await run(seconds=SECONDS, seed=2026, size=SHORT, drain_seconds=DRAIN_SECONDS)
    broken = [name for name, found in result.breaches.items() if found]
    assert not broken, as_text(result)
    for deed in ("SIGKILL", "SIGSTOP longer than a lease", "connections terminated", "PostgreSQL restarted"):
        assert result.counts[deed], as_text(result)
    assert result.counts["rescues"], as_text(result)
