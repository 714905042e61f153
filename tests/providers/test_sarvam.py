"""Sarvam: a job gets its id before it costs anything, its files are uploaded, and it is started once."""

import dataclasses
import tracemalloc

import pytest

from batchwright.errors import Fatal, RateLimited, SchemaInvalid, Transient
from batchwright.providers.contract import Cancelled, Ending, InDoubt, Phase
from tests.providers.cases.speech import stored
from tests.providers.conformance import SECRET
from tests.providers.speech_world import ask, audio, run, sent, speech_world

MISSING = "gs://nowhere/gone.wav"


@pytest.fixture
async def world(tmp_path):
    async with speech_world("sarvam", tmp_path) as made:
        yield made


async def test_the_request_says_what_to_do(world):
    options = {"language": "hi-IN", "diarization": True, "speakers_max": 2, "word_timestamps": True}
    await run(world, ask(stored(world, 1, "a.wav"), **options, provider_options={"mode": "translate"}))
    assert sent(world, "create") == [
        {
            "job_parameters": {
                "model": "saaras:v3",
                "mode": "translate",
                "language_code": "hi-IN",
                "with_timestamps": True,
                "with_diarization": True,
                "num_speakers": 2,
            }
        }
    ]


async def test_bytes_are_uploaded_unchanged_and_the_transcript_is_returned(world):
    job, status, results = await run(world, ask(stored(world, 1, "Montag (früh).wav"), stored(world, 2, "b.mp3")))
    assert (status.ending, status.counts.succeeded) == (Ending.SUCCEEDED, 2)
    uploads = world.server.requests("signed.put")
    assert [one.body for one in uploads] == [b"audio 1", b"audio 2"]
    assert {one.headers["x-ms-blob-type"] for one in uploads} == {"BlockBlob"}
    assert [one.headers["content-type"] for one in uploads] == ["audio/x-wav", "audio/mpeg"]
    assert all(one.headers["content-length"] == "7" for one in uploads)
    assert SECRET not in str([one.headers for one in uploads])
    assert results["1"].value["text"].startswith("transcript of 0000-Montag_fr_h_.wav with 7 bytes")
    assert results["1"].value["raw"]["language_code"] == "hi-IN"
    assert results["2"].usage.audio_seconds is not None
    assert job.external_id == world.server.jobs(provider="sarvam")[0].id


async def test_a_large_file_is_streamed(world):
    """Memory holds the server's copy and a few pieces."""
    size, piece = 24 * 1024 * 1024, b"x" * 65_536

    async def chunks(id):
        for _ in range(size // len(piece)):
            yield piece

    world.tools._open_stored = chunks
    request = ask(audio("file:large", filename="large.wav", bytes=size))
    tracemalloc.start()
    try:
        await world.stage(request)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.7 * size
    (upload,) = world.server.requests("signed.put")
    assert upload.headers["content-length"] == str(size)


async def test_an_upload_resumes_with_the_files_that_are_left(world):
    request = ask(*(stored(world, n, f"{n}.wav") for n in range(3)))
    steps = [staged async for staged in world.adapter.stage(request, {})]
    assert [len(one["uploaded"]) for one in steps] == [0, 1, 2, 3]
    before = len(world.server.requests("signed.put"))
    assert await world.stage(request, steps[1]) == steps[-1]
    assert len(world.server.requests("signed.put")) - before == 2
    assert len(world.server.requests("sarvam.create")) == 1


async def test_a_job_is_found_by_its_id_once_it_has_started(world):
    request = ask(stored(world, 1, "a.wav"))
    assert await world.adapter.find(request, {}, world.tools.now()) == []
    staged = await world.stage(request)
    assert await world.adapter.find(request, staged, world.tools.now()) == []
    job = await world.adapter.submit(request, staged)
    assert await world.adapter.find(request, staged, world.tools.now()) == [job]


@pytest.mark.parametrize("fault", ["drop", "truncate", "not_json", "500:accepted=1"])
async def test_a_lost_answer_is_in_doubt_and_starting_again_adopts_the_one_job(world, fault):
    request = ask(stored(world, 1, "a.wav"))
    staged = await world.stage(request)
    kind, _, rest = fault.partition(":")
    world.server.put_faults(":".join(filter(None, [kind, "route=sarvam.start", "times=1", rest])))
    with pytest.raises(InDoubt):
        await world.adapter.submit(request, staged)
    (found,) = await world.adapter.find(request, staged, world.tools.now())
    assert await world.adapter.submit(request, staged) == found
    assert len(world.server.jobs(provider="sarvam")) == 1
    status = await world.finish(found)
    assert [one.error for one in await world.results(request, found, status)] == [None]


@pytest.mark.parametrize("fault", ["hang_up", "502"])
async def test_a_start_that_did_not_arrive_is_resent(world, fault):
    request = ask(stored(world, 1, "a.wav"))
    staged = await world.stage(request)
    world.server.put_faults(f"{fault}:route=sarvam.start:times=1")
    with pytest.raises(InDoubt):
        await world.adapter.submit(request, staged)
    assert await world.adapter.find(request, staged, world.tools.now()) == []
    await world.adapter.submit(request, staged)
    assert len(world.server.jobs(provider="sarvam")) == 1


async def test_a_refused_start_is_in_doubt_until_the_status_shows_whether_the_job_already_runs(world):
    request = ask(stored(world, 1, "a.wav"))
    staged = await world.stage(request)
    await world.adapter.submit(request, staged)
    world.server.put_faults("503:route=sarvam.get:times=1")
    with pytest.raises(InDoubt):
        await world.adapter.submit(request, staged)


async def test_an_input_that_cannot_be_read_fails_alone(world):
    request = ask(stored(world, 1, "a.wav"), audio(MISSING, "2"), stored(world, 3, "c.wav"))
    job, _, results = await run(world, request)
    assert {key: result.error is None for key, result in results.items()} == {"1": True, "2": False, "3": True}
    assert results["2"].error["code"] == "input_not_found"
    assert "gone.wav" in results["2"].error["message"]
    staged = await world.stage(request, {"job_id": job.external_id, "uploaded": ["1", "3"], "refused": {}})
    assert list(staged["refused"]) == ["2"]


async def test_without_any_readable_input_nothing_is_started(world):
    request = ask(audio(MISSING))
    staged = await world.stage(request)
    with pytest.raises(SchemaInvalid, match=r"gone\.wav"):
        await world.adapter.submit(request, staged)
    assert world.creations == 0


async def test_an_outage_of_a_bucket_interrupts_staging_and_fails_no_input(world):
    request = ask(stored(world, 1, "a.wav"))
    world.server.put_faults("503:route=signed.put:times=1")
    with pytest.raises(Transient):
        await world.stage(request)
    staged = await world.stage(request)
    assert staged["refused"] == {}


async def test_an_expired_link_to_a_result_is_requested_again(world):
    request = ask(stored(world, 1, "a.wav"))
    job, _ = await world.submit(request)
    status = await world.finish(job)
    world.server.put_faults("expired_url:route=signed.get:times=1")
    (result,) = await world.results(request, job, status)
    assert result.error is None
    world.server.put_faults("expired_url:route=signed.get")
    with pytest.raises(Transient) as caught:
        await world.results(request, job, status)
    assert "sig=" not in str(caught.value)


@pytest.mark.parametrize(("status", "kind"), [(400, "schema_invalid"), (500, "transient")])
async def test_a_failed_file_says_why(world, status, kind):
    request = ask(stored(world, 1, "a.wav"), stored(world, 2, f"b__fail_{status}__.wav"))
    _, ended, results = await run(world, request)
    assert (ended.ending, ended.counts.failed) == (Ending.PARTIAL, 1)
    assert results["2"].error["kind"] == kind


async def test_a_failed_job_keeps_what_was_finished(world):
    world.server.put_faults("expired:share=0.5")
    _, status, results = await run(world, ask(stored(world, 1, "a.wav"), stored(world, 2, "b.wav")))
    assert (status.raw_status, status.ending) == ("Failed", Ending.PARTIAL)
    assert [results[key].error is None for key in ("1", "2")] == [True, False]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("429:code=rate_limit_exceeded_error:retry_after=5", RateLimited),
        ("400:code=invalid_request_error", SchemaInvalid),
        ("429:code=insufficient_quota_error", Fatal),
        ("403:code=invalid_api_key_error", Fatal),
        ("503:code=billing_service_unavailable_error", Transient),
    ],
)
async def test_errors_while_a_job_is_created_have_their_classes(world, fault, kind):
    world.server.put_faults(f"{fault}:route=sarvam.create")
    with pytest.raises(kind) as caught:
        await world.stage(ask(stored(world, 1, "a.wav")))
    if kind is Fatal:
        assert caught.value.scope == "credential"


async def test_a_job_that_was_created_but_not_started_is_queued_and_cannot_be_cancelled(world):
    request = ask(stored(world, 1, "a.wav"))
    job, _ = await world.submit(request)
    assert (await world.adapter.poll(job)).phase is Phase.QUEUED
    assert await world.adapter.cancel(job) is Cancelled.UNSUPPORTED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": [audio("file:1", str(n)) for n in range(21)]}, "21 inputs"),
        ({"options": {"languages": ["hi-IN", "en-IN"]}}, "1 to 1"),
        ({"options": {"speakers_max": 0}}, "1 to 10"),
    ],
)
async def test_bad_requests_are_named(world, change, message):
    (problem,) = world.adapter.validate(dataclasses.replace(ask(audio("file:1")), **change))
    assert message in problem.message
