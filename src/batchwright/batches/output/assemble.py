"""From journals to the two result files, in the order of the input.

    plans, pieces → index → fill what is missing → counts, output file, error file

The index has 21 bytes per line: its offset, its length, where its record is, and its status. Lines are then copied one
by one from the journals, and each is checked on the way, so that memory does not grow with the answers. The first
record of a line wins; a record of a line that is not in the plan is refused.
"""

from __future__ import annotations

import asyncio
import os
import threading
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import DecodeError

from batchwright.batches.journal.envelopes import MESSAGES, error_code_of, request_id, unanswered
from batchwright.batches.journal.journal import Record, open_to_read, read_open, scan_open
from batchwright.batches.journal.segments import Piece
from batchwright.batches.plan.lines import split
from batchwright.batches.plan.planfile import Entry, read_entries
from batchwright.batches.tally import LineStatus, Tally
from batchwright.errors import Conflict, NotFound, StorageError, StorageUnavailable

MANIFEST_VERSION = 1
REJECTED_CODE = "model_not_found"

_CHUNK_BYTES = 1024 * 1024
_ENTRIES_AT_ONCE = 4096
_FILES_MAX = 128

_LENGTH_BITS = 32
_POSITION_BITS = 40
_MISSING = len(LineStatus)
_REJECTED = len(LineStatus) + 1


class Counts(NamedTuple):
    """How the lines of a batch ended."""

    ok: int
    failed: int
    expired: int
    cancelled: int
    total: int

    def as_json(self) -> dict[str, int]:
        return {
            "total": self.total,
            "completed": self.ok,
            "failed": self.failed,
            "expired": self.expired,
            "cancelled": self.cancelled,
        }


def assemble(
    batch_id: str, input: Path, *, plans: Iterable[Path], rejected: Path | None = None, pieces: Sequence[Piece]
) -> Assembly:
    """Find every line of the plans in the pieces, which are in the order of their registration. Blocks."""
    index = _Index(plans, rejected)
    paths = list(dict.fromkeys(piece.path for piece in pieces))
    numbers = {path: number for number, path in enumerate(paths)}
    assembly = Assembly(batch_id, input, index, paths)
    with closing(_Files(paths)) as files:
        for piece in pieces:
            number = numbers[piece.path]
            for found in scan_open(files.descriptor(number), piece.path, piece.start, piece.end):
                assembly.take(found, number, files)
    assembly.add_rejected()
    return assembly


class Assembly:
    """A batch of which every line is known, or known to be missing.

    >>> assembly = await asyncio.to_thread(assemble, batch.id, input, plans=plans, pieces=pieces)
    >>> assembly.fill("batch_expired")
    >>> stored = await store.put(key, assembly.output)
    """

    def __init__(self, batch_id: str, input: Path, index: _Index, paths: Sequence[Path]) -> None:
        self.batch_id = batch_id
        self.input = input
        self.paths = paths
        self.index = index
        self.filler: str | None = None
        self.duplicates = 0
        """Records that lost against an earlier one of the same line."""
        self.tally = Tally()
        """Sums over the lines of both files: first records, rejected lines and, once they are filled, missing ones."""

    @property
    def total(self) -> int:
        return len(self.index.offsets)

    @property
    def missing(self) -> int:
        """Number of lines without a record; a batch that completes normally has none."""
        return self.index.kinds.count(_MISSING)

    @property
    def missing_offsets(self) -> set[int]:
        """The offsets of these lines."""
        return {offset for offset, kind in zip(self.index.offsets, self.index.kinds, strict=True) if kind == _MISSING}

    @property
    def counts(self) -> Counts:
        """How the lines ended; raises Conflict while lines are missing and `fill` was not called."""
        self._refuse_gaps()
        tally = self.tally
        counts = Counts(tally.completed, tally.failed, tally.expired, tally.cancelled, self.total)
        if sum(counts[:-1]) != counts.total:
            raise StorageError(f"the lines of batch {self.batch_id} do not add up: {counts}")
        return counts

    @property
    def has_output(self) -> bool:
        return self.tally.completed > 0

    @property
    def has_errors(self) -> bool:
        return self.tally.completed < self.total

    def fill(self, code: str) -> None:
        """Set the error code of the missing lines: batch_expired, batch_cancelled or batch_failed."""
        assert self.filler is None, "what is missing is filled once"
        assert code in MESSAGES, f"{code} has no message"
        self._add_fillers(_MISSING, code)
        self.filler = code

    def output(self) -> AsyncIterator[bytes]:
        """The output file, from its beginning at each call."""
        return self._chunks(is_output=True)

    def errors(self) -> AsyncIterator[bytes]:
        """The error file, from its beginning at each call."""
        self._refuse_gaps()
        return self._chunks(is_output=False)

    def take(self, found: Record, number: int, files: _Files) -> None:
        """Add one record of the file with this number."""
        was = self.index.put(found, number)
        if was == _MISSING:
            self.tally.add(found.status, found.tokens)
            if found.status is not LineStatus.OK:
                self._add_error(found, number, files)
        elif was is None:
            raise StorageError(
                f"the journal {self.paths[number]} holds a line at byte {found.position} that is not in the plan "
                f"of batch {self.batch_id}: offset {found.offset}"
            )
        else:
            self.duplicates += 1

    def add_rejected(self) -> None:
        """Lines whose model no gateway serves have no records; they fail."""
        self._add_fillers(_REJECTED, REJECTED_CODE)

    def _add_error(self, found: Record, number: int, files: _Files) -> None:
        descriptor, path = files.descriptor(number), self.paths[number]
        line = read_open(descriptor, path, found.position, found.length, found.offset)
        self.tally.add_error(*error_code_of(line))

    def _add_fillers(self, kind: int, code: str) -> None:
        count = self.index.kinds.count(kind)
        if count == 0:
            return
        with closing(_Input(self.input)) as lines:
            sample = lines.custom_id(self.index.entry(self.index.kinds.index(kind)))
        name = LineStatus.of(code).name.lower()
        self.tally += Tally.from_json({"lines": count, name: count, "errors": {code: (count, sample)}})

    def _refuse_gaps(self) -> None:
        if self.filler is None and self.missing:
            raise Conflict(
                f"{self.missing} of {self.total} lines of batch {self.batch_id} have no record: "
                "finish them, or set their error code with fill()"
            )

    async def _chunks(self, *, is_output: bool) -> AsyncIterator[bytes]:
        copy = _Copy(self, is_output)
        try:
            while chunk := await asyncio.to_thread(copy.next_chunk):
                yield chunk
        finally:
            await asyncio.to_thread(copy.close)


def manifest(
    counts: Counts, *, input_sha256: str, output_sha256: str | None, error_sha256: str | None
) -> dict[str, Any]:
    """Proof that nothing was lost: every line is in one of the files, and these are their checksums."""
    return {
        "version": MANIFEST_VERSION,
        "lines": counts.total,
        "counts": counts.as_json(),
        "sha256": {"input": input_sha256, "output": output_sha256, "errors": error_sha256},
    }


class _Index:
    """Every expected line by its offset, as arrays: an object for each would be ten times as large."""

    def __init__(self, plans: Iterable[Path], rejected: Path | None) -> None:
        packed = [_pack(offset, length, 0) for plan in plans for offset, length, _ in _entries(plan)]
        packed += [_pack(offset, length, 1) for offset, length, _ in _entries(rejected)] if rejected else []
        packed.sort()
        self.offsets = array("q", (one >> _LENGTH_BITS + 1 for one in packed))
        self.lengths = array("I", (one >> 1 & 2**_LENGTH_BITS - 1 for one in packed))
        """Length of the line in the input; once its record is found, of the line in the journal."""
        self.kinds = bytearray(_REJECTED if one & 1 else _MISSING for one in packed)
        self.places = array("q", bytes(8 * len(packed)))
        if any(map(int.__eq__, self.offsets, self.offsets[1:])):
            raise StorageError("the plans hold a line twice")

    def put(self, found: Record, number: int) -> int | None:
        """Note where the record of a line is, unless one is known; returns what was known, None for a foreign line."""
        at = bisect_left(self.offsets, found.offset)
        if at == len(self.offsets) or self.offsets[at] != found.offset or self.kinds[at] == _REJECTED:
            return None
        was = self.kinds[at]
        if was == _MISSING:
            self.kinds[at] = found.status
            self.lengths[at] = found.length
            self.places[at] = number << _POSITION_BITS | found.position
        return was

    def entry(self, at: int) -> Entry:
        return Entry(self.offsets[at], self.lengths[at], 0)


class _Copy:
    """One pass that writes one of the files; threads build the chunks, one after the other."""

    def __init__(self, assembly: Assembly, is_output: bool) -> None:
        self._assembly = assembly
        self._index = assembly.index
        self._wanted = (at for at, kind in enumerate(self._index.kinds) if (kind == LineStatus.OK) is is_output)
        self._rest = b""
        """The part of the last line that did not fit into its chunk."""
        self._files = _Files(assembly.paths)
        self._input: _Input | None = None
        self._lock = threading.Lock()

    def next_chunk(self) -> bytes:
        """One MiB, or less for the last chunk; empty at the end."""
        parts, size = list[bytes](), 0
        with self._lock:
            while size < _CHUNK_BYTES and (line := self._rest or self._next_line()):
                part = line[: _CHUNK_BYTES - size]
                self._rest = line[len(part) :]
                parts.append(part)
                size += len(part)
        return b"".join(parts)

    def close(self) -> None:
        """The lock waits for the thread of a cancelled pass, which may still be reading."""
        with self._lock:
            self._files.close()
            if self._input is not None:
                self._input.close()

    def _next_line(self) -> bytes:
        at = next(self._wanted, None)
        if at is None:
            return b""
        kind = self._index.kinds[at]
        if kind >= _MISSING:
            return self._filler(at, kind)
        place = self._index.places[at]
        number, position = place >> _POSITION_BITS, place & 2**_POSITION_BITS - 1
        path = self._assembly.paths[number]
        descriptor = self._files.descriptor(number)
        return read_open(descriptor, path, position, self._index.lengths[at], self._index.offsets[at])

    def _filler(self, at: int, kind: int) -> bytes:
        if self._input is None:
            self._input = _Input(self._assembly.input)
        entry = self._index.entry(at)
        code = REJECTED_CODE if kind == _REJECTED else self._assembly.filler
        assert code is not None, "gaps were refused"
        return unanswered(request_id(self._assembly.batch_id, entry.offset), self._input.custom_id(entry), code)


class _Files:
    """Open journals by number; if there are too many, the one that was opened first is closed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: dict[int, int] = {}

    def descriptor(self, number: int) -> int:
        descriptor = self._open.get(number)
        if descriptor is None:
            if len(self._open) >= _FILES_MAX:
                os.close(self._open.pop(next(iter(self._open))))
            descriptor = self._open[number] = open_to_read(self._paths[number])
        return descriptor

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class _Input:
    """The input file, for the lines that no journal has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError as error:
            raise NotFound(f"the input {path} is gone, and with it the custom_ids of the missing lines") from error
        except OSError as error:
            raise StorageUnavailable(f"the input {path} cannot be opened: {error.strerror}") from error

    def custom_id(self, entry: Entry) -> str:
        try:
            return split(os.pread(self._file.fileno(), entry.length, entry.offset))[0]
        except DecodeError as error:
            raise StorageError(f"the input {self._path} has no request at byte {entry.offset} any more") from error
        except OSError as error:
            raise StorageUnavailable(f"the input {self._path} cannot be read: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


def _entries(plan: Path) -> Iterator[Entry]:
    start = 0
    while entries := read_entries(plan, start, _ENTRIES_AT_ONCE):
        yield from entries
        start += len(entries)


def _pack(offset: int, length: int, is_rejected: int) -> int:
    """Pack an entry into one number, which sorts by offset."""
    return (offset << _LENGTH_BITS | length) << 1 | is_rejected
