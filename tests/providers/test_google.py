"""Google Speech-to-Text: one job per model; a folder in a bucket marks the job and shows that it has run."""

import dataclasses
import json

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from obstore.store import GCSStore

from batchwright.errors import ConfigurationError, Fatal, SchemaInvalid
from batchwright.providers.adapters.google import GoogleSettings
from batchwright.providers.buckets import Bucket
from batchwright.providers.contract import Cancelled, Ending, Job, Phase
from batchwright.storage.remote import Remote
from tests.inference.server import RawServer, answer
from tests.providers.cases.speech import stored
from tests.providers.conformance import KEY
from tests.providers.speech_world import ask, audio, run, sent, speech_world

OUTPUT = f"gs://results/speech/out/{KEY}/"


@pytest.fixture
async def world(tmp_path):
    async with speech_world("google", tmp_path) as made:
        made.server.world.put_blob("calls", "monday.wav", b"audio")
        yield made


CALL = audio("gs://calls/monday.wav")


async def test_the_request_says_what_to_do_and_where_to_write(world):
    options = {"languages": ["en-US", "hi-IN"], "diarization": True, "speakers_max": 3, "word_timestamps": True}
    own = {"provider_options": {"config": {"features": {"profanityFilter": True}}, "files": []}}
    await run(world, ask(CALL, model="telephony", **options, **own))
    assert sent(world, "create") == [
        {
            "config": {
                "autoDecodingConfig": {},
                "model": "telephony",
                "languageCodes": ["en-US", "hi-IN"],
                "features": {
                    "enableWordTimeOffsets": True,
                    "diarizationConfig": {"minSpeakerCount": 1, "maxSpeakerCount": 3},
                    "profanityFilter": True,
                },
            },
            "files": [{"uri": "gs://calls/monday.wav"}],
            "recognitionOutputConfig": {"gcsOutputConfig": {"uri": OUTPUT}},
            "processingStrategy": "DYNAMIC_BATCHING",
        }
    ]
    (create,) = world.server.requests("google.create")
    assert create.path.endswith("/v2/projects/project/locations/us-central1/recognizers/_:batchRecognize")


async def test_a_result_has_its_text_and_the_seconds_that_are_billed(world):
    job, status, results = await run(world, ask(CALL))
    assert job.external_id.startswith("projects/123456789/locations/us-central1/operations/")
    assert (status.raw_status, status.counts.succeeded) == ("SUCCEEDED", 1)
    assert results["1"].value["text"].startswith("transcript of monday.wav with 5 bytes")
    assert len(results["1"].value["raw"]["results"]) == 2
    assert results["1"].usage.audio_seconds == 3.5
    json.dumps(dict(status.found))


async def test_an_input_from_another_place_is_copied_and_the_copy_is_deleted_at_the_end(world):
    request = ask(CALL, stored(world, 2, "b.wav"))
    job, staged = await world.submit(request)
    copy = f"speech/in/{KEY}/0001-b.wav"
    assert staged == {"copies": {"2": f"gs://results/{copy}"}, "refused": {}}
    assert world.server.world.blobs["results", copy].data == b"audio 2"
    status = await world.finish(job)
    assert [one.error for one in await world.results(request, job, status)] == [None, None]
    for _ in range(2):
        await world.adapter.clean_up(request, staged, job)
    left = sorted(name for bucket, name in world.server.world.blobs if bucket in ("results", "calls"))
    assert [name.partition("_transcript")[0] for name in left] == [
        "monday.wav",
        f"speech/out/{KEY}/0001-b",
        f"speech/out/{KEY}/monday",
    ]


async def test_an_input_that_cannot_be_read_fails_alone(world):
    request = ask(CALL, audio("s3://nowhere/gone.wav", "2"))
    _, status, results = await run(world, request)
    assert status.ending is Ending.SUCCEEDED
    assert results["1"].error is None
    assert results["2"].error["code"] == "input_not_found"


async def test_a_file_that_google_does_not_find_is_a_failed_input(world):
    _, status, results = await run(world, ask(CALL, audio("gs://calls/gone.wav", "2")))
    assert status.ending is Ending.PARTIAL
    assert results["1"].error is None
    assert results["2"].error == {
        "kind": "fatal",
        "code": "5",
        "message": "gs://calls/gone.wav was not found",
    }


async def test_without_any_readable_input_nothing_is_sent(world):
    request = ask(audio("s3://nowhere/gone.wav"))
    staged = await world.stage(request)
    with pytest.raises(SchemaInvalid, match=r"gone\.wav"):
        await world.adapter.submit(request, staged)
    assert world.creations == 0


async def test_two_inputs_with_one_uri_are_paid_for_once(world):
    _, _, results = await run(world, ask(CALL, dataclasses.replace(CALL, id="2")))
    assert sent(world, "create")[0]["files"] == [{"uri": "gs://calls/monday.wav"}]
    assert results["1"].value == results["2"].value is not None


async def test_the_folder_shows_that_an_operation_that_google_forgot_has_run(world):
    request = ask(CALL, stored(world, 2, "b.wav"))
    job, staged = await world.submit(request)
    await world.finish(job)
    world.server.world.jobs.clear()
    status = await world.adapter.poll(job)
    assert (status.phase, status.ending, status.counts.succeeded) == (Phase.ENDED, Ending.SUCCEEDED, 2)
    assert [one.error for one in await world.results(request, job, status)] == [None, None]
    (found,) = await world.adapter.find(request, staged, world.tools.now())
    assert found.external_id == OUTPUT
    status = await world.adapter.poll(found)
    assert [one.error for one in await world.results(request, found, status)] == [None, None]
    assert await world.adapter.cancel(found) is Cancelled.ENDED_ALREADY


async def test_a_folder_with_some_results_shows_that_the_job_ran_but_not_that_it_ended(world):
    request = ask(CALL, stored(world, 2, "b.wav"))
    staged = await world.stage(request)
    world.server.put_faults("lag:seconds=50")
    job = await world.adapter.submit(request, staged)
    world.server.world.put_blob("results", f"speech/out/{KEY}/monday_transcript_1.json", b'{"results": []}')
    (found,) = await world.adapter.find(request, staged, world.tools.now())
    assert found.external_id == OUTPUT
    status = await world.adapter.poll(found)
    assert (status.phase, status.is_error, status.counts.succeeded) == (Phase.RUNNING, False, 1)
    by_key = {one.key: one for one in await world.results(request, found, status)}
    assert [by_key[key].error is None for key in ("1", "2")] == [True, False]
    world.server.advance(50)
    assert (await world.adapter.poll(found)).raw_status == "RUNNING"
    assert await world.adapter.cancel(found) is Cancelled.REQUESTED
    assert (await world.adapter.find(request, staged, world.tools.now())) == [job]


async def test_a_forgotten_operation_with_some_results_is_an_error_answer_that_still_has_them(world):
    request = ask(CALL, audio("gs://calls/gone.wav", "2"))
    job, _ = await world.submit(request)
    await world.finish(job)
    world.server.world.jobs.clear()
    status = await world.adapter.poll(job)
    assert (status.phase, status.is_error, status.error["code"]) == (Phase.RUNNING, True, "job_not_found")
    by_key = {one.key: one for one in await world.results(request, job, status)}
    assert [by_key[key].error is None for key in ("1", "2")] == [True, False]


async def test_ambiguous_results_in_the_folder_count_as_missing(world):
    world.server.world.put_blob("others", "monday.wav", b"audio")
    request = ask(CALL, audio("gs://others/monday.wav", "2"))
    job, _ = await world.submit(request)
    await world.finish(job)
    world.server.world.jobs.clear()
    status = await world.adapter.poll(job)
    assert (status.is_error, status.counts.succeeded) == (True, 0)
    results = await world.results(request, job, status)
    assert [one.value for one in results] == [None, None]


async def test_a_result_outside_of_the_own_folder_is_not_read(world, caplog):
    request = ask(CALL)
    job, _ = await world.submit(request)
    status = await world.finish(job)
    world.server.world.put_blob("secrets", "a.json", b'{"results": []}')
    files = {"gs://calls/monday.wav": {"output": "gs://secrets/a.json"}}
    (result,) = await world.results(request, job, dataclasses.replace(status, found={"files": files}))
    assert result.error["code"] == "missing_result"
    assert "outside of its folder" in caplog.text


async def test_a_cancel_that_google_answers_as_not_implemented_is_unsupported(world):
    object.__setattr__(world.server.settings, "is_google_speech_cancellable", False)
    job, _ = await world.submit(ask(CALL))
    assert await world.adapter.cancel(job) is Cancelled.UNSUPPORTED


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, "rate_limited"), (503, "transient"), (400, "schema_invalid"), (401, "credential"), (404, "fatal")],
)
async def test_a_failed_operation_says_why(world, status, kind):
    world.server.put_faults(f"failed:status={status}:message=no luck")
    _, ended, results = await run(world, ask(CALL))
    assert (ended.raw_status, ended.ending) == ("FAILED", Ending.FAILED)
    assert (ended.error["kind"], ended.error["message"]) == (kind, "no luck")
    assert results["1"].error == ended.error


async def test_the_location_of_results_can_come_from_the_job(world):
    request = ask(CALL)
    job, _ = await world.submit(request)
    status = await world.finish(job)
    kept = Job(external_id=job.external_id, extra={**job.extra, **status.found})
    (result,) = await world.results(request, kept, dataclasses.replace(status, found={}))
    assert result.error is None


async def test_a_service_account_is_enough(world, tmp_path):
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    async with RawServer() as tokens:
        tokens.replies["/token"] = answer(b'{"access_token": "ya29.made", "expires_in": 3600}')
        account = {
            "client_email": "speech@project.iam.gserviceaccount.com",
            "private_key": key.private_bytes(*encoding).decode(),
            "token_uri": f"{tokens.url}/token",
        }
        (tmp_path / "account.json").write_text(json.dumps(account))
        world.adapter = world.make(access_token_env=None, service_account_file=tmp_path / "account.json")
        _, status, _ = await run(world, ask(CALL))
        assert len(tokens.lines) == 1
    assert status.ending is Ending.SUCCEEDED
    assert {one.headers["authorization"] for one in world.server.requests(port="api")} == {"Bearer ya29.made"}


async def test_buckets_are_reached_by_obstore(world):
    """The same with Google's own storage protocol instead of direct access to the server's buckets."""
    account = {"gcs_base_url": world.server.urls["gcs"], "disable_oauth": True, "client_email": "", "private_key": ""}
    text = json.dumps({**account, "private_key_id": ""})

    def bucket(root):
        name = root.removeprefix("gs://")
        store = GCSStore(name, service_account_key=text, client_options={"allow_http": True})
        return Bucket(Remote(store, part_bytes=5 * 1024 * 1024, name=root))

    world.tools._open_bucket = bucket
    world.tools._buckets.clear()
    request = ask(CALL, stored(world, 2, "b.wav"), audio("gs://calls/gone.wav", "3"))
    job, _, results = await run(world, request)
    assert {key: result.error is None for key, result in results.items()} == {"1": True, "2": True, "3": False}
    world.server.world.jobs.clear()
    assert (await world.adapter.poll(job)).counts.succeeded == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket": "s3://b"}, "gs://bucket/folder"),
        ({"project": ""}, "project"),
        ({"base_url": "nowhere"}, "base_url"),
        ({"access_token_env": "A", "service_account_file": "b"}, "only one"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        GoogleSettings(**{"project": "p", "bucket": "gs://b", **settings})


def test_the_location_names_the_service():
    assert GoogleSettings(project="p", bucket="gs://b").endpoint == "https://us-central1-speech.googleapis.com"
    assert GoogleSettings(project="p", bucket="gs://b", location="global").endpoint == "https://speech.googleapis.com"


async def test_too_many_inputs_are_refused(world):
    (problem,) = world.adapter.validate(ask(*(audio(f"gs://b/{n}.wav", str(n)) for n in range(16))))
    assert "16 inputs" in problem.message


async def test_a_bucket_that_refuses_the_credential_stops_the_account(world):
    async def refuse(*_):
        raise Fatal("closed", scope="credential", code="storage_refused")

    world.tools.bucket("gs://results").write = refuse
    with pytest.raises(Fatal) as caught:
        await world.stage(ask(stored(world, 1, "a.wav")))
    assert caught.value.scope == "credential"
