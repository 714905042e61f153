"""Anthropic's own client submits, polls and fetches."""

import pytest

from tests.simulator.providers.support import KEY, blocking, finish, opened, sdk

pytestmark = pytest.mark.thorough
"""These tests use official clients, which `.ci/run` installs."""


def anthropic(server):
    return opened(sdk("anthropic").Anthropic(base_url=server.urls["anthropic"], api_key=KEY, max_retries=0))


def message(id, content, **fields):
    params = {"model": "claude-test", "max_tokens": 64, "messages": [{"role": "user", "content": content}], **fields}
    return {"custom_id": id, "params": params}


def submit(client, *contents, prefix="bw-1"):
    requests = [message(f"{prefix}-{n}", one) for n, one in enumerate(contents or ("a", "b [[fail:529]]", "c", "d"))]
    return client.messages.batches.create(requests=requests)


async def results(client, id):
    found = await blocking(lambda: list(client.messages.batches.results(id)))
    return [(one.custom_id, one.result.type) for one in found], [one.result for one in found]


async def test_a_batch_ends_and_its_results_are_read(providers):
    client = anthropic(providers)
    batch = await blocking(submit, client)
    assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 4)
    providers.advance(60)
    running = await blocking(client.messages.batches.retrieve, batch.id)
    assert (running.request_counts.processing, running.results_url) == (4, None)
    providers.advance(5)
    ended = await blocking(client.messages.batches.retrieve, batch.id)
    assert (ended.processing_status, ended.request_counts.succeeded, ended.request_counts.errored) == ("ended", 3, 1)
    types, found = await results(client, batch.id)
    assert types == [("bw-1-0", "succeeded"), ("bw-1-1", "errored"), ("bw-1-2", "succeeded"), ("bw-1-3", "succeeded")]
    assert found[0].message.content[0].text == "echo: a"
    assert found[1].error.error.type == "overloaded_error"
    assert len(providers.jobs("bw-1-", "anthropic")) == 1
    assert (await blocking(client.messages.batches.delete, batch.id)).type == "message_batch_deleted"


async def test_lists_have_pages_with_the_newest_first(providers):
    client = anthropic(providers)
    made = [(await blocking(submit, client)).id for _ in range(3)]
    assert [one.id for one in await blocking(lambda: list(client.messages.batches.list(limit=2)))] == made[::-1]
    assert len(providers.requests("anthropic.list")) == 2


@pytest.mark.parametrize(("fault", "fate"), [("expired", "expired"), ("shuffled", None)])
async def test_the_unfinished_lines_of_a_batch_that_ends_early_say_so(providers, fault, fate):
    client = anthropic(providers)
    providers.put_faults(fault)
    batch = await blocking(submit, client, "a", "b", "c", "d")
    if fate is None:
        fate = "canceled"
        providers.advance(5 + 30)
        assert (await blocking(client.messages.batches.cancel, batch.id)).processing_status == "canceling"
    finish(providers)
    types, _ = await results(client, batch.id)
    assert sorted(types) == [
        ("bw-1-0", "succeeded"),
        ("bw-1-1", "succeeded"),
        ("bw-1-2", fate),
        ("bw-1-3", fate),
    ]
    assert (types == sorted(types)) == (fault != "shuffled")


async def test_tools_are_called_and_bad_requests_refused(providers):
    client = anthropic(providers)
    tool = {"name": "look", "input_schema": {"type": "object"}}
    batch = await blocking(client.messages.batches.create, requests=[message("a", "[[tool]]", tools=[tool])])
    finish(providers)
    _, (found,) = await results(client, batch.id)
    assert (found.message.stop_reason, found.message.content[0].name) == ("tool_use", "look")
    with pytest.raises(sdk("anthropic").BadRequestError, match="unique"):
        await blocking(client.messages.batches.create, requests=[message("a", "x"), message("a", "y")])
    providers.put_faults("quota:route=anthropic.create:times=1")
    with pytest.raises(sdk("anthropic").BadRequestError, match="credit balance is too low"):
        await blocking(submit, client)
