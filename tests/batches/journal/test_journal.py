import asyncio
import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batches.journal import journal as module
from batchwright.batches.journal.envelopes import answered, request_id, unanswered
from batchwright.batches.journal.journal import (
    HEADER_BYTES,
    SYNC_LINES,
    Journal,
    JournalRange,
    Syncer,
    open_to_read,
    read_open,
    scan,
    tally_of,
    valid_end,
)
from batchwright.batches.tally import CODES_MAX, LineStatus, Tally
from batchwright.errors import Conflict, NotFound, StorageError, StorageFull, StorageUnavailable
from batchwright.inference.answers import Reply, Usage, classify

BATCH = "batch_" + "0" * 32
SECONDS_MAX = 20


def ok_line(offset, text="hi"):
    body = b'{"choices": ["%b"]}' % text.encode()
    return answered(request_id(BATCH, offset), f"c{offset}", classify(Reply(status=200, body=body), now=0.0))


def error_line(offset, code="batch_expired"):
    if code in ("batch_expired", "batch_cancelled", "request_aborted"):
        return unanswered(request_id(BATCH, offset), f"c{offset}", code)
    body = b'{"error": {"code": "%b"}}' % code.encode()
    return answered(request_id(BATCH, offset), f"c{offset}", classify(Reply(status=400, body=body), now=0.0))


CODES = {LineStatus.FAILED: "bad", LineStatus.EXPIRED: "batch_expired", LineStatus.CANCELLED: "batch_cancelled"}


def read_line(path, position):
    """The line of the record that begins at `position`."""
    head = path.read_bytes()[position : position + HEADER_BYTES]
    _, length, offset = struct.unpack_from("<IIq", head) if len(head) == HEADER_BYTES else (0, 0, 0)
    descriptor = open_to_read(path)
    try:
        return read_open(descriptor, path, position, length, offset)
    finally:
        os.close(descriptor)


def line_of(offset, status, text="hi"):
    return ok_line(offset, text) if status is LineStatus.OK else error_line(offset, CODES[status])


def add(journal, offset, status=LineStatus.OK, usage=None, text="hi"):
    journal.append(offset, status, line_of(offset, status, text), usage or Usage())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "7.2.seg"


@pytest.fixture
def syncer():
    syncer = Syncer(seconds=3600)
    yield syncer
    syncer.close()


def offsets(path, end=None):
    return [found.offset for found in scan(path, 0, end, verify=True)]


# Records


def test_appended_records_are_read_back(path):
    journal = Journal(path)
    usage = Usage(input=10, cached=4, output=2**31 - 1, reasoning=0)
    add(journal, 0, usage=usage)
    add(journal, 2**39, LineStatus.FAILED)
    add(journal, 5000, LineStatus.EXPIRED)
    add(journal, 7000, LineStatus.CANCELLED, Usage(input=1))
    records = list(scan(path, 0, journal.size, verify=True))
    assert [(one.offset, one.status, one.usage) for one in records] == [
        (0, LineStatus.OK, usage),
        (2**39, LineStatus.FAILED, Usage()),
        (5000, LineStatus.EXPIRED, Usage()),
        (7000, LineStatus.CANCELLED, Usage(input=1)),
    ]
    assert all(read_line(path, one.position) == line_of(one.offset, one.status) for one in records)
    assert [one.position for one in records] == [0, *(one.end for one in records[:-1])]
    assert [one.length for one in records] == [len(line_of(one.offset, one.status)) for one in records]
    assert records[-1].end == journal.size == path.stat().st_size
    journal.close()


def test_a_scan_may_begin_and_end_at_any_record(path):
    journal = Journal(path)
    for offset in range(5):
        add(journal, offset)
    ends = [found.end for found in scan(path)]
    assert [found.offset for found in scan(path, ends[0], ends[3])] == [1, 2, 3]
    journal.close()


@pytest.mark.parametrize("size", [1, 260_000, 262_144 - HEADER_BYTES, 3_000_000])
def test_lines_longer_than_the_buffer_are_read_whole(path, size):
    journal = Journal(path)
    for offset in range(4):
        add(journal, offset, text="x" * size)
    for verify in (False, True):
        found = list(scan(path, verify=verify))
        assert [one.offset for one in found] == [0, 1, 2, 3]
    assert read_line(path, found[2].position) == ok_line(2, "x" * size)
    assert valid_end(path) == journal.size
    journal.close()


def test_impossible_token_counts_are_unknown(path):
    journal = Journal(path)
    add(journal, 0, usage=Usage(input=2**32, output=2**32 - 1, cached=2**32 - 2))
    (found,) = scan(path)
    assert found.usage == Usage(cached=2**32 - 2)
    assert journal.take().tally == tally_of(path, 0, journal.size)
    journal.close()


def test_a_line_without_its_newline_is_not_taken(path):
    journal = Journal(path)
    for line in (b"{}", b"{}\n{}\n", b"\n\n", b""):
        with pytest.raises(AssertionError):
            journal.append(0, LineStatus.OK, line)
    assert journal.size == path.stat().st_size == 0
    journal.close()


def test_one_record_is_one_write(path, monkeypatch):
    writes = []
    write = os.write
    journal = Journal(path)
    monkeypatch.setattr(os, "write", lambda descriptor, data: (writes.append(len(data)), write(descriptor, data))[1])
    for offset in range(3):
        add(journal, offset)
    assert writes == [HEADER_BYTES + len(ok_line(offset)) for offset in range(3)]
    journal.close()


# Damage

records = st.lists(st.tuples(st.sampled_from(LineStatus), st.text("abc", max_size=3)), min_size=1, max_size=4)


def written(folder, found):
    """Write a journal with these lines; return its path and the end of each record."""
    path = Path(folder) / "1.1.seg"
    journal = Journal(path)
    ends = []
    for offset, (status, text) in enumerate(found):
        add(journal, offset, status, Usage(input=offset), text)
        ends.append(journal.size)
    journal.close()
    return path, ends


@settings(deadline=None, max_examples=15)
@given(records)
def test_cut_at_any_byte_a_journal_keeps_the_whole_records_before_it(found):
    with tempfile.TemporaryDirectory() as folder:
        path, ends = written(folder, found)
        for cut in range(ends[-1], -1, -1):
            os.truncate(path, cut)
            whole = [end for end in ends if end <= cut]
            end = valid_end(path)
            assert end == (whole[-1] if whole else 0)
            assert offsets(path, end) == list(range(len(whole)))
            if end < cut:
                for verify in (False, True):
                    with pytest.raises(StorageError, match=f"no whole record at byte {end}"):
                        list(scan(path, 0, cut, verify=verify))
        for start in ends:
            with pytest.raises(StorageError, match="damaged"):
                valid_end(path, start)


@settings(deadline=None, max_examples=200)
@given(records, st.integers(1, 255), st.data())
def test_a_changed_byte_is_detected_wherever_it_is(found, change, data):
    with tempfile.TemporaryDirectory() as folder:
        path, ends = written(folder, found)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= change
        path.write_bytes(content)
        hit = next(number for number, end in enumerate(ends) if at < end)
        start = ends[hit - 1] if hit else 0
        assert valid_end(path) == start
        assert offsets(path, start) == list(range(hit))
        with pytest.raises(StorageError, match=f"no whole record at byte {start}"):
            list(scan(path, verify=True))
        with pytest.raises(StorageError, match=f"record at byte {start} has a wrong checksum"):
            read_line(path, start)


def test_a_changed_bit_anywhere_in_a_record_is_detected(tmp_path):
    path, (start, end) = written(tmp_path, [(LineStatus.OK, "a"), (LineStatus.FAILED, "b")])
    content = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for at in range(start, end):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([content[at] ^ 1 << bit]), at)
                assert valid_end(path) == start
            os.pwrite(file.fileno(), content[at : at + 1], at)
    assert valid_end(path) == end


@pytest.mark.parametrize(
    "garbage", [b"\0", b"\0" * 4096, b"\xff" * 100, b"\n" * 33, os.urandom(500), b"\0" * 8 + b"\x01" * 60]
)
def test_bytes_that_a_power_cut_leaves_after_the_last_record_are_refused(path, garbage):
    journal = Journal(path)
    add(journal, 1)
    add(journal, 2)
    journal.close()
    with path.open("ab") as file:
        file.write(garbage)
    assert valid_end(path) == journal.size
    assert valid_end(path, journal.size) == journal.size
    assert tally_of(path, 0, valid_end(path)).lines == 2


@pytest.mark.parametrize("garbage", [b"\0" * HEADER_BYTES * 4, b"\7\0\0\0" * HEADER_BYTES, b"\xff" * 200])
@pytest.mark.parametrize("verify", [False, True])
def test_a_registered_range_of_garbage_is_damage(path, garbage, verify):
    path.write_bytes(garbage)
    with pytest.raises(StorageError, match="no whole record at byte 0"):
        list(scan(path, 0, len(garbage), verify=verify))


def test_a_range_beyond_the_end_of_the_file_is_damage(path):
    journal = Journal(path)
    add(journal, 1)
    for verify in (False, True):
        with pytest.raises(StorageError, match="damaged"):
            list(scan(path, 0, journal.size + 1, verify=verify))
        with pytest.raises(StorageError, match="damaged"):
            list(scan(path, 0, journal.size - 1, verify=verify))
        with pytest.raises(StorageError, match="damaged"):
            list(scan(path, 1, journal.size, verify=verify))
    with pytest.raises(StorageError, match="checksum"):
        read_line(path, journal.size)
    journal.close()


def test_a_journal_that_is_not_there_is_not_found(path):
    with pytest.raises(NotFound, match=r"no journal .*7\.2\.seg"):
        list(scan(path))
    with pytest.raises(NotFound):
        Journal(path.parent / "nowhere" / "1.1.seg")


def test_a_disk_that_cannot_be_read_is_an_error_of_the_storage(path, monkeypatch):
    journal = Journal(path)
    add(journal, 1)
    monkeypatch.setattr(os, "pread", fails)
    for read in (valid_end, lambda path: list(scan(path)), lambda path: read_line(path, 0)):
        with pytest.raises(StorageUnavailable, match="cannot be used: Input/output error"):
            read(path)
    journal.close()


# Opening


def test_an_existing_file_is_cut_after_its_last_record_and_continued(path):
    journal = Journal(path)
    add(journal, 1)
    size = journal.size
    journal.close()
    with path.open("ab") as file:
        file.write(b"half a record")
    again = Journal(path)
    assert again.size == path.stat().st_size == size
    add(again, 2)
    assert offsets(path) == [1, 2]
    part = again.take()
    assert (part.start, part.end, part.tally.lines) == (size, again.size, 1)
    assert again.sync() == again.size
    again.close()


def test_only_one_writer_at_a_time(path):
    journal = Journal(path)
    add(journal, 1)
    with pytest.raises(Conflict, match="each claim has its own"):
        Journal(path)
    add(journal, 2)
    assert offsets(path) == [1, 2]
    journal.close()


def test_a_closed_journal_refuses_lines(path):
    journal = Journal(path)
    add(journal, 1)
    assert journal.sync() == journal.size
    journal.close()
    assert journal.sync() == journal.size
    journal = Journal(path)
    add(journal, 1)
    journal.close()
    journal.close()
    with pytest.raises(StorageError, match="is closed"):
        add(journal, 2)
    with pytest.raises(StorageError, match="is closed"):
        journal.sync()


# Failures of the disk


class Disk:
    """Replaces os.write: writes a limited number of bytes per call, and fails after a limited number in all."""

    def __init__(self, monkeypatch, *, room=10**9, most=10**9, problem=errno.ENOSPC):
        self.room, self.most, self.problem = room, most, problem
        self.write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor, data):
        size = min(len(data), self.most, self.room)
        if size == 0:
            raise OSError(self.problem, os.strerror(self.problem))
        self.room -= size
        return self.write(descriptor, data[:size])


def test_short_writes_are_completed(path, monkeypatch):
    journal = Journal(path)
    Disk(monkeypatch, most=7)
    for offset in range(3):
        add(journal, offset)
    assert offsets(path) == [0, 1, 2]
    assert journal.size == path.stat().st_size
    journal.close()


@pytest.mark.parametrize(
    ("problem", "error", "words"),
    [
        (errno.ENOSPC, StorageFull, "no room for the journal"),
        (errno.EDQUOT, StorageFull, "no room for the journal"),
        (errno.EIO, StorageUnavailable, "cannot be used"),
    ],
)
def test_a_failed_write_leaves_nothing_behind_and_the_journal_can_be_used(path, monkeypatch, problem, error, words):
    journal = Journal(path)
    add(journal, 0)
    size = journal.size
    for room in range(HEADER_BYTES + len(ok_line(1))):
        disk = Disk(monkeypatch, room=room, problem=problem)
        with pytest.raises(error, match=words):
            add(journal, 1)
        assert journal.size == path.stat().st_size == size
        monkeypatch.setattr(os, "write", disk.write)
    assert journal.take().tally.lines == 1
    add(journal, 2)
    assert offsets(path) == [0, 2]
    assert journal.take().tally.lines == 1
    journal.close()


def test_lines_appended_together_are_written_as_if_one_by_one(path, tmp_path):
    statuses = [LineStatus.OK, LineStatus.FAILED, LineStatus.OK, LineStatus.EXPIRED]
    lines = [(n, status, line_of(n, status, "hi"), Usage(input=n, output=7)) for n, status in enumerate(statuses)]
    together, alone = Journal(path), Journal(tmp_path / "alone.seg")
    together.append_all(lines)
    for line in lines:
        alone.append(*line)
    assert path.read_bytes() == alone.path.read_bytes()
    assert (together.lines, together.take()) == (4, alone.take())
    together.close()
    alone.close()


def test_of_lines_appended_together_all_are_kept_or_none(path, monkeypatch):
    journal = Journal(path)
    add(journal, 0)
    size = journal.size
    lines = [(n, LineStatus.OK, ok_line(n), Usage()) for n in (1, 2)]
    disk = Disk(monkeypatch, room=HEADER_BYTES + len(ok_line(1)) + 10)
    with pytest.raises(StorageFull):
        journal.append_all(lines)
    assert (journal.lines, journal.size, path.stat().st_size) == (1, size, size)
    monkeypatch.setattr(os, "write", disk.write)
    journal.append_all(lines)
    assert offsets(path) == [0, 1, 2]
    assert journal.take().tally.lines == 3
    journal.close()


def test_a_write_beyond_the_largest_file_size_means_that_the_disk_is_full(path):
    """With the kernel's limit on file sizes, a write is first cut short and then refused."""
    journal = Journal(path)
    add(journal, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size + 40, hard))
    try:
        with pytest.raises(StorageFull):
            add(journal, 1)
        assert path.stat().st_size == journal.size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    add(journal, 2)
    assert offsets(path) == [0, 2]
    journal.close()


def test_a_journal_whose_partial_record_cannot_be_removed_refuses_lines(path, monkeypatch):
    journal = Journal(path)
    add(journal, 0)
    disk = Disk(monkeypatch, room=10)
    truncate = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", fails)
    with pytest.raises(StorageFull):
        add(journal, 1)
    monkeypatch.setattr(os, "write", disk.write)
    monkeypatch.setattr(os, "ftruncate", truncate)
    with pytest.raises(StorageFull):
        add(journal, 2)
    assert valid_end(path) == journal.size
    journal.close()


def fails(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


# Syncing


class Syncs:
    """Records which files are synced to the disk, and fails on demand."""

    def __init__(self, monkeypatch):
        self.sizes = []
        self.folders = []
        self.problem = None
        self.done = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        monkeypatch.setattr(module, "_sync_data", self.file)
        monkeypatch.setattr(module, "sync_folder", self.folders.append)

    def file(self, descriptor):
        assert self.gate.wait(SECONDS_MAX)
        if self.problem is not None:
            raise OSError(self.problem, os.strerror(self.problem))
        self.sizes.append(os.fstat(descriptor).st_size)
        self.done.set()


@pytest.fixture
def syncs(monkeypatch):
    return Syncs(monkeypatch)


async def test_a_sync_returns_when_the_lines_are_on_the_disk(path, syncer, syncs):
    journal = Journal(path, syncer)
    assert await syncer.sync(journal) == 0
    add(journal, 1)
    add(journal, 2)
    assert await syncer.sync(journal) == journal.size == journal.synced
    assert await syncer.sync(journal) == journal.size
    assert syncs.sizes == [journal.size]
    add(journal, 3)
    assert await syncer.sync(journal) == journal.size
    assert (len(syncs.sizes), syncs.folders) == (2, [path.parent])
    journal.close()


async def test_many_journals_are_synced_at_once(tmp_path, syncer):
    journals = [Journal(tmp_path / f"{shard}.1.seg", syncer) for shard in range(20)]
    for journal in journals:
        add(journal, 1)
    sizes = await asyncio.gather(*[syncer.sync(journal) for journal in journals for _ in range(2)])
    assert set(sizes) == {journals[0].size}
    for journal in journals:
        journal.close()


async def test_journals_that_somebody_waits_for_are_synced_first(tmp_path, syncer, syncs):
    other, wanted = Journal(tmp_path / "1.1.seg", syncer), Journal(tmp_path / "2.1.seg", syncer)
    add(other, 1)
    add(wanted, 1)
    add(wanted, 2)
    await syncer.sync(wanted)
    syncer.close()
    assert syncs.sizes == [wanted.size, other.size]
    other.close()
    wanted.close()


async def test_a_sync_promises_only_what_was_there_when_it_began(path, syncer, syncs):
    journal = Journal(path, syncer)
    add(journal, 1)
    size = journal.size
    syncs.gate.clear()
    waiting = asyncio.ensure_future(syncer.sync(journal))
    async with asyncio.timeout(SECONDS_MAX):
        while not journal._lock.locked():
            await asyncio.sleep(0)
    add(journal, 2)
    syncs.gate.set()
    assert await waiting == size == journal.synced
    assert await syncer.sync(journal) == journal.size
    journal.close()


def test_dirty_journals_are_synced_after_a_while(path, syncs):
    syncer = Syncer(seconds=0.001)
    journal = Journal(path, syncer)
    for offset in range(3):
        syncs.done.clear()
        add(journal, offset)
        assert syncs.done.wait(SECONDS_MAX)
    syncer.close()
    assert journal.synced == journal.size
    journal.close()


def test_many_lines_are_synced_at_once(path, syncer, syncs):
    journal = Journal(path, syncer)
    for turn in range(3):
        for offset in range(SYNC_LINES - 1):
            add(journal, turn * 1000 + offset)
        assert not syncer._hurry
        assert len(syncs.sizes) == turn
        journal.append_all([(turn * 1000 + n, LineStatus.OK, ok_line(n), Usage()) for n in (998, 999)])
        assert syncs.done.wait(SECONDS_MAX)
        with journal._lock:
            assert journal.synced == journal.size
        syncs.done.clear()
    journal.close()


async def test_a_failed_sync_is_raised_for_all_later_syncs_of_the_journal(path, syncer, syncs):
    journal = Journal(path, syncer)
    add(journal, 1)
    good = await syncer.sync(journal)
    add(journal, 2)
    syncs.problem = errno.EIO
    with pytest.raises(StorageUnavailable, match="cannot be used"):
        await syncer.sync(journal)
    syncs.problem = None
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            await syncer.sync(journal)
        with pytest.raises(StorageUnavailable):
            journal.sync()
        with pytest.raises(StorageUnavailable):
            add(journal, 3)
    assert journal.synced == good
    journal.close()


async def test_a_sync_that_failed_in_the_background_is_raised_later(path, syncs):
    syncer = Syncer(seconds=0)
    journal = Journal(path, syncer)
    syncs.problem = errno.ENOSPC
    add(journal, 1)
    async with asyncio.timeout(SECONDS_MAX):
        while journal.broken is None:
            await asyncio.sleep(0)
    syncs.problem = None
    with pytest.raises(StorageFull):
        await syncer.sync(journal)
    with pytest.raises(StorageFull):
        add(journal, 2)
    syncer.close()
    journal.close()


async def test_one_broken_journal_leaves_the_others_alone(tmp_path, syncer, monkeypatch):
    bad, good = Journal(tmp_path / "1.1.seg", syncer), Journal(tmp_path / "2.1.seg", syncer)
    monkeypatch.setattr(bad, "_sync_file", lambda: 1 / 0)
    for journal in (bad, good):
        add(journal, 1)
    results = await asyncio.gather(syncer.sync(bad), syncer.sync(good), return_exceptions=True)
    assert isinstance(results[0], ZeroDivisionError)
    assert results[1] == good.size
    with pytest.raises(StorageError, match="cannot be synced: ZeroDivisionError"):
        add(bad, 2)
    for journal in (bad, good):
        journal.close()


def test_closing_the_syncer_syncs_what_is_dirty(path, syncs):
    syncer = Syncer(seconds=3600)
    journal = Journal(path, syncer)
    add(journal, 1)
    syncer.close()
    syncer.close()
    assert syncs.sizes == [journal.size]
    assert asyncio.run(syncer.sync(journal)) == journal.size
    add(journal, 2)
    with pytest.raises(StorageError, match="its syncer is closed"):
        asyncio.run(syncer.sync(journal))
    assert journal.sync() == journal.size
    journal.close()


def test_a_syncer_without_work_has_no_thread():
    before = threading.active_count()
    syncer = Syncer()
    assert threading.active_count() == before
    syncer.close()


async def test_cancelled_waiters_do_not_disturb_a_sync(path, syncer, syncs):
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    journal = Journal(path, syncer)
    add(journal, 1)
    syncs.gate.clear()
    waiting = asyncio.ensure_future(syncer.sync(journal))
    await asyncio.sleep(0)
    waiting.cancel()
    syncs.gate.set()
    add(journal, 2)
    assert await syncer.sync(journal) == journal.size
    assert waiting.cancelled()
    assert problems == []
    journal.close()


def test_a_sync_of_a_journal_that_is_closed_before_its_turn_fails(path, syncer, syncs):
    journal = Journal(path, syncer)
    add(journal, 1)
    journal.close()
    with pytest.raises(StorageError, match="is closed"):
        asyncio.run(syncer.sync(journal))
    assert syncs.sizes == []


# Totals


def test_a_part_holds_the_lines_appended_since_the_last_part(path):
    journal = Journal(path)
    add(journal, 0, usage=Usage(input=10, cached=1, output=5, reasoning=2))
    add(journal, 1, LineStatus.FAILED)
    assert journal.untaken == journal.size
    first = journal.take()
    assert journal.untaken == 0
    assert first == JournalRange(0, journal.size, tally_of(path, 0, journal.size))
    assert first.tally == Tally(
        lines=2,
        completed=1,
        failed=1,
        input_tokens=10,
        cached_tokens=1,
        output_tokens=5,
        reasoning_tokens=2,
        errors={"bad": (1, "c1")},
    )
    assert journal.take() == JournalRange(journal.size, journal.size, Tally())
    add(journal, 2, LineStatus.EXPIRED)
    add(journal, 3, LineStatus.CANCELLED)
    second = journal.take()
    assert second == JournalRange(first.end, journal.size, tally_of(path, first.end, journal.size))
    assert first.tally + second.tally == tally_of(path, 0, journal.size)
    journal.close()


def test_a_line_whose_error_cannot_be_read_is_not_written(path):
    journal = Journal(path)
    with pytest.raises(Exception, match=r".*"):
        journal.append(0, LineStatus.FAILED, b"{}\n")
    assert journal.size == path.stat().st_size == journal.take().tally.lines == 0
    journal.close()


def test_codes_beyond_the_limit_are_counted_together():
    tally = Tally()
    for number in range(CODES_MAX + 5):
        for _ in range(2):
            tally.add_error(f"code{number}", f"c{number}")
    assert len(tally.errors) == CODES_MAX + 1
    assert tally.errors["code0"] == (2, "c0")
    assert tally.errors["other"] == (10, f"c{CODES_MAX}")
    tally += tally + Tally()
    assert len(tally.errors) == CODES_MAX + 1
    assert tally.errors["other"] == (20, f"c{CODES_MAX}")


def test_codes_counted_together_do_not_mix_with_a_code_of_that_name():
    tally = Tally(errors={"other": (1, "c")})
    for number in range(CODES_MAX + 1):
        tally.add_error(f"code{number}", "d")
    assert len(tally.errors) == CODES_MAX + 1
    assert tally.errors["other"] == (2, "c")


def test_fields_that_are_absent_in_json_count_as_zero():
    assert Tally.from_json({}) == Tally()
    assert Tally.from_json({"errors": {"a": [2, "c"]}, "later": 1}) == Tally(errors={"a": (2, "c")})


def test_usage_is_named_as_on_the_batch():
    tally = Tally(input_tokens=1, cached_tokens=2, output_tokens=3, reasoning_tokens=4)
    assert tally.usage() == {"input": 1, "cached": 2, "output": 3, "reasoning": 4}


counts = st.integers(0, 1000)
tallies = st.builds(
    Tally,
    **dict.fromkeys([name for name in Tally.__dataclass_fields__ if name != "errors"], counts),
    errors=st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 9), st.text(max_size=3))),
)


@given(tallies, tallies, tallies)
def test_totals_do_not_depend_on_how_lines_are_grouped(one, two, three):
    assert (one + two) + three == one + (two + three)
    assert one + Tally() == one
    before = Tally.from_json(one.as_json())
    assert before == one
    total = one + two
    assert one == before
    one += two
    assert one == total


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("batch_expired", LineStatus.EXPIRED),
        ("batch_cancelled", LineStatus.CANCELLED),
        ("batch_failed", LineStatus.FAILED),
        ("model_not_found", LineStatus.FAILED),
        ("request_aborted", LineStatus.FAILED),
        ("invalid_response", LineStatus.FAILED),
    ],
)
def test_the_code_decides_the_status(code, status):
    assert LineStatus.of(code) is status


# Journals of dead claims


def test_the_tail_of_a_dead_claim_counts_up_to_its_last_valid_record(path):
    journal = Journal(path)
    for offset in range(3):
        add(journal, offset, usage=Usage(input=1))
    registered = journal.take()
    add(journal, 3, LineStatus.FAILED)
    add(journal, 4, usage=Usage(input=5))
    rest = journal.take()
    os.write(journal._descriptor, b"torn")
    size = path.stat().st_size
    assert valid_end(path, registered.end) == rest.end
    assert tally_of(path, registered.end, rest.end) == rest.tally
    assert path.stat().st_size == size
    assert valid_end(path, rest.end) == rest.end
    journal.close()


def test_a_claim_that_wrote_nothing_leaves_nothing_to_register(path):
    Journal(path).close()
    assert valid_end(path) == 0


def test_a_journal_that_lost_registered_bytes_is_an_error(path):
    with pytest.raises(NotFound):
        valid_end(path, 100)
    path.write_bytes(b"\0" * 99)
    with pytest.raises(StorageError, match="it had 100 bytes before, and now it has 99"):
        valid_end(path, 100)


WRITER = """
import sys
from pathlib import Path
from tests.batches.journal.test_journal import Journal, Syncer, add
journal = Journal(Path(sys.argv[1]), Syncer())
for offset in range(1_000_000):
    add(journal, offset, text="x" * (offset % 3000))
    print(offset, flush=True)
"""


def test_a_killed_process_loses_no_appended_line(path):
    root = Path(__file__).parents[3]
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=root, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) == 300:
            break
    writer.send_signal(signal.SIGKILL)
    *told, _ = writer.stdout.read().split("\n")
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL
    end = valid_end(path)
    tally = tally_of(path, 0, end)
    assert offsets(path, end) == list(range(tally.lines))
    assert tally.lines > int(told[-1] if told else 300)
