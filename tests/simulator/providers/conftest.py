"""One contract server for each test, and SDKs that are closed after it."""

import asyncio

import pytest

from batchwright.simulator.providers import running
from tests.simulator.providers.support import OPENED


@pytest.fixture
async def providers():
    async with running() as server:
        yield server
        while OPENED:
            await asyncio.to_thread(OPENED.pop())
