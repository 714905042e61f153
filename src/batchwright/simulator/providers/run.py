"""A contract server for tests, in this event loop; its clock moves only on request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from batchwright.simulator.providers.server import Server
from batchwright.simulator.providers.world import ProviderSettings


@asynccontextmanager
async def running(
    settings: ProviderSettings | None = None, *, port: int = 0, signed_port: int = 0, **values: Any
) -> AsyncIterator[Server]:
    """A contract server in this loop, on free ports. Without settings its clock is stopped until `advance` moves it.

    >>> async with running(faults=["drop:route=openai.create:times=1"]) as providers:
    ...     await submit(providers.urls["openai"])
    ...     providers.advance(3600)
    """
    server = await Server(settings or ProviderSettings(**{"speed": 0.0, **values})).open(
        port=port, signed_port=signed_port
    )
    try:
        yield server
    finally:
        await server.close()
