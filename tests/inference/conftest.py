"""A raw server per test."""

import pytest

from tests.inference.server import RawServer


@pytest.fixture
async def model_server():
    async with RawServer() as server:
        yield server
