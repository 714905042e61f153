"""The HTTP server inside our own event loop: it starts, reports its address, and stops on request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn

from batchwright.access.gate import Gate, require_key
from batchwright.api.application import application
from batchwright.api.connections import Connection, Crowd, backlog, places
from batchwright.api.jobs import render_event
from batchwright.api.listener import listen
from batchwright.api.services import Services
from batchwright.api.streams import StreamPlaces
from batchwright.core import Core, exposition_of
from batchwright.engine.event_streams import EventStreams
from batchwright.engine.exposition import process_counts
from batchwright.engine.metrics import CountsWriter
from batchwright.engine.worker.worker import worker_id
from batchwright.part import Server
from batchwright.storage.metrics import STORAGE_METRIC
from batchwright.telemetry.metrics import Counts

_END_SECONDS_MAX = 5
_ABORT_SECONDS = 4.0
"""Connections whose client has not read its answer by then are closed."""
_PATIENCE_SECONDS = 10.0
"""How long a user's request is retried while the store is unavailable."""


async def open_server(core: Core, version: str) -> ApiServer:
    """The HTTP server for these settings, with the routes of all parts; it listens, and `start()` makes it answer."""
    settings = core.settings.api
    await require_key(core.keys, host=settings.host, is_loopback=settings.is_loopback)
    own = process_counts()
    stored = Counts([STORAGE_METRIC])
    offered = Server(counts=stored, store=core.open_store("apiserver", stored, patience_seconds=_PATIENCE_SECONDS))
    services = Services(
        core=core,
        counts=own,
        event_streams=EventStreams(core.queue.database, render_event),
        exposition=exposition_of(core, own),
        gate=Gate(core.keys, is_loopback=settings.is_loopback),
        served=tuple(served for part in core.parts if (served := part.serve(offered)) is not None),
        settings=settings,
        stream_places=StreamPlaces(settings),
        version=version,
    )
    return ApiServer(CountsWriter(core.queue.database, f"api:{worker_id()}", stored), services)


class _ServerWithoutSignals(uvicorn.Server):
    """Leaves signals to the program that runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """Serves until `close()`."""

    def __init__(self, counts: CountsWriter, services: Services) -> None:
        self._counts = counts
        self._services = services
        self._counting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._listener = listen(services.settings, backlog())
        config = uvicorn.Config(
            application(services),
            loop="none",
            http=Connection,
            backlog=backlog(),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_END_SECONDS_MAX,
            timeout_keep_alive=services.settings.idle_seconds,
        )
        self._server = _ServerWithoutSignals(config)
        self._server.server_state = self.crowd = Crowd(services.settings, places(services.settings))
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """For a unix socket, `unix:` and its path."""
        return self._listener.url

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._server.serve([self._listener.socket]))
        self._counting = asyncio.create_task(self._counts.run())
        self._watching = asyncio.create_task(self.crowd.watch())
        return self._task

    async def close(self) -> None:
        """Finish the requests in progress, end the event streams, and stop."""
        self._server.should_exit = True
        for served in self._services.served:
            if served.end_streams is not None:
                served.end_streams()
        await self._services.event_streams.close()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_ABORT_SECONDS)
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._watching is not None:
            self._watching.cancel()
        self._listener.close()
        for served in self._services.served:
            if served.close is not None:
                await served.close()
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)
            await self._counts.write_last()
