"""What dead claims left: answers that were written to a journal of this machine and never registered.

A journal may hold more than what is registered of it: its writer died before the next checkpoint, or lost its claim. Up
to the last whole record this is as good as what is registered, so the heir registers it in its own name, but for lines
that were asked again since. On another machine nobody can see it, and those lines are asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from batchwright.batches.assemble import Piece
from batchwright.batches.checkpoint import Checkpoints, Owner
from batchwright.batches.journal import Part, adopt, scan, tally_of, valid_end
from batchwright.batches.segments import Segments
from batchwright.batches.store import Batches, Segment
from batchwright.batches.workspace import Workspace


class Takeover:
    """Takes up what is there."""

    def __init__(self, batches: Batches, workspace: Workspace, segments: Segments, checkpoints: Checkpoints) -> None:
        self._batches = batches
        self._workspace = workspace
        self._segments = segments
        self._checkpoints = checkpoints

    async def of_shard(self, owner: Owner) -> tuple[set[int], int]:
        """The offsets of a shard that have their answer, and how many of them had not been registered."""
        segments = await self._batches.segments(owner.batch_id, shard=owner.shard)
        done = await asyncio.to_thread(_offsets, await self._segments.fetch(segments))
        registered = len(done)
        for _, claim, path in self._workspace.journals(owner.batch_id, owner.shard):
            if claim < owner.job_claim:
                await self._adopt(owner, claim, path, segments, done)
        return done, len(done) - registered

    async def of_batch(self, owner: Owner, models: Mapping[int, str]) -> int:
        """The same for all shards of a batch, which have ended; `models` are those of the shards, by number."""
        journals = self._workspace.journals(owner.batch_id)
        if not journals:
            return 0
        segments = await self._batches.segments(owner.batch_id)
        adopted = 0
        for shard, claim, path in journals:
            own = [one for one in segments if one.shard == shard]
            if path.stat().st_size > _registered(own, claim, self._workspace.id):
                done = await asyncio.to_thread(_offsets, await self._segments.fetch(own))
                before = len(done)
                heir = replace(owner, shard=shard, model=models[shard])
                await self._adopt(heir, claim, path, own, done)
                adopted += len(done) - before
        return adopted

    async def _adopt(self, owner: Owner, claim: int, path: Path, segments: Sequence[Segment], done: set[int]) -> None:
        start = _registered(segments, claim, self._workspace.id)
        seq = max((one.seq for one in segments if one.claim == claim), default=-1) + 1
        parts = await asyncio.to_thread(_new_parts, path, start, done)
        if parts and await self._checkpoints.adopt(owner, claim, seq, path, parts):
            done |= await asyncio.to_thread(_offsets, [Piece(path, part.start, part.end) for part in parts])


def tails(workspace: Workspace, batch_id: str, segments: Sequence[Segment]) -> list[Piece]:
    """What the journals of this machine hold beyond what is registered, up to their last whole records. Blocks."""
    pieces = []
    for shard, claim, path in workspace.journals(batch_id):
        start = _registered((one for one in segments if one.shard == shard), claim, workspace.id)
        if path.stat().st_size > start and (end := valid_end(path, start)) > start:
            pieces.append(Piece(path, start, end))
    return pieces


def _registered(segments: Iterable[Segment], claim: int, host: str) -> int:
    return max((one.end for one in segments if one.claim == claim and one.host == host), default=0)


def _offsets(pieces: Iterable[Piece]) -> set[int]:
    return {found.offset for piece in pieces for found in scan(piece.path, piece.start, piece.end)}


def _new_parts(path: Path, start: int, done: set[int]) -> list[Part]:
    """The tail of a journal in as few ranges as leave out what is done already."""
    end, tally = adopt(path, start)
    runs = list(_runs(path, start, end, done))
    if runs == [(start, end)]:
        return [Part(start, end, tally)]
    return [Part(first, last, tally_of(path, first, last)) for first, last in runs]


def _runs(path: Path, start: int, end: int, done: set[int]) -> Iterator[tuple[int, int]]:
    seen = set(done)
    begun: int | None = None
    for found in scan(path, start, end):
        if found.offset in seen:
            if begun is not None:
                yield begun, found.position
            begun = None
        elif begun is None:
            begun = found.position
        seen.add(found.offset)
    if begun is not None:
        yield begun, end
