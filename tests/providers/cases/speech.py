"""Transcription of audio files, and its four providers."""

import importlib.util

from batchwright.providers.contract import Input, Request
from tests.conftest import skip
from tests.providers.blobs import use_server_buckets
from tests.providers.conformance import FAIL, VARIABLE, Case

NO_LIST = "jobs are not looked up in a list"
ONE_JOB = "there cannot be a second job of the same key"
NO_HTTP = "results are read from a bucket, whose reads are repeated by themselves"


def name(n, item):
    return f"call-{n}{'__fail_400__' if item == FAIL else ''}.wav"


def request(key, inputs):
    return Request(key=key, task_type="transcription", model=None, inputs=inputs)


def azure_settings(world):
    return {"base_url": world.server.urls["azure"], "api_key_env": VARIABLE}


def azure_request(world, key, items):
    names = [name(n, item) for n, item in enumerate(items)]
    return request(
        key, [Input(id=str(n), uri=f"https://audio.example.com/{one}", filename=one) for n, one in enumerate(names)]
    )


def google_settings(world):
    use_server_buckets(world)
    object.__setattr__(world.server.settings, "is_google_speech_cancellable", True)
    return {
        "base_url": world.server.urls["google"],
        "project": "project",
        "bucket": "gs://results/speech",
        "access_token_env": VARIABLE,
    }


def google_request(world, key, items):
    """Every second input is in a bucket already."""
    inputs = []
    for n, one in enumerate(name(n, item) for n, item in enumerate(items)):
        if n % 2:
            world.server.world.put_blob("calls", one, b"audio")
            inputs.append(Input(id=str(n), uri=f"gs://calls/{one}", filename=one))
        else:
            inputs.append(stored(world, n, one))
    return request(key, inputs)


def sarvam_settings(world):
    return {"base_url": world.server.urls["sarvam"], "api_key_env": VARIABLE}


def stored(world, n, filename):
    world.stored[f"file-{n}"] = f"audio {n}".encode()
    return Input(id=str(n), uri=f"file:file-{n}", filename=filename, bytes=len(world.stored[f"file-{n}"]))


def stored_request(world, key, items):
    return request(key, [stored(world, n, name(n, item)) for n, item in enumerate(items)])


def aws_settings(world):
    """The server checks the id of the key, because botocore logs ids but no secrets."""
    if importlib.util.find_spec("aiobotocore") is None:
        skip("aiobotocore is not installed")
    use_server_buckets(world)
    world.environment["KEY_ID"] = "wrong" if world.environment.get(VARIABLE) == "wrong" else "AKIATEST"
    return {
        "base_url": world.server.urls["aws"],
        "region": "us-east-1",
        "bucket": "s3://results/speech",
        "language": "en-US",
        "access_key_id_env": "KEY_ID",
        "secret_access_key_env": VARIABLE,
    }


CASES = [
    Case(
        name="azure",
        settings=azure_settings,
        make_request=azure_request,
        unsupported={"an_expired_job": "jobs do not expire"},
    ),
    Case(
        name="google",
        settings=google_settings,
        make_request=google_request,
        unsupported={
            "an_error_while_results": NO_HTTP,
            "an_unknown_status": "operations have no word for where they are",
        },
    ),
    Case(
        name="sarvam",
        settings=sarvam_settings,
        make_request=stored_request,
        routes={"create": "start"},
        unsupported={"a_job_is_found_when_the_list": NO_LIST, "two_jobs_of_one_key": ONE_JOB},
    ),
    Case(
        name="aws",
        settings=aws_settings,
        make_request=stored_request,
        items_max=1,
        unsupported={
            "a_job_is_found_when_the_list": NO_LIST,
            "a_job_without_any_results": "a job has one result",
            "a_refused_credential": "a used-up quota is a rate limit; credentials are in test_aws",
            "an_error_while_results": NO_HTTP,
            "an_expired_job": "jobs do not expire",
            "two_jobs_of_one_key": ONE_JOB,
        },
    ),
]
