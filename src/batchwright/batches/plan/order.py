"""Puts requests that share the beginning of their prompt side by side, so that a model server computes it once.

A prompt becomes a chain: one hash per full block of 256 bytes, each seeded with the one before, so that two chains
agree exactly as far as their prompts do. Sorted by chain, requests that share any leading blocks are neighbours.
Requests and families that share nothing more keep the order of the input, so that a file is read from front to back.

Prompts are compared as the bytes of their JSON fields. So some prompts that are equal for a model differ here: those
with other white space or key order inside `messages`, other escapes of the same character, or content as a string
instead of content parts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from struct import pack
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

BLOCK_BYTES = 256
BLOCKS_MAX = 64
GROUP_BLOCKS_MIN = 4  # 1 KB: less is not worth waiting for

_HASH_BYTES = 8
_PROMPT_BYTES_MAX = BLOCK_BYTES * BLOCKS_MAX


class Order(NamedTuple):
    """`positions` is a permutation of the input; `groups` and `shared` run along it.

    `groups` holds 0 for a request without a group, else a number that counts from 1. `shared` is the number of leading
    blocks that a request has in common with the one before it.
    """

    positions: list[int]
    groups: array[int]
    shared: array[int]


def chain(prompt: bytes) -> bytes:
    """Eight bytes per full block, for the first 64 blocks."""
    hashes = []
    seed = 0
    for start in range(0, min(len(prompt), _PROMPT_BYTES_MAX) - BLOCK_BYTES + 1, BLOCK_BYTES):
        seed = xxh3_64_intdigest(prompt[start : start + BLOCK_BYTES], seed)
        hashes.append(seed)
    return pack(f"<{len(hashes)}Q", *hashes)


def order(chains: Sequence[bytes]) -> Order:
    """Put requests that share most side by side; otherwise keep the order of the input."""
    if not chains:
        return Order([], array("I"), array("B"))
    in_chain_order = sorted(range(len(chains)), key=chains.__getitem__)
    depths = array("B", [0])
    depths.extend(shared_blocks(chains[left], chains[right]) for left, right in pairwise(in_chain_order))
    positions, between = _by_first_occurrence(in_chain_order, depths, 0, len(chains))
    shared = array("B", [0, *between])
    return Order(positions, group(shared), shared)


def _by_first_occurrence(positions: list[int], shared: array[int], start: int, end: int) -> tuple[list[int], list[int]]:
    """A range of the chain order, its branches sorted by their first request; and what neighbours share.

    The requests of the range share a prefix and branch where it ends. Each recursion is a block deeper, so there are at
    most 64 levels.
    """
    if end - start == 1:
        return [positions[start]], []
    depth = min(shared[start + 1 : end])
    cuts = [start, *(at for at in range(start + 1, end) if shared[at] == depth), end]
    if len(cuts) == end - start + 1:
        return sorted(positions[start:end]), [depth] * (end - start - 1)
    branches = [_by_first_occurrence(positions, shared, left, right) for left, right in pairwise(cuts)]
    branches.sort(key=lambda branch: branch[0][0])
    ordered, between = branches[0]
    for more, within in branches[1:]:
        ordered += more
        between += (depth, *within)
    return ordered, between


def group(shared: Sequence[int]) -> array[int]:
    """Numbers the runs of two or more neighbours whose deepest shared prefix is the same, and at least 1 KB long.

    The deepest prefix that a request shares with any other is shared with a neighbour. Two neighbours are in one group
    if they share at least as much with each other as with their other neighbours.
    """
    groups = array("I", bytes(4 * len(shared)))
    last = 0
    for here in range(1, len(shared)):
        depth = shared[here]
        after = shared[here + 1] if here + 1 < len(shared) else 0
        if depth < GROUP_BLOCKS_MIN or depth < after or depth < shared[here - 1]:
            continue
        if groups[here - 1] == 0:
            last += 1
            groups[here - 1] = last
        groups[here] = groups[here - 1]
    return groups


def shared_blocks(left: bytes, right: bytes) -> int:
    """How many leading blocks two chains have in common."""
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size], "big") ^ int.from_bytes(right[:size], "big")
    return (size - (differing.bit_length() + 7) // 8) // _HASH_BYTES
