"""A contract server for each test, and SDKs that are closed after the test."""

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
