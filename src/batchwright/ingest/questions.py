"""Search queries as users type them: words, "phrases", and -words to exclude; and the lookups made from them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from batchwright.errors import InvalidInput, TooLarge

QUERY_CHARACTERS_MAX = 2_000
FILTERS_MAX = 20
_PHRASES_MAX = 10
_LEXEMES_MAX = 24
_PROBES_MAX = 10
"""Maximum number of lexemes of a query that chunks are looked up by: the most selective ones."""
_COMMON_SHARE = 0.1
"""A lexeme in more chunks than this is too common to look up chunks by it alone."""
_PAIRS_MAX = 4
_PAIR_SHARE = 0.02
"""Two neighbouring common lexemes are selective together, unless both are in almost all chunks."""
_RARE_WEIGHT = math.log(1 + 1000)
_PIECE = re.compile(r'(?P<minus>(?<!\S)-)?"(?P<phrase>[^"]*)"?|(?P<word>[^\s"]+)')
_WORD = re.compile(r"\w+")
_COMPOUND = re.compile(r"\w+(?:[-.@/:_'\u2019]\w+)*")
_UNSTORABLE = re.compile(r"[\0\ud800-\udfff]")
_BUILT_IN = ("source", "name", "page", "entity")


@dataclass(frozen=True, slots=True)
class Question:
    """A parsed query."""

    text: str
    """All words to search for, including those in phrases."""
    phrases: tuple[str, ...]
    excluded: tuple[str, ...]


def read_question(query: str) -> Question:
    """Parse a query. Any text is valid, except an empty one."""
    if not query.strip():
        raise InvalidInput("the query is empty; give words to search for", param="q")
    if len(query) > QUERY_CHARACTERS_MAX:
        found = f"the query has {len(query):,} characters; the limit is {QUERY_CHARACTERS_MAX:,}"
        raise TooLarge(found, param="q")
    _refuse_unstorable("the query", query, param="q")
    wanted: list[str] = []
    phrases: list[str] = []
    excluded: list[str] = []
    for piece in _PIECE.finditer(query):
        phrase, word = piece["phrase"], piece["word"] or ""
        if phrase is not None:
            (excluded if piece["minus"] else phrases).append(phrase)
            wanted += [] if piece["minus"] else [phrase]
        elif word[0] == "-" and _WORD.match(word, 1) and (piece.start() == 0 or query[piece.start() - 1].isspace()):
            excluded.append(word[1:])
        else:
            wanted.append(word)
    return Question(" ".join(wanted), tuple(phrases[:_PHRASES_MAX]), tuple(excluded[:_PHRASES_MAX]))


@dataclass(frozen=True, slots=True)
class Probes:
    """How chunks are looked up by their words: tsqueries, as text."""

    probes: list[str]
    lexemes: list[str]
    numbers: list[int | None]
    """For each lexeme, the number of the probe that counts it."""
    weights: list[float | None]
    """The weight of each common lexeme. The weight of the others depends on how many chunks their probe finds."""
    guesses: list[float]
    """The weight of each lexeme if nothing is counted."""
    condition: str | None
    """Phrases and exclusions."""
    any: str
    """All lexemes, for marking."""

    @classmethod
    def plan(
        cls,
        collection_id: int,
        lexemes: Sequence[str],
        shares: Mapping[str, float],
        phrases: Sequence[str] = (),
        excluded: Sequence[str] = (),
    ) -> Probes:
        """Probe for single lexemes, the rarest first; for pairs of common neighbours; and for all lexemes together."""
        lexemes = lexemes[:_LEXEMES_MAX]
        quoted = {lexeme: _quote(lexeme) for lexeme in lexemes}
        rare = sorted(lexemes, key=lambda lexeme: shares.get(lexeme, 0.0))
        singles = [one for one in rare if shares.get(one, 0.0) < _COMMON_SHARE][:_PROBES_MAX] or rare[:1]
        pairs = [pair for pair in itertools.pairwise(lexemes) if 0 < _share_of(pair, shares) < _PAIR_SHARE]
        groups = [(one,) for one in singles] + pairs[:_PAIRS_MAX] + ([tuple(lexemes)] if len(lexemes) > 1 else [])
        here = _quote(collection_lexeme(collection_id))
        conditions = [f"({phrase})" for phrase in phrases if phrase] + [f"!({phrase})" for phrase in excluded if phrase]
        return cls(
            probes=[" & ".join([here, *(quoted[one] for one in group), *conditions]) for group in groups],
            lexemes=list(quoted.values()),
            numbers=[singles.index(one) + 1 if one in singles else None for one in lexemes],
            weights=[math.log(1 + 1 / shares[one]) if one in shares else None for one in lexemes],
            guesses=[math.log(1 + 1 / shares[one]) if one in shares else _RARE_WEIGHT for one in lexemes],
            condition=" & ".join(conditions) or None,
            any=" | ".join(quoted.values()),
        )


def _share_of(pair: tuple[str, str], shares: Mapping[str, float]) -> float:
    """The expected share of chunks that have both, if they are independent; 0 if one is rare."""
    return shares.get(pair[0], 0.0) * shares.get(pair[1], 0.0)


def collection_lexeme(collection_id: int) -> str:
    """A lexeme that all chunks of a collection have, and that cannot be a word."""
    return f"c {collection_id}"


def read_filters(filters: Mapping[str, str]) -> dict[str, Any]:
    """Filters as parameters of SQL statements: built-in ones by name; all others filter on metadata."""
    if len(filters) > FILTERS_MAX:
        raise TooLarge(f"there are {len(filters)} filters; at most {FILTERS_MAX} are allowed", param="filter")
    for key, value in filters.items():
        _refuse_unstorable(f"the filter {key!r}", key + value, param="filter")
    page = filters.get("page")
    if page is not None and not (page.isascii() and page.isdigit() and len(page) < 10):
        raise InvalidInput(f"the filter page is {page!r}; write a number, such as 12", param="filter")
    metadata = {key: value for key, value in filters.items() if key not in _BUILT_IN}
    return {
        "metadata": orjson.dumps(metadata).decode(),
        "source": _like(filters.get("source")),
        "name": _like(filters.get("name")),
        "page": int(page) if page is not None else None,
        "entity": filters.get("entity"),
    }


def words_of(text: str) -> set[str]:
    """All words of a text, alone and as parts of compounds such as `ERR-4711`."""
    return {*_COMPOUND.findall(text), *_WORD.findall(text)}


def mark(text: str, matching: set[str]) -> list[tuple[int, int]]:
    """Where words of a text match. In a compound these are the parts that match, or all of it if no part matches."""
    marks = []
    for compound in _COMPOUND.finditer(text):
        parts = [part.span() for part in _WORD.finditer(text, *compound.span()) if part[0] in matching]
        marks += parts or ([compound.span()] if compound[0] in matching else [])
    return marks


def _refuse_unstorable(what: str, text: str, *, param: str) -> None:
    if found := _UNSTORABLE.search(text):
        raise InvalidInput(
            f"{what} contains the character U+{ord(found[0]):04X}, which cannot be stored; remove it", param=param
        )


def _quote(lexeme: str) -> str:
    return "'" + lexeme.replace("\\", "\\\\").replace("'", "''") + "'"


def _like(glob: str | None) -> str | None:
    """A LIKE pattern; `*` matches anything, and all other characters match themselves."""
    if glob is None:
        return None
    return re.sub(r"([\\%_])", r"\\\1", glob).replace("*", "%")
