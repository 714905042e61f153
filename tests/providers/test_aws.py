"""AWS Transcribe: the real protocol with moto, and with a raw server where moto cannot help."""

import importlib.util
import json
import os
import socket
import uuid
from datetime import UTC, datetime

import pytest

from tests.conftest import skip

if importlib.util.find_spec("aiobotocore") is None:
    skip("aiobotocore is not installed", allow_module_level=True)

from aiobotocore.session import AioSession
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

from batchwright.errors import ConfigurationError, Fatal, RateLimited, SchemaInvalid, Transient
from batchwright.inference.http import Http
from batchwright.providers.adapters.aws import Aws, AwsSettings
from batchwright.providers.buckets import Bucket, open_bucket
from batchwright.providers.contract import Cancelled, Ending, InDoubt, Input, Phase, Request
from batchwright.providers.tools import AdapterTools
from batchwright.storage.remote import Remote
from tests.inference.server import RawServer, answer
from tests.providers.speech_world import speech_world

SINCE = datetime(2026, 1, 1, tzinfo=UTC)
KEYS = {"AWS_KEY_ID_REF": "the-key-id", "AWS_SECRET_REF": "the-secret"}
BY_REFERENCE = {"access_key_id_env": "AWS_KEY_ID_REF", "secret_access_key_env": "AWS_SECRET_REF"}


@pytest.fixture(scope="module")
def moto():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
async def http():
    async with Http() as made:
        yield made


@pytest.fixture
async def stub():
    async with RawServer() as made:
        made.then_close.add("/")
        yield made


@pytest.fixture(autouse=True)
def without_aws_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


def s3(endpoint):
    def bucket(root):
        name = root.removeprefix("s3://")
        keys = {"access_key_id": "the-key-id", "secret_access_key": "the-secret"}
        store = S3Store(name, endpoint=endpoint, region="us-east-1", client_options={"allow_http": True}, **keys)
        return Bucket(Remote(store, part_bytes=5 * 1024 * 1024, name=root))

    return bucket


SESSION = AioSession()
"""One session for all tests, because botocore reads its descriptions of services once per session."""


def client(endpoint):
    return SESSION.create_client(
        "transcribe",
        region_name="us-east-1",
        endpoint_url=endpoint,
        aws_access_key_id="the-key-id",
        aws_secret_access_key="the-secret",
    )


class Account:
    """An adapter, its bucket, and clients to check them."""

    def __init__(self, endpoint, http, **settings):
        self.endpoint = endpoint
        self.name = f"bucket-{uuid.uuid4().hex[:8]}"
        self.stored = {"file-1": b"some audio"}
        self.tools = AdapterTools(http, open_stored=self._open, bucket=s3(endpoint), environment=KEYS)
        self.settings = AwsSettings(
            region="us-east-1",
            bucket=f"s3://{self.name}/speech",
            base_url=endpoint,
            **{"language": "en-US", **BY_REFERENCE, **settings},
        )
        self.adapter = self.make_adapter()

    def make_adapter(self):
        adapter = Aws(self.settings, self.tools)
        adapter._session = SESSION
        return adapter

    async def _open(self, id):
        yield self.stored[id]

    async def make_bucket(self):
        assert (await self.tools.http.ask("PUT", f"{self.endpoint}/{self.name}")).is_ok
        return self

    async def put(self, key, data):
        async def chunks():
            yield data

        await self.tools.bucket(f"s3://{self.name}").write(key, chunks)

    async def submit(self, request):
        staged = await stage(self.adapter, request)
        return await self.adapter.submit(request, staged), staged

    async def finish(self, job):
        for _ in range(5):
            status = await self.adapter.poll(job)
            if status.phase is Phase.ENDED:
                return status
        raise AssertionError(status)

    async def write_transcript(self, job, document):
        key = job.extra["output"].removeprefix(f"s3://{self.name}/")
        await self.put(key, json.dumps(document).encode())


@pytest.fixture
async def account(moto, http):
    return await Account(moto, http).make_bucket()


async def stage(adapter, request):
    staged = {}
    async for step in adapter.stage(request, staged):
        staged = step
        json.dumps(staged)
    return staged


def new_key():
    return f"bw-{uuid.uuid4().hex[:20]}-a1"


def request(uri="s3://calls/monday.wav", *, filename="monday.wav", key=None, **options):
    audio = Input(id="in-1", uri=uri, filename=filename)
    return Request(key=key or new_key(), task_type="transcription", model=None, inputs=[audio], options=options)


def transcript(text):
    return {"jobName": "x", "status": "COMPLETED", "results": {"transcripts": [{"transcript": text}], "items": []}}


async def test_a_job_goes_through_all_its_states_and_its_transcript_is_read(account):
    asked = request()
    assert account.adapter.validate(asked) == []
    job, _ = await account.submit(asked)
    assert (job.external_id, job.extra) == (asked.key, {"output": f"s3://{account.name}/speech/out/{asked.key}.json"})
    polls = [await account.adapter.poll(job) for _ in range(3)]
    assert [(status.phase, status.raw_status) for status in polls] == [
        (Phase.QUEUED, "QUEUED"),
        (Phase.RUNNING, "IN_PROGRESS"),
        (Phase.ENDED, "COMPLETED"),
    ]
    assert polls[-1].ending is Ending.SUCCEEDED
    await account.write_transcript(job, transcript("Hello."))
    for _ in range(2):
        (result,) = [one async for one in account.adapter.results(asked, job, polls[-1])]
        assert (result.key, result.value["text"], result.error) == ("in-1", "Hello.", None)
        assert result.value["raw"]["results"]["transcripts"] == [{"transcript": "Hello."}]


async def test_the_request_says_where_to_write_and_what_to_do(account):
    asked = request(diarization=True, speakers_max=3, languages=["en-US", "hi-IN"])
    job, _ = await account.submit(asked)
    async with client(account.endpoint) as transcribe:
        made = (await transcribe.get_transcription_job(TranscriptionJobName=job.external_id))["TranscriptionJob"]
    assert made["Media"] == {"MediaFileUri": "s3://calls/monday.wav"}
    assert made["Settings"] == {"ShowSpeakerLabels": True, "MaxSpeakerLabels": 3}
    sent = account.adapter._parameters(asked, {"media": "s3://calls/monday.wav"})
    assert sent["OutputBucketName"] == account.name
    assert sent["OutputKey"] == f"speech/out/{asked.key}.json"
    assert (sent["IdentifyLanguage"], sent["LanguageOptions"]) == (True, ["en-US", "hi-IN"])


def test_options_of_the_provider_override_ours_except_our_marker():
    adapter = Aws(AwsSettings(region="us-east-1", bucket="s3://bucket"), AdapterTools(None, environment={}))
    options = {"provider_options": {"MediaFormat": "wav", "TranscriptionJobName": "mine", "OutputKey": "theirs"}}
    sent = adapter._parameters(request(key="bw-1-a1", **options), {"media": "s3://a/b.wav"})
    assert (sent["MediaFormat"], sent["TranscriptionJobName"], sent["OutputKey"]) == (
        "wav",
        "bw-1-a1",
        "out/bw-1-a1.json",
    )
    assert sent["IdentifyLanguage"] is True


async def test_an_input_from_another_place_is_copied_once_and_deleted_after_the_end(account):
    asked = request("file:file-1", filename="ä call.wav")
    job, staged = await account.submit(asked)
    copy = f"s3://{account.name}/speech/in/{asked.key}/0000-_call.wav"
    assert staged == {"media": copy, "is_copy": True}
    bucket = account.tools.bucket(f"s3://{account.name}")
    key = copy.removeprefix(f"s3://{account.name}/")
    assert [chunk async for chunk in bucket.read(key)] == [b"some audio"]
    assert [step async for step in account.adapter.stage(asked, staged)] == []
    for _ in range(2):
        await account.adapter.clean_up(asked, staged, job)
    assert await bucket.size(key) is None


async def test_an_input_of_the_user_is_not_deleted(account):
    asked = request(f"s3://{account.name}/mine.wav")
    await account.put("mine.wav", b"x")
    job, staged = await account.submit(asked)
    await account.adapter.clean_up(asked, staged, job)
    assert await account.tools.bucket(f"s3://{account.name}").size("mine.wav") == 1


async def test_a_second_submission_adopts_the_first_job(account):
    asked = request()
    job, staged = await account.submit(asked)
    assert await account.adapter.submit(asked, staged) == job
    assert await account.adapter.find(asked, staged, SINCE) == [job]


async def test_a_job_of_our_name_for_another_file_is_not_adopted(account):
    asked = request()
    await account.submit(asked)
    for call in (
        account.adapter.submit(asked, {"media": "s3://calls/other.wav", "is_copy": False}),
        account.adapter.find(asked, {"media": "s3://calls/other.wav", "is_copy": False}, SINCE),
    ):
        with pytest.raises(Fatal, match="another file") as caught:
            await call
        assert caught.value.code == "name_taken"


async def test_nothing_is_found_of_a_job_that_was_never_made(account):
    asked = request()
    assert await account.adapter.find(asked, {"media": "s3://calls/monday.wav"}, SINCE) == []


async def test_a_job_that_aws_does_not_have_is_an_error_answer(account):
    asked = request()
    status = await account.adapter.poll(account.adapter._job(asked))
    assert (status.is_error, status.phase) == (True, Phase.RUNNING)


async def test_an_absent_transcript_is_a_missing_result(account):
    asked = request()
    job, _ = await account.submit(asked)
    status = await account.finish(job)
    (result,) = [one async for one in account.adapter.results(asked, job, status)]
    assert (result.key, result.value, result.error["code"]) == ("in-1", None, "missing_result")


async def test_jobs_cannot_be_cancelled(account):
    job, _ = await account.submit(request())
    assert await account.adapter.cancel(job) is Cancelled.UNSUPPORTED


async def test_a_check_lists_jobs(account):
    assert await account.adapter.check() == "AWS Transcribe in us-east-1 lists jobs"


def found(**fields):
    job = {"TranscriptionJobName": "bw-1", "Media": {"MediaFileUri": "s3://calls/monday.wav"}, **fields}
    return json_answer({"TranscriptionJob": job})


def json_answer(document, status="200 OK", *headers):
    return answer(
        json.dumps(document).encode(), status, "content-type: application/x-amz-json-1.1", "connection: close", *headers
    )


def refusal(code, message="no", status="400 Bad Request"):
    return json_answer({"__type": code, "Message": message}, status, f"x-amzn-errortype: {code}")


@pytest.fixture
def stubbed(stub, http, tmp_path):
    account = Account(stub.url, http)
    account.tools = AdapterTools(
        http, bucket=lambda root: open_bucket(f"file://{tmp_path}/{root.replace('://', '/')}"), environment=KEYS
    )
    account.adapter = account.make_adapter()
    return account


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("Unsupported media format.", "schema_invalid"),
        ("The media format provided does not match the detected media format.", "schema_invalid"),
        ("Invalid sample rate for audio file.", "schema_invalid"),
        ("The sample rate provided does not match the detected sample rate.", "schema_invalid"),
        ("Invalid file size: file size too large.", "schema_invalid"),
        ("Invalid number of channels: number of channels too large.", "schema_invalid"),
        ("Internal Failure.", "transient"),
    ],
)
async def test_a_failed_job_says_why(stub, stubbed, reason, kind):
    stub.replies["/"] = found(TranscriptionJobStatus="FAILED", FailureReason=reason)
    asked = request()
    job = stubbed.adapter._job(asked)
    status = await stubbed.adapter.poll(job)
    assert (status.phase, status.ending) == (Phase.ENDED, Ending.FAILED)
    assert status.error == {"kind": kind, "code": "job_failed", "message": reason}
    (result,) = [one async for one in stubbed.adapter.results(asked, job, status)]
    assert result.error == status.error


async def test_a_job_without_a_status_is_queued(stub, stubbed):
    stub.replies["/"] = found()
    status = await stubbed.adapter.poll(stubbed.adapter._job(request()))
    assert (status.phase, status.raw_status) == (Phase.QUEUED, "QUEUED")


async def test_an_unknown_status_counts_as_running(stub, stubbed, caplog):
    stub.replies["/"] = found(TranscriptionJobStatus="DREAMING")
    status = await stubbed.adapter.poll(stubbed.adapter._job(request()))
    assert (status.phase, status.raw_status, status.ending) == (Phase.RUNNING, "DREAMING", None)
    assert "DREAMING" in caplog.text


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        ("ThrottlingException", "Rate exceeded", RateLimited),
        ("LimitExceededException", "You have sent too many requests.", RateLimited),
        ("LimitExceededException", "Your file is too long.", SchemaInvalid),
        ("LimitExceededConcurrentJobException", "The queue is full", RateLimited),
        ("BadRequestException", "The language code is wrong", SchemaInvalid),
        ("AccessDeniedException", "You may not", Fatal),
        ("ExpiredTokenException", "Your token is old", Fatal),
    ],
)
async def test_a_refused_request_has_created_no_job(stub, stubbed, code, message, kind):
    stub.replies["/"] = refusal(code, message)
    with pytest.raises(kind, match=message) as caught:
        await stubbed.submit(request())
    assert caught.value.code == code
    assert len(stub.lines) == 1
    if kind is Fatal:
        assert caught.value.scope == "credential"


@pytest.mark.parametrize(
    "reply",
    [b"", refusal("InternalFailureException", status="500 Internal Server Error"), answer(b"no", "503 Busy")],
    ids=["dropped", "500", "503"],
)
async def test_without_an_answer_the_job_is_in_doubt_after_one_request(stub, stubbed, reply):
    stub.replies["/"] = reply
    with pytest.raises(InDoubt):
        await stubbed.submit(request())
    assert len(stub.lines) == 1


async def test_an_answer_that_is_cut_short_leaves_the_job_in_doubt(stub, stubbed):
    stub.replies["/"] = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"
    with pytest.raises(InDoubt):
        await stubbed.submit(request())
    assert len(stub.lines) == 1


async def test_an_unreachable_service_has_created_no_job(http):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(Transient) as caught:
        await Account(url, http).submit(request())
    assert not isinstance(caught.value, InDoubt)


@pytest.mark.parametrize("reply", [b"", answer(b"no", "503 Busy")], ids=["dropped", "503"])
async def test_an_error_while_polling_is_transient(stub, stubbed, reply):
    stub.replies["/"] = reply
    with pytest.raises(Transient):
        await stubbed.adapter.poll(stubbed.adapter._job(request()))
    assert len(stub.lines) == 1


async def test_a_job_whose_name_is_taken_and_that_is_not_found_is_in_doubt(stub, stubbed):
    stub.replies["/"] = refusal("ConflictException", "The job couldn't be found.")
    with pytest.raises(InDoubt):
        await stubbed.submit(request())
    assert len(stub.lines) == 2


@pytest.mark.parametrize("fault", ["drop", "truncate", "not_json", "500:accepted=1"])
async def test_a_lost_answer_is_in_doubt_and_submitting_again_adopts_the_one_job(tmp_path, fault):
    async with speech_world("aws", tmp_path) as world:
        asked = world.request()
        staged = await world.stage(asked)
        kind, _, rest = fault.partition(":")
        world.server.put_faults(":".join(filter(None, [kind, "route=aws.create", "times=1", rest])))
        with pytest.raises(InDoubt):
            await world.adapter.submit(asked, staged)
        (found,) = await world.adapter.find(asked, staged, SINCE)
        assert await world.adapter.submit(asked, staged) == found
        assert len(world.server.jobs(provider="aws")) == 1
        status = await world.finish(found)
        assert [one.error for one in await world.results(asked, found, status)] == [None]


async def test_proxies_of_the_environment_are_not_used(stub, stubbed, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    stub.replies["/"] = found(TranscriptionJobStatus="QUEUED")
    assert (await stubbed.adapter.poll(stubbed.adapter._job(request()))).phase is Phase.QUEUED


async def test_keys_that_are_missing_are_named_and_nothing_is_sent(stub, http):
    account = Account(stub.url, http)
    adapter = Aws(account.settings, AdapterTools(http, environment={}))
    assert "AWS_KEY_ID_REF" in adapter.missing_credentials()
    with pytest.raises(Fatal, match="AWS_KEY_ID_REF") as caught:
        await adapter.check()
    assert caught.value.scope == "credential"
    plain = Account(stub.url, http, access_key_id_env=None, secret_access_key_env=None)
    with pytest.raises(Fatal) as caught:
        await plain.adapter.check()
    assert (caught.value.scope, caught.value.code) == ("credential", "credentials_missing")
    assert stub.lines == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket": "gs://b"}, "s3://bucket/folder"),
        ({"bucket": "s3://"}, "s3://bucket/folder"),
        ({"region": ""}, "region"),
        ({"access_key_id_env": "A"}, "set both"),
        ({"base_url": "nowhere"}, "base_url"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        AwsSettings(**{"region": "us-east-1", "bucket": "s3://b", **settings})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"uri": "ftp://x/a.wav"}, "begins with 'ftp'"),
        ({"filename": "notes.txt"}, "a format that AWS does not accept"),
        ({"speakers_max": 1}, "2 to 30"),
        ({"language": "English!"}, "en-US"),
        ({"tempo": 2}, "'tempo' is unknown"),
        ({"diarization": "yes"}, "true or false"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_sent(changes, message):
    adapter = Aws(AwsSettings(region="us-east-1", bucket="s3://bucket"), AdapterTools(None, environment={}))
    (problem,) = adapter.validate(request(**changes))
    assert message in problem.message
