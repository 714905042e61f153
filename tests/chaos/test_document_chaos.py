"""The short form of `make chaos-documents`."""

import pytest

from tests.chaos.documents import SHORT, as_text, run


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_every_step_is_done_once_and_paid_for_once_while_workers_die():
    result = await run(SHORT, seed=2026)
    assert all(goal.met for goal in result.goals), as_text(result)
    assert result.counts["workers_killed"] >= 5, as_text(result)
    assert result.counts["model_call_in_doubt"], as_text(result)
    assert result.counts["model_failed"], as_text(result)
