"""Merges the results of a batch with those of the batches that retried its failed lines.

Every line of a result file has its offset in the input at the end of its id, and all files are in that order. They are
merged line by line, so memory does not grow with them.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Sequence

from batchwright.batches.journal.envelopes import offset_of
from batchwright.batches.store import Batch, Batches
from batchwright.files.store import Files

_DEPTH_MAX = 100
_CHUNK_BYTES = 1024 * 1024


async def follow_retries(batches: Batches, batch: Batch) -> list[Batch]:
    """The batch, the one that it retries, and so on; the newest first."""
    found = [batch]
    while found[-1].retry_of is not None and len(found) < _DEPTH_MAX:
        found.append(await batches.get(found[-1].retry_of, tenant=batch.tenant))
    return found


async def merge_outputs(files: Files, batches: Sequence[Batch]) -> AsyncIterator[bytes]:
    """The output files of all of them as one, in the order of the input; no line is in two of them."""
    ids = [batch.output_file_id for batch in batches if batch.output_file_id is not None]
    if len(ids) == 1:
        async for chunk in files.content(await files.get(ids[0], tenant=None)):
            yield chunk
        return
    held = bytearray()
    async for line in _merge([_read_lines(files, id) for id in ids]):
        held += line
        if len(held) >= _CHUNK_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


async def _read_lines(files: Files, id: str) -> AsyncIterator[bytes]:
    """The lines of a file, each with its newline."""
    rest = b""
    async for chunk in files.content(await files.get(id, tenant=None)):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line + b"\n"


async def _merge(sources: Sequence[AsyncIterator[bytes]]) -> AsyncIterator[bytes]:
    heads: list[tuple[int, int, bytes]] = []
    for number, source in enumerate(sources):
        if (line := await anext(source, None)) is not None:
            heapq.heappush(heads, (offset_of(line), number, line))
    while heads:
        _, number, line = heads[0]
        yield line
        following = await anext(sources[number], None)
        if following is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (offset_of(following), number, following))
