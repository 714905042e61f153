"""The short form of `make siege`."""

import pytest

from tests.siege.siege import SHORT, as_text, run


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_attackers_disturb_neither_the_server_nor_an_honest_client():
    result = await run(SHORT)
    assert all(goal.met for goal in result.goals), as_text(result)
    for attack in ("send_body", "send_headers", "send_long_header", "send_content_type", "follow"):
        assert any(name.startswith(attack) for name in result.attacks), as_text(result)
    assert result.attacks["connections"] > SHORT.halves, as_text(result)
    assert result.counts["jobs"], as_text(result)
    assert result.counts["batches"] >= 2, as_text(result)
