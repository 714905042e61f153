"""Azure AI Speech: what is sent, signed URLs that are never kept, and results that are matched by their source."""

import dataclasses
import json

import pytest

from batchwright.errors import ConfigurationError, Fatal, SchemaInvalid, Transient
from batchwright.providers.adapters.azure import AzureSettings, without_query
from batchwright.providers.contract import Cancelled, Ending, Job, Phase
from batchwright.simulator.providers.faults import Fault
from tests.providers.conformance import KEY
from tests.providers.speech_world import ask, audio, run, sent, speech_world

URL = "https://audio.example.com/monday.wav"


@pytest.fixture
async def world(tmp_path):
    async with speech_world("azure", tmp_path) as made:
        yield made


async def test_the_request_has_our_marker_and_says_what_to_do(world):
    options = {"languages": ["en-US", "hi-IN"], "diarization": True, "speakers_max": 4, "word_timestamps": True}
    more = {"provider_options": {"properties": {"punctuationMode": "None"}, "displayName": "mine"}}
    await run(world, ask(audio(URL), **options, **more))
    (body,) = sent(world, "create")
    assert body == {
        "displayName": KEY,
        "customProperties": {"bw_key": KEY},
        "locale": "en-US",
        "contentUrls": [URL],
        "properties": {
            "timeToLiveHours": 48,
            "wordLevelTimestampsEnabled": True,
            "diarization": {"enabled": True, "maxSpeakers": 4},
            "languageIdentification": {"candidateLocales": ["en-US", "hi-IN"], "mode": "Continuous"},
            "punctuationMode": "None",
        },
    }
    assert {one.query["api-version"] for one in world.server.requests(port="api")} == {"2024-11-15"}


async def test_a_model_is_named_by_its_address(world):
    await run(world, ask(audio(URL), model="whisper"))
    (body,) = sent(world, "create")
    assert body["model"] == {"self": f"{world.server.urls['azure']}/models/base/whisper?api-version=2024-11-15"}
    with pytest.raises(Fatal, match="does not get its credentials"):
        await world.submit(ask(audio(URL), model="https://elsewhere.example.com/models/1"))


async def test_a_result_has_its_text_its_length_and_what_azure_said(world):
    job, status, results = await run(world, ask(audio(URL)))
    assert job.external_id.startswith(f"{world.server.urls['azure']}/transcriptions/")
    assert (status.counts.total, status.counts.succeeded, status.counts.failed) == (1, 1, 0)
    result = results["1"]
    assert result.value["text"] == "Transcript of monday.wav."
    assert result.value["raw"]["recognizedPhrases"][0]["nBest"][0]["confidence"] == 0.56
    assert result.usage.audio_seconds == 1.5


async def test_azure_says_when_to_poll_again(world):
    job, _ = await world.submit(ask(audio(URL)))
    assert (await world.adapter.poll(job)).next_poll_seconds == 60


async def test_objects_of_buckets_are_signed_when_they_are_sent_and_the_signature_is_never_kept(world):
    signed = iter(range(100))

    async def sign(uri, seconds):
        assert seconds >= world.adapter.abilities.timeout_hours * 3600
        return f"https://store.example.com/{uri.partition('://')[2]}?sig=SECRET{next(signed)}"

    world.tools.sign = sign
    world.tools._place_of_stored = "s3://files/{}".format
    inputs = [audio("gs://calls/a.wav", "1"), audio("file:file-9", "2", filename="b.wav"), audio(URL, "3")]
    request = ask(*inputs)
    assert list(world.adapter.validate(request)) == []
    job, status, results = await run(world, request)
    (body,) = sent(world, "create")
    assert body["contentUrls"] == [
        "https://store.example.com/calls/a.wav?sig=SECRET0",
        "https://store.example.com/files/file-9?sig=SECRET1",
        URL,
    ]
    assert sorted(results) == ["1", "2", "3"]
    assert all(result.error is None for result in results.values())
    kept = json.dumps([job.external_id, dict(job.extra), [dict(one.value) for one in results.values()]])
    assert "SECRET" not in kept + repr(status)
    (found,) = await world.adapter.find(request, {}, world.tools.now())
    assert found == job


async def test_a_file_that_azure_cannot_reach_is_refused_before_anything_is_sent(world):
    request = ask(audio(URL, "1"), audio("file:file-1", "2", filename="b.wav"))
    (problem,) = world.adapter.validate(request)
    assert problem.input_id == "2"
    assert "https URL" in problem.message
    with pytest.raises(Fatal) as caught:
        await world.adapter.submit(request, {})
    assert (caught.value.scope, caught.value.code) == ("item", "cannot_sign")
    assert world.creations == 0


async def test_urls_that_differ_only_in_their_queries_are_different_inputs(world):
    inputs = [audio(f"https://audio.example.com/get?id={n}", str(n), filename=f"{n}.wav") for n in (1, 2)]
    _, _, results = await run(world, ask(*inputs))
    assert sorted(results) == ["1", "2"]
    assert all(result.error is None for result in results.values())
    assert "?" not in results["1"].value["raw"]["source"]


async def test_two_inputs_with_one_url_are_paid_for_once(world):
    _, _, results = await run(world, ask(audio(URL, "1"), audio(URL, "2")))
    assert sent(world, "create")[0]["contentUrls"] == [URL]
    assert results["1"].value == results["2"].value is not None


async def test_results_are_read_page_by_page(world):
    object.__setattr__(world.server.settings, "page_max", 2)
    inputs = [audio(f"https://audio.example.com/{n}.wav", str(n)) for n in range(5)]
    _, status, results = await run(world, ask(*inputs))
    assert status.counts.succeeded == 5
    assert sorted(results) == ["0", "1", "2", "3", "4"]
    assert all(result.error is None for result in results.values())


async def test_an_expired_link_to_a_result_is_requested_again(world):
    request = ask(audio(URL))
    job, _ = await world.submit(request)
    status = await world.finish(job)
    world.server.put_faults("expired_url:route=signed.get:times=1")
    (result,) = await world.results(request, job, status)
    assert result.error is None
    world.server.put_faults("expired_url:route=signed.get")
    with pytest.raises(Transient) as caught:
        await world.results(request, job, status)
    assert caught.value.code == "result_unavailable"
    assert "sig=" not in str(caught.value)


async def test_a_failed_file_says_why(world):
    bad = "https://audio.example.com/a__fail_400__.wav"
    _, status, results = await run(world, ask(audio(URL, "1"), audio(bad, "2")))
    assert (status.ending, status.counts.failed) == (Ending.PARTIAL, 1)
    assert results["1"].error is None
    assert results["2"].error["code"] == "InvalidAudioFormat"


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        ("InvalidArgument", "Something", "schema_invalid"),
        ("InternalServerError", "Timeout when downloading recordings URI.", "transient"),
        ("InvalidRequest", "Authentication failed for recordings URI", "fatal"),
        ("QuotaViolation", "Something", "credential"),
    ],
)
async def test_a_failed_job_says_why(world, code, message, kind):
    world.server.put_faults(f"failed:code={code}:message={message}")
    _, status, results = await run(world, ask(audio(URL)))
    assert status.error == {"kind": kind, "code": code, "message": message}
    assert results["1"].error == status.error


async def test_a_signature_in_an_error_is_not_kept(world):
    message = "Cannot read https://store.example.com/a.wav?sv=1&sig=SECRET now. Why? Ask=me"
    world.server.put_faults(Fault(kind="failed", message=message))
    _, status, _ = await run(world, ask(audio(URL)))
    assert status.error["message"] == "Cannot read https://store.example.com/a.wav now. Why? Ask=me"


async def test_the_key_is_not_sent_to_another_host_in_the_address_of_a_job(world):
    job, _ = await world.submit(ask(audio(URL)))
    id = job.external_id.rpartition("/")[2]
    moved = Job(external_id=f"https://elsewhere.example.com/transcriptions/{id}", extra=job.extra)
    assert (await world.adapter.poll(moved)).phase is Phase.QUEUED


async def test_a_finished_job_is_deleted_and_an_unfinished_one_is_left_alone(world):
    request = ask(audio(URL))
    job, staged = await world.submit(request)
    await world.adapter.clean_up(request, staged, job)
    assert len(world.server.jobs(provider="azure")) == 1
    assert await world.adapter.cancel(job) is Cancelled.UNSUPPORTED
    await world.finish(job)
    await world.adapter.clean_up(request, staged, job)
    assert world.server.jobs(provider="azure") == []


async def test_a_bad_request_creates_no_job_and_is_not_retried(world):
    request = ask(audio(URL), provider_options={"status": "Succeeded"})
    with pytest.raises(SchemaInvalid, match="read-only") as caught:
        await world.adapter.submit(request, {})
    assert caught.value.code == "InvalidPayload"


async def test_a_job_answered_without_its_address_is_in_doubt(world):
    request = ask(audio(URL))
    world.server.put_faults("truncate:route=azure.create")
    with pytest.raises(Transient):
        await world.adapter.submit(request, {})
    assert len(await world.adapter.find(request, {}, world.tools.now())) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either region"),
        ({"region": "westeurope", "base_url": "https://x.example.com"}, "either region"),
        ({"region": "westeurope", "time_to_live_hours": 5}, "6 to 744"),
        ({"base_url": "nowhere"}, "base_url"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        AzureSettings(**settings)


def test_the_region_names_the_service():
    assert AzureSettings(region="westeurope").endpoint == "https://westeurope.api.cognitive.microsoft.com/speechtotext"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": [audio("http://audio.example.com/a.wav")]}, "begins with 'http'"),
        ({"inputs": [audio("https:///a.wav")]}, "incomplete address"),
        ({"inputs": [audio("https://[a.wav")]}, "incomplete address"),
        ({"inputs": [audio("s3://calls")]}, "incomplete address"),
        ({"inputs": [audio(URL, bytes=2_000_000_000)]}, "2000000000 bytes"),
        ({"inputs": [audio(URL, str(n)) for n in range(1001)]}, "1001 inputs"),
        ({"options": {"speakers_max": 99}}, "2 to 35"),
        ({"options": {"languages": []}}, "1 to 10"),
        ({"options": {"language": "auto"}}, "list up to 10"),
        ({"options": {"language": "en-US", "languages": ["en-US"]}}, "either language or languages"),
        ({"options": {"provider_options": [1]}}, "must be an object"),
    ],
)
async def test_bad_requests_are_named(world, change, message):
    (problem,) = world.adapter.validate(dataclasses.replace(ask(audio(URL)), **change))
    assert message in problem.message


def test_a_url_is_kept_without_its_query():
    assert without_query("https://a.example.com/b/c.wav?sig=1#x") == "https://a.example.com/b/c.wav"
