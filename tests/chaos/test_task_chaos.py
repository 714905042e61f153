"""The short form of `make chaos-tasks`."""

import pytest

from tests.chaos.tasks import SHORT, as_text, run


@pytest.mark.chaos
@pytest.mark.timeout(240)
async def test_every_task_is_paid_for_once_and_comes_home_while_workers_and_the_database_die():
    result = await run(SHORT, seed=2026)
    assert all(goal.met for goal in result.goals), as_text(result)
    assert result.counts["workers killed"] >= 3, as_text(result)
    assert result.counts["PostgreSQL killed"], as_text(result)
    assert result.counts["faults"], as_text(result)
