"""What the official clients do with files: section 5.8 of the contract."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conformance.conftest import FILE_BYTES_MAX, Client, Running, official

TEXT = '{"custom_id": "a"}\n{"custom_id": "\u20ac"}\n{"custom_id": "c"}'
DATA = TEXT.encode()


@pytest.mark.parametrize("kind", ["path", "bytes", "tuple", "BytesIO", "file"])
async def test_a_file_is_uploaded_from_anything_that_the_client_accepts(
    client: Client, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(DATA)
    with path.open("rb") as opened:
        sources = {
            "path": path,
            "bytes": DATA,
            "tuple": ("in.jsonl", DATA, "application/jsonl"),
            "BytesIO": io.BytesIO(DATA),
            "file": opened,
        }
        file = await client(client.files.create, file=sources[kind], purpose="batch")
    assert (file.object, file.bytes, file.purpose, file.status) == ("file", len(DATA), "batch", "processed")
    assert file.id.startswith("file-")
    assert file.filename == "in.jsonl" if kind in ("path", "tuple", "file") else file.filename
    assert file.expires_at == file.created_at + 30 * 24 * 3600
    assert await client.text(file.id) == TEXT
    assert await client(client.files.retrieve, file.id) == file


async def test_a_file_expires_after_the_time_that_the_client_gives(client: Client) -> None:
    file = await client.upload(DATA, expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError) as refused:
        await client.upload(DATA, expires_after={"anchor": "created_at", "seconds": 60})
    assert (refused.value.code, refused.value.param) == ("integer_below_min_value", "expires_after[seconds]")
    assert (await client.upload(DATA, purpose="user_data")).expires_at is None


async def test_waiting_for_a_file_ends_at_once(client: Client) -> None:
    file = await client.upload(DATA)
    found = await asyncio.wait_for(client(client.files.wait_for_processing, file.id), 4)  # the client polls every 5 s
    assert found == file


async def test_files_are_listed_over_several_pages(client: Client) -> None:
    ids = [(await client.upload(b"%d" % n, purpose="batch" if n % 5 else "evals")).id for n in range(25)]
    for order, wanted in (("desc", ids[::-1]), ("asc", ids)):
        assert [file.id for file in await client.all(client.files.list, limit=10, order=order)] == wanted
    evals = await client.all(client.files.list, purpose="evals", limit=2)
    assert [file.id for file in evals] == ids[::5][::-1]
    page = await client(client.files.list, limit=10)
    assert (page.has_more, len(page.data), page.data[-1].id) == (True, 10, page.model_extra["last_id"])
    assert len(await client.all(client.files.list)) == 25


async def test_a_deleted_file_is_not_found(client: Client) -> None:
    file = await client.upload(DATA)
    deleted = await client(client.files.delete, file.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
    for method in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as refused:
            await client(method, file.id)
        assert refused.value.type == "invalid_request_error"
        assert file.id in refused.value.message
        assert refused.value.request_id


async def test_content_is_read_as_text_lines_and_bytes(running: Running, tenant: str) -> None:
    secret = await asyncio.to_thread(running.secret, tenant)
    async with official("sync", running, secret) as client:

        def read() -> None:
            id = client.files.create(file=("in.jsonl", DATA), purpose="batch").id
            assert client.files.content(id).text == TEXT
            assert client.files.content(id).read() == DATA
            assert list(client.files.content(id).iter_lines()) == TEXT.split("\n")
            with client.files.with_streaming_response.content(id) as response:
                assert response.headers["content-length"] == str(len(DATA))
                assert list(response.iter_lines()) == TEXT.split("\n")
            with client.files.with_streaming_response.content(id, extra_headers={"Range": "bytes=2-5"}) as response:
                assert (response.status_code, b"".join(response.iter_bytes())) == (206, DATA[2:6])

        await asyncio.to_thread(read)


async def test_content_is_read_as_text_lines_and_bytes_by_the_async_client(
    running: Running, tenant: str, tmp_path: Path
) -> None:
    secret = await asyncio.to_thread(running.secret, tenant)
    async with official("async", running, secret) as client:
        id = (await client.files.create(file=("in.jsonl", DATA), purpose="batch")).id
        content = await client.files.content(id)
        assert (content.text, await content.aread()) == (TEXT, DATA)
        assert [line async for line in await (await client.files.content(id)).aiter_lines()] == TEXT.split("\n")
        async with client.files.with_streaming_response.content(id) as response:
            assert [line async for line in response.iter_lines()] == TEXT.split("\n")
        async with client.files.with_streaming_response.content(id) as response:
            await response.stream_to_file(tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == DATA


async def test_a_file_that_is_too_large_is_a_bad_request(client: Client) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.upload(b"x" * (FILE_BYTES_MAX + 1))
    assert refused.value.body == {
        "message": f"File is too large. The limit of this server is {FILE_BYTES_MAX} bytes (batches.file_bytes_max).",
        "type": "invalid_request_error",
        "param": "file",
        "code": None,
    }
    with pytest.raises(openai.BadRequestError):
        await client.upload(b"x" * (FILE_BYTES_MAX + 20_000_000))
    assert await client.all(client.files.list) == []


async def test_a_purpose_that_cannot_be_uploaded_is_a_bad_request(client: Client) -> None:
    for purpose in ("batch_output", "nonsense"):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.upload(DATA, purpose=purpose)
        assert (refused.value.code, refused.value.param) == ("invalid_value", "purpose")


async def test_an_upload_is_repeated_by_its_key(client: Client) -> None:
    key = {"extra_headers": {"Idempotency-Key": "once"}}
    file = await client.upload(DATA, **key)
    assert (await client.upload(DATA, **key)).id == file.id
    with pytest.raises(openai.ConflictError) as refused:
        await client.upload(b"other", **key)
    assert was_sent_once(refused.value)
    assert len(await client.all(client.files.list)) == 1


async def test_keys_allow_only_what_their_scopes_allow(running: Running, tenant: str) -> None:
    reader = await asyncio.to_thread(running.secret, tenant, "read")
    async with official("async", running, "bw_unknown") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.files.list()
    async with official("async", running, reader) as client:
        assert (await client.files.list()).data == []
        with pytest.raises(openai.PermissionDeniedError):
            await client.files.create(file=DATA, purpose="batch")


def was_sent_once(error: Any) -> bool:
    """Whether the client sent the request only once."""
    return bool(error.response.request.headers["x-stainless-retry-count"] == "0")
