"""The HTTP server inside our own event loop: it starts, says where it listens, and ends when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from batchwright.access.settings import ApiSettings
from batchwright.api.application import application
from batchwright.api.services import Services
from batchwright.engine.metrics import CountsWriter
from batchwright.errors import ConfigurationError

_END_SECONDS_MAX = 5
_ABORT_SECONDS = 4.0
"""Who has not taken his answer by then is hung up on."""
_UNREAD_SECONDS_MAX = 60
"""The kernel ends a connection whose peer has not taken anything for so long."""
_BACKLOG = 2048


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
