"""The end of the server."""

from __future__ import annotations

import asyncio

from batchwright.api.server import ApiServer
from batchwright.engine.metrics import CountsWriter
from batchwright.telemetry.metrics import Counts
from tests.api.streaming import serving


class Slow(CountsWriter):
    """A write in progress that takes a moment to cancel, because the driver must ask the server."""

    is_writing = False
    has_ended = False

    async def run(self):
        self.is_writing = True
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.is_writing = False

    async def write_last(self):
        assert not self.is_writing, "the last counts were written while an older write could still overwrite them"
        self.has_ended = True


async def test_the_last_counts_are_written_after_any_older_write_has_ended(database_url):
    async with serving(database_url) as (batchwright, first):
        counts = Slow(batchwright.queue, "api", Counts([]))
        server = ApiServer(counts, first._services)
        server.start()
        while not counts.is_writing:
            await asyncio.sleep(0)
        await server.close()
    assert counts.has_ended
