"""Cuts the plan of a batch into shards, each the work of one child job.

    plan ──▶ numbered shards of 1,000 requests ──▶ branches of decreasing size, for several workers

A shard may be divided: before any worker claims it, so that several workers end at the same time; and while it runs,
when other workers are idle. Its branches have its number, so that a search for the answers of a shard finds them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from batchwright.batches.plan.planfile import MODEL_MAP, Entry, plan_path, read_entries

SHARD_BYTES_MAX = 16 * 1024 * 1024
SHARD_REQUESTS_MAX = 1000
BRANCH_REQUESTS_MIN = 64
"""Minimum size of the branches into which shards are divided before they are claimed: each costs some statements."""
_BRANCHES_PER_WORKER = 2
"""A branch has this fraction of each worker's share of what is left: early branches are large, the last ones small."""
_CLAIMS_PER_ROUND = 1_000_000
_CLAIMS_PER_BRANCH = 100_000_000
_CLAIMS_OF_SHARDS = 1_000_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderPlan:
    """The outside provider that answers a model's requests, and how many requests a job there may hold."""

    provider: str
    model: str
    """The provider's name for the model."""
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
    """The payload of a shard, or of a branch of one: the entries `start` to `start + count` of a model's plan."""

    batch_id: str
    model: str
    number: int
    """The shard's number in the batch; branches have that of their shard."""
    start: int
    count: int
    branch: int = 0
    """The distance of its start from the start of its shard, so it is unique among the branches; 0 for the first."""
    donors: Sequence[int] = ()
    """The branches from which it was split: their journals may hold answers to its lines."""
    round: int = 0
    """How often lines of the batch were resent before, because they had no answer at its end."""
    provider: str | None = None
    """The outside provider that answers its requests; None if a server of our own does."""
    provider_model: str | None = None
    """The provider's name for the model."""

    @property
    def name(self) -> str:
        """Its name in the batch."""
        return f"{self.number}-{self.branch}" if self.branch else str(self.number)

    def journal_number(self, claim: int) -> int:
        """Each claim of each branch and round writes a journal of its own."""
        return self.branch * _CLAIMS_PER_BRANCH + self.round * _CLAIMS_PER_ROUND + claim

    def may_be_in(self, journal_number: int) -> bool:
        """Whether this journal of the shard may hold answers to lines of this branch."""
        return self.round > 0 or journal_number // _CLAIMS_PER_BRANCH in (self.branch, *self.donors)

    def split(self, *places: int) -> tuple[Shard, list[Shard]]:
        """What is left of it, and the branches that begin at these entries of the plan."""
        ends = [*places[1:], self.start + self.count]
        given = [
            replace(
                self,
                start=start,
                count=end - start,
                branch=self.branch + start - self.start,
                donors=[*self.donors, self.branch],
            )
            for start, end in zip(places, ends, strict=True)
        ]
        return replace(self, count=places[0] - self.start), given


def last_journal_number(claim: int) -> int:
    """The number of a journal that the batch's own job writes at the end; it is above those of all shards."""
    return _CLAIMS_OF_SHARDS + claim


def shards_of(batch_id: str, folder: Path, *, workers: int = 1) -> Iterator[Shard]:
    """The shards of a planned batch, divided for several workers. The same plan gives the same shards."""
    found = orjson.loads((folder / MODEL_MAP).read_bytes())
    number = 0
    for model, safe in sorted(found["model_to_safe"].items()):
        there = ProviderPlan(**found["providers"][model]) if model in found.get("providers", ()) else None
        limits = {} if there is None else {"requests_max": there.requests_max, "bytes_max": there.bytes_max}
        entries = read_entries(plan_path(folder, safe))
        for one in cut(entries, **limits):
            shard = Shard(
                batch_id=batch_id,
                model=model,
                number=number,
                start=one.start,
                count=one.count,
                provider=None if there is None else there.provider,
                provider_model=None if there is None else there.model,
            )
            yield from [shard] if there is not None else divide(shard, entries, workers)
            number += 1


def divide(shard: Shard, entries: Sequence[Entry], workers: int) -> Iterator[Shard]:
    """Divide a shard for this number of workers; `entries` is the model's whole plan. For one worker it stays whole."""
    place, end = shard.start, shard.start + shard.count
    while workers > 1 and end - place > BRANCH_REQUESTS_MIN:
        size = max(BRANCH_REQUESTS_MIN, (len(entries) - place) // (_BRANCHES_PER_WORKER * workers))
        until = _end(entries, place, size, SHARD_BYTES_MAX)
        until = end if end - until < BRANCH_REQUESTS_MIN // 2 else until
        yield replace(shard, start=place, count=until - place, branch=place - shard.start)
        place = until
    if place < end:
        yield replace(shard, start=place, count=end - place, branch=place - shard.start)


def cut(
    entries: Sequence[Entry], *, requests_max: int = SHARD_REQUESTS_MAX, bytes_max: int = SHARD_BYTES_MAX
) -> Iterator[PlanRange]:
    """Shards of at most this many requests and bytes, in plan order; a longer line gets its own shard.

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
            best = end if is_boundary(entries, end) else best
        size += entries[end].length
        if end > start and (end - start == requests_max or size > bytes_max):
            return best or end
    return len(entries)


def is_boundary(entries: Sequence[Entry], end: int) -> bool:
    """Whether a group begins or none continues at this entry."""
    return entries[end].group == 0 or entries[end].group != entries[end - 1].group
