"""Answers with junk in any place: an adapter returns a result, or raises one of the errors of operations."""

import copy

import pytest

from batchwright.errors import OperationError
from batchwright.inference.http import Http, Response
from batchwright.providers.contract import Phase, Status
from batchwright.simulator.providers import running
from tests.providers.conformance import World, all_cases
from tests.support import sparsely

NAMES = ("openai", "together", "azure_openai", "anthropic", "gemini", "mistral", "vertex")
JUNK = [None, [], {}, [[]], [5], "x", "", 5, -1.5, True, {"x": {}}]


def places(document, path=()):
    yield path
    inside = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inside:
        yield from places(value, (*path, key))


def spoiled(document, path, junk):
    if not path:
        return junk
    changed = copy.deepcopy(document)
    inside = changed
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = junk
    return changed


@pytest.fixture(params=sparsely([case for case in all_cases() if str(case) in NAMES], 3), ids=str)
async def world(request, tmp_path):
    async with running() as server, Http() as http:
        yield World(request.param, server, http, tmp_path)


async def try_everything(monkeypatch, call):
    """Repeat the call with junk in each place of its answer; yields the results of calls that still succeed."""
    seen = []
    read = Response.json
    monkeypatch.setattr(Response, "json", lambda self: seen.append(read(self)) or seen[-1])
    await call()
    (document, *_) = seen
    answered = 0
    for path in list(places(document)):
        for junk in JUNK:
            changed = spoiled(document, path, junk)
            monkeypatch.setattr(Response, "json", lambda self, changed=changed: changed)
            try:
                yield await call()
                answered += 1
            except OperationError:
                pass
    monkeypatch.setattr(Response, "json", read)
    assert answered


@pytest.mark.parametrize("faults", [(), ("failed",), ("partial",)])
async def test_a_poll_survives_anything(world, monkeypatch, faults):
    world.server.put_faults(*faults)
    job, _ = await world.submit(world.request())
    await world.finish(job)
    async for status in try_everything(monkeypatch, lambda: world.adapter.poll(job)):
        assert isinstance(status, Status)
        assert all(isinstance(value, str) for value in status.found.values())
        assert (status.phase is Phase.ENDED) is (status.ending is not None)


async def test_a_search_survives_anything(world, monkeypatch):
    monkeypatch.setattr("batchwright.providers.adapters.mistral._PAGES_MAX", 3)  # it reads pages up to this limit
    request = world.request()
    job, staged = await world.submit(request)
    async for found in try_everything(monkeypatch, lambda: world.adapter.find(request, staged, world.tools.now())):
        assert {one.external_id for one in found} <= {job.external_id, "x", ""}


async def test_a_submission_survives_anything(world, monkeypatch):
    request = world.request()
    staged = await world.stage(request)
    async for job in try_everything(monkeypatch, lambda: world.adapter.submit(request, staged)):
        assert isinstance(job.external_id, str)
