"""Cuts the plan of a batch into shards, each the work of one child job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from batchwright.batches.plan.planfile import MODEL_MAP, Entry, plan_path, read_entries

SHARD_BYTES_MAX = 16 * 1024 * 1024
SHARD_REQUESTS_MAX = 1000
_CLAIMS_PER_ROUND = 1_000_000
_CLAIMS_OF_SHARDS = 1_000_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderPlan:
    """Where the requests of a model go that an outside provider answers, and how many a job there may hold."""

    provider: str
    model: str
    """As the provider calls it."""
    requests_max: int
    bytes_max: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRange:
    """Entries `start` to `start + count` of a plan; `bytes` is the length of their lines."""

    start: int
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The payload of a shard: its number in the batch, and the entries `start` to `start + count` of a model's plan."""

    batch_id: str
    model: str
    number: int
    start: int
    count: int
    round: int = 0
    """How often the batch was sent before because lines had no answer at its end."""
    provider: str | None = None
    """The outside provider that answers its requests; unset, a server of our own does."""
    provider_model: str | None = None
    """What the provider calls the model."""

    def journal_number(self, claim: int) -> int:
        """Each claim of each round writes a journal of its own."""
        return self.round * _CLAIMS_PER_ROUND + claim


def last_journal_number(claim: int) -> int:
    """The journals that the batch's own job writes, for what it finds at the end, come after those of all shards."""
    return _CLAIMS_OF_SHARDS + claim


def shards_of(batch_id: str, folder: Path) -> Iterator[Shard]:
    """The shards of a planned batch; the same plan gives the same shards."""
    found = orjson.loads((folder / MODEL_MAP).read_bytes())
    number = 0
    for model, safe in sorted(found["model_to_safe"].items()):
        there = ProviderPlan(**found["providers"][model]) if model in found.get("providers", ()) else None
        limits = {} if there is None else {"requests_max": there.requests_max, "bytes_max": there.bytes_max}
        for shard in cut(read_entries(plan_path(folder, safe)), **limits):
            yield Shard(
                batch_id=batch_id,
                model=model,
                number=number,
                start=shard.start,
                count=shard.count,
                provider=None if there is None else there.provider,
                provider_model=None if there is None else there.model,
            )
            number += 1


def cut(
    entries: Sequence[Entry], *, requests_max: int = SHARD_REQUESTS_MAX, bytes_max: int = SHARD_BYTES_MAX
) -> Iterator[PlanRange]:
    """Shards of at most so many requests and bytes, in plan order; a line longer than `bytes_max` has its own.

    A full shard ends where a group ends, if one does after the shard is three quarters full.
    """
    start = 0
    while start < len(entries):
        end = _end(entries, start, requests_max, bytes_max)
        size = sum(entry.length for entry in entries[start:end])
        yield PlanRange(start=start, count=end - start, bytes=size)
        start = end


def _end(entries: Sequence[Entry], start: int, requests_max: int, bytes_max: int) -> int:
    best = None
    size = 0
    for end in range(start, len(entries)):
        if 4 * (end - start) >= 3 * requests_max or 4 * size >= 3 * bytes_max:
            best = end if _is_boundary(entries, end) else best
        size += entries[end].length
        if end > start and (end - start == requests_max or size > bytes_max):
            return best or end
    return len(entries)


def _is_boundary(entries: Sequence[Entry], end: int) -> bool:
    return entries[end].group == 0 or entries[end].group != entries[end - 1].group
