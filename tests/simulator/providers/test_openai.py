"""OpenAI's own client, and those of Groq and Together, submit, poll and fetch."""

import pytest

from tests.simulator.providers.support import KEY, blocking, chat_line, finish, jsonl, opened, parsed, sdk

ENDPOINT = "/v1/chat/completions"
LINES = jsonl(chat_line("a", "one"), chat_line("b", "two [[fail:429]]"), chat_line("c", "three"))
WINDOW = {"completion_window": "24h"}


def openai(server, name="openai", **options):
    return opened(sdk("openai").OpenAI(base_url=server.urls[name], api_key=KEY, max_retries=0, **options))


def submit(client, lines=LINES, **fields):
    file = client.files.create(file=("bw-marker.jsonl", lines), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, **WINDOW, **fields)


@pytest.mark.parametrize("name", ["openai", "groq", "azure_openai"])
async def test_a_batch_runs_by_the_clock_and_its_results_are_read(providers, name):
    client = openai(providers, name)
    batch = await blocking(submit, client, metadata={"bw_key": "bw-1"})
    assert (batch.status, batch.metadata, batch.request_counts.total) == ("validating", {"bw_key": "bw-1"}, 3)
    seen = []
    for _ in range(5):
        seen.append((await blocking(client.batches.retrieve, batch.id)).status)
        providers.advance(17)
    assert seen == ["validating", "in_progress", "in_progress", "in_progress", "completed"]
    done = await blocking(client.batches.retrieve, batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    output = parsed((await blocking(client.files.content, done.output_file_id)).content)
    assert [(one["custom_id"], said(one)) for one in output] == [("a", "echo: one"), ("c", "echo: three")]
    (error,) = parsed((await blocking(client.files.content, done.error_file_id)).content)
    assert (error["custom_id"], error["error"], error["response"]["status_code"]) == ("b", None, 429)


def said(line):
    return line["response"]["body"]["choices"][0]["message"]["content"]


async def test_lists_have_pages_and_a_lagging_list_shows_a_new_batch_late(providers):
    client = openai(providers)
    first = await blocking(submit, client)
    providers.put_faults("lag:seconds=30")
    second = await blocking(submit, client)
    assert [one.id for one in await blocking(client.batches.list)] == [first.id]
    assert (await blocking(client.batches.retrieve, second.id)).id == second.id
    providers.advance(30)
    assert [one.id for one in await blocking(lambda: list(client.batches.list(limit=1)))] == [second.id, first.id]
    assert (await blocking(lambda: list(client.files.list())))[0].id == second.input_file_id
    assert len(providers.requests("openai.list")) == 3


async def test_azure_accepts_paths_with_a_version_too(providers):
    url, version = f"{providers.url}/azure_openai", "2025-03-01-preview"
    client = opened(sdk("openai").AzureOpenAI(azure_endpoint=url, api_key=KEY, api_version=version, max_retries=0))
    batch = await blocking(submit, client)
    assert (await blocking(client.batches.retrieve, batch.id)).id == batch.id
    (seen,) = providers.requests("azure_openai.get")
    assert seen.path.startswith("/azure_openai/openai/batches/")
    assert seen.query == {"api-version": "2025-03-01-preview"}
    assert seen.headers["api-key"] == KEY


async def test_together_has_statuses_in_capitals_and_no_metadata(providers, tmp_path):
    client = opened(sdk("together").Together(base_url=f"{providers.url}/together", api_key=KEY, max_retries=0))
    path = tmp_path / "bw-marker.jsonl"
    path.write_bytes(LINES)
    id = (await blocking(client.files.upload, file=path, purpose="batch-api", check=False)).id
    made = await blocking(client.batches.create, input_file_id=id, endpoint=ENDPOINT)
    assert (made.job.status, made.job.input_file_id) == ("VALIDATING", id)
    finish(providers)
    (found,) = await blocking(client.batches.list)
    assert (found.status, found.progress) == ("COMPLETED", 100)
    assert not hasattr(found, "metadata")
    content = await blocking(client.files.content, found.output_file_id)
    assert len(parsed(content.read())) == 2
    assert len(providers.jobs("bw-marker", "together")) == 1
    assert ([one.method for one in providers.requests(port="signed")], providers.leaks) == (["PUT"], [])


async def test_groqs_client_reads_the_same_objects(providers):
    client = opened(sdk("groq").Groq(base_url=f"{providers.url}/groq", api_key=KEY, max_retries=0))
    batch = await blocking(submit, client)
    finish(providers)
    assert (await blocking(client.batches.retrieve, batch.id)).status == "completed"


async def test_a_cancelled_batch_keeps_what_was_finished(providers):
    client = openai(providers)
    batch = await blocking(submit, client)
    providers.advance(5 + 20)
    assert (await blocking(client.batches.cancel, batch.id)).status == "cancelling"
    providers.advance(10)
    found = await blocking(client.batches.retrieve, batch.id)
    assert (found.status, found.request_counts.completed, found.error_file_id) == ("cancelled", 1, None)
    assert len(parsed((await blocking(client.files.content, found.output_file_id)).content)) == 1
    with pytest.raises(sdk("openai").ConflictError):
        await blocking(client.batches.cancel, batch.id)


async def test_an_expired_batch_has_the_finished_half_and_names_the_rest(providers):
    providers.put_faults("expired")
    client = openai(providers)
    batch = await blocking(submit, client, jsonl(*(chat_line(str(i)) for i in range(4))))
    finish(providers)
    found = await blocking(client.batches.retrieve, batch.id)
    assert (found.status, found.request_counts.completed) == ("expired", 2)
    errors = parsed((await blocking(client.files.content, found.error_file_id)).content)
    assert [(one["custom_id"], one["error"]["code"]) for one in errors] == [
        ("2", "batch_expired"),
        ("3", "batch_expired"),
    ]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (b"{broken\n", "invalid_json_line"),
        (jsonl(chat_line("a"), chat_line("a")), "duplicate_custom_id"),
        (jsonl({**chat_line("a"), "url": "/v1/embeddings"}), "mismatched_url"),
        (b"", "empty_file"),
    ],
)
async def test_validation_fails_a_batch_and_names_the_line(providers, lines, code):
    client = openai(providers)
    batch = await blocking(submit, client, lines)
    finish(providers)
    found = await blocking(client.batches.retrieve, batch.id)
    assert (found.status, found.errors.data[0].code) == ("failed", code)
    assert (found.output_file_id, found.error_file_id) == (None, None)


async def test_requests_with_tools_or_json_get_matching_answers(providers):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    form = {"type": "json_object"}
    client = openai(providers)
    lines = jsonl(chat_line("a", "use it [[tool]]", tools=[tool]), chat_line("b", response_format=form))
    batch = await blocking(submit, client, lines)
    finish(providers)
    found = await blocking(client.batches.retrieve, batch.id)
    called, formed = parsed((await blocking(client.files.content, found.output_file_id)).content)
    assert called["response"]["body"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert said(formed).startswith("{")


async def test_a_rate_limit_and_a_quota_have_different_codes(providers):
    openai_sdk, client = sdk("openai"), openai(providers)
    providers.put_faults("429:times=1", "quota:times=1")
    codes = []
    for _ in range(2):
        with pytest.raises(openai_sdk.RateLimitError) as refused:
            await blocking(client.batches.list)
        codes.append(refused.value.code)
    assert codes == ["rate_limit_exceeded", "insufficient_quota"]
