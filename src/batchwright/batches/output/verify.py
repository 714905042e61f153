"""Compares the files of an ended batch with its manifest: checksums, counts, and every custom_id exactly once."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchwright.batches.journal.envelopes import custom_id_of
from batchwright.batches.plan.lines import split
from batchwright.batches.plan.plan import digest_of
from batchwright.batches.store import Batch
from batchwright.db.check import Finding, Level
from batchwright.errors import Conflict, NotFound
from batchwright.files.store import Files

_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class _Seen:
    """What one pass over a file found."""

    sha256: str = ""
    lines: int = 0
    digests: set[bytes] = field(default_factory=set)
    """Digests of the custom_ids, because the ids themselves would need too much memory."""


async def verify(files: Files, batch: Batch) -> list[Finding]:
    """Read every file again; report a file that is gone, because it cannot be checked."""
    if batch.manifest is None:
        raise Conflict(f"the batch {batch.id} has no manifest: it is {batch.status.value}")
    manifest = batch.manifest
    total, completed = int(manifest["lines"]), int(manifest["counts"]["completed"])
    reader = _Reader(files, manifest)
    input = await reader.read("input", lambda line: split(line)[0])
    output = await reader.read("output", custom_id_of, lines=completed)
    errors = await reader.read("errors", custom_id_of, lines=total - completed)
    if output is not None and errors is not None:
        reader.findings.append(_judge_ids(total, output, errors, input, is_part=batch.retry_of is not None))
    return reader.findings


class _Reader:
    """Reads the files of a manifest, and notes what was found."""

    def __init__(self, files: Files, manifest: Mapping[str, Any]) -> None:
        self._files = files
        self._ids = manifest["files"]
        self._checksums = manifest["sha256"]
        self.findings: list[Finding] = []

    async def read(self, name: str, custom_id: Callable[[bytes], str], lines: int | None = None) -> _Seen | None:
        """None if it cannot be read; a file that the batch does not have counts as empty."""
        id = self._ids[name]
        if id is None:
            self.findings.append(_judge_absence(name, lines))
            return _Seen()
        try:
            file = await self._files.get(id, tenant=None)
        except NotFound:
            self.findings.append(Finding(name, Level.WARNING, f"{id} was deleted, and cannot be checked"))
            return None
        try:
            seen = await _read(self._files.content(file), custom_id)
        except (NotFound, ValueError) as error:  # msgspec raises a ValueError for invalid JSON and for invalid text
            self.findings.append(Finding(name, Level.ERROR, f"{id} cannot be read: {error}"))
            return None
        self.findings.append(self._judge(name, id, seen, lines))
        return seen

    def _judge(self, name: str, id: str, seen: _Seen, lines: int | None) -> Finding:
        if seen.sha256 != self._checksums[name]:
            text = f"{id} has the SHA-256 {seen.sha256}, and the manifest says {self._checksums[name]}"
            return Finding(name, Level.ERROR, text, "the store has changed it: restore it from a backup")
        if lines is not None and seen.lines != lines:
            return Finding(name, Level.ERROR, f"{id} has {seen.lines} lines, and the manifest says {lines}")
        return Finding(name, Level.OK, f"{id}: {seen.lines} lines, SHA-256 as in the manifest")


def _judge_absence(name: str, lines: int | None) -> Finding:
    if lines:
        return Finding(name, Level.ERROR, f"there is no such file, and the manifest counts {lines} lines in it")
    return Finding(name, Level.OK, "none, as the manifest says")


def _judge_ids(total: int, output: _Seen, errors: _Seen, input: _Seen | None, *, is_part: bool) -> Finding:
    """A batch that retries another has only a part of the input's lines."""
    found = output.digests | errors.digests
    twice = output.lines + errors.lines - len(found)
    if twice:
        return Finding("custom_ids", Level.ERROR, f"{twice} occur more than once")
    if len(found) != total:
        return Finding("custom_ids", Level.ERROR, f"there are {len(found)}, and the manifest says {total}")
    if input is None:
        return Finding("custom_ids", Level.OK, f"all {total} exactly once; there is no input to compare with")
    strange, missing = len(found - input.digests), len(input.digests - found)
    if strange or (missing and not is_part):
        text = f"{missing} of the input are in no file, and {strange} are not from the input"
        return Finding("custom_ids", Level.ERROR, text)
    return Finding("custom_ids", Level.OK, f"all {total} of the {'failed lines' if is_part else 'input'} exactly once")


async def _read(chunks: AsyncIterator[bytes], custom_id: Callable[[bytes], str]) -> _Seen:
    seen = _Seen()
    digest = hashlib.sha256()
    rest = b""
    async for chunk in chunks:
        digest.update(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        _note(seen, lines, custom_id)
    _note(seen, [rest], custom_id)
    seen.sha256 = digest.hexdigest()
    return seen


def _note(seen: _Seen, lines: list[bytes], custom_id: Callable[[bytes], str]) -> None:
    for line in lines:
        if not seen.lines:
            line = line.removeprefix(_BOM)
        if line.strip():
            seen.lines += 1
            seen.digests.add(digest_of(custom_id(line)))
