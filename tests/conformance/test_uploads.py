"""What the official clients do with uploads: a large file in parts."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.batches.stage import jsonl, request
from tests.conformance.conftest import FILE_BYTES_MAX, Client
from tests.conformance.test_files import was_sent_once

DATA = jsonl([request(f"r{n}") for n in range(20)])


async def begun(client: Client, size: int = len(DATA), **options: Any) -> Any:
    wanted = {"filename": "in.jsonl", "purpose": "batch", "mime_type": "application/jsonl", **options}
    return await client(client.raw.uploads.create, bytes=size, **wanted)


async def part(client: Client, upload: Any, data: bytes) -> str:
    added = await client(client.raw.uploads.parts.create, upload.id, data=data)
    assert (added.object, added.upload_id) == ("upload.part", upload.id)
    return str(added.id)


async def test_a_file_uploaded_in_parts_is_the_input_of_a_batch(client: Client) -> None:
    upload = await begun(client)
    assert (upload.object, upload.status, upload.bytes, upload.file) == ("upload", "pending", len(DATA), None)
    assert upload.expires_at == upload.created_at + 3600
    pieces = [DATA[1000:], DATA[:1000]]
    last, first = await asyncio.gather(*(part(client, upload, piece) for piece in pieces))
    complete = client.raw.uploads.complete
    with pytest.raises(openai.BadRequestError):
        await client(complete, upload.id, part_ids=[first])
    with pytest.raises(openai.BadRequestError):
        await client(complete, upload.id, part_ids=[first, last], md5="0" * 32)
    md5 = hashlib.md5(DATA).hexdigest()
    done = await client(complete, upload.id, part_ids=[first, last], md5=md5)
    assert (done.status, done.file.object, done.file.bytes) == ("completed", "file", len(DATA))
    assert await client(complete, upload.id, part_ids=[first, last]) == done
    assert await client(client.files.retrieve, done.file.id) == done.file
    assert (await client.text(done.file.id)).encode() == DATA
    batch = await client(
        client.batches.create, input_file_id=done.file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    over = await client.ended(batch.id)
    assert (over.status, over.request_counts.completed) == ("completed", 20)


async def test_an_upload_can_be_cancelled_and_one_that_is_too_large_is_refused(client: Client) -> None:
    upload = await begun(client)
    await part(client, upload, DATA)
    assert (await client(client.raw.uploads.cancel, upload.id)).status == "cancelled"
    with pytest.raises(openai.ConflictError) as refused:
        await client(client.raw.uploads.parts.create, upload.id, data=DATA)
    assert was_sent_once(refused.value)
    with pytest.raises(openai.NotFoundError):
        await client(client.raw.uploads.cancel, "upload_unknown")
    with pytest.raises(openai.BadRequestError) as large:
        await begun(client, FILE_BYTES_MAX + 1)
    assert str(FILE_BYTES_MAX) in large.value.message
    assert await client.all(client.files.list) == []


@pytest.mark.parametrize("kind", ["path", "bytes"])
async def test_the_client_cuts_a_file_into_parts_by_itself(client: Client, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(DATA)
    source: dict[str, Any] = {"file": path}
    if kind == "bytes":
        source = {"file": DATA, "filename": "in.jsonl", "bytes": len(DATA)}
    upload = await client(
        client.raw.uploads.upload_file_chunked,
        **source, mime_type="application/jsonl", purpose="batch", part_size=len(DATA) // 3,
        md5=hashlib.md5(DATA).hexdigest(),
    )  # fmt: skip
    assert (upload.status, upload.file.filename) == ("completed", "in.jsonl")
    assert (await client.text(upload.file.id)).encode() == DATA
