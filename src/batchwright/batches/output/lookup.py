"""Finds lines of a batch by their custom_id: the request beside its answer, while the batch runs and afterwards.

    input file ── text in custom_id ──▶ requests ──▶ answers: in the output and error files; before the end, in journals

Files are searched for the bytes of the text, and only lines that hold them are read. The search has a time limit; if it
is reached, the result says that it is incomplete.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from batchwright.batches.journal.journal import open_to_read, read_open, scan_open
from batchwright.batches.journal.segments import Segments
from batchwright.batches.journal.workspace import Workspace
from batchwright.batches.store import Batch, Batches, Segment
from batchwright.errors import NotFound, StorageError
from batchwright.files.store import File, Files

SECONDS_MAX = 2.0
_SEGMENTS_MAX = 5_000
_EXAMPLES_MAX = 50

Data = bytes | mmap.mmap
"""Something to search: a block of whole lines, or a file."""


class _Id(msgspec.Struct):
    """The field that identifies a line; the decoder skips all others."""

    custom_id: str


_id = msgspec.json.Decoder(_Id)


@dataclass(slots=True)
class FoundLine:
    """A request and, once there is one, its answer; each as in its file or journal."""

    custom_id: str
    offset: int | None = None
    """Where the request begins in the input; None if the input is gone."""
    request: bytes | None = None
    answer: bytes | None = None
    """A line of the output or of the error file."""


@dataclass(slots=True)
class Lookup:
    """What was found, in the order of the input."""

    lines: list[FoundLine] = field(default_factory=list)
    is_complete: bool = True
    """False if there may be more: the search took too long, or found as many as were wanted."""
    input_gone: bool = False
    answers_elsewhere: bool = False
    """Whether answers are on another machine, and cannot be read before the output file is written."""


class _Hit(NamedTuple):
    custom_id: str
    offset: int
    line: bytes


@dataclass(slots=True)
class _Query:
    """The search terms, and the deadline of the search."""

    text: str
    is_exact: bool
    limit: int
    until: float
    only: frozenset[str] | None = None
    """If the lines are already known, their custom_ids."""

    @property
    def needles(self) -> list[bytes]:
        """The text as it may be written in JSON: as it is, or with everything but ASCII escaped."""
        written = [msgspec.json.encode(self.text), json.dumps(self.text).encode()]
        return list(dict.fromkeys(one if self.is_exact else one[1:-1] for one in written))

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until

    def matches(self, custom_id: str) -> bool:
        if self.only is not None:
            return custom_id in self.only
        return custom_id == self.text if self.is_exact else self.text in custom_id


class LineSearch:
    """Finds lines in batches of all tenants."""

    def __init__(self, batches: Batches, files: Files, workspace: Workspace) -> None:
        self._batches = batches
        self._files = files
        self._workspace = workspace
        self._segments = Segments(workspace, files.store)
        self._examples: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        """By error file, which never changes: an open page reads them every second."""

    async def find(
        self, batch: Batch, text: str, *, is_exact: bool = False, limit: int = 20, seconds_max: float = SECONDS_MAX
    ) -> Lookup:
        """Lines whose custom_id contains this text, or equals it if `is_exact` is set."""
        query = _Query(text, is_exact, limit, time.monotonic() + seconds_max)
        found = Lookup()
        try:
            input = await self._files.get(batch.input_file_id, tenant=None, also_gone=True)
            hits = await self._search(input, query, found, self._workspace.input(batch.id))
            found.lines = [FoundLine(hit.custom_id, hit.offset, hit.line) for hit in hits]
        except NotFound:
            found.input_gone = True
        await self._add_answers(batch, query, found)
        return found

    async def find_errors(self, batch: Batch, custom_ids: Sequence[str]) -> dict[str, bytes]:
        """Lines of the error file of an ended batch, as far as they are found quickly."""
        if batch.error_file_id is None or not batch.has_ended:
            return {}
        if batch.error_file_id not in self._examples:
            self._examples[batch.error_file_id] = await self._read_examples(batch.error_file_id, custom_ids)
            if len(self._examples) > _EXAMPLES_MAX:
                self._examples.popitem(last=False)
        return self._examples[batch.error_file_id]

    async def _read_examples(self, file_id: str, custom_ids: Sequence[str]) -> dict[str, bytes]:
        answers: dict[str, bytes] = {}
        until = time.monotonic() + SECONDS_MAX / 4
        try:
            file = await self._files.get(file_id, tenant=None)
            for custom_id in custom_ids:
                if time.monotonic() > until:
                    break
                hits = await self._search(file, _Query(custom_id, True, 1, until), Lookup())
                answers |= {hit.custom_id: hit.line for hit in hits}
        except NotFound:
            return {}
        return answers

    async def _add_answers(self, batch: Batch, query: _Query, found: Lookup) -> None:
        if batch.has_ended and (batch.output_file_id or batch.error_file_id):
            for id in (batch.output_file_id, batch.error_file_id):
                if id is not None:
                    await self._add_from_file(id, query, found)
        elif batch.segments_gone_at is None and found.lines:
            await self._add_from_journals(batch, query, found)

    async def _add_from_file(self, id: str, query: _Query, found: Lookup) -> None:
        try:
            file = await self._files.get(id, tenant=None)
            known = {line.custom_id: line for line in found.lines if line.answer is None}
            if not found.input_gone:
                query = replace(query, only=frozenset(known), limit=len(known))
            hits = await self._search(file, query, found)
        except NotFound:
            return
        for hit in hits:
            line = known.get(hit.custom_id)
            if line is None and found.input_gone and len(found.lines) < query.limit:
                line = FoundLine(hit.custom_id)
                found.lines.append(line)
            if line is not None:
                line.answer = hit.line

    async def _add_from_journals(self, batch: Batch, query: _Query, found: Lookup) -> None:
        """Add answers from journals, in the order of their registration: the first record of a request counts."""
        wanted = {line.offset: line for line in found.lines if line.offset is not None}
        segments = await self._batches.segments(batch.id, limit=_SEGMENTS_MAX)
        here: dict[Path, list[Segment]] = {}
        elsewhere: list[Segment] = []
        for segment in segments:
            path = self._segments.find_journal(segment)
            if path is not None:
                here.setdefault(path, []).append(segment)
            else:
                elsewhere.append(segment)
        answers = await asyncio.to_thread(_read_records, here, set(wanted), lambda: query.is_over)
        for segment in elsewhere:
            if query.is_over or len(answers) == len(wanted):
                break
            if segment.key is None:
                found.answers_elsewhere = True
                continue
            with suppress(NotFound):  # the garbage collector has just removed it
                data = await self._files.store.read(segment.key, 0, segment.end - segment.start)
                answers |= await asyncio.to_thread(_read_stored, data, segment, set(wanted) - set(answers))
        for offset, answer in answers.items():
            wanted[offset].answer = answer
        found.is_complete &= not query.is_over

    async def _search(self, file: File, query: _Query, found: Lookup, copy: Path | None = None) -> list[_Hit]:
        """Search a file on this machine if there is one, otherwise while downloading it."""
        path = self._files.store.local_path(file.key)
        for place in (copy, path):
            if place is not None and await asyncio.to_thread(place.is_file):
                hits = await asyncio.to_thread(_search_file, place, query)
                break
        else:
            hits = await self._search_stored(file, query)
        is_full = query.only is None and not query.is_exact and len(hits) >= query.limit
        found.is_complete &= not query.is_over and not is_full
        return hits

    async def _search_stored(self, file: File, query: _Query) -> list[_Hit]:
        hits: list[_Hit] = []
        rest, base = b"", 0
        async for part in self._files.content(file):
            data = rest + part
            end = data.rfind(b"\n") + 1
            hits += await asyncio.to_thread(_search_block, data[:end], query, base)
            rest, base = data[end:], base + end
            if query.is_over or len(hits) >= query.limit:
                return hits[: query.limit]
        return [*hits, *_hits(rest, query, base)][: query.limit]


def _search_file(path: Path, query: _Query) -> list[_Hit]:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return list(_hits(data, query, 0))


def _search_block(data: bytes, query: _Query, base: int) -> list[_Hit]:
    return list(_hits(data, query, base))


def _hits(data: Data, query: _Query, base: int) -> Iterator[_Hit]:
    """Matching lines, in order; each is read once, even if it contains the text several times."""
    position, count, size = 0, 0, len(data)
    needles = query.needles
    while position < size and count < query.limit and not query.is_over:
        places = [place for needle in needles if (place := data.find(needle, position)) >= 0]
        if not places:
            return
        place = min(places)
        start = data.rfind(b"\n", 0, place) + 1
        end = data.find(b"\n", place)
        end = size if end < 0 else end
        line = bytes(data[start:end])
        if (custom_id := _custom_id(line)) is not None and query.matches(custom_id):
            count += 1
            yield _Hit(custom_id, base + start, line)
        position = end + 1


def _custom_id(line: bytes) -> str | None:
    try:
        return _id.decode(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _read_records(here: dict[Path, list[Segment]], wanted: set[int], is_over: Callable[[], bool]) -> dict[int, bytes]:
    """The lines of journals that answer the requests at these offsets."""
    answers: dict[int, bytes] = {}
    for path, segments in here.items():
        if is_over() or len(answers) == len(wanted):
            break
        try:
            descriptor = open_to_read(path)
        except (NotFound, StorageError):
            continue  # the garbage collector has just removed it
        try:
            for segment in segments:
                _take(descriptor, path, segment.start, segment.end, wanted, answers)
        finally:
            os.close(descriptor)
    return answers


def _read_stored(data: bytes, segment: Segment, wanted: set[int]) -> dict[int, bytes]:
    """The same for a stored piece, which is written to a temporary file first."""
    answers: dict[int, bytes] = {}
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        _take(file.fileno(), Path(str(segment.key)), 0, len(data), wanted, answers)
    return answers


def _take(descriptor: int, path: Path, start: int, end: int, wanted: set[int], answers: dict[int, bytes]) -> None:
    for record in scan_open(descriptor, path, start, end):
        if record.offset in wanted and record.offset not in answers:
            line = read_open(descriptor, path, record.position, record.length, record.offset)
            answers[record.offset] = line
