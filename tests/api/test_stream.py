"""Server-sent events over real sockets."""

from __future__ import annotations

import asyncio
import logging

import httpx
import orjson
import pytest

from batchwright import NewJob
from batchwright.access import gate
from batchwright.api import jobs as routes
from batchwright.api import server as server_module
from batchwright.engine import event_streams as module
from tests.api.streaming import Stream, serving
from tests.support import emit, noop, other, put, succeed, take_one


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_SECONDS_MIN", 0.005)
    monkeypatch.setattr(module, "_LOOK_SHARE", 0)


@pytest.fixture(autouse=True)
def no_complaints(caplog):
    """Neither the server nor the loop may have anything to say about streams that come and go."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.fixture
async def served(database_url):
    async with serving(database_url, noop, other, api={"streams_max": 30}) as (batchwright, server):
        yield batchwright, server


@pytest.fixture
def queue(served):
    return served[0].queue


@pytest.fixture
def url(served):
    return served[1].url


@pytest.fixture
def event_streams(served):
    return served[1]._services.event_streams


async def running(queue):
    (id,) = await put(queue)
    return id, await take_one(queue)


async def known(queue, id):
    return [event.id for event in await queue.events(id)]


async def until(condition):
    """What the server notices shows in no message; the test's timeout bounds this."""
    while not condition():
        await asyncio.sleep(0.005)


# Framing ----------------------------------------------------------------------------------------------------------


async def test_a_stream_brings_each_event_as_one_message_and_ends_with_the_job(queue, url):
    id, claim = await running(queue)
    async with await Stream.open(url, id) as stream:
        assert stream.status == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["cache-control"] == "no-store"
        assert stream.headers["x-accel-buffering"] == "no"
        assert await stream.next() == {"retry": "1000"}
        first, second = await stream.next(), await stream.next()
        assert list(first) == ["id", "data"]
        assert (first.json["event"], first.json["status"], first.json["job_id"]) == ("job.enqueued", "QUEUED", str(id))
        assert second.json["event"] == "job.started"
        said = "a line\nand another\r\nand …\u2028\u2029\x85"
        await emit(queue, claim, message=said, fields={"n": 1, "html": "<b>&</b>"})
        third = await stream.next()
        assert third.json["message"] == said
        assert third.json["fields"] == {"n": 1, "html": "<b>&</b>"}
        await succeed(queue, claim)
        fourth = await stream.next()
        assert fourth.json["status"] == "SUCCEEDED"
        end = await stream.next()
        assert (end["event"], end.json) == ("end", {"job_id": str(id)})
        assert await stream.next() is None
        assert [int(one["id"]) for one in (first, second, third, fourth)] == await known(queue, id)


async def test_an_event_looks_as_it_does_in_the_list(queue, url, served):
    id, claim = await running(queue)
    await emit(queue, claim, fields={"a": [1, None]}, cost="0.125", prompt_tokens=7, model="m")
    await succeed(queue, claim)
    async with httpx.AsyncClient(base_url=url) as client:
        listed = (await client.get(f"/v1/jobs/{id}/events")).json()["data"]
    async with await Stream.open(url, id) as stream:
        assert (await stream.events())[0] == listed


# Where to begin ---------------------------------------------------------------------------------------------------


async def test_a_stream_begins_after_the_event_that_the_client_names(queue, url):
    id, claim = await running(queue)
    await emit(queue, claim, 3)
    await succeed(queue, claim)
    whole = await known(queue, id)
    for place in (
        {"last_id": whole[2]},
        {"query": f"?after={whole[2]}"},
        {"query": "?after=0", "last_id": whole[2]},
    ):
        async with await Stream.open(url, id, **place) as stream:
            events, last = await stream.events()
        assert ([event["id"] for event in events], last) == (whole[3:], "end"), place


async def test_an_ended_job_of_which_all_was_seen_is_204(queue, url):
    id, claim = await running(queue)
    await succeed(queue, claim)
    async with await Stream.open(url, id, last_id=(await known(queue, id))[-1]) as stream:
        assert (stream.status, await stream.body()) == (204, b"")


async def test_a_place_beyond_the_last_event_hides_nothing_that_comes(queue, url):
    """As after a restore from a backup: the client has seen more than there is."""
    id, claim = await running(queue)
    async with await Stream.open(url, id, last_id=10**9) as stream:
        assert await stream.next() == {"retry": "1000"}
        await succeed(queue, claim)
        events, last = await stream.events()
    assert ([event["event"] for event in events], last) == (["job.succeeded"], "end")


async def test_a_place_that_is_no_number_is_refused(queue, url):
    id, _ = await running(queue)
    for last_id in ("x", "-1", "1.5", 2**63):
        async with await Stream.open(url, id, last_id=last_id) as stream:
            assert stream.status == 400, last_id
            assert "error" in orjson.loads(await stream.body())


async def test_a_job_that_is_not_there_is_404(queue, url):
    async with await Stream.open(url, "00000000-0000-0000-0000-000000000000") as stream:
        assert stream.status == 404


async def test_a_job_of_another_tenant_is_404(served, queue, url):
    batchwright, _ = served
    (theirs,) = await put(queue, NewJob("noop", tenant="theirs"))
    (ours,) = await put(queue, NewJob("noop", tenant="ours"))
    _, secret = await batchwright.keys.create("reader", tenant="ours", scopes=["read"])
    key = {"Authorization": f"Bearer {secret}"}
    async with await Stream.open(url, theirs, **key) as stream:
        assert stream.status == 404
    async with await Stream.open(url, ours, **key) as stream:
        assert stream.status == 200
    async with await Stream.open(url, ours) as stream:
        assert stream.status == 401


# Life and death ---------------------------------------------------------------------------------------------------


async def test_a_silent_stream_is_kept_alive_by_pings(queue, url, monkeypatch):
    monkeypatch.setattr(routes, "_PING_SECONDS", 0.01)
    id, _ = await running(queue)
    async with await Stream.open(url, id) as stream:
        while (await stream.next()).get("id") != str((await known(queue, id))[-1]):
            pass
        assert [await stream.next() for _ in range(3)] == [{"": "ping"}] * 3


@pytest.mark.parametrize("begins_with_key", [True, False], ids=["revoked", "from the first key on"])
async def test_a_stream_ends_when_its_key_opens_nothing_any_more(served, queue, url, monkeypatch, begins_with_key):
    monkeypatch.setattr(routes, "_PING_SECONDS", 0.01)
    monkeypatch.setattr(gate, "LIVE_SECONDS", 0.0)
    batchwright, _ = served
    id, _ = await running(queue)
    key, headers = None, {}
    if begins_with_key:
        key, secret = await batchwright.keys.create("reader", scopes=["read"])
        headers = {"Authorization": f"Bearer {secret}"}
    async with await Stream.open(url, id, **headers) as stream:
        while await stream.next() != {"": "ping"}:
            pass
        await (batchwright.keys.revoke(key.id) if key else batchwright.keys.create("first"))
        _, last = await stream.events()
        assert last is None, "the job has not ended, so nobody says so"
    async with await Stream.open(url, id, **headers) as stream:
        assert stream.status == 401


async def test_many_streams_of_a_key_ask_for_it_once_in_a_while(served, queue, url, monkeypatch):
    monkeypatch.setattr(routes, "_PING_SECONDS", 0.01)
    asked = []
    gate = served[1]._services.gate
    ask = gate.is_open_to_all

    async def counted():
        asked.append(True)
        return await ask()

    id, _ = await running(queue)
    streams = [await Stream.open(url, id) for _ in range(10)]
    monkeypatch.setattr(gate, "is_open_to_all", counted)
    for stream in streams:
        while await stream.next() != {"": "ping"}:
            pass
        await stream.close()
    assert len(asked) <= 1


async def test_a_client_that_leaves_frees_its_stream_at_once(served, queue, url, event_streams):
    """Pings are 15 seconds apart here, so it is not the next write that finds out."""
    counts = served[1]._services.counts
    id, _ = await running(queue)
    streams = [await Stream.open(url, id) for _ in range(5)]
    await until(lambda: event_streams.followers == 5)
    assert counts.total("event_streams") == 5
    for stream in streams:
        await stream.close()
    await asyncio.wait_for(until(lambda: event_streams.followers == 0), 3)
    assert event_streams._streams == {}
    assert counts.total("event_streams") == 0


async def test_a_client_that_does_not_read_holds_up_nobody_and_leaves_as_easily(queue, url, event_streams):
    id, claim = await running(queue)
    async with await Stream.open(url, id, limit=1024) as stalled, await Stream.open(url, id) as brisk:
        await brisk.next()
        for _ in range(60):
            await emit(queue, claim, 5, message="x" * 50_000)
        await succeed(queue, claim)
        events, last = await brisk.events()
        assert (len(events), last) == (303, "end")
        assert event_streams.followers == 1, "the stalled one stands where its socket was full"
        await stalled.close()
        await asyncio.wait_for(until(lambda: event_streams.followers == 0), 3)


async def test_closing_does_not_wait_for_a_client_that_does_not_read(database_url, monkeypatch):
    monkeypatch.setattr(server_module, "_ABORT_SECONDS", 0.2)
    async with serving(database_url, noop) as (batchwright, server):
        id, claim = await running(batchwright.queue)
        async with await Stream.open(server.url, id, limit=1024):
            for _ in range(60):
                await emit(batchwright.queue, claim, 5, message="x" * 50_000)
            event_streams = server._services.event_streams
            await until(lambda: event_streams._streams[id].place.after > 250)
            async with asyncio.timeout(3):
                await server.close()
            assert event_streams.followers == 0


async def test_more_streams_than_the_limit_are_refused_until_one_leaves(queue, url, event_streams):
    id, _ = await running(queue)
    streams = [await Stream.open(url, id) for _ in range(30)]
    await until(lambda: event_streams.followers == 30)
    async with await Stream.open(url, id) as refused:
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert "30 event streams are open already" in orjson.loads(await refused.body())["error"]["message"]
    await streams.pop().close()
    await until(lambda: event_streams.followers == 29)
    async with await Stream.open(url, id) as accepted:
        assert accepted.status == 200
    for stream in streams:
        await stream.close()


@pytest.mark.thorough
async def test_closing_ends_500_open_streams_quickly_and_without_an_end_message(database_url):
    """Without `end` the clients know that the job goes on, and come back."""
    async with serving(database_url, noop, other) as (batchwright, server):
        ids = await put(batchwright.queue, *(NewJob("noop") for _ in range(100)))
        streams = await asyncio.gather(*(Stream.open(server.url, id) for id in ids for _ in range(5)))
        for stream in streams:
            assert await stream.next() == {"retry": "1000"}
            assert (await stream.next()).json["event"] == "job.enqueued"
        loop = asyncio.get_running_loop()
        began = loop.time()
        await server.close()
        assert loop.time() - began < 3
        assert await asyncio.gather(*(stream.events() for stream in streams)) == [([], None)] * 500
        assert server._services.event_streams.followers == 0
        for stream in streams:
            await stream.close()
