"""Speech: Google's and Sarvam's own clients, aiobotocore for AWS, and plain HTTP for Azure, which has no client."""

import json
import warnings

import httpx
import pytest

from batchwright.simulator.providers import running
from tests.simulator.providers.support import KEY, blocking, finish, opened, sdk

pytestmark = pytest.mark.thorough
"""These tests use official clients, which `.ci/run` installs."""

SUBMIT = "/transcriptions:submit?api-version=2024-11-15"


def azure(server, **options):
    headers = {"ocp-apim-subscription-key": KEY}
    return httpx.AsyncClient(base_url=server.urls["azure"], headers=headers, verify=False, **options)


def transcription(*urls, name="bw-1", **fields):
    properties = {"timeToLiveHours": 48, "wordLevelTimestampsEnabled": True}
    body = {"displayName": name, "locale": "en-US", "contentUrls": urls, "properties": properties}
    return {**body, "customProperties": {"bw_key": name}, **fields}


URLS = ("https://audio.test/a.wav?sig=1", "https://audio.test/b__fail__.wav", "https://audio.test/c.wav")


async def test_azure_transcribes_and_reports_each_file(providers):
    async with azure(providers) as client:
        made = await client.post(SUBMIT, json=transcription(*URLS))
        job = made.json()
        assert (made.status_code, job["status"]) == (201, "NotStarted")
        assert made.headers["location"] == job["self"]
        assert "contentUrls" not in job
        poll = await client.get(job["self"])
        assert poll.headers["retry-after"] == "60"
        assert (await client.delete(job["self"])).json()["innerError"]["code"] == "DeleteNotAllowed"
        providers.advance(5)
        assert (await client.get(job["self"])).json()["status"] == "Running"
        finish(providers)
        done = await client.get(job["self"])
        assert (done.json()["status"], "retry-after" in done.headers) == ("Succeeded", False)
        files = (await client.get(job["links"]["files"])).json()["values"]
        assert [one["name"] for one in files] == ["contenturl_0.json", "contenturl_2.json", "report.json"]
        assert all(one["links"]["contentUrl"].startswith(providers.signed_url) for one in files)
        only = await client.get(f"{job['links']['files']}&filter=kind eq 'TranscriptionReport'")
        assert [one["name"] for one in only.json()["values"]] == ["report.json"]
    async with httpx.AsyncClient(verify=False) as bare:
        first, _, report = [(await bare.get(one["links"]["contentUrl"])).json() for one in files]
        assert (report["successfulTranscriptionsCount"], report["failedTranscriptionsCount"]) == (2, 1)
        assert first["source"] == URLS[0]
        assert first["recognizedPhrases"][0]["nBest"][0]["display"] == "Transcript of a.wav."
        assert providers.leaks == []
        providers.advance(13 * 3600)
        assert (await bare.get(files[0]["links"]["contentUrl"])).status_code == 403
    async with azure(providers) as client:
        assert (await client.delete(job["self"])).status_code == 204
        assert (await client.delete(job["self"])).status_code == 204


async def test_azure_lists_by_name_in_pages(providers):
    async with azure(providers) as client:
        for name in ("bw-1", "bw-2", "bw-2"):
            await client.post(SUBMIT, json=transcription(*URLS, name=name))
        query = {"api-version": "2024-11-15", "filter": "displayName eq 'bw-2'", "top": 1}
        first = (await client.get("/transcriptions", params=query)).json()
        second = (await client.get(first["@nextLink"])).json()
        names = [one["displayName"] for one in first["values"] + second["values"]]
        assert (names, "@nextLink" in second) == (["bw-2", "bw-2"], False)
        assert len(providers.jobs("bw-2", "azure")) == 2


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"properties": {}}, "InvalidTimeToLive"),
        ({"createdDateTime": "now"}, "InvalidPayload"),
        ({"contentUrls": []}, "InvalidArgument"),
        ({"customProperties": {"a": "x" * 300}}, "InvalidPayload"),
    ],
)
async def test_azure_refuses_what_is_wrong(providers, change, code):
    async with azure(providers) as client:
        refused = await client.post(SUBMIT, json=transcription(*URLS, **change))
    assert (refused.status_code, refused.json()["innerError"]["code"]) == (400, code)


def google(server):
    speech, options = sdk("google.cloud.speech_v2"), sdk("google.api_core.client_options")
    credentials = sdk("google.oauth2.credentials").Credentials(KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = speech.SpeechClient(
            transport="rest",
            credentials=credentials,
            client_options=options.ClientOptions(api_endpoint=server.urls["google"]),
        )
    return opened(client, "transport.close")


def recognition(*uris, output="gs://bucket/out/bw-1/"):
    return {
        "recognizer": "projects/p/locations/global/recognizers/_",
        "config": {"auto_decoding_config": {}, "model": "long", "language_codes": ["en-US"]},
        "files": [{"uri": uri} for uri in uris],
        "recognition_output_config": {"gcs_output_config": {"uri": output}},
        "processing_strategy": "DYNAMIC_BATCHING",
    }


async def test_google_recognizes_into_a_bucket_and_says_which_file_failed(providers):
    speech, client = sdk("google.cloud.speech_v2"), google(providers)
    providers.world.put_blob("bucket", "in/a.wav", b"abc")
    asked = recognition("gs://bucket/in/a.wav", "gs://bucket/in/none.wav")
    operation = await blocking(client.batch_recognize, request=asked)
    name = operation.operation.name
    listed = await blocking(client.list_operations, {"name": "projects/p/locations/global"})
    metadata = speech.OperationMetadata.deserialize(listed.operations[0].metadata.value)
    output = metadata.batch_recognize_request.recognition_output_config.gcs_output_config.uri
    assert ([one.name for one in listed.operations], output) == ([name], "gs://bucket/out/bw-1/")
    assert not (await blocking(client.get_operation, {"name": name})).done
    finish(providers)
    assert await blocking(operation.done)
    response = await blocking(operation.result, 5)
    good, bad = response.results["gs://bucket/in/a.wav"], response.results["gs://bucket/in/none.wav"]
    assert (bad.error.code, good.error.code, good.metadata.total_billed_duration.total_seconds()) == (5, 0, 3.5)
    bucket, _, key = good.cloud_storage_result.uri.removeprefix("gs://").partition("/")
    raw = providers.world.blobs[bucket, key].data
    found = speech.BatchRecognizeResults.from_json(raw.decode())
    assert found.results[0].alternatives[0].transcript == "transcript of a.wav with 3 bytes 352441c2"
    assert key.startswith("out/bw-1/a_transcript_")


async def test_google_has_a_limit_of_files_and_does_not_cancel(providers):
    client, exceptions = google(providers), sdk("google.api_core.exceptions")
    with pytest.raises(exceptions.BadRequest):
        await blocking(client.batch_recognize, request=recognition(*(f"gs://bucket/{n}.wav" for n in range(16))))
    operation = await blocking(client.batch_recognize, request=recognition("gs://bucket/a.wav"))
    with pytest.raises(exceptions.MethodNotImplemented):
        await blocking(client.cancel_operation, {"name": operation.operation.name})
    async with running(is_google_speech_cancellable=True) as other:
        client = google(other)
        operation = await blocking(client.batch_recognize, request=recognition("gs://bucket/a.wav"))
        await blocking(client.cancel_operation, {"name": operation.operation.name})
        finish(other)
        assert (await blocking(client.get_operation, {"name": operation.operation.name})).error.code == 1


def sarvam(server):
    module, environment = sdk("sarvamai"), sdk("sarvamai.environment")
    url = server.urls["sarvam"]
    where = environment.SarvamAIEnvironment(base=url, creative=url, production=url)
    client = module.SarvamAI(api_subscription_key=KEY, environment=where)
    return opened(client, "_client_wrapper.httpx_client.httpx_client.close")


async def test_sarvam_uploads_starts_and_downloads(providers, tmp_path):
    client = sarvam(providers)
    paths = [tmp_path / name for name in ("bw-1-a.wav", "b__fail_500__.wav")]
    for path in paths:
        path.write_bytes(b"RIFF")
    options = {"model": "saaras:v3", "language_code": "hi-IN", "with_diarization": True}
    job = await blocking(client.speech_to_text_job.create_job, **options)
    assert (await blocking(job.get_status)).job_state == "Accepted"
    assert providers.jobs(provider="sarvam") == []  # nothing has been started, so nothing is paid
    assert await blocking(job.upload_files, file_paths=[str(path) for path in paths])
    assert (await blocking(job.start)).job_state == "Pending"
    assert len(providers.jobs("bw-1-a", "sarvam")) == 1
    finish(providers)
    status = await blocking(job.get_status)
    assert (status.job_state, status.successful_files_count, status.failed_files_count) == ("Completed", 1, 1)
    assert [one.state for one in status.job_details] == ["Success", "Internal Server Error"]
    assert await blocking(job.download_outputs, output_dir=str(tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "bw-1-a.wav.json").read_text())
    assert found["transcript"].startswith("transcript of bw-1-a.wav with 4 bytes")
    assert [one.method for one in providers.requests(port="signed")] == ["PUT", "PUT", "GET"]
    assert providers.leaks == []


async def test_sarvam_refuses_a_second_start_a_get_and_a_wrong_key(providers):
    async with httpx.AsyncClient(base_url=providers.urls["sarvam"], headers={"api-subscription-key": KEY}) as client:
        path = "/speech-to-text/job/v1"
        id = (await client.post(path, json={"job_parameters": {}})).json()["job_id"]
        await client.post(f"{path}/upload-files", json={"job_id": id, "files": ["a.wav"]})
        assert (await client.post(f"{path}/{id}/start")).status_code == 200
        again = await client.post(f"{path}/{id}/start")
        assert (again.status_code, again.json()["error"]["code"]) == (400, "invalid_request_error")
        assert (await client.get(f"{path}/download-files")).status_code == 405
        refused = await client.get(f"{path}/{id}/status", headers={"api-subscription-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "invalid_api_key_error")


def aws(server):
    session, config = sdk("aiobotocore.session").get_session(), sdk("aiobotocore.config")
    return session.create_client(
        "transcribe",
        region_name="us-east-1",
        endpoint_url=server.urls["aws"],
        aws_access_key_id="AKTEST",
        aws_secret_access_key=KEY,
        config=config.AioConfig(retries={"total_max_attempts": 1}),
    )


def media(name="bw-1", uri="s3://media/a.wav", **fields):
    return {"TranscriptionJobName": name, "Media": {"MediaFileUri": uri}, "LanguageCode": "en-US", **fields}


async def test_aws_fails_throttles_and_refuses_a_second_job(providers):
    exceptions = sdk("botocore.exceptions")
    async with aws(providers) as client:
        made = await client.start_transcription_job(**media("bw-1", "s3://media/a__fail__.wav"))
        assert made["TranscriptionJob"]["TranscriptionJobStatus"] == "QUEUED"
        with pytest.raises(client.exceptions.ConflictException):
            await client.start_transcription_job(**media("bw-1"))
        providers.put_faults("429:route=aws.get:times=1", "400:route=aws.create:code=LimitExceededException")
        with pytest.raises(exceptions.ClientError, match="ThrottlingException"):
            await client.get_transcription_job(TranscriptionJobName="bw-1")
        with pytest.raises(client.exceptions.LimitExceededException):
            await client.start_transcription_job(**media("bw-2"))
        finish(providers)
        found = (await client.get_transcription_job(TranscriptionJobName="bw-1"))["TranscriptionJob"]
        assert (found["TranscriptionJobStatus"], found["FailureReason"]) == ("FAILED", "Unsupported media format.")
        await client.delete_transcription_job(TranscriptionJobName="bw-1")
        with pytest.raises(client.exceptions.BadRequestException):
            await client.get_transcription_job(TranscriptionJobName="bw-1")


async def test_aws_writes_the_transcript_to_the_requested_place(providers):
    async with aws(providers) as client:
        await client.start_transcription_job(**media("bw-1", OutputBucketName="out", OutputKey="x/bw-1.json"))
        await client.start_transcription_job(**media("bw-2"))
        finish(providers)
        listed = await client.list_transcription_jobs(Status="COMPLETED", JobNameContains="bw-")
        assert [one["TranscriptionJobName"] for one in listed["TranscriptionJobSummaries"]] == ["bw-2", "bw-1"]
        second = (await client.get_transcription_job(TranscriptionJobName="bw-2"))["TranscriptionJob"]
    transcript = json.loads(providers.world.blobs["out", "x/bw-1.json"].data)
    assert transcript["results"]["transcripts"][0]["transcript"] == "transcript of a.wav."
    assert second["Transcript"]["TranscriptFileUri"].startswith(providers.signed_url)


async def test_obstore_reads_the_same_objects_as_s3(providers):
    obstore = sdk("obstore")
    bucket = sdk("obstore.store").S3Store(
        "out",
        endpoint=providers.urls["s3"],
        access_key_id="AKTEST",
        secret_access_key=KEY,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    await obstore.put_async(bucket, "a/b.json", b"{}")
    assert [one["path"] for one in await bucket.list().collect_async()] == ["a/b.json"]
    assert providers.world.blobs["out", "a/b.json"].data == b"{}"
