"""The protocol, byte by byte: split packets, chunks, garbage, old clients."""

import asyncio
import json

import pytest

from batchwright.simulator import running
from tests.simulator.wire import CHAT, ask, chat, request, until, wire

pytestmark = pytest.mark.timeout(30)


async def test_a_connection_is_kept_and_serves_one_request_after_the_other():
    async with running() as simulator, wire(simulator.url) as connection:
        for n in range(3):
            status, headers, _ = await connection.ask(chat(f"number {n}"))
            assert (status, headers.get("connection")) == (200, None)
        assert simulator.stats()["connections"] == {"opened": 1, "closed": 0, "open": 1, "open_max": 1}
        assert simulator.stats()["received"] == 3


async def test_a_request_may_arrive_in_single_bytes():
    async with running() as simulator, wire(simulator.url) as connection:
        for byte in request(chat("split")):
            connection.writer.write(bytes([byte]))
            await connection.writer.drain()
            await asyncio.sleep(0)
        assert (await connection.answer())[0] == 200


async def test_a_body_may_come_in_chunks():
    raw = json.dumps(chat("in chunks")).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(raw[i : i + 7]), raw[i : i + 7]) for i in range(0, len(raw), 7))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    async with running() as simulator, wire(simulator.url) as connection:
        connection.writer.write(head + chunks + b"0\r\n\r\n")
        status, _, body = await connection.answer()
        assert (status, json.loads(body)["object"]) == (200, "chat.completion")


async def test_requests_sent_ahead_are_answered_in_their_order():
    async with running() as simulator, wire(simulator.url) as connection:
        connection.writer.write(b"".join(request(chat(f"{n}"), x_request_id=f"r{n}") for n in range(100)))
        ids = [(await connection.answer())[1]["x-request-id"] for _ in range(100)]
        assert ids == [f"r{n}" for n in range(100)]
        assert simulator.stats()["in_flight_max"] == 1


async def test_a_client_that_asks_whether_to_continue_is_told_to():
    raw = json.dumps(chat()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {len(raw)}\r\n\r\n"
    async with running() as simulator, wire(simulator.url) as connection:
        connection.writer.write(head.encode())
        assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.writer.write(raw)
        assert (await connection.answer())[0] == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ],
)
async def test_garbage_is_answered_400_and_the_connection_ends(garbage):
    async with running() as simulator, wire(simulator.url) as connection:
        connection.writer.write(garbage)
        answer = await connection.rest()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"the request is not valid HTTP" in answer
        assert simulator.stats()["received"] == 0


async def test_an_upgrade_is_refused():
    async with running() as simulator, wire(simulator.url) as connection:
        connection.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
        assert b"without upgrades" in await connection.rest()


async def test_endless_headers_are_refused():
    async with running() as simulator, wire(simulator.url) as connection:
        lines = b"".join(b"x-%d: %b\r\n" % (n, b"y" * 1000) for n in range(66))
        connection.writer.write(b"GET /health HTTP/1.1\r\n" + lines)
        assert (await connection.rest()).startswith(b"HTTP/1.1 431 ")


async def test_a_body_over_the_limit_is_refused():
    async with running(body_bytes_max=1000) as simulator, wire(simulator.url) as connection:
        assert (await connection.ask(chat("x" * 500)))[0] == 200
        connection.writer.write(request(chat("x" * 1000)))
        assert (await connection.rest()).startswith(b"HTTP/1.1 413 ")


async def test_http_1_0_is_answered_and_closed_unless_it_asks_to_stay():
    raw = json.dumps(chat()).encode()
    head = f"POST {CHAT} HTTP/1.0\r\ncontent-length: {len(raw)}\r\n".encode()
    async with running() as simulator:
        async with wire(simulator.url) as connection:
            connection.writer.write(head + b"\r\n" + raw)
            answer = await connection.rest()
            assert b"connection: close" in answer
            assert answer.endswith(b"}")
        async with wire(simulator.url) as connection:
            connection.writer.write(head + b"connection: keep-alive\r\n\r\n" + raw)
            assert (await connection.answer())[1]["connection"] == "keep-alive"


async def test_head_has_the_length_and_no_body():
    async with running() as simulator, wire(simulator.url) as connection:
        status, headers, body = await connection.ask(b"", "/health", "HEAD")
        assert (status, headers["content-length"], body) == (200, "15", b"")
        assert (await connection.ask(b"", "/health", "GET"))[2] == b'{"status":"ok"}'


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", CHAT, 405), ("PUT", "/health", 405), ("GET", "/x", 404)]
)
async def test_other_routes_and_methods_are_refused(method, path, status):
    async with running() as simulator:
        found, _, body = await ask(simulator.url, b"", path, method)
        assert (found, body["error"]["type"]) == (status, "invalid_request_error")


async def test_a_client_that_leaves_in_the_middle_of_a_body_was_never_counted():
    async with running() as simulator:
        async with wire(simulator.url) as connection:
            connection.writer.write(request(chat("half"))[:-5])
            await connection.writer.drain()
        await until(lambda: simulator.stats()["connections"]["closed"] == 1)
        assert (simulator.stats()["received"], simulator.stats()["aborted"]["total"]) == (0, 0)
