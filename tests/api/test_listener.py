"""The unix socket of the HTTP server: private, replaced when it is stale, never taken from a live server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from batchwright import AsyncBatchwright
from batchwright.access.settings import ApiSettings
from batchwright.api.listener import Listener, listen
from batchwright.cli.loop import loop_factory
from batchwright.errors import ConfigurationError
from tests.api.conftest import OPERATIONS, configured
from tests.conftest import roomy_folder, skip
from tests.test_private import second_user


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path that is short enough for a socket, which other users may enter."""
    made = Path(tempfile.mkdtemp(prefix="bw-", dir=roomy_folder()))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def listen_on(path: Path) -> Listener:
    return listen(ApiSettings(socket=path))


def mode(path: Path) -> int:
    return path.lstat().st_mode & 0o777


async def test_the_server_answers_on_a_socket_that_needs_no_key_and_checks_hosts(
    database_url: str, folder: Path
) -> None:
    path = folder / "run" / "api.sock"
    settings = configured(database_url, folder, api=ApiSettings(host="0.0.0.0", socket=path))
    async with AsyncBatchwright(settings=settings, operations=OPERATIONS) as batchwright:
        server = await batchwright.server()
        server.start()
        try:
            assert server.url == f"unix:{path}"
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                made = await client.post("/v1/jobs", json={"job_type": "echo", "payload": {"value": 1}})
                assert made.status_code == 201
                assert (await client.get("/v1/jobs", headers={"host": "evil.example"})).status_code == 421
                answer = await client.get("/v1/jobs", headers={"origin": "http://evil.example"})
                assert answer.status_code == 403
            curl = await asyncio.create_subprocess_exec(
                *("curl", "--silent", "--unix-socket", str(path), "http://localhost/v1/jobs"),
                stdout=asyncio.subprocess.PIPE,
            )
            said, _ = await curl.communicate()
            assert [one["id"] for one in json.loads(said)["data"]] == [made.json()["id"]]
        finally:
            await server.close()
    assert not path.exists()


def test_uvloop_serves_a_unix_socket_too(database_url: str, folder: Path) -> None:
    path = folder / "api.sock"
    settings = configured(database_url, folder, api=ApiSettings(socket=path))

    async def ask() -> int:
        async with AsyncBatchwright(settings=settings) as batchwright:
            server = await batchwright.server()
            server.start()
            try:
                async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path))) as client:
                    return (await client.get("http://localhost/healthz")).status_code
            finally:
                await server.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert runner.run(ask()) == 200


def test_the_socket_is_private_also_in_a_folder_that_is_open(folder: Path) -> None:
    before = os.umask(0)
    try:
        listeners = [listen_on(folder / "api.sock"), listen_on(folder / "made" / "too" / "api.sock")]
    finally:
        os.umask(before)
    assert mode(folder / "api.sock") == 0o600
    assert (mode(folder), mode(folder / "made"), mode(folder / "made" / "too")) == (0o755, 0o700, 0o700)
    assert sorted(path.name for path in folder.iterdir()) == ["api.sock", "made"]
    for one in listeners:
        one.close()
    assert not (folder / "api.sock").exists()


def test_a_second_user_cannot_connect(folder: Path) -> None:
    if (other := second_user()) is None:
        skip("only root can look through the eyes of a second user, who must be able to run Python")
    assert other is not None
    listener = listen_on(folder / "api.sock")
    assert other.look([folder / "api.sock"]) == []
    (folder / "api.sock").chmod(0o666)
    assert other.look([folder / "api.sock"]) == [str(folder / "api.sock")], (
        "with an open mode, the second user can connect"
    )
    listener.close()


def test_a_stale_socket_is_replaced_and_a_live_one_is_an_error_that_names_it(folder: Path) -> None:
    path = folder / "api.sock"
    dead = listen_on(path)
    dead.socket.close()
    alive = listen_on(path)
    with pytest.raises(ConfigurationError, match=f"another server listens on api.socket {path}"):
        listen_on(path)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
    dead.close()
    assert path.is_socket(), "the path belongs to another server now, so it must stay"
    alive.close()


def test_a_path_that_cannot_be_a_socket_is_refused_with_the_reason(folder: Path) -> None:
    (folder / "file").write_text("mine")
    with pytest.raises(ConfigurationError, match="is not a socket but another file"):
        listen_on(folder / "file")
    assert (folder / "file").read_text() == "mine"
    with pytest.raises(ConfigurationError, match="is too long for a socket; it may have 103 bytes"):
        listen_on(folder / ("a" * 100))
    with pytest.raises(ConfigurationError, match=r"cannot listen on api\.socket .*/file/api\.sock: File exists"):
        listen_on(folder / "file" / "api.sock")
    with pytest.raises(ConfigurationError, match=r"api\.socket is '/'"):
        replace(ApiSettings(), socket=Path("/"))
