"""The short forms of `make chaos-batches`."""

import pytest

from tests.chaos import crowd
from tests.chaos.batches import SHARED, SHORT, as_text, run


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_no_line_of_a_batch_is_lost_or_doubled_while_workers_and_the_database_die():
    result = await run(SHORT, seed=2026)
    broken = [name for name, found in result.breaches.items() if found]
    assert not broken, as_text(result)
    assert result.counts["workers killed"] >= 3, as_text(result)
    assert result.counts["PostgreSQL killed"], as_text(result)
    assert result.counts["rescues"], as_text(result)
    assert result.counts["asked again"] <= result.asked_again_max, as_text(result)


@pytest.mark.thorough
@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_twelve_workers_that_give_each_other_work_lose_nothing_while_they_are_killed():
    result = await run(SHARED, seed=2026)
    assert all(goal.met for goal in result.goals), as_text(result)


@pytest.mark.thorough
@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_small_batches_that_begin_and_end_while_perturbed_workers_are_killed_lose_nothing():
    result = await crowd.run(crowd.SHORT_KILLED, seed=2026)
    assert all(goal.met for goal in result.goals), crowd.as_text(result)
    assert result.counts["workers killed"] == crowd.SHORT_KILLED.kills, crowd.as_text(result)
