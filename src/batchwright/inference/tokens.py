"""Tokens without a tokenizer: an estimate for one text, and a count divided among many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def estimate_tokens(text: str) -> int:
    """An estimate: a third of the ASCII characters, plus all others. Use a tokenizer if the limit is strict."""
    plain = len(text.encode("ascii", "ignore"))
    return (plain + 2) // 3 + len(text) - plain


def share_out(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to the weights, whose sum is the total."""
    if not sum(weights):
        weights = [1] * len(weights)
    ends = [0, *accumulate(weights)]
    return [total * end // ends[-1] - total * start // ends[-1] for start, end in pairwise(ends)]
