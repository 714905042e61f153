"""The health page of a worker over real HTTP, in this process."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import asynccontextmanager

import httpx
import pytest

from batchwright.app import VERSION
from batchwright.engine.exposition import Exposition
from batchwright.engine.worker.health import HealthServer, own_counts
from batchwright.engine.worker.worker import Worker
from batchwright.errors import ConfigurationError
from batchwright.operations.registry import Registry


@asynccontextmanager
async def served(pool, queue, *, port=0):
    worker = Worker(pool, Registry(), queue=queue)
    server = HealthServer(
        worker, Exposition(queue.database, own_counts(worker)), version=VERSION, host="127.0.0.1", port=port
    )
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            yield worker, http
    finally:
        await server.close()


async def test_a_worker_is_ready_only_while_it_takes_jobs_and_alive_all_the_time(pool, queue):
    async with served(pool, queue) as (worker, http):

        async def said():
            pages = [await http.get("/healthz"), await http.get("/readyz")]
            return [page.status_code for page in pages], pages[1].json().get("detail")

        assert await said() == ([200, 503], "this worker is starting")
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(30):
            await worker.started.wait()
        assert await said() == ([200, 200], None)
        worker.stop()
        assert await said() == ([200, 503], "this worker is stopping")
        assert await running


async def test_a_health_page_refuses_unknown_paths_and_methods(pool, queue):
    async with served(pool, queue) as (_, http):
        head, elsewhere, post = await http.head("/healthz"), await http.get("/v1/jobs"), await http.post("/healthz")
        assert [one.status_code for one in (head, elsewhere, post)] == [200, 404, 405]
        assert (head.content, int(head.headers["content-length"]) > 0) == (b"", True)
        assert "GET /healthz, /readyz or /metrics" in elsewhere.json()["detail"]
        assert (await http.get("/healthz?probe=1")).json() == {"status": "ok", "version": VERSION}
        port = http.base_url.port
        for nonsense in (b"GET /" + b"x" * 20_000, b"hello\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(nonsense)
            async with asyncio.timeout(30):
                assert (await reader.readline()) == b"HTTP/1.1 400 Bad Request\r\n"
            writer.close()


async def test_a_health_port_that_is_taken_is_an_error_with_a_remedy(pool, queue):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError) as refused:
            async with served(pool, queue, port=port):
                pass
    complaint = f"cannot listen on 127.0.0.1:{port} for worker.health_port: {os.strerror(errno.EADDRINUSE)}; choose"
    assert str(refused.value).startswith(complaint)
