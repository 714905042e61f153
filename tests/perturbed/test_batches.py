"""Many batches at once, which begin and end at random times; each must end as its story requires."""

from __future__ import annotations

import asyncio

import pytest

from tests.perturbed.company import company
from tests.perturbed.conftest import SCALE

pytestmark = pytest.mark.timeout(240)
BATCHES = 30 * SCALE


async def test_every_batch_ends_as_its_story_requires_and_each_line_is_sent_once(database_url, tmp_path, chance):
    async with company(database_url, tmp_path, chance) as crowd, asyncio.TaskGroup() as group:
        for place in range(BATCHES):
            group.create_task(crowd.live(place))
