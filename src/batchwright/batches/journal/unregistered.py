"""Answers that earlier claims wrote to a journal, or uploaded, and that the database does not know.

A journal may hold more than what is registered of it: its writer died before the next checkpoint, or lost its claim; or
the database lost the registration in a failover. Such answers are valid, and were paid for. The next owner of the shard
copies those that it lacks into its own journal, and registers them under its own claim. It cannot see answers that are
only on another machine: those lines are resent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from batchwright.batches.journal.checkpoint import Checkpoints, Owner
from batchwright.batches.journal.journal import Journal, open_to_read, read_open, scan, scan_open
from batchwright.batches.journal.segments import Piece, Segments
from batchwright.batches.store import Batches


class UnregisteredAnswers:
    """Finds answers that the database does not know, and keeps them."""

    def __init__(self, batches: Batches, segments: Segments, checkpoints: Checkpoints) -> None:
        self._batches = batches
        self._segments = segments
        self._checkpoints = checkpoints

    async def recover_for_shard(
        self, owner: Owner, journal: Journal, offsets: set[int], *, is_wanted: Callable[[int], bool]
    ) -> tuple[set[int], int]:
        """Which of these lines have an answer, and how many answers were copied into the journal.

        Only journals of the shard with a wanted number are read: the others have answers to other lines.
        """
        known = await self._batches.segments(owner.batch_id, shard=owner.shard)
        segments = [one for one in known if is_wanted(one.claim)]
        own = Piece(journal.path, 0, journal.size)
        answered = await asyncio.to_thread(_read_offsets, [own, *await self._segments.fetch(segments)])
        found = await self._segments.find_unregistered(owner.batch_id, segments, shard=owner.shard, is_wanted=is_wanted)
        strays = [piece for piece in found.get(owner.shard, ()) if piece.path != journal.path]
        copied = await asyncio.to_thread(_copy, strays, journal, offsets - answered)
        return answered | copied, len(copied)

    async def recover_for_batch(self, owner: Owner, models: Mapping[int, str], missing: set[int]) -> int:
        """Register what can be found of these lines under the claim of the batch's own job; returns how many.

        All shards have ended. `models` are theirs, by number.
        """
        segments = await self._batches.segments(owner.batch_id)
        total = 0
        for shard, strays in (await self._segments.find_unregistered(owner.batch_id, segments)).items():
            account = await self._checkpoints.open(replace(owner, shard=shard, model=models.get(shard, owner.model)))
            try:
                copied = await asyncio.to_thread(_copy, strays, account.journal, missing)
                await self._checkpoints.flush(account)
            finally:
                self._checkpoints.close(account)
            missing = missing - copied
            total += len(copied)
        return total


def _read_offsets(pieces: Iterable[Piece]) -> set[int]:
    return {found.offset for piece in pieces for found in scan(piece.path, piece.start, piece.end)}


def _copy(pieces: Iterable[Piece], journal: Journal, wanted: set[int]) -> set[int]:
    """Append the first record of each wanted line to the journal; returns which were found. Blocks."""
    copied: set[int] = set()
    for piece in pieces:
        descriptor = open_to_read(piece.path)
        try:
            for found in scan_open(descriptor, piece.path, piece.start, piece.end):
                if found.offset in wanted and found.offset not in copied:
                    line = read_open(descriptor, piece.path, found.position, found.length, found.offset)
                    journal.append(found.offset, found.status, line, found.usage)
                    copied.add(found.offset)
        finally:
            os.close(descriptor)
    return copied
