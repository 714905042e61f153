"""The short form of `make chaos-failover`."""

import pytest

from tests.chaos.failover import SHORT, as_text, run
from tests.chaos.failover_play import Plan


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_no_answer_is_lost_when_a_failover_takes_the_last_commits_away():
    result = await run(SHORT, [Plan("asynchronous", "claims survive")], seed=2026)
    assert all(goal.met for goal in result.goals), as_text(result)
