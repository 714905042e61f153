"""The finished lines of a shard, one file per claim: lines are appended, never changed.

    <shard>.<claim>.seg   record, record, ...
    record                crc32 u32, length u32, offset i64, status u8, four tokens u32, then the finished line

A record is written before its slot is freed, so a killed process loses only what was in flight. Records that finish
together are written by one call. One thread syncs the files to disk soon after, so a power cut loses a twentieth of a
second at most. The crc covers everything that follows it: what a crash left after the last whole record has a wrong crc
and is never read.

A line's place in the input, its offset, is its identity. Lines that are in a file but not registered count only if
another claim copies them into its own journal.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn
from zlib import crc32

import msgspec

from batchwright.batches.journal.envelopes import error_code_of
from batchwright.batches.plan.planfile import sync_folder
from batchwright.batches.tally import TOKENS_UNKNOWN, LineStatus, Tally, Tokens
from batchwright.errors import Conflict, NotFound, StorageError, StorageFull, StorageUnavailable
from batchwright.inference.answers import UNKNOWN, Usage
from batchwright.storage.backend import FULL

if sys.platform != "win32":
    import fcntl

SYNC_LINES = 256
SYNC_SECONDS = 0.05

_BUFFER_BYTES = 256 * 1024

_CRC_BYTES = 4
_FIELDS = struct.Struct("<IqBIIII")
_HEADER = struct.Struct("<IIqBIIII")
_IDENTITY = struct.Struct("<IIq")
HEADER_BYTES = _HEADER.size

_sync_data = os.fdatasync if sys.platform == "linux" else os.fsync


_OK = LineStatus.OK
"""Used for every line; access through the enum takes five times as long."""
_STATUSES = tuple(LineStatus)


Line = tuple[int, LineStatus, bytes, Usage]
"""A finished line: its offset, its status, the line itself and its tokens."""


class JournalRange(NamedTuple):
    """A range of a journal and the sums over its lines, as it will be registered."""

    start: int
    end: int
    tally: Tally


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record without its line: its position in the file, and the length (newline included), status and tokens."""

    position: int
    length: int
    offset: int
    status: LineStatus
    tokens: Tokens

    @property
    def end(self) -> int:
        return self.position + HEADER_BYTES + self.length

    @property
    def usage(self) -> Usage:
        input, cached, output, reasoning = (None if n == TOKENS_UNKNOWN else n for n in self.tokens)
        return Usage(input=input, cached=cached, output=output, reasoning=reasoning)


class Journal:
    """The file that one claim appends to. Only one object at a time may write to a file; others are refused.

    An existing file is truncated after its last whole record and continued.
    """

    def __init__(self, path: Path, syncer: Syncer | None = None) -> None:
        self.path = path
        self.broken: StorageError | None = None
        """Why nothing can be appended any more; after a failed fsync the content of the disk is unknown."""
        self.lines = 0
        self.size = 0
        self.synced = 0
        """Bytes that are known to be on the disk."""
        self._syncer = syncer
        self._tally = Tally()
        self._is_dirty = False
        self._is_listed = False
        self._lines_seen = 0
        self._lock = threading.Lock()
        with _explain_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._begin()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._taken = self.size

    def append(self, offset: int, status: LineStatus, line: bytes, usage: Usage = UNKNOWN) -> None:
        """Write a finished line. If this raises StorageFull or another StorageError, nothing is written."""
        self.append_all([(offset, status, line, usage)])

    def append_all(self, lines: Sequence[Line]) -> None:
        """Write finished lines in one call. If this raises, none of them is written."""
        if self.broken is not None:
            self._refuse(self.broken)
        parts: list[bytes] = []
        counted: list[tuple[LineStatus, Tokens]] = []
        for offset, status, line, usage in lines:
            assert 0 <= line.find(b"\n") == len(line) - 1, "a line has one newline, at its end"
            tokens = _pack_tokens(usage)
            head = _FIELDS.pack(len(line), offset, status, *tokens)
            parts += (crc32(line, crc32(head)).to_bytes(_CRC_BYTES, "little"), head, line)
            counted.append((status, tokens))
        errors = [error_code_of(line) for _, status, line, _ in lines if status is not _OK]
        self._write(b"".join(parts))
        self.lines += len(lines)
        self._tally.add_all(counted)
        for error in errors:
            self._tally.add_error(*error)
        if self._syncer is not None:
            self._notify(self._syncer, len(lines))

    def _write(self, records: bytes) -> None:
        size = len(records)
        try:
            written = os.write(self._descriptor, records)
            while written < size:
                written += os.write(self._descriptor, records[written:])
        except OSError as problem:
            self._take_back(problem)
        self.size += size

    @property
    def untaken(self) -> int:
        """Bytes appended since the last `take`."""
        return self.size - self._taken

    def take(self) -> JournalRange:
        """What was appended since the last call; sync it before you register it."""
        taken = JournalRange(self._taken, self.size, self._tally)
        self._taken, self._tally = self.size, Tally()
        return taken

    def sync(self) -> int:
        """Sync everything appended so far to disk and return the number of bytes. Blocks."""
        with self._lock:
            self._is_dirty = False  # before the size is read: a writer that still sees True has appended before that
            self._lines_seen = self.lines
            size = self.size
            if size <= self.synced:
                return self.synced
            if self.broken is not None:
                self._refuse(self.broken)
            try:
                self._sync_file()
            except OSError as problem:
                self.broken = _storage_error(self.path, problem)
                raise self.broken from problem
            self.synced = size
            return size

    def close(self) -> None:
        """Data that is not synced may be lost if the machine crashes, but not if the process does."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                self.broken = self.broken or StorageError(f"the journal {self.path} is closed")

    def _begin(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(f"the journal {self.path} is being written already: each claim has its own") from error
        with _explain_errors(self.path):
            self.size = _valid_end(self._descriptor, self.path, 0)
            os.ftruncate(self._descriptor, self.size)

    def _sync_file(self) -> None:
        _sync_data(self._descriptor)
        if os.fstat(self._descriptor).st_nlink == 0:  # its content is lost when this process ends
            raise FileNotFoundError(errno.ENOENT, "it was deleted while in use")
        if not self._is_listed:
            sync_folder(self.path.parent)
            self._is_listed = True

    def _take_back(self, problem: OSError) -> NoReturn:
        """Remove a half-written record. If that fails too, nothing more can be appended."""
        error = _storage_error(self.path, problem)
        try:
            os.ftruncate(self._descriptor, self.size)
        except OSError:
            self.broken = error
        raise error from problem

    def _refuse(self, broken: StorageError) -> NoReturn:
        raise type(broken)(*broken.args) from broken

    def _notify(self, syncer: Syncer, added: int) -> None:
        waiting = self.lines - self._lines_seen
        is_many = waiting - added < SYNC_LINES <= waiting
        if not self._is_dirty or is_many:
            self._is_dirty = True
            syncer.notice(self, hurry=is_many)


class Syncer:
    """One thread that syncs dirty journals to disk: within a twentieth of a second, or after a number of lines."""

    def __init__(self, *, seconds: float = SYNC_SECONDS) -> None:
        self._seconds = seconds
        self._changed = threading.Condition()
        self._dirty: dict[Journal, list[asyncio.Future[int]]] = {}
        self._hurry = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    async def sync(self, journal: Journal) -> int:
        """Wait until everything appended before this call is on the disk; returns the number of synced bytes."""
        if journal.synced >= journal.size:
            return journal.synced
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if not self.notice(journal, hurry=True, waiting=done):
            raise StorageError(f"the journal {journal.path} cannot be synced: its syncer is closed")
        return await done

    def notice(self, journal: Journal, *, hurry: bool = False, waiting: asyncio.Future[int] | None = None) -> bool:
        """Note that a journal has something to sync; False if the syncing thread has ended."""
        with self._changed:
            if self._is_closed:
                return False
            waiters = self._dirty.setdefault(journal, [])
            if waiting is not None:
                waiters.append(waiting)
            self._hurry |= hurry
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="batchwright-journal", daemon=True)
                self._thread.start()
            self._changed.notify()
        return True

    def close(self) -> None:
        """Sync what is dirty and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while dirty := self._next_round():
            for journal, waiters in sorted(dirty.items(), key=lambda item: not item[1]):
                result = _sync_one(journal)
                for waiter in waiters:
                    with suppress(RuntimeError):  # its event loop is closed, so no caller waits any more
                        waiter.get_loop().call_soon_threadsafe(_resolve, waiter, result)

    def _next_round(self) -> dict[Journal, list[asyncio.Future[int]]]:
        """The journals to sync now; none means that the thread should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._dirty or self._is_closed)
            self._changed.wait_for(lambda: self._hurry or self._is_closed, self._seconds)
            dirty, self._dirty, self._hurry = self._dirty, {}, False
            return dirty


def open_to_read(path: Path) -> int:
    """A file descriptor, for callers that read a lot; close it with os.close()."""
    with _explain_errors(path):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def scan(path: Path, start: int = 0, end: int | None = None, *, verify: bool = False) -> Iterator[Record]:
    """The records of a range of whole records; raises StorageError where it is damaged.

    Without `verify` only the headers are read; a line is checked when it is read.
    """
    with _open_file(path) as descriptor:
        yield from scan_open(descriptor, path, start, end, verify=verify)


def scan_open(
    descriptor: int, path: Path, start: int = 0, end: int | None = None, *, verify: bool = False
) -> Iterator[Record]:
    """The same for a file that is open; `path` is only for messages."""
    size = os.fstat(descriptor).st_size
    stop = size if end is None else end
    reached = yield from _walk(descriptor, path, start, min(stop, size), verify)
    if reached != stop:
        raise StorageError(f"the journal {path} is damaged: it has no whole record at byte {reached}")


def valid_end(path: Path, start: int = 0) -> int:
    """Where the last valid record ends. `start` must be the end of a record."""
    with _open_file(path) as descriptor:
        return _valid_end(descriptor, path, start)


def sound_ranges(path: Path, start: int, end: int) -> list[tuple[int, int]]:
    """What is left of a range that a disk has damaged: the records whose checksums match.

    After a damaged record, the search continues where its header says that it ends. If the header is damaged too, no
    later checksum matches.
    """
    ranges = []
    with _open_file(path) as descriptor:
        end = min(end, os.fstat(descriptor).st_size)
        while start < end:
            good = start
            for found in _walk(descriptor, path, start, end, verify=True):
                good = found.end
            if good > start:
                ranges.append((start, good))
            head = _read(descriptor, path, good, HEADER_BYTES).ljust(HEADER_BYTES, b"\0")
            start = good + HEADER_BYTES + _IDENTITY.unpack_from(head)[1]
    return ranges


def read_open(descriptor: int, path: Path, position: int, length: int, offset: int) -> bytes:
    """The line of the record with this position, length and offset in an open file; `path` is only for messages."""
    try:
        record = os.pread(descriptor, HEADER_BYTES + length, position)
    except OSError as error:
        raise _storage_error(path, error) from error
    if length > 0 and len(record) == HEADER_BYTES + length:
        expected = (crc32(memoryview(record)[_CRC_BYTES:]), length, offset)
        if _IDENTITY.unpack_from(record) == expected:
            return record[HEADER_BYTES:]
    raise StorageError(f"the journal {path} is damaged: the record at byte {position} has a wrong checksum")


def tally_of(path: Path, start: int, end: int) -> Tally:
    """The sums over a range, as they were when it was appended."""
    tally = Tally()
    with _open_file(path) as descriptor:
        for found in scan_open(descriptor, path, start, end, verify=True):
            tally.add(found.status, found.tokens)
            if found.status is not LineStatus.OK:
                line = read_open(descriptor, path, found.position, found.length, found.offset)
                tally.add_error(*error_code_of(line))
    return tally


def _pack_tokens(usage: Usage) -> Tokens:
    input, cached, output, reasoning = usage.input, usage.cached, usage.output, usage.reasoning
    return (  # a helper for the four of them would be a third of the cost of a record
        TOKENS_UNKNOWN if input is None or input > TOKENS_UNKNOWN else input,
        TOKENS_UNKNOWN if cached is None or cached > TOKENS_UNKNOWN else cached,
        TOKENS_UNKNOWN if output is None or output > TOKENS_UNKNOWN else output,
        TOKENS_UNKNOWN if reasoning is None or reasoning > TOKENS_UNKNOWN else reasoning,
    )


def _walk(descriptor: int, path: Path, start: int, end: int, verify: bool) -> Generator[Record, None, int]:
    """Records until `end`, or until the first that is cut off or, if `verify` is set, has a wrong checksum.

    Returns where the last good one ends.
    """
    position = base = start
    data = b""
    while position + HEADER_BYTES < end:
        if (at := position - base) + HEADER_BYTES > len(data):
            base, at, data = position, 0, _read(descriptor, path, position, min(_BUFFER_BYTES, end - position))
            if len(data) < HEADER_BYTES:
                return position
        crc, length, offset, status, *_ = fields = _HEADER.unpack_from(data, at)
        size = HEADER_BYTES + length
        if length == 0 or status >= len(_STATUSES) or position + size > end:
            return position
        if verify:
            if at + size > len(data):
                ahead = min(max(_BUFFER_BYTES, size), end - position)
                base, at, data = position, 0, _read(descriptor, path, position, ahead)
            if crc32(memoryview(data)[at + _CRC_BYTES : at + size]) != crc:
                return position
        yield Record(position, length, offset, _STATUSES[status], fields[4:])
        position += size
    return position


def _read(descriptor: int, path: Path, position: int, size: int) -> bytes:
    try:
        return os.pread(descriptor, size, position)
    except OSError as error:
        raise _storage_error(path, error) from error


def _valid_end(descriptor: int, path: Path, start: int) -> int:
    size = os.fstat(descriptor).st_size
    if size < start:
        raise StorageError(f"the journal {path} is damaged: it had {start} bytes before, and now it has {size}")
    end = start
    for found in _walk(descriptor, path, start, size, verify=True):
        end = found.end
    return end


def _sync_one(journal: Journal) -> int | Exception:
    """A failure of one journal must not end the thread that syncs all of them."""
    try:
        return journal.sync()
    except Exception as error:
        journal.broken = journal.broken or StorageError(f"the journal {journal.path} cannot be synced: {error!r}")
        return error


def _resolve(waiter: asyncio.Future[int], result: int | Exception) -> None:
    if waiter.done():
        return
    if isinstance(result, Exception):
        waiter.set_exception(result)
    else:
        waiter.set_result(result)


@contextmanager
def _open_file(path: Path) -> Iterator[int]:
    descriptor = open_to_read(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"there is no journal {path}, or no folder for it") from error
    except OSError as error:
        raise _storage_error(path, error) from error


def _storage_error(path: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return StorageFull(f"no room for the journal {path}: {reason}; free some space, or set batches.work_dir")
    return StorageUnavailable(f"the journal {path} cannot be used: {reason}")
