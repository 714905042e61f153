"""Documents in a bucket, on moto's S3: listing in pages, gaps, and fetches that fail or find another object."""

from __future__ import annotations

import asyncio
import hashlib
import os

import obstore
import pytest
from obstore.store import S3Store

from batchwright.errors import Fatal, InvalidInput, Transient
from batchwright.ingest.sources import NotModified, Reason, Sources, local_roots
from batchwright.ingest.sources.objects import Objects
from batchwright.providers.buckets import Bucket
from batchwright.storage import StorageSettings
from batchwright.storage.remote import Remote
from batchwright.storage.settings import MIB
from tests.ingest.sources.conftest import SETTINGS


@pytest.fixture
def put(s3):
    store = S3Store(s3.bucket, client_options={"allow_http": True})

    async def call(*keys, content=b"text"):
        for key in keys:
            await obstore.put_async(store, key, content, use_multipart=False)

    return call


@pytest.fixture
def sources():
    """Sources with short timeouts, so that a failure is raised at once, and with small parts."""
    settings = StorageSettings(attempts=2, retry_seconds_max=1, part_bytes=5 * MIB)
    return Sources(SETTINGS, objects=Objects(lambda root: Bucket(Remote.at(root, settings), settings)))


async def listed(sources, *named, **options):
    listing = sources.list(named, roots=local_roots(named), **options)
    return [document async for document in listing], listing


async def test_a_prefix_is_listed_like_a_folder(s3, put, sources):
    await put("p/b.md", "p/2024/a.PDF", "p/x.png", "p/.git/x.txt", "p-other.txt", "q/c.txt", "p/ä b+%#?.txt")
    await put("p/huge.txt", content=b"x" * 3_000_001)
    documents, listing = await listed(sources, f"s3://{s3.bucket}/p")
    assert [document.name for document in documents] == ["2024/a.PDF", "b.md", "ä b+%#?.txt"]
    assert documents[0].uri == f"s3://{s3.bucket}/p/2024/a.PDF"
    assert documents[0].metadata == {"bucket": f"s3://{s3.bucket}", "folder": "2024"}
    assert (documents[0].size, listing.is_complete) == (4, True)
    assert {skipped.name: skipped.reason for skipped in listing.skipped} == {
        ".git/x.txt": Reason.HIDDEN,
        "huge.txt": Reason.TOO_LARGE,
        "x.png": Reason.UNSUPPORTED,
    }


async def test_a_whole_bucket_and_one_object_can_be_named(s3, put, sources):
    await put("a.txt", "b/c.dat")
    documents, _ = await listed(sources, f"s3://{s3.bucket}", include=["*"])
    assert [document.name for document in documents] == ["a.txt", "b/c.dat"]
    documents, listing = await listed(sources, f"s3://{s3.bucket}/b/c.dat")
    assert ([document.name for document in documents], listing.is_complete) == (["c.dat"], True)


async def test_a_prefix_without_objects_is_a_gap_so_that_a_typo_retires_nothing(s3, put, sources):
    await put("a.txt")
    documents, listing = await listed(sources, f"s3://{s3.bucket}/nothing/")
    assert (documents, listing.is_complete) == ([], False)
    assert "no object or folder with this name" in listing.skipped[0].message


async def test_a_page_that_fails_once_is_requested_again(s3, put, sources):
    await put("p/a.txt", "p/b.txt")
    s3.fail(503)
    documents, listing = await listed(sources, f"s3://{s3.bucket}/p/")
    assert ([document.name for document in documents], listing.is_complete) == (["a.txt", "b.txt"], True)


async def test_a_page_that_keeps_failing_is_a_gap_and_other_sources_are_still_listed(s3, put, sources, tmp_path):
    (tmp_path / "x.txt").write_text("text")
    await put("p/a.txt")
    s3.fail(503, 503)
    documents, listing = await listed(sources, f"s3://{s3.bucket}/p/", str(tmp_path))
    assert ([document.name for document in documents], listing.is_complete) == (["x.txt"], False)
    assert "only a part of it could be listed" in listing.skipped[0].message


@pytest.mark.thorough
async def test_a_later_page_that_fails_is_requested_again_after_the_last_key(s3, put, sources):
    await asyncio.gather(*(put(f"p/{n:04}.txt") for n in range(1_005)))
    s3.fail("", 503)
    documents, listing = await listed(sources, f"s3://{s3.bucket}/p/")
    assert (len(documents), listing.is_complete) == (1_005, True)
    assert [document.name for document in documents] == sorted(document.name for document in documents)
    s3.fail("", 503, 503, 503)
    documents, listing = await listed(sources, f"s3://{s3.bucket}/p/")
    assert (len(documents), listing.is_complete) == (1_000, False)


async def test_credentials_that_are_refused_stop_the_listing(s3, put, sources):
    s3.fail(403)
    with pytest.raises(Fatal, match="403") as raised:
        await listed(sources, f"s3://{s3.bucket}/p/")
    assert raised.value.scope == "credential"


async def test_an_object_is_fetched_and_not_again_while_it_is_the_same(s3, put, sources, tmp_path):
    content = os.urandom(1_000_000)
    await put("p/ä b+%#?.txt", content=content)
    (document,), _ = await listed(sources, f"s3://{s3.bucket}/p")
    roots = [f"s3://{s3.bucket}/p"]
    fetched = await sources.fetch(document.uri, tmp_path / "document", roots=roots)
    assert fetched.path.read_bytes() == content
    assert (fetched.sha256, fetched.name) == (hashlib.sha256(content).hexdigest(), "ä b+%#?.txt")
    assert fetched.etag == document.etag
    again = await sources.fetch(document.uri, tmp_path / "again", etag=document.etag, roots=roots)
    assert again == NotModified(etag=document.etag)
    await put("p/ä b+%#?.txt", content=b"other")
    assert (await sources.fetch(document.uri, tmp_path / "again", etag=document.etag, roots=roots)).size == 5


@pytest.mark.parametrize(
    ("faults", "kind", "code"),
    [
        ([404], Fatal, "source_gone"),
        (["", 404], Fatal, "source_gone"),
        (["", 412], Transient, "source_changed"),
        ([503, 503], Transient, "storage_unavailable"),
        ([403], Fatal, "storage_refused"),
    ],
)
async def test_a_failed_fetch_has_the_right_error(s3, put, sources, tmp_path, faults, kind, code):
    await put("a.txt")
    s3.fail(*faults)
    with pytest.raises(kind) as raised:
        await sources.fetch(f"s3://{s3.bucket}/a.txt", tmp_path / "document", roots=[f"s3://{s3.bucket}"])
    assert raised.value.code == code
    assert list(tmp_path.iterdir()) == []


async def test_an_object_that_is_too_large_is_not_read(s3, put, sources, tmp_path):
    await put("a.txt", content=b"x" * 3_000_001)
    s3.fail()
    with pytest.raises(Fatal, match="3,000,001 bytes") as raised:
        await sources.fetch(f"s3://{s3.bucket}/a.txt", tmp_path / "document", roots=[f"s3://{s3.bucket}"])
    assert raised.value.code == "document_too_large"
    assert [line.split()[0] for line in s3.asked()] == ["HEAD"]


async def test_an_object_outside_of_the_roots_is_not_read(s3, put, sources, tmp_path):
    await put("public/a.txt", "public-not/a.txt")
    roots = [f"s3://{s3.bucket}/public"]
    assert (await sources.fetch(f"s3://{s3.bucket}/public/a.txt", tmp_path / "document", roots=roots)).size == 4
    s3.fail()
    for uri in (f"s3://{s3.bucket}/public-not/a.txt", f"s3://{s3.bucket}/x.txt", "s3://other/public/a.txt"):
        with pytest.raises(Fatal, match="outside the roots") as raised:
            await sources.fetch(uri, tmp_path / "document", roots=roots)
        assert raised.value.code == "source_refused"
        with pytest.raises(InvalidInput, match="outside the roots"):
            sources.list([uri], roots=roots)
    with pytest.raises(Fatal):
        await sources.fetch(f"s3://{s3.bucket}/public/../x.txt", tmp_path / "document", roots=roots)
    assert s3.asked() == []


async def test_a_key_that_obstore_cannot_name_is_a_gap(s3, put, sources):
    await put("p/a.txt")
    s3._call("PUT", f"/{s3.bucket}/p/x//y.txt", b"text")
    _, listing = await listed(sources, f"s3://{s3.bucket}/p/")
    assert not listing.is_complete
    assert 'Path "p/x//y.txt" contained empty path segment' in listing.skipped[0].message
