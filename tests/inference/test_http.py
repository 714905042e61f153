"""The general client, with a raw server: requests, answers, and whether a failed request may have been received."""

import asyncio
import resource
import socket
import time

import pytest

from batchwright.errors import Fatal, Transient
from batchwright.inference.answers import Failure
from batchwright.inference.http import MIB, Http, NoAnswer, Service, Upload, multipart, origin
from tests.inference.server import RawServer, answer


@pytest.fixture
async def http():
    async with Http() as made:
        yield made


def file_upload(path):
    async def chunks():
        with path.open("rb") as file:
            while chunk := file.read(MIB):
                yield chunk

    return Upload(length=path.stat().st_size, open=chunks, content_type="application/jsonl")


async def key_header():
    return {"authorization": "Bearer sk-secret"}


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
async def test_a_request_goes_out_as_it_was_given(model_server, http, method):
    body = b"" if method in ("GET", "DELETE") else b"\x00bytes"
    answered = await http.ask(method, f"{model_server.url}/a?b=c%20d", headers={"x-one": "1"}, body=body)
    assert (answered.status, answered.body, answered.is_ok) == (200, b"{}", True)
    assert model_server.lines == [f"{method} /a?b=c%20d HTTP/1.1"]
    assert model_server.bodies == [body]
    (head,) = model_server.heads
    head.pop("content-length", None)
    assert head == {
        "accept-encoding": "identity",
        "host": f"127.0.0.1:{model_server.port}",
        "user-agent": "batchwright",
        "x-one": "1",
    }


async def test_an_answer_has_its_status_headers_and_json(model_server, http):
    model_server.replies["/"] = answer(b'{"a": 1}', "429 Too Many", "Retry-After: 7", "X-Id: r1")
    answered = await http.ask("GET", model_server.url)
    assert (answered.status, answered.is_ok, answered.json()) == (429, False, {"a": 1})
    assert (answered.headers["retry-after"], answered.headers["x-id"]) == ("7", "r1")


async def test_an_answer_that_is_not_json_is_a_transient_error(model_server, http):
    model_server.replies["/"] = answer(b"<html>")
    with pytest.raises(Transient, match="not JSON"):
        (await http.ask("GET", model_server.url)).json()


async def test_a_body_over_its_limit_is_cut_off(model_server, http):
    model_server.replies["/"] = answer(bytes(2000))
    assert len((await http.ask("GET", model_server.url, bytes_max=2000)).body) == 2000
    with pytest.raises(NoAnswer, match="longer than 1999 bytes") as caught:
        await http.ask("GET", model_server.url, bytes_max=1999)
    assert caught.value.failure is Failure.TOO_LARGE
    assert caught.value.was_sent


async def test_connections_are_used_again(model_server, http):
    for _ in range(3):
        await http.ask("GET", model_server.url)
        async with http.open("GET", model_server.url) as incoming:
            assert [chunk async for chunk in incoming.chunks()] == [b"{}"]
    assert model_server.connections == 1


async def test_no_redirect_is_followed(model_server, http):
    model_server.replies["/"] = answer(b"", "302 Found", f"location: {model_server.url}/other")
    answered = await http.ask("GET", model_server.url)
    assert (answered.status, len(model_server.lines)) == (302, 1)


async def test_no_proxy_comes_from_the_environment(model_server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with Http() as http:
        assert (await http.ask("GET", model_server.url)).is_ok


class Pouring:
    """A server that answers every request with this many bytes, and reads and drops every body."""

    def __init__(self, size):
        self.size = size
        self.received = 0
        self.body = b""
        self.head = b""

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error):
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        self.head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(self.head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        while self.received < length:
            part = await reader.read(MIB)
            self.received += len(part)
            self.body = (self.body + part)[:1000] if self.received < 10_000 else self.body
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {self.size}\r\n\r\n".encode())
        block = bytes(64 * 1024)
        for _ in range(self.size // len(block)):
            writer.write(block)
            await writer.drain()
        writer.close()


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def test_a_download_of_50_mb_takes_little_memory(http):
    async with Pouring(50 * MIB) as server, http.open("GET", server.url) as incoming:
        before, size = peak(), 0
        assert incoming.length == 50 * MIB
        async for chunk in incoming.chunks():
            size += len(chunk)
    assert size == 50 * MIB
    assert peak() - before < 16 * MIB


async def test_an_upload_of_50_mb_takes_little_memory(http, tmp_path):
    with (tmp_path / "in.jsonl").open("wb") as file:
        file.truncate(50 * MIB)
    upload = file_upload(tmp_path / "in.jsonl")
    before = peak()
    async with Pouring(0) as server:
        assert (await http.ask("PUT", server.url, body=upload)).is_ok
        assert server.received == 50 * MIB
        assert b"content-type: application/jsonl" in server.head
        assert b"transfer-encoding" not in server.head
    assert peak() - before < 16 * MIB


async def test_a_form_is_streamed_from_a_file(model_server, http, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'{"custom_id": "a"}\n')
    file = file_upload(tmp_path / "in.jsonl")
    form = multipart({"purpose": "batch"}, file, filename='in"1.jsonl')
    assert (await http.ask("POST", model_server.url, body=form)).is_ok
    (head,), (body,) = model_server.heads, model_server.bodies
    boundary = head["content-type"].removeprefix("multipart/form-data; boundary=")
    assert body.decode() == (
        f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="in%221.jsonl"\r\n'
        f'content-type: application/jsonl\r\n\r\n{{"custom_id": "a"}}\n\r\n--{boundary}--\r\n'
    )


async def test_the_error_of_a_source_is_the_error_of_the_upload(model_server, http):
    async def broken():
        yield b"some"
        raise Fatal("the input is gone")

    with pytest.raises(Fatal, match="the input is gone"):
        await http.ask("PUT", model_server.url, body=Upload(length=100, open=broken))


@pytest.mark.parametrize("length", [3, 5])
async def test_a_source_of_another_length_fails_the_upload(model_server, http, length):
    async def four():
        yield b"four"

    with pytest.raises(Transient, match="another length"):
        await http.ask("PUT", model_server.url, body=Upload(length=length, open=four))


async def test_a_task_that_is_cancelled_closes_its_connection_at_once(model_server, http):
    model_server.replies["/"] = None
    task = asyncio.create_task(http.ask("POST", model_server.url, body=b"{}"))
    await model_server.arrived.wait()
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(model_server.gone, 5) - began < 0.1


async def test_a_cancelled_download_closes_its_connection_at_once(model_server, http):
    model_server.replies["/half"] = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nsome"
    got = asyncio.Event()

    async def download():
        async with http.open("GET", f"{model_server.url}/half") as incoming:
            async for _ in incoming.chunks():
                got.set()

    task = asyncio.create_task(download())
    await got.wait()
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(model_server.gone, 5) - began < 0.1


async def test_a_cancelled_upload_closes_its_source(model_server, http):
    closed = asyncio.Event()

    async def endless():
        try:
            while True:
                yield bytes(1000)
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    task = asyncio.create_task(http.ask("PUT", model_server.url, body=Upload(length=10**9, open=endless)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(closed.wait(), 5)


async def test_nothing_was_sent_to_an_unreachable_service(http):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(NoAnswer, match="could not be reached: connection refused") as caught:
        await http.ask("POST", url, body=b"{}")
    assert (caught.value.failure, caught.value.was_sent) == (Failure.CONNECT, False)


async def test_nothing_was_sent_to_an_invalid_url(http):
    with pytest.raises(NoAnswer, match="cannot be sent") as caught:
        await http.ask("POST", "http://", body=b"{}")
    assert (caught.value.failure, caught.value.was_sent) == (Failure.UNSENDABLE, False)


async def test_nothing_was_sent_if_the_connection_was_not_made_in_time():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        with socket.create_connection(address), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(address)
            async with Http(connect_seconds=0.2) as http:
                with pytest.raises(NoAnswer) as caught:
                    await http.ask("POST", f"http://127.0.0.1:{address[1]}", body=b"{}", seconds=2)
    assert (caught.value.failure, caught.value.was_sent) == (Failure.CONNECT, False)


async def test_a_silent_service_may_have_received_the_request(model_server, http):
    model_server.replies["/"] = None
    with pytest.raises(NoAnswer, match="the request timed out") as caught:
        await http.ask("POST", model_server.url, body=b"{}", seconds=0.2)
    assert (caught.value.failure, caught.value.was_sent) == (Failure.TIMEOUT, True)


async def test_after_a_dropped_connection_the_request_may_have_been_received_and_is_not_resent(model_server, http):
    await http.ask("GET", f"{model_server.url}/first")
    model_server.replies["/"] = b""
    with pytest.raises(NoAnswer, match="connection was lost") as caught:
        await http.ask("POST", model_server.url, body=b"{}")
    assert (caught.value.failure, caught.value.was_sent) == (Failure.LOST, True)
    assert [line for line in model_server.lines if line.startswith("POST")] == ["POST / HTTP/1.1"]


@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_partial_answer_is_an_error(model_server, http, is_silent):
    model_server.replies["/half"] = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nsome"
    if not is_silent:
        model_server.then_close.add("/half")
    with pytest.raises(NoAnswer, match="after the status 200") as caught:
        async with http.open("GET", f"{model_server.url}/half", seconds=0.2) as incoming:
            async for chunk in incoming.chunks():
                assert chunk == b"some"
    assert caught.value.failure is (Failure.TIMEOUT if is_silent else Failure.LOST)


async def test_credentials_are_sent_only_to_their_service(model_server, http):
    service = Service(http, f"{model_server.url}/base/", key_header)
    await service.ask("GET", "/a", query={"q": "x y"})
    await service.ask("POST", f"{model_server.url}/b?c=d", json={"e": 1}, query={"f": 2})
    async with service.open("GET", "g") as incoming:
        await incoming.whole()
    assert model_server.lines == ["GET /base/a?q=x+y HTTP/1.1", "POST /b?c=d&f=2 HTTP/1.1", "GET /base/g HTTP/1.1"]
    assert all(head["authorization"] == "Bearer sk-secret" for head in model_server.heads)
    assert (model_server.bodies[1], model_server.heads[1]["content-type"]) == (b'{"e":1}', "application/json")
    async with RawServer() as other:
        for url in (other.url, f"https://127.0.0.1:{model_server.port}/", f"http://localhost:{model_server.port}/"):
            with pytest.raises(Fatal, match="does not get its credentials"):
                await service.ask("GET", url)
        async with service.open_signed(f"{other.url}/signed?sig=1") as incoming:
            assert incoming.is_ok
        assert len(other.heads) == 1
        assert "authorization" not in other.heads[0]


async def test_a_signed_url_of_the_service_itself_gets_no_credentials_either(model_server, http):
    service = Service(http, model_server.url, key_header)
    async with service.open_signed(f"{model_server.url}/signed") as incoming:
        await incoming.whole()
    assert "authorization" not in model_server.heads[0]


@pytest.mark.parametrize(
    "url",
    [
        "https://api.example.com@evil.com/",
        "https://api.example.com:1/",
        "http://api.example.com/",
        "https://evil.com\\@api.example.com/",
        "https://api.example.com.evil.com/",
        "//evil.com/",
        "https://[",
    ],
)
def test_origins_are_compared_completely(url):
    assert origin(url) != origin("https://api.example.com")


@pytest.mark.parametrize("url", ["https://api.example.com/v1?x=y", "https://API.example.com:443"])
def test_the_same_origin_is_the_same(url):
    assert origin(url) == origin("https://api.example.com")
