"""Finds where text may be cut without breaking what a reader sees as one character.

Follows UAX #29 conservatively: it may join a little more than the standard does.
It does not know marks that are newer than Python's Unicode tables.
"""

from __future__ import annotations

import unicodedata

_FIRST_SPECIAL = "\u0300"
_JOINER = "\u200d"
_MARKS = frozenset(("Mn", "Mc", "Me"))
_LETTERS = frozenset(("Lo", "Ll", "Lu", "Lm"))
_VIRAMA = 9
_EXTENDING = frozenset("\u200c\u200d\u0e33\u0eb3\uff9e\uff9f")
_PREPENDED = frozenset(
    "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\u0d4e"
    "\U000110bd\U000110cd\U000111c2\U000111c3\U000113d1\U0001193f\U00011941\U00011a3a"
    "\U00011a84\U00011a85\U00011a86\U00011a87\U00011a88\U00011a89\U00011d46\U00011f02"
)


def is_boundary(text: str, offset: int, *, origin: int = 0) -> bool:
    """Whether the text may be cut before this character; `origin` is a known boundary before it."""
    if offset <= origin or offset >= len(text):
        return True
    before, after = text[offset - 1], text[offset]
    if before < _FIRST_SPECIAL and after < _FIRST_SPECIAL:
        return not (before == "\r" and after == "\n")
    if before in "\n\r" or after in "\n\r":
        return True
    if _is_extending(after) or before == _JOINER or before in _PREPENDED:
        return False
    if _is_regional(before) and _is_regional(after):
        return _is_between_flags(text, offset, origin)
    if unicodedata.combining(before) == _VIRAMA and unicodedata.category(after) in _LETTERS:
        return False
    return not _is_in_syllable(before, after)


def _is_extending(character: str) -> bool:
    is_modifier = "\U0001f3fb" <= character <= "\U0001f3ff" or "\U000e0020" <= character <= "\U000e007f"
    return is_modifier or character in _EXTENDING or unicodedata.category(character) in _MARKS


def _is_regional(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _is_between_flags(text: str, offset: int, origin: int) -> bool:
    """Two regional letters form a flag, so a boundary has an even number of them before it."""
    start = offset
    while start > origin and _is_regional(text[start - 1]):
        start -= 1
    return (offset - start) % 2 == 0


def _is_in_syllable(before: str, after: str) -> bool:
    """Korean letters, several of which form a syllable."""
    is_leading = "\u1100" <= before <= "\u115f" or "\ua960" <= before <= "\ua97c"
    is_vowel_or_final = "\u1160" <= after <= "\u11ff" or "\ud7b0" <= after <= "\ud7fb"
    return (is_leading and _is_korean(after)) or (is_vowel_or_final and _is_korean(before))


def _is_korean(character: str) -> bool:
    return "\u1100" <= character <= "\u11ff" or "\ua960" <= character <= "\ua97c" or "\uac00" <= character <= "\ud7fb"
