"""The prefix cache of a model server: blocks of prompts, keyed by the hash of the prompt up to their end; LRU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import xxhash

BLOCK_TOKENS = 16
BLOCK_BYTES = 64


def tokens(text: bytes) -> int:
    """Four bytes count as a token: close enough for English, and the same everywhere."""
    return (len(text) + 3) // 4


def chain(prompt: bytes) -> list[int]:
    """One hash per full block, each over the prompt up to its end.

    The block with the last token is left out, even if it is full: a server must always process at least one token.
    """
    digest = xxhash.xxh3_64_intdigest
    link = 0
    links = []
    for start in range(0, (tokens(prompt) - 1) // BLOCK_TOKENS * BLOCK_BYTES, BLOCK_BYTES):
        link = digest(prompt[start : start + BLOCK_BYTES], link)
        links.append(link)
    return links


class PrefixCache:
    """Blocks of prompts that were fully processed.

    A prompt is stored from its tail to its head, so a block is never younger than those before it: the tail is
    dropped first, and if a block is known, all blocks before it are.
    """

    def __init__(self, capacity: int, *, seen_max: int = 4_000_000) -> None:
        self.capacity = capacity
        self._seen_max = seen_max
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.reset()

    def __len__(self) -> int:
        return len(self._blocks)

    def reset(self) -> None:
        """Forget the blocks and the counts."""
        self._blocks.clear()
        self._seen: set[int] = set()
        self.total_blocks = 0
        self.cached_blocks = 0

    @property
    def distinct_blocks(self) -> int:
        return len(self._seen)

    @property
    def is_exact(self) -> bool:
        """Whether every distinct block was counted; memory for them has a limit."""
        return len(self._seen) < self._seen_max

    def find(self, links: Sequence[int]) -> int:
        """Return how many leading blocks are known, and count them."""
        known = self._known(links)
        self.total_blocks += len(links)
        self.cached_blocks += known
        if self.is_exact:
            self._seen.update(links)
        return known

    def store(self, links: Sequence[int]) -> None:
        """The prompt has been processed: its blocks are now the youngest."""
        blocks = self._blocks
        touch = blocks.move_to_end
        for link in reversed(links):
            blocks[link] = None
            touch(link)
        for _ in range(len(blocks) - self.capacity):
            blocks.popitem(last=False)

    def _known(self, links: Sequence[int]) -> int:
        blocks = self._blocks
        low, high = 0, len(links)
        while low < high:
            middle = (low + high) // 2
            if links[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low
