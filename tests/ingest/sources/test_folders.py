"""Folders with odd contents: what is listed, what is skipped and why, and what a fetch does with it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import socket
import stat
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from batchwright.errors import Fatal, InvalidInput, Transient
from batchwright.ingest.sources import Fetched, NotModified, Reason, Sources, local_roots
from batchwright.ingest.sources import folders as module
from tests.conftest import roomy_folder
from tests.ingest.sources.conftest import SETTINGS

NOBODY = 65534


def fill(folder, *names, content=b"text"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def settle(path):
    """Make a file old enough that its time is reliable."""
    os.utime(path, ns=(1_700_000_000_123_456_789,) * 2)


@pytest.fixture
def roomy():
    with tempfile.TemporaryDirectory(dir=roomy_folder()) as folder:
        yield Path(folder)


async def test_a_folder_is_listed_in_the_order_of_names_with_all_below_it(pull, papers):
    fill(papers, "b.md", "a/z.pdf", "a/b/c.TXT", "c.docx", "Z.txt")
    documents, listing = await pull.list(str(papers))
    assert [listed.name for listed in documents] == ["Z.txt", "a/b/c.TXT", "a/z.pdf", "b.md", "c.docx"]
    assert [listed.metadata for listed in documents][:3] == [{}, {"folder": "a/b"}, {"folder": "a"}]
    assert documents[3].uri == f"file://{papers}/b.md"
    assert (documents[3].size, listing.count, listing.is_complete, listing.skipped) == (4, 5, True, [])


async def test_a_file_that_is_not_a_document_is_skipped_with_a_reason(pull, papers):
    fill(papers, ".hidden.txt", ".git/a.txt", "image.png", "Makefile", "good.txt", "empty.txt")
    (papers / "empty.txt").write_bytes(b"")
    fill(papers, "huge.txt", content=b"x" * 3_000_001)
    os.mkfifo(papers / "pipe.txt")
    (papers / "inside.txt").symlink_to("good.txt")
    (papers / "outside.txt").symlink_to("/etc/hostname")
    (papers / "broken.txt").symlink_to("nothing.txt")
    (papers / "folder").symlink_to("/etc")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(papers / "s.txt"))
        documents, listing = await pull.list(str(papers))
    assert [listed.name for listed in documents] == ["empty.txt", "good.txt"]
    assert {skipped.name: skipped.reason for skipped in listing.skipped} == {
        ".git": Reason.HIDDEN,
        ".hidden.txt": Reason.HIDDEN,
        "Makefile": Reason.UNSUPPORTED,
        "broken.txt": Reason.LINK,
        "folder": Reason.LINK,
        "huge.txt": Reason.TOO_LARGE,
        "image.png": Reason.UNSUPPORTED,
        "inside.txt": Reason.LINK,
        "outside.txt": Reason.LINK,
        "pipe.txt": Reason.SPECIAL,
        "s.txt": Reason.SPECIAL,
    }
    said = {skipped.name: skipped.message for skipped in listing.skipped}
    assert "leads out of the folder" in said["outside.txt"]
    assert "to something in the same folder" in said["inside.txt"]
    assert "3,000,001 bytes" in said["huge.txt"]
    assert "the extension .png is not read" in said["image.png"]
    assert listing.is_complete
    assert listing.skipped_total == 11


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        (["*.dat"], [], ["a/deep/x.dat", "x.dat"]),
        (["/x.*"], [], ["x.dat", "x.md"]),
        (["a/**/*.dat", "*.MD"], [], ["a/deep/x.dat", "x.md"]),
        ([], ["a/"], ["x.md"]),
        ([], ["**/deep"], ["a/y.txt", "x.md"]),
        (["*.dat"], ["a/*/x.*"], ["x.dat"]),
        (["*"], ["*.txt"], ["a/deep/x.dat", "x.dat", "x.md"]),
    ],
)
async def test_patterns_choose_and_exclusion_wins(pull, papers, include, exclude, names):
    fill(papers, "x.md", "x.dat", "a/y.txt", "a/deep/x.dat", "a/deep/z.txt")
    documents, listing = await pull.list(str(papers), include=include, exclude=exclude)
    assert [listed.name for listed in documents] == names
    assert listing.is_complete


async def test_a_pattern_that_could_take_for_ever_is_fast(pull, papers):
    fill(papers, "a" * 200 + ".txt")
    began = time.monotonic()
    documents, _ = await pull.list(str(papers), include=["*a" * 100 + "*b"])
    assert (documents, time.monotonic() - began < 2) == ([], True)


@pytest.mark.parametrize("patterns", [[""], ["/"], ["x" * 501], ["a"] * 101])
async def test_an_invalid_pattern_is_refused(pull, papers, patterns):
    with pytest.raises(InvalidInput, match="pattern"):
        await pull.list(str(papers), include=patterns)


async def test_links_are_followed_on_demand_but_never_out_of_the_roots(pull, papers, tmp_path):
    fill(papers, ".data/real.txt", "a/b.txt")
    fill(tmp_path, "secret.txt")
    (papers / "link.txt").symlink_to(".data/real.txt")
    (papers / "loop").symlink_to(".")
    (papers / "out.txt").symlink_to("../secret.txt")
    (papers / "twice").symlink_to("a")
    documents, listing = await pull.list(str(papers), follow_links=True)
    assert [listed.name for listed in documents] == ["a/b.txt", "link.txt", "twice/b.txt"]
    said = {skipped.name: skipped.message for skipped in listing.skipped}
    assert "out of the roots" in said["out.txt"]
    assert "a folder that it is in" in said["loop"]
    assert (await pull.fetch(documents[1].uri, roots=local_roots([str(papers)]))).size == 4


async def test_names_that_are_not_utf8_or_contain_control_characters_can_be_listed_and_fetched(pull, papers):
    names = [b"caf\xe9.txt", b"new\nline.txt", b"100%?#.txt", "grün.txt".encode()]
    for name in names:
        (papers / os.fsdecode(name)).write_bytes(name)
    documents, listing = await pull.list(str(papers))
    assert [listed.name for listed in documents] == ["100%?#.txt", "caf\\xe9.txt", "grün.txt", "new\\nline.txt"]
    assert [listed.uri.rpartition("/")[2] for listed in documents] == [
        "100%25%3F%23.txt",
        "caf%E9.txt",
        "gr%C3%BCn.txt",
        "new%0Aline.txt",
    ]
    for listed, name in zip(documents, sorted(names), strict=True):
        fetched = await pull.fetch(listed.uri)
        assert fetched.sha256 == hashlib.sha256(name).hexdigest()
        assert fetched.name == listed.name
        listed.uri.encode()
    assert listing.is_complete


@contextlib.contextmanager
def as_nobody(folder):
    """Run as a user who may not read everything, in a folder that this user owns."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


async def test_a_folder_that_cannot_be_read_makes_the_listing_incomplete(pull, roomy):
    fill(roomy, "a/x.txt", "closed/y.txt", "z.txt")
    with as_nobody(roomy):
        (roomy / "closed").chmod(0)
        documents, listing = await pull.list(str(roomy))
        (roomy / "closed").chmod(0o700)
    assert [listed.name for listed in documents] == ["a/x.txt", "z.txt"]
    assert not listing.is_complete
    assert [(skipped.name, skipped.reason) for skipped in listing.skipped] == [("closed/", Reason.UNREADABLE)]
    assert "Permission denied" in listing.skipped[0].message


async def test_a_file_that_we_may_not_read_fails_alone(roomy):
    fill(roomy, "a.txt")
    (roomy / "a.txt").chmod(0)
    with as_nobody(roomy), pytest.raises(Fatal, match="user may not read") as raised:
        await Sources(SETTINGS).fetch(f"file://{roomy}/a.txt", roomy / "document", roots=[str(roomy)])
    assert (raised.value.code, raised.value.scope) == ("source_refused", "item")
    assert [path.name for path in roomy.iterdir()] == ["a.txt"]


async def test_a_folder_deeper_than_the_limit_makes_the_listing_incomplete(pull, papers):
    deep = papers.joinpath(*["d"] * (module.DEPTH_MAX + 1))
    deep.mkdir(parents=True)
    fill(deep, "x.txt")
    documents, listing = await pull.list(str(papers))
    assert (documents, listing.is_complete) == ([], False)
    assert "deeper than 100" in listing.skipped[0].message


async def test_more_documents_than_the_limit_make_the_listing_incomplete(pull, papers):
    fill(papers, "a.txt", "b.txt", "c.txt")
    documents, listing = await pull.list(str(papers), documents_max=2)
    assert (len(documents), listing.is_complete) == (2, False)
    documents, listing = await pull.list(str(papers), documents_max=3)
    assert (len(documents), listing.is_complete) == (3, True)


async def test_skipped_files_are_counted_and_listed_up_to_a_limit_and_gaps_are_always_listed(pull, papers):
    fill(papers, *(f"{n}.png" for n in range(1_100)))
    papers.joinpath("z", *["d"] * (module.DEPTH_MAX + 1)).mkdir(parents=True)
    _, listing = await pull.list(str(papers))
    assert (len(listing.skipped), listing.skipped_total) == (1_001, 1_101)
    assert listing.skipped[-1].reason is Reason.UNREADABLE
    assert listing.skipped_counts[Reason.UNSUPPORTED] == 1_100


async def test_a_listing_that_was_not_read_to_its_end_is_incomplete(papers):
    fill(papers, "a.txt", "b.txt")
    listing = Sources(SETTINGS).list([str(papers)], roots=[str(papers)])
    await anext(listing)
    assert not listing.is_complete


async def test_a_file_that_is_named_as_the_source_is_listed_whatever_its_name(pull, papers):
    fill(papers, ".notes", "x.txt")
    (papers / "link").symlink_to("x.txt")
    documents, _ = await pull.list(str(papers / ".notes"), str(papers / "link"), str(papers), f"file://{papers}/x.txt")
    assert [listed.name for listed in documents] == [".notes", "link", "x.txt"]


async def test_a_missing_path_or_one_that_is_not_a_file_cannot_be_listed(pull, papers):
    with pytest.raises(InvalidInput, match=r"nothing cannot be listed: No such file"):
        await pull.list(str(papers / "nothing"))
    os.mkfifo(papers / "pipe")
    with pytest.raises(InvalidInput, match="neither a file nor a folder"):
        await pull.list(str(papers / "pipe"))


@pytest.mark.thorough
@pytest.mark.timed("a bound on time")
async def test_a_hundred_thousand_files_are_listed_quickly_without_blocking_the_event_loop(pull, roomy):
    papers = roomy
    for folder in range(100):
        (papers / f"{folder:03}").mkdir()
        for n in range(1_000):
            os.close(os.open(papers / f"{folder:03}" / f"{n:04}.txt", os.O_CREAT | os.O_WRONLY))
    waits, stop = [], asyncio.Event()

    async def watch():
        while not stop.is_set():
            began = time.monotonic()
            await asyncio.sleep(0.01)
            waits.append(time.monotonic() - began)

    watching = asyncio.ensure_future(watch())
    began = time.monotonic()
    documents, listing = await pull.list(str(papers))
    took = time.monotonic() - began
    stop.set()
    await watching
    assert (len(documents), listing.is_complete, documents[-1].name) == (100_000, True, "099/0999.txt")
    assert took < 30
    assert max(waits) < 1


async def test_a_file_is_fetched_into_a_private_copy(pull, papers):
    content = os.urandom(2_500_000)
    fill(papers, "a.txt", content=content)
    settle(papers / "a.txt")
    before = os.umask(0)
    try:
        fetched = await pull.fetch(f"file://{papers}/a.txt")
    finally:
        os.umask(before)
    assert isinstance(fetched, Fetched)
    assert fetched.path.read_bytes() == content
    assert (fetched.sha256, fetched.size) == (hashlib.sha256(content).hexdigest(), len(content))
    assert (fetched.name, fetched.media_type) == ("a.txt", None)
    assert stat.S_IMODE(fetched.path.stat().st_mode) == 0o600
    assert pull.leftovers == []


async def test_an_unchanged_file_is_not_fetched_again(pull, papers):
    fill(papers, "a.txt")
    settle(papers / "a.txt")
    (listed,), _ = await pull.list(str(papers))
    first = await pull.fetch(listed.uri)
    assert first.etag == listed.etag
    first.path.unlink()
    assert await pull.fetch(listed.uri, etag=first.etag) == NotModified(etag=first.etag)
    assert not first.path.exists()
    assert pull.leftovers == []
    fill(papers, "a.txt", content=b"more text")
    assert (await pull.fetch(listed.uri, etag=first.etag)).size == 9


async def test_a_file_written_just_now_has_no_etag_because_it_may_change_again_unnoticed(pull, papers):
    fill(papers, "a.txt")
    os.utime(papers / "a.txt", ns=(time.time_ns(),) * 2)
    assert (await pull.fetch(f"file://{papers}/a.txt")).etag is None


async def test_an_empty_file_is_fetched(pull, papers):
    fill(papers, "a.txt", content=b"")
    fetched = await pull.fetch(f"file://{papers}/a.txt")
    assert (fetched.size, fetched.path.read_bytes()) == (0, b"")


@pytest.mark.parametrize(
    ("make", "error", "code"),
    [
        (lambda path: None, Fatal, "source_gone"),
        (lambda path: path.parent.rmdir(), Fatal, "source_gone"),
        (lambda path: path.mkdir(), Fatal, "source_refused"),
        (lambda path: os.mkfifo(path), Fatal, "source_refused"),
        (lambda path: path.symlink_to("/dev/zero"), Fatal, "source_refused"),
        (lambda path: path.symlink_to("/etc/passwd"), Fatal, "source_refused"),
        (lambda path: path.symlink_to(path), Fatal, "source_refused"),
        (lambda path: path.write_bytes(b"x" * 3_000_001), Fatal, "document_too_large"),
    ],
)
async def test_a_file_that_was_replaced_by_something_else_fails_alone(pull, papers, make, error, code):
    path = papers / "sub" / "a.txt"
    path.parent.mkdir()
    make(path)
    with pytest.raises(error) as raised:
        await asyncio.wait_for(pull.fetch(f"file://{path}", roots=[str(papers)]), 10)
    assert (raised.value.code, raised.value.scope) == (code, "item")
    assert not (papers.parent / "fetched" / "document").exists()
    assert pull.leftovers == []


async def test_a_file_that_changes_while_it_is_copied_is_retried_later(pull, papers, monkeypatch):
    fill(papers, "a.txt", content=b"x" * 2_000_000)
    read = os.read

    def read_and_write(file, size):
        data = read(file, size)
        if size == module.PIECE_BYTES:
            with (papers / "a.txt").open("ab") as more:
                more.write(b"y")
        return data

    monkeypatch.setattr(module.os, "read", read_and_write)
    with pytest.raises(Transient, match="changed while it was read") as raised:
        await pull.fetch(f"file://{papers}/a.txt")
    assert raised.value.code == "source_changed"
    assert pull.leftovers == []


async def test_a_link_put_in_the_way_after_the_check_is_not_followed(papers, tmp_path, monkeypatch):
    fill(papers, "sub/a.txt")
    fill(tmp_path, "secret/a.txt", content=b"secret")
    roots = module.Roots([str(papers)])
    checked = os.path.realpath(papers / "sub" / "a.txt")
    (papers / "sub").rename(papers / "old")
    (papers / "sub").symlink_to(tmp_path / "secret")
    with pytest.raises((Fatal, Transient)) as raised:
        module._open(checked, "sub/a.txt", roots)
    assert raised.value.code in ("source_gone", "source_changed")


async def test_an_error_of_the_disk_is_transient(pull, papers, monkeypatch):
    fill(papers, "a.txt")

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module.os, "read", broken)
    with pytest.raises(Transient, match="Input/output error") as raised:
        await pull.fetch(f"file://{papers}/a.txt")
    monkeypatch.undo()
    assert raised.value.code == "source_unavailable"


async def test_a_full_disk_is_transient(pull, papers, monkeypatch):
    fill(papers, "a.txt")
    from batchwright.ingest.sources import sink

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sink.os, "write", full)
    with pytest.raises(Transient, match="No space left") as raised:
        await pull.fetch(f"file://{papers}/a.txt")
    monkeypatch.undo()
    assert raised.value.code == "disk_full"
    assert pull.leftovers == []


async def test_a_mount_that_hangs_does_not_block_other_work(pull, papers, monkeypatch):
    """More fetches hang than asyncio has threads; other work that needs a thread still gets one."""
    fill(papers, "a.txt")
    read, go_on = os.read, threading.Event()
    monkeypatch.setattr(module.os, "read", lambda file, size: go_on.wait(60) and read(file, size))
    sources = Sources(replace(SETTINGS, seconds=0.3))
    hanging = [
        sources.fetch(f"file://{papers}/a.txt", papers.parent / f"{n}", roots=[str(papers)])
        for n in range((os.cpu_count() or 1) + 40)
    ]
    ends = await asyncio.gather(*hanging, return_exceptions=True)
    assert {getattr(end, "code", end) for end in ends} == {"source_slow"}
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 5) == "free"
    go_on.set()
    await sources.close()


async def test_a_cancelled_fetch_leaves_nothing_behind_although_its_thread_continues(pull, papers, monkeypatch):
    fill(papers, "a.txt", content=b"x" * 2_500_000)
    read, reads, go_on, ended = os.read, [], threading.Event(), threading.Event()

    def stuck(file, size):
        if size == module.PIECE_BYTES:
            reads.append(size)
            go_on.wait(10)
        return read(file, size)

    def copy(*arguments, original=module._copy):
        try:
            return original(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(module.os, "read", stuck)
    monkeypatch.setattr(module, "_copy", copy)
    with pytest.raises(Transient, match=r"did not arrive within 0.2 s") as raised:
        await pull.fetch(f"file://{papers}/a.txt", seconds=0.2)
    assert raised.value.code == "source_slow"
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 10)
    assert (len(reads), pull.leftovers) == (1, [])
    assert not (papers.parent / "fetched" / "document").exists()
