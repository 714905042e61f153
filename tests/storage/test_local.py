"""A folder as a store: complete objects or none, synced before a put returns, and with little memory."""

import asyncio
import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from batchwright.errors import (
    ConfigurationError,
    InvalidInput,
    NotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from batchwright.storage import StorageSettings, open_store
from batchwright.storage.settings import MIB
from tests.storage.test_store import chunks, keys, whole


def program(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


def drafts(tmp_path) -> list[Path]:
    folder = tmp_path / "files" / ".drafts"
    return list(folder.iterdir()) if folder.exists() else []


MANY_PUTS = """
    import asyncio, os, sys
    from pathlib import Path
    from batchwright.storage.local import Local
    from batchwright.storage import Store

    async def main():
        store = Store(Local(Path(sys.argv[1])))
        async def stream(size):
            for _ in range(size // 50_000):
                await asyncio.sleep(0)
                yield os.urandom(50_000)
        async def write(lane):
            for n in range(100_000):
                key = f"{sys.argv[2]}/{lane}/{n % 7}/{n}"
                stored = await store.put(key, stream(2_000_000))
                print(key, stored.sha256, flush=True)
        await asyncio.gather(*map(write, range(3)))

    asyncio.run(main())
"""


async def test_a_kill_in_the_middle_of_puts_leaves_only_whole_objects(tmp_path):
    root = tmp_path / "files"
    acknowledged = {}
    for round in range(3):
        with subprocess.Popen(
            [*program(MANY_PUTS), str(root), str(round)], stdout=subprocess.PIPE, text=True
        ) as writer:
            for _ in range(10 + random.randrange(10)):
                key, sha256 = writer.stdout.readline().split()
                acknowledged[key] = sha256
            os.kill(writer.pid, signal.SIGKILL)
            for line in writer.stdout.read().splitlines(keepends=True):
                if line.endswith("\n"):
                    acknowledged.update([line.split()])
        store = open_store(StorageSettings(), beside=tmp_path)
        found = {found.key: found.size async for found in store.list()}
        assert set(acknowledged) <= set(found)
        assert set(found.values()) == {2_000_000}
        for key, sha256 in acknowledged.items():
            assert hashlib.sha256(await whole(store, key)).hexdigest() == sha256
        assert len(found) - len(acknowledged) <= 3 * (round + 1), (
            "at most one object per lane was stored but not reported yet"
        )
    assert await store.sweep(older_than_seconds=3_600) == 0
    left = len(drafts(tmp_path))
    assert left > 0
    assert await store.sweep(older_than_seconds=-1) == left
    assert drafts(tmp_path) == []


async def test_everything_is_synced_before_and_after_it_gets_its_name(folder, tmp_path, monkeypatch):
    calls = []
    root = tmp_path / "files"
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor):
        calls.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    def note_replace(source, target):
        calls.append(("replace", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    folders = [("fsync", str(root / "a" / "b")), ("fsync", str(root / "a")), ("fsync", str(root))]
    journal = tmp_path / "journal"
    journal.write_bytes(b"precious")
    journal.chmod(0o600)
    for put in (folder.put("a/b/c", b"x"), folder.put_file("a/b/c", journal)):
        calls.clear()
        await put
        (verb, draft), *rest = calls
        assert verb == "fsync"
        assert Path(draft).parent == root / ".drafts"
        assert rest == [("replace", str(root / "a" / "b" / "c")), *folders]


async def test_a_finished_file_is_linked_and_outlives_its_old_name(folder, tmp_path):
    journal = tmp_path / "journal"
    journal.write_bytes(b"precious")
    journal.chmod(0o600)
    stored = await folder.put_file("a/b", journal)
    assert folder.local_path("a/b").stat().st_ino == journal.stat().st_ino
    assert (await folder.head("a/b")).etag == stored.etag
    await folder.put_file("a/b", journal)
    journal.unlink()
    assert await whole(folder, "a/b") == b"precious"
    assert drafts(tmp_path) == []
    with pytest.raises(NotFound, match="no file"):
        await folder.put_file("a/c", journal)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM])
async def test_if_links_are_impossible_files_are_copied(folder, tmp_path, monkeypatch, number):
    def link(source, target):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    journal = tmp_path / "journal"
    journal.write_bytes(b"precious")
    await folder.put_file("a", journal)
    assert folder.local_path("a").stat().st_ino != journal.stat().st_ino
    assert await whole(folder, "a") == b"precious"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_says_so_keeps_the_old_object_and_leaves_no_draft(
    folder, tmp_path, monkeypatch, number, attempts
):
    await folder.put("a", b"old")

    def full(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="no space for a in the folder"):
        await folder.put("a", chunks(b"x" * 3 * MIB))
    assert await whole(folder, "a") == b"old"
    assert drafts(tmp_path) == []
    assert attempts()["put", "failure"] == 1


LIMITED = """
    import asyncio, resource, sys
    from pathlib import Path
    from batchwright.errors import StorageFull
    from batchwright.storage import Store
    from batchwright.storage.local import Local

    async def main():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))
        store = Store(Local(Path(sys.argv[1])))
        async def stream(n):
            for _ in range(n):
                yield b"x" * 1_000_000
        try:
            await store.put("a/b", stream(8))
        except StorageFull as error:
            print("full")
        await store.put("a/c", stream(4))
        print([found.key async for found in store.list()])

    asyncio.run(main())
"""


def test_a_write_that_the_system_refuses_half_way_leaves_nothing(tmp_path):
    command = [*program(LIMITED), str(tmp_path / "files")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.splitlines() == ["full", "['a/c']"]
    assert drafts(tmp_path) == []


async def test_a_disk_with_a_transient_error_is_tried_again(folder, monkeypatch, attempts):
    fsync, failures = os.fsync, [errno.EIO, errno.ESTALE]

    def stumble(descriptor):
        if failures:
            raise OSError(failures.pop(), "stumbled")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", stumble)
    await folder.put("a", chunks(b"a small stream is kept and sent again"))
    assert attempts() == {("put", "retry"): 2, ("put", "success"): 1}
    failures[:] = [errno.EIO]
    with pytest.raises(StorageUnavailable, match=r"attempt 1 of 4"):
        await folder.put("a", chunks(b"x" * 3 * MIB))  # the stream is used up and cannot be read again
    failures[:] = [errno.EIO]
    assert (await folder.put("a", lambda: chunks(b"x" * 3 * MIB))).size == 3 * MIB


async def test_a_folder_that_cannot_be_written_is_named_and_not_tried_again(folder, monkeypatch, attempts):
    def refuse(descriptor):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=r"no permission for a in the folder .*: Permission denied; let") as told:
        await folder.put("a", b"x")
    assert type(told.value) is StorageError
    assert attempts() == {("put", "failure"): 1}


async def test_a_key_is_an_object_or_a_folder(folder):
    await folder.put("a/b", b"x")
    for key in ("a", "a/b/c", "a/b/c/d"):
        with pytest.raises(InvalidInput, match="cannot be both"):
            await folder.put(key, b"y")
    await folder.delete("a", "a/b/c")
    assert await keys(folder) == ["a/b"]


async def test_puts_survive_deletions_that_remove_their_folder(folder):
    async def come_and_go(name):
        for _ in range(60):
            await folder.put(f"a/b/{name}", b"x")
            await folder.delete(f"a/b/{name}")

    await asyncio.gather(*map(come_and_go, "xyz"))
    assert await keys(folder) == []


async def test_2500_objects_are_listed_in_order_page_by_page_and_from_any_place(folder, attempts):
    names = [f"a/{n % 50:02}/{n:04}" for n in range(2_500)]
    root = folder.local_path("a")
    for name in names:
        path = root.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    names.sort()
    assert await keys(folder, "a") == names
    assert attempts()["list", "success"] == 4
    pages, after = [], None
    for _ in range(26):
        page = []
        async for found in folder.list("a", after):
            page.append(found.key)
            if len(page) == 100:
                break
        pages += page
        after = page[-1] if page else after
    assert pages == names


STREAM_300_MB = """
    import asyncio, os, resource, sys
    from pathlib import Path
    from batchwright.storage import StorageSettings, open_store

    async def main(url, folder):
        store = open_store(StorageSettings(url=url or None), beside=Path(folder))
        piece = bytes(64 * 1024)
        async def stream(n):
            for _ in range(n):
                await asyncio.sleep(0)
                yield piece
        async def pass_by(mib):
            stored = await store.put("a", stream(mib * 16))
            size = 0
            async for part in store.get("a"):
                size += len(part)
            assert size == stored.size == mib * 1024 * 1024
        await pass_by(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await pass_by(int(sys.argv[3]))
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, flush=True)

    asyncio.run(main(*sys.argv[1:3]))
    os._exit(0)  # a thread of obstore's may abort an interpreter that is leaving
"""


def test_300_mb_stream_through_40_mb_of_memory(tmp_path):
    command = [*program(STREAM_300_MB), "", str(tmp_path), "300"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert int(answer.stdout) < 40


def test_parts_of_a_remote_upload_are_few_at_a_time(tmp_path, s3):
    command = [*program(STREAM_300_MB), f"s3://{s3.bucket}/a", str(tmp_path), "80"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert int(answer.stdout) < 80


async def test_the_folder_is_beside_the_database_or_where_the_url_says(tmp_path):
    assert open_store(StorageSettings(), beside=tmp_path).local_path("a") == tmp_path / "files" / "a"
    named = open_store(StorageSettings(url=f"file://{tmp_path}/my%20files"), beside=tmp_path)
    assert named.local_path("a/b") == tmp_path / "my files" / "a" / "b"
    assert await named.head("a/b") is None
    assert not (tmp_path / "my files").exists()


@pytest.mark.parametrize(
    "url", ["/tmp/files", "file://relative/x", "ftp://host/x", "https://host/x", "s3://", "memory://", "bucket"]
)
def test_an_invalid_url_of_a_store_is_refused_with_valid_examples(tmp_path, url):
    with pytest.raises(ConfigurationError, match="write s3://bucket/path"):
        open_store(StorageSettings(url=url), beside=tmp_path)


@pytest.mark.parametrize(
    ("setting", "least"), [({"attempts": 0}, "1"), ({"part_bytes": 1}, "5242880"), ({"timeout_seconds": 0}, "0")]
)
def test_settings_that_cannot_work_are_refused(setting, least):
    with pytest.raises(ConfigurationError, match=f"must be .* {least}"):
        StorageSettings(**setting)


async def test_a_file_that_others_can_read_is_copied_so_that_the_object_is_private(tmp_path: Path) -> None:
    store = open_store(StorageSettings(), beside=tmp_path)
    for name, mode in {"public": 0o644, "private": 0o600}.items():
        (tmp_path / name).write_bytes(b"answer")
        (tmp_path / name).chmod(mode)
        await store.put_file(f"a/{name}", tmp_path / name)
    public, private = (store.local_path(f"a/{name}") for name in ("public", "private"))
    assert public is not None
    assert private is not None
    assert (public.stat().st_mode & 0o777, (tmp_path / "public").stat().st_mode & 0o777) == (0o600, 0o644)
    assert private.samefile(tmp_path / "private"), "a file that is already private is linked"
