"""The HTTP server inside our own event loop: it starts, says where it listens, and ends when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from batchwright.access.gate import Gate, require_key
from batchwright.access.settings import ApiSettings
from batchwright.api.application import application
from batchwright.api.jobs import render_event
from batchwright.api.services import Services
from batchwright.core import Core, exposition_of
from batchwright.engine.event_streams import EventStreams
from batchwright.engine.exposition import process_counts
from batchwright.engine.metrics import CountsWriter
from batchwright.engine.worker.worker import worker_id
from batchwright.errors import ConfigurationError
from batchwright.part import Server
from batchwright.storage.metrics import STORAGE_METRIC
from batchwright.telemetry.metrics import Counts

_END_SECONDS_MAX = 5
_ABORT_SECONDS = 4.0
"""Who has not taken his answer by then is hung up on."""
_UNREAD_SECONDS_MAX = 60
"""The kernel ends a connection whose peer has not taken anything for so long."""
_BACKLOG = 2048
_PATIENCE_SECONDS = 10.0
"""How long a request of a user waits for a store that is unavailable, before it is told so."""


async def open_server(core: Core, version: str) -> ApiServer:
    """The HTTP server of these settings with all that the parts serve; it listens, and `start()` makes it answer."""
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
        version=version,
    )
    return ApiServer(CountsWriter(core.queue.database, f"api:{worker_id()}", stored), services)


class _Quiet(uvicorn.Server):
    """Signals are the program's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """Serves until `close()`."""

    def __init__(self, counts: CountsWriter, services: Services) -> None:
        self._counts = counts
        self._services = services
        self._counting: asyncio.Task[None] | None = None
        self._socket = listening(services.settings)
        config = uvicorn.Config(
            application(services),
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_END_SECONDS_MAX,
            timeout_keep_alive=75,
        )
        self._server = _Quiet(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        self._counting = asyncio.create_task(self._counts.run())
        return self._task

    async def close(self) -> None:
        """Answer what is under way, let the followers of events go, and leave."""
        self._server.should_exit = True
        await self._services.event_streams.close()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_ABORT_SECONDS)
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()
        for served in self._services.served:
            if served.close is not None:
                await served.close()
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)
            await self._counts.write_last()


def listening(settings: ApiSettings) -> socket.socket:
    """The socket is bound here, so that an address that cannot be had is an error with a remedy."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            "choose another address with --host and --port"
        ) from error
    # Accepted sockets inherit these. Without the first one an answer on a kept connection waits 40 ms for company.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_SECONDS_MAX * 1000)
    return listener
