"""What every store promises, tested with every implementation."""

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from batchwright.errors import Conflict, InvalidInput, NotFound, StorageError, TooLarge
from batchwright.storage.settings import MIB


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def chunks(data: bytes, size: int = 100_000):
    for start in range(0, len(data), size):
        await asyncio.sleep(0)
        yield data[start : start + size]


async def whole(store, key, *args) -> bytes:
    return b"".join([part async for part in store.get(key, *args)])


async def keys(store, *args) -> list[str]:
    return [found.key async for found in store.list(*args)]


LARGE = os.urandom(11 * MIB + 17)


@pytest.mark.parametrize("data", [b"", b"x", b"some bytes\r\n\x00", LARGE], ids=["empty", "one", "few", "parts"])
async def test_any_content_that_was_put_can_be_read_back(store, tmp_path, data):
    file = tmp_path / "upload"
    file.write_bytes(data)
    sources = {"bytes": data, "stream": chunks(data), "maker": lambda: chunks(data), "path": file}
    for form, source in sources.items():
        key = f"files/{form}"
        stored = await store.put(key, source)
        assert (stored.key, stored.size, stored.sha256) == (key, len(data), sha256(data))
        found = await store.head(key)
        assert (found.key, found.size, found.etag) == (key, len(data), stored.etag)
        assert await whole(store, key) == data
    stored = await store.put_file("files/linked", file)
    assert (stored.size, stored.sha256) == (len(data), sha256(data))
    assert await whole(store, "files/linked") == data


async def test_ranges_are_read_and_cut_where_the_object_ends(store):
    data = LARGE[: 6 * MIB]
    await store.put("a", data)
    middle = 5 * MIB - 3, 5 * MIB + 3
    assert await whole(store, "a", *middle) == data[slice(*middle)]
    assert await whole(store, "a", len(data) - 2) == data[-2:]
    assert await whole(store, "a", 3, 3) == b""
    assert await whole(store, "a", len(data) + 5) == b""
    assert await store.read("a", 10, 4) == data[10:14]
    assert await store.read("a", len(data) - 2, 100) == data[-2:]
    assert await store.read("a", len(data), 1) == b""


async def test_a_missing_object_is_not_found(store):
    await store.put("a/b", b"x")
    for key in ("a/c", "a", "a/b/c", "z"):
        assert await store.head(key) is None
        with pytest.raises(NotFound, match=f"there is no object {key}"):
            await store.read(key, 0, 1)
    with pytest.raises(NotFound, match="no file"):
        await store.put("a/d", missing)
    assert await keys(store) == ["a/b"]


async def missing():
    raise NotFound("there is no file of that name")
    yield b""


async def test_deleting_twice_is_fine_and_spares_the_others(store):
    for name in ("a/1", "a/2", "a/3"):
        await store.put(name, b"x")
    await store.delete("a/1", "a/9", "b/c/d", "a/2")
    await store.delete("a/1")
    await store.delete()
    assert await keys(store) == ["a/3"]
    await store.delete("a/3")
    await store.put("a/4", b"back in a folder that was emptied")
    assert await keys(store) == ["a/4"]


async def test_put_replaces(store):
    await store.put("a", b"old")
    await store.put("a", b"new!")
    assert await whole(store, "a") == b"new!"


@pytest.mark.parametrize("size", [1_000, 11 * MIB])
@pytest.mark.parametrize("form", ["bytes", "stream", "path"])
async def test_an_object_over_the_limit_is_refused_and_leaves_nothing(store, tmp_path, attempts, size, form):
    data = LARGE[:size]
    (tmp_path / "upload").write_bytes(data)
    source = {"bytes": data, "stream": chunks(data), "path": tmp_path / "upload"}[form]
    with pytest.raises(TooLarge, match=f"larger than {size - 1} bytes"):
        await store.put("files/a", source, limit=size - 1)
    assert await store.head("files/a") is None
    assert await keys(store) == []
    assert ("put", "failure") not in attempts()
    assert (await store.put("files/a", data, limit=size)).size == size


async def test_a_put_that_is_refused_has_closed_what_it_read(store, tmp_path, monkeypatch):
    opened, closed = [], []
    upload = tmp_path / "upload"
    upload.write_bytes(LARGE[:2_000])
    really_open = Path.open

    def watch(path, *args, **kwargs):
        file = really_open(path, *args, **kwargs)
        if path == upload:
            opened.append(file)
        return file

    async def stream():
        try:
            async for chunk in chunks(LARGE[:2_000], size=500):
                yield chunk
        finally:
            closed.append("stream")

    monkeypatch.setattr(Path, "open", watch)
    for source in (upload, stream):
        with pytest.raises(TooLarge):
            await store.put("files/a", source, limit=1_000)
    assert [file.closed for file in opened] == [True]
    assert closed == ["stream"]

    async def refuse(key, chunks):
        await anext(chunks)
        raise StorageError("the disk is odd")

    monkeypatch.setattr(store._backend, "write", refuse)
    with pytest.raises(StorageError):
        await store.put("files/a", stream)
    assert closed == ["stream", "stream"]


async def test_an_error_of_the_stream_is_raised_and_leaves_nothing_behind(store):
    class Gone(Exception):
        pass

    async def broken(size):
        async for chunk in chunks(LARGE[:size]):
            yield chunk
        raise Gone

    await store.put("a", b"before")
    for size in (10, 11 * MIB):
        with pytest.raises(Gone):
            await store.put("a", broken(size))
        with pytest.raises(Gone):
            await store.put("b", lambda size=size: broken(size))
    assert await keys(store) == ["a"]
    assert await whole(store, "a") == b"before"


async def test_a_cancelled_put_leaves_nothing(store):
    reached = asyncio.Event()

    async def endless():
        async for chunk in chunks(LARGE):
            yield chunk
        reached.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(store.put("a", endless()))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await keys(store) == []


async def test_concurrent_puts_of_one_key_leave_one_whole_object(store):
    bodies = [bytes([n]) * 700_000 for n in range(6)]
    await asyncio.gather(*(store.put("a/b", chunks(body)) for body in bodies))
    assert await whole(store, "a/b") in bodies
    assert await keys(store) == ["a/b"]


async def test_listing_is_by_folder_in_the_order_of_whole_keys(store):
    names = ["a-b/1", "a.b", "a/b/1", "a/b-1", "a/b.1", "a/c", "ab/1", "b"]
    for name in names:
        await store.put(name, b"xy")
    assert await keys(store) == sorted(names)
    assert await keys(store, "a") == await keys(store, "a/") == ["a/b-1", "a/b.1", "a/b/1", "a/c"]
    assert await keys(store, "a/b") == ["a/b/1"]
    assert await keys(store, "zzz") == []
    for after in [*names, "a", "a/b", "a/b/0", "aa", "Z", "zz"]:
        assert await keys(store, "", after) == [name for name in sorted(names) if name > after]
        inside = ["a/b-1", "a/b.1", "a/b/1", "a/c"]
        assert await keys(store, "a", after) == [name for name in inside if name > after]
    [found] = [found async for found in store.list("a/b")]
    assert found == await store.head("a/b/1")


async def test_an_object_that_is_replaced_under_a_reader_is_a_conflict(store):
    await store.put("a", LARGE)
    parts = store.get("a")
    await anext(parts)
    await store.put("a", LARGE[::-1])
    with pytest.raises(Conflict, match="a was replaced while it was read"):
        await anext(parts)


BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "../a",
    "a/..",
    "a/./b",
    ".drafts/x",
    "a\x00b",
    "a\nb",
    "a\n",
    "ä",
    "a b",
    "a#1",
    "a%2f",
]


@pytest.mark.parametrize("key", [*BAD_KEYS, "a" * 201, "a/" * 256 + "a", "C:\\a", "-" * 600])
async def test_a_key_that_could_leave_the_store_is_refused(folder, tmp_path, key):
    (tmp_path / "a").write_bytes(b"not yours")
    calls = [
        lambda: folder.put(key, b"x"),
        lambda: folder.put_file(key, tmp_path / "a"),
        lambda: folder.head(key),
        lambda: folder.read(key, 0, 1),
        lambda: folder.delete("b", key),
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match="cannot name an object"):
            await call()
    with pytest.raises(InvalidInput):
        folder.local_path(key)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
