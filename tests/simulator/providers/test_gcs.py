"""The buckets, as obstore and as Google's JSON API meet them."""

import json

import httpx
import obstore
import pytest
from obstore.exceptions import AlreadyExistsError
from obstore.store import GCSStore


def store(server):
    account = {
        "gcs_base_url": server.urls["gcs"],
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    return GCSStore("bucket", service_account_key=json.dumps(account), client_options={"allow_http": True})


async def test_obstore_writes_reads_lists_and_deletes(providers):
    bucket = store(providers)
    await obstore.put_async(bucket, "a/ä b.txt", b"hello")
    await obstore.put_async(bucket, "a/large.bin", b"x" * 12_000_000)
    await obstore.put_async(bucket, "b/c.txt", b"")
    found = await obstore.get_async(bucket, "a/ä b.txt")
    assert bytes(await found.bytes_async()) == b"hello"
    assert bytes(await obstore.get_range_async(bucket, "a/ä b.txt", start=1, end=3)) == b"el"
    assert (await obstore.head_async(bucket, "a/large.bin"))["size"] == 12_000_000
    assert sorted(one["path"] for one in await bucket.list("a").collect_async()) == ["a/large.bin", "a/ä b.txt"]
    assert (await bucket.list_with_delimiter_async())["common_prefixes"] == ["a", "b"]
    with pytest.raises(AlreadyExistsError):
        await obstore.put_async(bucket, "b/c.txt", b"again", mode="create")
    await obstore.delete_async(bucket, "b/c.txt")
    with pytest.raises(FileNotFoundError):
        await obstore.head_async(bucket, "b/c.txt")


async def test_lists_in_xml_have_pages(providers):
    for n in range(5):
        providers.world.put_blob("bucket", f"a/{n}", b"x")
    url = f"{providers.urls['gcs']}/bucket"
    async with httpx.AsyncClient(params={"list-type": "2", "max-keys": "2"}) as client:
        first = (await client.get(url)).text
        assert "<NextContinuationToken>a/1</NextContinuationToken>" in first
        last = (await client.get(url, params={"continuation-token": "a/3"})).text
    assert "<Key>a/4</Key>" in last
    assert "NextContinuationToken" not in last


async def test_the_json_api_uploads_lists_gets_and_deletes(providers):
    async with httpx.AsyncClient(base_url=providers.urls["gcs"], headers={"authorization": "Bearer t"}) as client:
        path = "/upload/storage/v1/b/bucket/o"
        made = await client.post(path, params={"uploadType": "media", "name": "a/b.wav"}, content=b"123")
        assert (made.json()["name"], made.json()["size"]) == ("a/b.wav", "3")
        start = await client.post(path, params={"uploadType": "resumable", "name": "a/c.wav"}, json={})
        where = start.headers["location"]
        more = await client.put(where, content=b"12", headers={"content-range": "bytes 0-1/*"})
        assert (more.status_code, more.headers["range"]) == (308, "bytes=0-1")
        assert (await client.put(where, content=b"3", headers={"content-range": "bytes 2-2/3"})).json()["size"] == "3"
        listed = (await client.get("/storage/v1/b/bucket/o", params={"prefix": "a/", "maxResults": 1})).json()
        assert ([one["name"] for one in listed["items"]], listed["nextPageToken"]) == (["a/b.wav"], "1")
        one = "/storage/v1/b/bucket/o/a%2Fb.wav"
        assert (await client.get(one)).json()["bucket"] == "bucket"
        assert (await client.get(one, params={"alt": "media"})).content == b"123"
        assert (await client.delete(one)).status_code == 204
        missing = await client.get(one)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, 404)
