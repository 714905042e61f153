"""Fixtures: listing and fetching, an HTTP server whose answers are written by hand, and moto's S3."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from batchwright.inference.http import Http
from batchwright.ingest.sources import FetchSettings, Sources, local_roots
from tests.inference.server import RawServer
from tests.storage.conftest import s3, s3_port

__all__ = ["s3", "s3_port"]
SETTINGS = FetchSettings(seconds=20, bytes_max=3_000_000)


class Pull:
    """Sources as the CLI uses them: with the rights of its user."""

    def __init__(self, folder, http):
        self._folder = folder
        self._http = http

    async def list(self, *named, include=None, exclude=None, **settings):
        sources = Sources(replace(SETTINGS, **settings))
        listing = sources.list(named, include=include, exclude=exclude, roots=local_roots(named))
        return [listed async for listed in listing], listing

    async def fetch(self, uri, *, etag=None, roots=None, **settings):
        """`private` is set unless a test says otherwise."""
        sources = Sources(replace(SETTINGS, **{"private": True, **settings}), self._http)
        roots = local_roots([uri]) if roots is None else roots
        return await sources.fetch(uri, self._folder / "document", etag=etag, roots=roots)

    @property
    def leftovers(self):
        """Files that a fetch has left behind."""
        return sorted(path.name for path in self._folder.iterdir() if path.name != "document")


@pytest.fixture
async def http():
    async with Http(connect_seconds=3) as http:
        yield http


@pytest.fixture
def pull(tmp_path, http):
    folder = tmp_path / "fetched"
    folder.mkdir()
    return Pull(folder, http)


@pytest.fixture
def papers(tmp_path):
    folder = tmp_path / "papers"
    folder.mkdir()
    return folder


@pytest.fixture
async def server():
    async with RawServer() as server:
        yield server


@pytest.fixture
async def endless():
    """A server that answers 200 and then sends `piece` repeatedly, with pauses, until the client disconnects."""
    gone = asyncio.Event()
    sent = {"piece": b"x" * 65_536, "pause": 0.0, "bytes": 0}

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n")
            while True:
                writer.write(sent["piece"])
                sent["bytes"] += len(sent["piece"])
                await writer.drain()
                await asyncio.sleep(sent["pause"])
        gone.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.sent, server.gone = sent, gone
    yield server
    server.close()
