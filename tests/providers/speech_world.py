"""One speech adapter with the contract server, for tests that are not in the common suite."""

import json
from contextlib import asynccontextmanager

from batchwright.inference.http import Http
from batchwright.providers.contract import Input, Request
from batchwright.simulator.providers import running
from tests.providers.cases.speech import CASES
from tests.providers.conformance import KEY, World

BY_NAME = {case.name: case for case in CASES}


@asynccontextmanager
async def speech_world(name, folder, **settings):
    async with running(**settings) as server, Http() as http:
        yield World(BY_NAME[name], server, http, folder)


def audio(uri, id="1", **values):
    return Input(**{"id": id, "uri": uri, "filename": uri.partition("?")[0].rpartition("/")[2], **values})


def ask(*inputs, key=KEY, model=None, **options):
    return Request(key=key, task_type="transcription", model=model, inputs=list(inputs), options=options)


async def run(world, request):
    """Submit, wait and fetch; returns the job, its last status, and the results by the ids of inputs."""
    job, _ = await world.submit(request)
    status = await world.finish(job)
    return job, status, {result.key: result for result in await world.results(request, job, status)}


def sent(world, route):
    """The bodies of requests to a route."""
    return [json.loads(one.body) for one in world.server.requests(f"{world.case.name}.{route}")]
