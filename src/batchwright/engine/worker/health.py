"""A worker's health page for probes and Prometheus: plain HTTP/1.1, one request for each connection.

A worker loads no web framework, and this page needs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

import orjson

from batchwright.db.migrate import require_current
from batchwright.engine.exposition import CONTENT_TYPE, Exposition
from batchwright.engine.worker.worker import Worker
from batchwright.errors import ConfigurationError, DatabaseError
from batchwright.telemetry.metrics import Counts, Metric

log = logging.getLogger(__name__)

_HEAD_BYTES_MAX = 16 * 1024
_HEAD_SECONDS_MAX = 5.0
_READY_SECONDS_MAX = 5.0
_WRITE_SECONDS_MAX = 10.0

OWN_METRICS = (
    Metric("this_worker_jobs", "Jobs that this worker process holds now.", kind="gauge"),
    Metric("this_worker_broken", "1 when this worker process has found itself broken and is stopping.", kind="gauge"),
)


def own_counts(worker: Worker) -> Counts:
    """The state of this process, for the worker's health page."""
    counts = Counts(OWN_METRICS)

    def look() -> None:
        counts.set_all("this_worker_jobs", {(): worker.jobs})
        counts.set_all("this_worker_broken", {(): float(worker.broken is not None)})

    counts.on_read(look)
    return counts


class Page(NamedTuple):
    status: HTTPStatus
    body: bytes
    type: str = "application/json"


class HealthServer:
    """`/healthz`, `/readyz` and `/metrics` of one worker, from `start()` to `close()`."""

    def __init__(self, worker: Worker, exposition: Exposition, *, version: str, host: str, port: int) -> None:
        self._worker = worker
        self._exposition = exposition
        self._version = version
        self._host = host
        self._port = port
        self._pages: dict[str, Callable[[], Awaitable[Page]]] = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
        }

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=_HEAD_BYTES_MAX)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {self._host}:{self._port} for worker.health_port: {_reason(error)}; choose another "
                "port with BATCHWRIGHT_WORKER_HEALTH_PORT, or unset it"
            ) from error
        log.info("health on %s", self.url)

    @property
    def url(self) -> str:
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    # Pages ------------------------------------------------------------------------------------------------------

    async def _healthz(self) -> Page:
        """Whether this process is alive: the loop answers, and nothing is broken. An unavailable database is no reason
        to restart it."""
        return self._answer_unavailable(self._broken) if self._broken else self._answer_ok()

    async def _readyz(self) -> Page:
        """Whether the worker claims jobs."""
        if reason := self._broken or self._worker.idle_because:
            return self._answer_unavailable(reason)
        try:
            async with asyncio.timeout(_READY_SECONDS_MAX):
                await require_current(self._worker.queue.database, self._version)
        except ConfigurationError as error:
            return self._answer_unavailable(str(error))
        except (DatabaseError, TimeoutError):
            return self._answer_unavailable("the database is unavailable")
        return self._answer_ok()

    async def _metrics(self) -> Page:
        return Page(HTTPStatus.OK, await self._exposition.render(), CONTENT_TYPE)

    @property
    def _broken(self) -> str | None:
        reason = self._worker.broken
        return None if reason is None else f"this worker is broken and must be restarted: {reason}"

    def _answer_ok(self) -> Page:
        return Page(HTTPStatus.OK, orjson.dumps({"status": "ok", "version": self._version}))

    def _answer_unavailable(self, detail: str) -> Page:
        body = {"status": "unavailable", "version": self._version, "detail": detail}
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, orjson.dumps(body))

    # HTTP -------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Close connections that are slow to send or to read."""
        with (
            contextlib.closing(writer),
            contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError),
        ):
            method, page = await self._answer(reader)
            writer.write(_head(page) if method == "HEAD" else _head(page) + page.body)
            async with asyncio.timeout(_WRITE_SECONDS_MAX):
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Page]:
        try:
            async with asyncio.timeout(_HEAD_SECONDS_MAX):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "", _refuse(HTTPStatus.BAD_REQUEST)
        method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        target, _, protocol = rest.rpartition(" ")
        if not protocol.startswith("HTTP/1."):
            return method, _refuse(HTTPStatus.BAD_REQUEST)
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return method, _refuse(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return method, _refuse(HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            return method, await page()
        except Exception:
            log.exception("the page %s cannot be shown", target)
            return method, _refuse(HTTPStatus.INTERNAL_SERVER_ERROR)


def _refuse(status: HTTPStatus) -> Page:
    body = {"status": "error", "detail": f"{status.phrase}; GET /healthz, /readyz or /metrics"}
    return Page(status, orjson.dumps(body))


def _head(page: Page) -> bytes:
    lines = [
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        f"content-type: {page.type}",
        f"content-length: {len(page.body)}",
        "cache-control: no-store",
        "connection: close",
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1")


def _reason(error: OSError) -> str:
    """The system's message, without the sentence that asyncio puts around it."""
    return os.strerror(error.errno) if error.errno else str(error)
