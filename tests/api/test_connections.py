"""Strangers on the network: requests without a key, and too large, too slow or too many ones, do not affect others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import orjson
import pytest

from batchwright import AsyncBatchwright, operation
from batchwright.access.settings import ApiSettings
from batchwright.api.connections import HEADERS_MAX, Window, backlog, places
from batchwright.api.server import ApiServer
from batchwright.api.turns import AT_ONCE
from batchwright.cli.loop import loop_factory
from tests.api.streaming import Stream, serving
from tests.api.wire import Wire

MEGABYTE = 1024 * 1024


@operation("nothing")
async def nothing() -> None:
    pass


class Door:
    """A server, and its keys."""

    def __init__(self, batchwright: AsyncBatchwright, server: ApiServer) -> None:
        self.batchwright = batchwright
        self.server = server
        self.url = server.url
        self.crowd = server.crowd
        self.key = ""

    async def make_key(self, *scopes: str, tenant: str = "default") -> str:
        made = await self.batchwright.keys.create("test", scopes=scopes or ("read", "submit"), tenant=tenant)
        return f"Authorization: Bearer {made.secret}"

    async def wire(self) -> Wire:
        return await Wire.open(self.url)

    async def health(self) -> int:
        async with await self.wire() as wire:
            return (await wire.ask("GET /healthz")).status

    async def check_in(self, seconds: float) -> None:
        """Let the server check its connections, this many seconds later."""
        await self.crowd.check(asyncio.get_running_loop().time() + seconds)


@contextlib.asynccontextmanager
async def opened(database_url: str, **api: object) -> AsyncIterator[Door]:
    async with serving(database_url, nothing, api=api) as (batchwright, server):
        door = Door(batchwright, server)
        door.key = await door.make_key()
        yield door


@pytest.fixture
async def door(database_url: str) -> AsyncIterator[Door]:
    async with opened(database_url) as door:
        yield door


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition of which the server sends no message; the test's timeout bounds this."""
    while not condition():
        await asyncio.sleep(0.005)


# Keys and bodies --------------------------------------------------------------------------------------------------

BODIES = (
    "POST /v1/jobs",
    "POST /v1/files",
    "POST /v1/batches",
    "POST /v1/uploads/upload_1/parts",
    "PUT /v1/schedules/a",
)
LARGE = f"Content-Length: {30 * MEGABYTE}"
JSON = "Content-Type: application/json"


async def test_without_a_valid_key_nothing_of_a_body_is_read(door: Door) -> None:
    wrong = "Authorization: Bearer bw_" + "x" * 43
    reader = await door.make_key("read")
    for line in BODIES:
        for header, status in (("X-None: 1", 401), (wrong, 401), ("Authorization: Basic eDp4", 401), (reader, 403)):
            for length in ("Content-Length: 100000", "Transfer-Encoding: chunked"):
                async with await door.wire() as wire:  # the body is never sent, and the server does not wait for it
                    answer = await wire.ask(line, header, length, JSON)
                    assert answer.status == status, line
                    assert answer.headers["connection"] == "close"
                    assert answer.error["code"] == {401: "unauthorized", 403: "forbidden"}[status]
                    assert await wire.is_ended()


async def test_a_length_of_thousands_of_digits_is_only_a_number(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """Python's `int` refuses it."""
    zeros = "0" * 5_000
    for key, length, status in (("X-None: 1", "2", 401), (door.key, "2", 400), (door.key, str(40 * MEGABYTE), 413)):
        async with await door.wire() as wire:
            wire.begin("POST /v1/jobs", key, JSON, f"Content-Length: {zeros}{length}")
            wire.send(b"{}")
            assert (await wire.answer()).status == status
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


async def test_a_large_body_without_a_key_is_cut_off_and_its_sender_sees_why(door: Door) -> None:
    async with httpx.AsyncClient(base_url=door.url, timeout=20) as client:
        content = b"[" + b"[]," * 60_000
        answer = await client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 401
    async with await door.wire() as wire:
        wire.begin("POST /v1/jobs", LARGE, JSON)
        assert (await wire.answer()).status == 401
        with pytest.raises(OSError):
            for _ in range(30):
                wire.send(b"x" * MEGABYTE)
                await wire.writer.drain()
    await until(lambda: not door.crowd.connections)


async def test_a_client_with_a_key_may_finish_sending_and_sees_that_the_body_was_too_large(database_url: str) -> None:
    key = {"Content-Type": "application/json"}
    async with (
        opened(database_url, jobs_bytes_max=MEGABYTE) as door,
        httpx.AsyncClient(base_url=door.url, timeout=20) as client,
    ):
        key["Authorization"] = door.key.partition(": ")[2]
        whole = b" " * (12 * MEGABYTE)

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(whole), MEGABYTE):
                yield whole[start : start + MEGABYTE]

        for content in (whole, chunks()):
            answer = await client.post("/v1/jobs", content=content, headers=key)
            assert (answer.status_code, answer.headers["connection"]) == (413, "close")
            assert f"larger than {MEGABYTE} bytes" in answer.text


async def test_a_connection_is_kept_after_the_body_was_read_also_if_it_came_with_the_headers(door: Door) -> None:
    body = orjson.dumps({"jobs": []}).decode()
    async with await door.wire() as wire:
        for _ in range(3):
            wire.begin("POST /v1/jobs", door.key, JSON, f"Content-Length: {len(body)}")
            wire.send(body.encode())
            answer = await wire.answer()
            assert (answer.status, answer.headers.get("connection")) == (400, None)
        assert (await wire.ask("GET /healthz")).status == 200
        wire.begin("POST /v1/jobs", "Content-Length: 4", JSON)
        wire.send(b"{}  ")
        assert (await wire.answer()).status == 401


async def test_a_key_in_a_trailer_is_ignored(door: Door) -> None:
    async with await door.wire() as wire:
        wire.begin("POST /v1/jobs", "Transfer-Encoding: chunked", JSON)
        wire.send(b"2\r\n{}\r\n0\r\n" + door.key.encode() + b"\r\n\r\n")
        assert (await wire.answer()).status == 401


async def test_a_client_that_disconnects_within_a_body_is_one_line_in_the_log(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for kind in (JSON, "Content-Type: text/plain", "X-None: 1"):
        caplog.clear()
        async with await door.wire() as wire:
            wire.begin("POST /v1/jobs", door.key, LARGE, kind)
            wire.send(b'{"job_type":')
            await until(lambda: any(not one.flow.read_paused for one in door.crowd.connections))
        await until(lambda: not door.crowd.tasks)
        (record,) = caplog.records
        assert "POST /v1/jobs: the client disconnected before its body was complete (req_" in record.getMessage()
        assert record.exc_info is None


def test_leaving_before_the_answer_is_no_line_in_the_log(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """On the loop of programs, whose transports refuse what is written after their end."""

    async def leave() -> None:
        async with opened(database_url) as door:
            writer, connection = await unread(door)
            writer.transport.abort()
            await until(lambda: not door.crowd.connections and not door.crowd.tasks)
            assert connection.transport.is_closing()
            assert door.crowd.turns._running == 0

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(leave())
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []


# Headers ----------------------------------------------------------------------------------------------------------


async def test_headers_have_a_limit_however_they_are_sent(door: Door) -> None:
    many = "".join(f"X-{n}: {'x' * 1000}\r\n" for n in range(100))
    heads = {
        "many": f"GET /healthz HTTP/1.1\r\n{many}",
        "tiny": "GET /healthz HTTP/1.1\r\n" + "a: b\r\n" * (HEADERS_MAX + 2),
        "one": "GET /healthz HTTP/1.1\r\nX-Long: " + "x" * MEGABYTE,
        "name": "GET /healthz HTTP/1.1\r\n" + "x" * MEGABYTE,
        "path": "GET /healthz?" + "x" * MEGABYTE,
        "blank": "\r\n" * MEGABYTE,
    }
    for name, head in heads.items():
        async with await door.wire() as wire:
            for start in range(0, len(head), 7_000):
                wire.send(head[start : start + 7_000].encode())
            answer = await wire.answer()
            assert (answer.status, answer.error["code"]) == (431, "headers_too_large"), name
            assert answer.headers["connection"] == "close"
            assert await wire.is_ended()
    assert door.crowd.head_bytes == 0
    async with await door.wire() as wire:
        answer = await wire.ask("GET /healthz", *(f"X-{n}: {'x' * 600}" for n in range(HEADERS_MAX - 28)))
        assert answer.status == 200


async def test_trailers_and_chunk_extensions_count_as_headers(door: Door) -> None:
    for after in (
        b"2;x=" + b"x" * MEGABYTE,
        b"2\r\n{}\r\n0\r\nX-Long: " + b"x" * MEGABYTE,
        b"0\r\n" + b"a: b\r\n" * 1000,
    ):
        async with await door.wire() as wire:
            wire.begin("POST /v1/jobs", door.key, "Transfer-Encoding: chunked", JSON)
            wire.send(after)
            assert (await wire.answer()).status == 431
    assert door.crowd.head_bytes == 0


async def test_unfinished_headers_of_all_connections_have_a_limit(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchwright.api.connections._HEADS_BYTES_MAX", 100_000)
    long = b"GET /healthz HTTP/1.1\r\n" + b"X-1: " + b"x" * 40_000 + b"\r\nX-2: "
    async with contextlib.AsyncExitStack() as stack:
        wires: list[Wire] = []
        for n in range(4):
            wires.append(await stack.enter_async_context(await door.wire()))
            wires[n].send(long + b"y")
            if n >= 2:
                assert await wires[n - 2].is_ended()
            await until(lambda n=n: door.crowd.head_bytes > 40_000 * min(2, n + 1))
        assert len(door.crowd.connections) == 2
        assert await door.health() == 200
    await until(lambda: door.crowd.head_bytes == 0)


async def test_headers_of_strangers_are_bounded_while_their_requests_wait_and_freed_when_answered(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchwright.api.connections._HEADS_BYTES_MAX", 100_000)
    head = (f"/v1/jobs?{'x' * 20_000}", "X-Long: " + "y" * 20_000)
    turns = door.crowd.turns
    turns._running += AT_ONCE  # nobody's turn comes
    async with contextlib.AsyncExitStack() as stack:
        wires: list[Wire] = []
        for n in range(4):
            wires.append(await stack.enter_async_context(await door.wire()))
            wires[n].begin(f"GET {head[0]}", head[1])
            if n >= 2:
                assert await wires[n - 2].is_ended()
            await until(lambda n=n: door.crowd.head_bytes > 40_000 * min(2, n + 1))
        assert 80_000 < door.crowd.head_bytes <= 100_000
        turns._running -= AT_ONCE
        turns._start_next()
        for wire in wires[2:]:
            assert (await wire.answer()).status == 401
        assert door.crowd.head_bytes == 0
        assert [(one.cycle, one.scope, one.headers) for one in door.crowd.idle] == [(None, None, None)] * 2
        for wire in wires[2:]:  # and these connections are as good as before
            assert (await wire.ask("GET /v1/jobs", door.key)).status == 200


async def test_one_request_may_follow_before_the_first_is_answered_and_the_rest_is_not_read(door: Door) -> None:
    request = f"GET /v1/jobs HTTP/1.1\r\nHost: {door.url.removeprefix('http://')}\r\n{door.key}\r\n\r\n".encode()
    async with await door.wire() as wire:
        for _ in range(3):
            wire.send(request * 2)
            for answer in (await wire.answer(), await wire.answer()):
                assert (answer.status, answer.headers.get("connection")) == (200, None)
    for asked in (request, request.replace(door.key.encode(), b"X-None: 1")):
        before = door.crowd.total_requests
        async with await door.wire() as wire:
            wire.send(asked * 10_000)
            answers = [await wire.answer() for _ in range(2)]
            assert [one.headers.get("connection") for one in answers] == [None, "close"]
            assert await wire.is_ended()
        assert door.crowd.total_requests - before == 2
    await until(lambda: not door.crowd.connections)


async def test_bytes_that_are_not_a_request_are_refused_in_the_common_format_of_errors(door: Door) -> None:
    async with await door.wire() as wire:
        wire.send(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        answer = await wire.answer()
        assert (answer.status, answer.error["code"]) == (400, "invalid_request")


# Time -------------------------------------------------------------------------------------------------------------


async def test_headers_must_come_in_time_and_idle_connections_are_left_alone(door: Door) -> None:
    async with await door.wire() as half, await door.wire() as silent, await door.wire() as idle:
        assert (await idle.ask("GET /healthz")).status == 200
        half.send(b"GET /healthz HTTP/1.1\r\nHost: loc")
        await until(lambda: len(door.crowd.waiting) == 2 and door.crowd.head_bytes > 0)
        await door.check_in(9)
        assert len(door.crowd.connections) == 3
        await door.check_in(11)
        answer = await half.answer()
        assert (answer.status, answer.error["code"]) == (408, "too_slow")
        assert await half.is_ended()
        assert await silent.is_ended()
        assert (await idle.ask("GET /healthz")).status == 200


async def test_an_idle_connection_ends_also_after_blank_lines(database_url: str) -> None:
    async with opened(database_url, idle_seconds=1) as door, await door.wire() as wire:
        assert (await wire.ask("GET /healthz")).status == 200
        wire.send(b"\r\n")
        assert await wire.is_ended()


async def test_a_body_must_keep_moving(door: Door) -> None:
    async with await door.wire() as stalled, await door.wire() as moving:
        for wire in (stalled, moving):
            wire.begin("POST /v1/jobs", door.key, LARGE, JSON)
        await until(lambda: [one.flow.read_paused for one in busy(door)] == [False, False])
        for n in range(1, 4):
            moving.send(b" " * 11_000)
            await until(lambda n=n: max(one._received_bytes for one in busy(door)) >= n * 11_000)
            await door.check_in(n * 10.5)
        answer = await stalled.answer()
        assert (answer.status, answer.error["code"]) == (408, "too_slow")
        assert await stalled.is_ended()
        assert [one.is_busy for one in door.crowd.connections] == [True]


def busy(door: Door) -> list[Any]:
    return [one for one in door.crowd.connections if one.is_busy]


async def unread(door: Door) -> tuple[asyncio.StreamWriter, Any]:
    """A stranger who asks for large answers and reads none, until one of them cannot be sent; and asks for one more."""
    door.server._listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # each connection inherits it
    before = set(door.crowd.connections)
    request = f"GET /openapi.json HTTP/1.1\r\nHost: {door.url.removeprefix('http://')}\r\n\r\n".encode()
    host, _, port = door.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    await until(lambda: len(set(door.crowd.connections) - before) == 1)
    (connection,) = set(door.crowd.connections) - before
    while not (connection.is_busy and connection.flow.write_paused):
        done = door.crowd.total_requests
        writer.write(request)
        await until(lambda done=done: door.crowd.total_requests > done or connection.is_busy)
    writer.write(request)
    await until(lambda: bool(connection.pipeline))
    return writer, connection


async def test_an_answer_that_is_not_read_ends(door: Door) -> None:
    writer, connection = await unread(door)
    await door.check_in(0)
    await door.check_in(29)
    assert not connection.transport.is_closing()
    await door.check_in(31)
    await until(lambda: not door.crowd.connections)
    writer.close()


async def test_strangers_who_do_not_read_their_answers_shut_nobody_out(database_url: str) -> None:
    async with opened(database_url, connections_max=64) as door, contextlib.AsyncExitStack() as stack:
        for _ in range(64):
            writer, _ = await unread(door)
            stack.callback(writer.close)
        async with await door.wire() as wire:
            assert (await wire.ask("GET /v1/jobs", door.key)).status == 200
        assert len(door.crowd.connections) <= 64


def test_a_window_requires_bytes_only_at_its_end() -> None:
    window = Window(100.0, 5_000)
    assert window.moves(109.0, 5_000, 100, 10)
    assert window.moves(110.0, 6_000, 100, 10)
    assert window.moves(119.0, 6_000, 100, 10)
    assert not window.moves(120.0, 6_999, 100, 10)


# Numbers ----------------------------------------------------------------------------------------------------------


async def test_new_connections_replace_the_oldest_ones_without_a_request(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(database_url, connections_max=64) as door, contextlib.AsyncExitStack() as stack:
        idle = await stack.enter_async_context(await door.wire())
        assert (await idle.ask("GET /healthz")).status == 200
        halves = []
        for _ in range(200):
            half = await stack.enter_async_context(await door.wire())
            half.send(b"GET /healthz HTTP/1.1\r\n")
            halves.append(half)
        for half in halves[:100]:
            assert await half.is_ended()
        assert len(door.crowd.connections) <= 64
        assert await door.health() == 200
        assert (await idle.ask("GET /healthz")).status == 200
        halves[-1].begin("X-Rest: 1")
        assert len([one for one in caplog.records if "connections are open" in one.getMessage()]) == 1


async def test_when_all_places_are_busy_only_health_checks_are_answered(database_url: str) -> None:
    limits = {"connections_max": 64, "streams_per_key_max": 64}
    async with opened(database_url, **limits) as door, contextlib.AsyncExitStack() as stack:
        id = await door.batchwright.enqueue("nothing", delay_seconds=3600)
        secret = {"Authorization": door.key.partition(": ")[2]}
        for _ in range(64):
            stream = await stack.enter_async_context(await Stream.open(door.url, id, **secret))
            assert stream.status == 200
        async with await door.wire() as wire:
            answer = await wire.ask("GET /v1/jobs", door.key)
            assert (answer.status, answer.error["code"]) == (503, "unavailable")
            assert "64 connections" in answer.error["message"]
        for _ in range(3):
            assert await door.health() == 200
        async with contextlib.AsyncExitStack() as more:
            for _ in range(100):
                half = await more.enter_async_context(await door.wire())
                half.send(b"GET /healthz HTTP/1.1\r\n")
            assert await door.health() == 200
            assert len(door.crowd.connections) <= 64 + 64


# Streams ----------------------------------------------------------------------------------------------------------


async def test_streams_are_limited_for_each_key_and_each_tenant(database_url: str) -> None:
    limits = {"streams_per_key_max": 2, "streams_per_tenant_max": 3, "streams_max": 4}
    async with opened(database_url, **limits) as door, contextlib.AsyncExitStack() as stack:
        ids = {tenant: await door.batchwright.enqueue("nothing", tenant=tenant, delay_seconds=3600) for tenant in "ab"}
        keys = {name: await door.make_key("read", tenant=name[0]) for name in ("a1", "a2", "b1", "b2")}

        async def follow(name: str) -> Stream:
            secret = {"Authorization": keys[name].partition(": ")[2]}
            return await stack.enter_async_context(await Stream.open(door.url, ids[name[0]], **secret))

        first = await follow("a1")
        assert (first.status, (await follow("a1")).status) == (200, 200)
        refused = await follow("a1")
        assert (refused.status, refused.headers["retry-after"]) == (429, "5")
        error = orjson.loads(await refused.body())["error"]
        assert (error["code"], "of this key" in error["message"]) == ("too_many_streams", True)
        assert (await follow("a2")).status == 200
        refused = await follow("a2")
        assert (refused.status, b"of this tenant" in await refused.body()) == (429, True)
        assert (await follow("b1")).status == 200
        refused = await follow("b2")
        assert (refused.status, b"the limit of this server" in await refused.body()) == (503, True)
        await first.close()
        await until(lambda: door.server._services.event_streams.followers == 3)
        again = await follow("a1")
        assert again.status == 200


async def test_a_stream_with_a_request_behind_it_ends_when_its_client_leaves(door: Door) -> None:
    id = await door.batchwright.enqueue("nothing", delay_seconds=3600)
    async with await door.wire() as wire:
        wire.begin(f"GET /v1/jobs/{id}/events/stream", door.key)
        await wire.reader.readuntil(b"\r\n\r\n")
        wire.begin("GET /v1/jobs", door.key)
        await until(lambda: any(one.pipeline for one in door.crowd.connections))
        assert door.server._services.stream_places._all == 1
    await until(lambda: door.server._services.stream_places._all == 0 and not door.crowd.tasks)


@pytest.mark.parametrize(
    ("soft", "queued", "open"),
    [(resource.RLIM_INFINITY, 2_048, 4_096), (65_536, 2_048, 4_096), (1_024, 256, 448), (300, 75, 64)],
)
def test_connections_leave_descriptors_for_everything_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, soft: int, queued: int, open: int
) -> None:
    monkeypatch.setattr("batchwright.api.connections.resource.getrlimit", lambda _: (soft, soft))
    assert (backlog(), places(ApiSettings())) == (queued, open)
    assert ("at most" in caplog.text) == (open < 4_096)
