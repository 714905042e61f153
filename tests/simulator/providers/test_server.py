"""The contract server itself: faults on every route, signed URLs, records and the control API."""

import asyncio
import json
from email.utils import parsedate_to_datetime

import httpx
import pytest

from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.simulator.providers import ProviderSettings, Server, running
from batchwright.simulator.providers.faults import parse
from tests.simulator.providers.support import KEY, chat_line, finish, jsonl

BEARER = {"authorization": f"Bearer {KEY}"}
GOOGLE_JOB = "/v2/projects/p/locations/l/recognizers/_:batchRecognize"
MESSAGE = {
    "custom_id": "bw-1-a",
    "params": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
}
SIGNATURE = {"authorization": "AWS4-HMAC-SHA256 Credential=AK/1/us/transcribe/aws4_request, Signature=0"}
TRANSCRIPTION = {
    "displayName": "bw-1",
    "locale": "en-US",
    "contentUrls": ["https://audio.test/a.wav"],
    "properties": {"timeToLiveHours": 48},
}


def openai_like(name, headers=BEARER):
    async def make(server, client):
        files = {"file": ("bw-1.jsonl", jsonl(chat_line("a"), chat_line("b")))}
        url = server.urls[name]
        file = await client.post(f"{url}/files", files=files, data={"purpose": "batch"}, headers=headers)
        body = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions"}
        return f"{url}/batches", {"headers": headers, "json": body}

    return make


async def mistral(server, client):
    body = {"endpoint": "/v1/chat/completions", "model": "m", "requests": [chat_line("a")], "metadata": {"k": "bw-1"}}
    return f"{server.urls['mistral']}/v1/batch/jobs", {"headers": BEARER, "json": body}


async def anthropic(server, client):
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    return f"{server.urls['anthropic']}/v1/messages/batches", {"headers": headers, "json": {"requests": [MESSAGE]}}


async def gemini(server, client):
    request = {"request": {"contents": [{"parts": [{"text": "x"}]}]}, "metadata": {"key": "a"}}
    batch = {"displayName": "bw-1", "inputConfig": {"requests": {"requests": [request]}}}
    url = f"{server.urls['gemini']}/v1beta/models/m:batchGenerateContent"
    return url, {"headers": {"x-goog-api-key": KEY}, "json": {"batch": batch}}


async def vertex(server, client):
    body = {
        "displayName": "bw-1",
        "model": "publishers/google/models/m",
        "inputConfig": {"instancesFormat": "jsonl", "gcsSource": {"uris": ["gs://b/in.jsonl"]}},
        "outputConfig": {"predictionsFormat": "jsonl", "gcsDestination": {"outputUriPrefix": "gs://b/out"}},
    }
    url = f"{server.urls['vertex']}/v1/projects/p/locations/l/batchPredictionJobs"
    return url, {"headers": BEARER, "json": body}


async def google(server, client):
    output = {"gcsOutputConfig": {"uri": "gs://b/out/bw-1/"}}
    body = {"config": {}, "files": [{"uri": "gs://b/a.wav"}], "recognitionOutputConfig": output}
    return server.urls["google"] + GOOGLE_JOB, {"headers": BEARER, "json": body}


async def azure(server, client):
    url = f"{server.urls['azure']}/transcriptions:submit?api-version=2024-11-15"
    return url, {"headers": {"ocp-apim-subscription-key": KEY}, "json": TRANSCRIPTION}


async def sarvam(server, client):
    url, headers = f"{server.urls['sarvam']}/speech-to-text/job/v1", {"api-subscription-key": KEY}
    id = (await client.post(url, headers=headers, json={"job_parameters": {}})).json()["job_id"]
    await client.post(f"{url}/upload-files", headers=headers, json={"job_id": id, "files": ["bw-1.wav"]})
    return f"{url}/{id}/start", {"headers": headers}


async def aws(server, client):
    body = {"TranscriptionJobName": "bw-1", "Media": {"MediaFileUri": "s3://b/a.wav"}, "LanguageCode": "en-US"}
    return server.urls["aws"], {
        "headers": {**SIGNATURE, "x-amz-target": "Transcribe.StartTranscriptionJob"},
        "json": body,
    }


SUBMITS = {
    "anthropic": anthropic,
    "aws": aws,
    "azure": azure,
    "azure_openai": openai_like("azure_openai", {"api-key": KEY}),
    "gemini": gemini,
    "google": google,
    "groq": openai_like("groq"),
    "mistral": mistral,
    "openai": openai_like("openai"),
    "sarvam": sarvam,
    "together": openai_like("together"),
    "vertex": vertex,
}
"""The request of each provider that costs money, with the requests that must come before it."""

every_provider = pytest.mark.parametrize("name", sorted(SUBMITS))


def paid(name):
    return f"{name}.start" if name == "sarvam" else f"{name}.create"


@pytest.fixture
async def client():
    async with httpx.AsyncClient(timeout=5, verify=False) as one:
        yield one


def test_every_provider_is_tried():
    assert set(Server()._protocols) == {*SUBMITS, "gcs", "s3"}


@every_provider
async def test_a_request_that_is_dropped_has_made_its_job(providers, client, name):
    url, request = await SUBMITS[name](providers, client)
    providers.put_faults(f"drop:route={paid(name)}:times=1")
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post(url, **request)
    (job,) = providers.jobs("bw-1", name)
    assert [one.status for one in providers.requests(paid(name))] == [0]
    assert job.provider == name


@every_provider
async def test_a_status_before_the_job_and_one_after_it(providers, client, name):
    url, request = await SUBMITS[name](providers, client)
    providers.put_faults(f"503:route={paid(name)}:times=2")
    assert [(await client.post(url, **request)).status_code for _ in range(2)] == [503, 503]
    assert providers.jobs("bw-1") == []
    providers.put_faults(f"503:route={paid(name)}:accepted=1:times=1")
    assert (await client.post(url, **request)).status_code == 503
    assert len(providers.jobs("bw-1")) == 1


@every_provider
@pytest.mark.parametrize("later", ["7", "date+7"])
async def test_a_rate_limit_says_when_to_retry(providers, client, name, later):
    url, request = await SUBMITS[name](providers, client)
    providers.put_faults(f"429:route={paid(name)}:retry_after={later}")
    refused = await client.post(url, **request)
    assert refused.status_code == (400 if name == "aws" else 429)
    said = refused.headers["retry-after"]
    wait = float(said) if later == "7" else parsedate_to_datetime(said).timestamp() - providers.clock.now()
    assert 6 <= wait <= 7
    assert providers.jobs("bw-1") == []


AUTH = {"aws": 400, "gemini": 400, "sarvam": 403}
QUOTA = {"anthropic": 400, "aws": 400, "azure": 403, "gemini": 403, "google": 403, "mistral": 402, "vertex": 403}


@every_provider
async def test_credentials_that_are_missing_wrong_or_used_up_are_refused(providers, client, name):
    url, request = await SUBMITS[name](providers, client)
    bare = {key: value for key, value in request["headers"].items() if key.startswith(("anthropic", "x-amz"))}
    wrong = {key: value.replace(KEY, "wrong").replace("AK/", "wrong/") for key, value in request["headers"].items()}
    for headers in (bare, wrong):
        assert (await client.post(url, **{**request, "headers": headers})).status_code == AUTH.get(name, 401)
    providers.put_faults("auth:times=1", "quota:times=1")
    assert (await client.post(url, **request)).status_code == AUTH.get(name, 401)
    assert (await client.post(url, **request)).status_code == QUOTA.get(name, 429)
    assert providers.jobs("bw-1") == []
    assert (await client.post(url, **request)).is_success


async def test_a_key_that_is_set_is_the_only_one(client):
    async with running(api_key="right") as server:
        url = f"{server.urls['openai']}/batches"
        assert (await client.get(url, headers=BEARER)).status_code == 401
        assert (await client.get(url, headers={"authorization": "Bearer right"})).status_code == 200


async def test_answers_can_be_late_in_pieces_cut_short_or_missing(providers, client):
    url = f"{providers.urls['openai']}/models"
    providers.put_faults(
        "slow:seconds=0.001:times=1", "truncate:times=1", "not_json:times=1", "hang:times=1", "hang_up:times=1"
    )
    assert (await client.get(url, headers=BEARER)).json()["object"] == "list"
    with pytest.raises(httpx.RemoteProtocolError, match="without sending complete"):
        await client.get(url, headers=BEARER)
    page = await client.get(url, headers=BEARER)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html")
    with pytest.raises(httpx.ReadTimeout):
        await client.get(url, headers=BEARER, timeout=0.05)
    with pytest.raises(httpx.RemoteProtocolError):
        await client.get(url, headers=BEARER)
    assert (await client.get(url, headers=BEARER)).status_code == 200
    assert [one.fault for one in providers.seen][3:] == ["hang:times=1", "hang_up:times=1", None]


async def test_a_signed_url_gives_access_to_one_object_for_a_while_and_leaked_credentials_are_recorded(
    providers, client
):
    providers.world.put_blob("bucket", "a b.json", b"{}")
    url = providers.world.sign("bucket", "a b.json", 60)
    assert url.startswith(providers.signed_url)
    assert providers.signed_url != providers.url
    assert (await client.get(url)).content == b"{}"
    assert (await client.get(url.replace("a%20b", "c"))).status_code == 403
    assert providers.leaks == []
    await client.get(url, headers=BEARER)
    assert [one.headers["authorization"] for one in providers.leaks] == [f"Bearer {KEY}"]
    providers.put_faults("expired_url:route=signed.get:times=1")
    assert (await client.get(url)).status_code == 403
    assert (await client.get(url)).status_code == 200
    providers.advance(61)
    refused = await client.get(url)
    assert (refused.status_code, "<Code>AuthenticationFailed</Code>" in refused.text) == (403, True)


async def test_rules_hit_by_route_and_by_text(providers, client):
    providers.put_faults("500:route=*.list:match=limit=7", "missing:route=groq", "shuffled:route=openai:match=bw-1")
    url = f"{providers.urls['openai']}/batches"
    assert (await client.get(f"{url}?limit=7", headers=BEARER)).status_code == 500
    assert (await client.get(f"{url}?limit=8", headers=BEARER)).status_code == 200
    for name in ("groq", "openai"):
        where, request = await SUBMITS[name](providers, client)
        await client.post(where, **request)
    assert [list(one.faults) for one in providers.jobs()] == [["missing"], ["shuffled"]]
    assert providers.faults.fired == [1, 1, 1]


async def test_the_control_api_moves_the_clock_sets_faults_and_counts(providers, client):
    control = f"{providers.url}/simulator"
    url, request = await SUBMITS["openai"](providers, client)
    before = providers.clock.now()
    assert (await client.post(f"{control}/faults", json={"faults": ["lag:seconds=9"]})).json() == {
        "faults": [{"fault": "lag:seconds=9.0", "fired": 0}]
    }
    await client.post(url, **request)
    assert (await client.post(f"{control}/clock", json={"advance": 65})).json()["now"] == before + 65
    jobs = (await client.get(f"{control}/jobs?marker=bw-1&provider=openai")).json()
    assert (jobs["count"], jobs["jobs"][0]["stage"], jobs["jobs"][0]["succeeded"]) == (1, "succeeded", 2)
    asked = (await client.get(f"{control}/requests?route=openai.create")).json()
    assert (asked["count"], asked["requests"][0]["headers"]["authorization"]) == (1, f"Bearer {KEY}")
    assert json.loads(asked["requests"][0]["body"])["endpoint"] == "/v1/chat/completions"
    stats = (await client.get(f"{control}/stats")).json()
    assert (stats["jobs"], stats["leaks"]) == ({"openai.succeeded": 1}, 0)
    assert (await client.get(f"{control}/providers")).json()["urls"] == providers.urls
    assert (await client.post(f"{control}/clock", json={"set": 5})).json() == {"now": 5}
    assert (await client.post(f"{control}/clock", json={})).status_code == 400
    assert (await client.post(f"{control}/faults", json={"faults": ["nonsense"]})).status_code == 400
    assert (await client.get(f"{control}/nothing")).status_code == 404
    await client.post(f"{control}/reset")
    assert (providers.jobs(), list(providers.seen)) == ([], [])
    assert (await client.get(f"{providers.url}/health")).json() == {"status": "ok"}


async def test_the_clock_may_run_by_itself(client):
    async with running(speed=100_000.0, queue_seconds=0.0, run_seconds=1.0) as server:
        url, request = await SUBMITS["openai"](server, client)
        id = (await client.post(url, **request)).json()["id"]
        async with asyncio.timeout(5):
            while (await client.get(f"{url}/{id}", headers=BEARER)).json()["status"] != "completed":
                pass


async def test_large_results_are_served_whole(providers, client):
    lines = jsonl(*(chat_line(str(n)) for n in range(5000)))
    url = providers.urls["openai"]
    file = await client.post(f"{url}/files", files={"file": ("a", lines)}, data={"purpose": "batch"}, headers=BEARER)
    body = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions"}
    id = (await client.post(f"{url}/batches", json=body, headers=BEARER)).json()["id"]
    finish(providers)
    output = (await client.get(f"{url}/batches/{id}", headers=BEARER)).json()["output_file_id"]
    found = await client.get(f"{url}/files/{output}/content", headers=BEARER)
    assert len(found.content.splitlines()) == 5000


@pytest.mark.parametrize("text", ["nothing", "429:what=1", "lag:seconds=soon", "200", "drop:"])
def test_a_rule_that_is_not_understood_is_refused(text):
    with pytest.raises(InvalidInput, match="fault"):
        parse(text)


def test_rules_are_written_as_they_are_read():
    for text in ("drop", "429:route=*.create:retry_after=date+7", "expired:share=0.25", "partial:every=1:status=500"):
        assert str(parse(text)) == text


@pytest.mark.parametrize("values", [{"run_seconds": -1}, {"speed": float("inf")}, {"page_max": 0}])
def test_settings_are_checked(values):
    with pytest.raises(ConfigurationError):
        ProviderSettings(**values)


async def test_a_port_that_is_taken_is_named(providers):
    with pytest.raises(ConfigurationError, match="cannot listen"):
        await Server().open(port=int(providers.url.rpartition(":")[2]))


@every_provider
async def test_an_invalid_request_is_a_bad_request(providers, client, name):
    url, request = await SUBMITS[name](providers, client)
    if name == "sarvam":
        url = f"{providers.urls['sarvam']}/speech-to-text/job/v1"
    for body in (b"{", b"[]", b'{"files": 7, "requests": 7, "batch": 7, "inputConfig": 7, "input_file_id": 7}'):
        refused = await client.post(url, headers=request["headers"], content=body)
        assert 400 <= refused.status_code < 500, refused.text
    assert providers.jobs(provider=name) == []
