"""The server as a whole: how it ends."""

from __future__ import annotations

import asyncio

from batchwright.api.server import ApiServer
from batchwright.engine.metrics import CountsWriter
from batchwright.telemetry.metrics import Counts
from tests.api.streaming import serving


class Slow(CountsWriter):
    """A write that is under way, and that takes a moment to be broken off: the driver asks the server to."""

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
        assert not self.is_writing, "older counts may be written over the last ones"
        self.has_ended = True


async def test_the_last_counts_are_written_when_no_older_write_is_under_way(database_url):
    async with serving(database_url) as (batchwright, first):
        counts = Slow(batchwright.queue, "api", Counts([]))
        server = ApiServer(counts, first._services)
        server.start()
        while not counts.is_writing:
            await asyncio.sleep(0)
        await server.close()
    assert counts.has_ended
