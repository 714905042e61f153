"""A remote store that fails: what is retried and counted, what is left in the store, and what errors say."""

import asyncio
import logging
import os

import pytest

from batchwright.errors import ConfigurationError, StorageError, StorageUnavailable
from batchwright.storage import StorageSettings, Store, open_store
from batchwright.storage.remote import Remote, redacted
from tests.storage.test_store import LARGE, chunks, keys, whole


@pytest.mark.parametrize("fault", [500, 503, 429, 408, "drop"])
async def test_transient_errors_are_retried_and_each_attempt_is_counted(bucket, s3, attempts, fault):
    operations = {
        "put": lambda: bucket.put("a/b", b"x"),
        "head": lambda: bucket.head("a/b"),
        "get": lambda: bucket._part("a/b", 0, 1, None),
        "list": lambda: keys(bucket),
        "delete": lambda: bucket.delete("a/b"),
    }
    for name, operation in operations.items():
        s3.fail(fault, fault)
        await operation()
        assert attempts()[name, "retry"] == 2
        assert attempts()[name, "success"] >= 1
        assert len(s3.asked()) >= 3


@pytest.mark.parametrize("fault", [400, 401, 403, 404])
async def test_final_errors_are_not_retried(bucket, s3, attempts, fault):
    s3.fail(fault)
    with pytest.raises(StorageError) as told:
        await bucket.put("a", b"x")
    assert type(told.value) is StorageError
    assert len(s3.asked()) == 1
    assert ("put", "retry") not in attempts()


async def test_retries_end_after_the_allowed_attempts(bucket, s3, attempts):
    s3.fail(*[503] * 10)
    with pytest.raises(StorageUnavailable, match=r"a in s3://.*: 503 .*\(attempt 4 of 4\)"):
        await bucket.put("a", b"x")
    assert len(s3.asked()) == 4
    assert attempts() == {("put", "retry"): 3, ("put", "failure"): 1}


async def test_retries_end_after_the_allowed_time(s3, counts, attempts):
    settings = StorageSettings(url=f"s3://{s3.bucket}", attempts=100, retry_seconds_max=0)
    store = Store(Remote.at(settings.url, settings), settings, counts=counts)
    s3.fail(*[503] * 10)
    with pytest.raises(StorageUnavailable, match="attempt 1 of 100"):
        await store.head("a")
    assert attempts() == {("head", "failure"): 1}


async def test_an_unreachable_store_is_unavailable(monkeypatch, unused_tcp_port, counts):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused_tcp_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    settings = StorageSettings(url="s3://some-bucket", attempts=1)
    store = Store(Remote.at(settings.url, settings), settings, counts=counts)
    with pytest.raises(StorageUnavailable, match="a in s3://some-bucket"):
        await store.head("a")
    with pytest.raises(StorageUnavailable):
        await store.put("a", chunks(LARGE))


@pytest.mark.parametrize("source", ["bytes", "short stream", "long maker"])
async def test_a_lost_answer_leaves_one_object(bucket, s3, attempts, source):
    data = LARGE if source == "long maker" else b"x"
    made = {"bytes": data, "short stream": chunks(data), "long maker": lambda: chunks(data)}[source]
    s3.fail("deaf")
    await bucket.put("a", made)
    assert attempts() == {("put", "retry"): 1, ("put", "success"): 1}
    assert await keys(bucket) == ["a"]
    assert await whole(bucket, "a") == data


@pytest.mark.parametrize("fault", [503, "drop"])
@pytest.mark.parametrize("request_that_fails", [0, 1, 2, 4])
async def test_a_long_upload_that_fails_at_any_point_is_restarted(bucket, s3, fault, request_that_fails):
    s3.fail(*[""] * request_that_fails, fault)
    stored = await bucket.put("a", lambda: chunks(LARGE))
    assert await whole(bucket, "a") == LARGE
    assert stored.size == len(LARGE)
    assert s3.open_uploads() == 0


async def test_a_long_stream_cannot_be_sent_twice(bucket, s3, attempts):
    s3.fail("", 503)
    with pytest.raises(StorageUnavailable, match="attempt 1 of 4"):
        await bucket.put("a", chunks(LARGE))
    assert attempts() == {("put", "failure"): 1}
    assert await bucket.head("a") is None
    assert s3.open_uploads() == 0


async def test_an_interrupted_upload_is_aborted(bucket, s3):
    class Gone(Exception):
        pass

    reached = asyncio.Event()

    async def stream(end):
        async for chunk in chunks(LARGE):
            yield chunk
        reached.set()
        if end is not None:
            raise end
        await asyncio.Event().wait()

    with pytest.raises(Gone):
        await bucket.put("a", stream(Gone()))
    reached.clear()
    task = asyncio.create_task(bucket.put("a", stream(None)))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert s3.open_uploads() == 0
    assert any("DELETE" in asked for asked in s3.asked())
    assert await keys(bucket) == []


async def test_2500_objects_are_listed_in_order_although_a_page_fails(memory, attempts, monkeypatch):
    names = sorted(f"a/{n:04}" for n in range(2_500))
    await asyncio.gather(*(memory._backend.write(name, chunks(b"x")) for name in names))
    pages, begun = memory._backend.pages, []

    async def stumbling(prefix, after):
        begun.append(after)
        async for page in pages(prefix, after):
            yield page
            if len(begun) < 3:
                raise StorageUnavailable("stumbled")

    monkeypatch.setattr(memory._backend, "pages", stumbling)
    assert await keys(memory, "a") == names
    assert begun == [None, names[999], names[1_999]]
    assert attempts() == {("list", "retry"): 2, ("list", "success"): 4}
    assert await keys(memory, "a", names[1_234]) == names[1_235:]


async def test_a_page_that_fails_is_requested_again(bucket, s3, attempts):
    for n in range(5):
        await bucket.put(f"a/{n}", b"x")
    s3.fail(503, "drop")
    assert await keys(bucket, "a", "a/1") == ["a/2", "a/3", "a/4"]
    assert attempts()["list", "retry"] == 2


async def test_a_bucket_that_does_not_exist_is_named(s3, counts):
    settings = StorageSettings(url="s3://no-such-bucket/x")
    store = open_store(settings, beside=None, counts=counts)
    for call in (store.put("a", b"x"), store.put("a", lambda: chunks(LARGE)), keys(store)):
        with pytest.raises(StorageError, match="s3://no-such-bucket/x does not exist"):
            await call


@pytest.mark.parametrize("fault", [400, 403, 503])
async def test_no_secret_is_shown(bucket, s3, caplog, fault):
    caplog.set_level(logging.DEBUG)
    s3.fail(*[fault] * 4)
    with pytest.raises(StorageError) as told:
        await bucket.put("a", b"x")
    error: BaseException | None = told.value
    while error is not None:
        assert "the-key-id" not in str(error)
        assert "the-secret" not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert "the-key-id" not in caplog.text
    assert str(fault) in str(told.value)


@pytest.mark.parametrize("url", ["s3://user:hidden@bucket/a", "s3://bucket/a?sig=hidden", "az://b/c#hidden"])
def test_a_url_with_secrets_is_refused_without_repeating_them(tmp_path, url):
    with pytest.raises(ConfigurationError, match="must be without user, password and query") as told:
        open_store(StorageSettings(url=url), beside=tmp_path)
    assert "hidden" not in str(told.value)
    assert "hidden" not in redacted(url)


def test_obstore_itself_never_retries(bucket):
    assert bucket._backend._store.retry_config["max_retries"] == 0


async def test_the_component_is_a_label(s3, counts):
    store = open_store(StorageSettings(url=f"s3://{s3.bucket}"), beside=None, counts=counts, component="api")
    await store.put("a", os.urandom(10))
    assert list(counts.flat()) == ['["file_storage_operations_total","put","api","success"]']


async def test_a_remote_object_has_no_path_here(bucket):
    assert bucket.local_path("a") is None
    assert await bucket.sweep(0) == 0
