"""Tokens without a tokenizer: a guess for one text, and a count shared out among many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def estimate_tokens(text: str) -> int:
    """A third of the ASCII characters and all others. A guess: give a tokenizer where the limit is strict."""
    plain = len(text.encode("ascii", "ignore"))
    return (plain + 2) // 3 + len(text) - plain


def share_out(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to the weights, whose sum is the total."""
    if not sum(weights):
        weights = [1] * len(weights)
    ends = [0, *accumulate(weights)]
    return [total * end // ends[-1] - total * start // ends[-1] for start, end in pairwise(ends)]
