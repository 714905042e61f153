"""Entities by patterns and lists of words: no model, no cost, and linear time.

To keep the time linear, each pattern starts only where no earlier match could have reached. It repeats only unambiguous
parts, and only a bounded number of times.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date

import orjson

from batchwright.errors import ConfigurationError
from batchwright.inference.calls import ENTITIES, Ledger
from batchwright.inference.sending import settle_here
from batchwright.ingest.entities.mention import Mention, dump_mentions

_VERSION = 1
_PHRASE_WORDS_MAX = 16
_MONTHS = (
    r"(?:Jan(?:uary|uar)?|Jänner|Feb(?:ruary|ruar)?|Mar(?:ch)?|März|Mär|Apr(?:il)?|May|Mai|Jun[ei]?|Jul[yi]?|Aug(?:ust)?"
    r"|Sept?(?:ember)?|O[ck]t(?:ober)?|Nov(?:ember)?|De[cz](?:ember)?)\b\.?"
)
_NUMBER = r"\d{1,3}(?:[.,'\u2019\u00a0\u202f]\d{3}){1,6}(?:[.,]\d{1,2})?(?!\d)|\d{1,15}(?:[.,]\d{1,2})?(?!\d)"
_SCALE = r"(?: ?(?:thousand|million|billion|trillion|Tsd\.|Mio\.|Mrd\.|Millionen|Milliarden|bn|[kKM])(?!\w))?"
_CURRENCY = r"(?:US\$|[$€£¥₹]|(?:USD|EUR|GBP|CHF|JPY|INR|CAD|AUD)\b)"
_CURRENCY_BEHIND = r"(?:[$€£¥₹]|(?:USD|EUR|GBP|CHF|JPY|INR|CAD|AUD|[Dd]ollars?|[Ee]uros?|Franken|[Pp]ounds?)\b)"
_EMAIL = re.compile(r"(?<![\w.+%-])[\w.+%-]{1,64}@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])")
_URL = re.compile(r"(?<!\w)(?:https?://|www\.)[^\s<>\"\u201c\u201d\u00ab\u00bb`{}|\\^]{1,2000}", re.IGNORECASE)
_DATE = re.compile(
    r"(?<![\w.,/-])(?:"
    r"(?P<y>\d{4})-(?P<m>\d\d)-(?P<d>\d\d)(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?:Z|[+-]\d\d:?\d\d)?)?(?![\w-])"
    r"|(?P<d2>\d{1,2})\.[ \u00a0]?(?P<m2>\d{1,2})\.[ \u00a0]?(?P<y2>\d{4}|\d\d)(?!\w|\.\d)"
    r"|(?P<a3>\d{1,2})/(?P<b3>\d{1,2})/(?P<y3>\d{4})(?![\w/])"
    rf"|(?P<d4>\d{{1,2}})(?:\.|st|nd|rd|th)?[ \u00a0](?:of )?{_MONTHS},?[ \u00a0](?P<y4>\d{{4}})(?!\w)"
    rf"|{_MONTHS}[ \u00a0](?P<d5>\d{{1,2}})(?:st|nd|rd|th)?,?[ \u00a0](?P<y5>\d{{4}})(?!\w)"
    rf"|{_MONTHS}[ \u00a0]\d{{4}}(?!\w))"
)
_MONEY = re.compile(
    rf"(?<![\w.,$€£¥₹])(?:{_CURRENCY}[ \u00a0]?(?:{_NUMBER}){_SCALE}|(?:{_NUMBER}){_SCALE}[ \u00a0]?{_CURRENCY_BEHIND})"
)
_PERCENTAGE = re.compile(
    r"(?<![\w.,])[-+\u2212]?\d{1,9}(?:[.,]\d{1,6})?[ \u00a0]?(?:[%\u2030]|(?:percent|per cent|Prozent)\b)"
)
_PHONE = re.compile(
    r"(?<![\w.,+/-])(?:"
    r"(?:\+|\((?=0)|(?=0[1-9]|00[1-9]))(?:\d|\)[ ]?(?=\d)|[ \u00a0./-](?=[\d(])|\((?=\d)){7,24}"
    r"|(?:\(\d{3}\) ?|\d{3}[-.])\d{3}[-.]\d{4})(?!\w)"
)
_SENTENCE = ".,;:!?'\u2019\u2026*_"
_TOKEN = re.compile(r"\w+|[^\w\s]")


class PatternExtractor:
    """E-mail addresses, urls, dates, money, percentages and phone numbers, and the words of your own lists.

    >>> PatternExtractor({"product": ["Batchwright", "Grand Piano"]}).find("A grand piano for 5.000 €")
    """

    model: str | None = None

    def __init__(self, lists: Mapping[str, Iterable[str]] | None = None) -> None:
        self._turns = asyncio.Semaphore(1)
        self._phrases: dict[tuple[str, ...], set[str]] = {}
        self._lengths: dict[str, list[int]] = {}
        for type, words in (lists or {}).items():
            for phrase in words:
                self._add(type, phrase)
        listed = sorted((phrase, sorted(types)) for phrase, types in self._phrases.items())
        digest = hashlib.sha256(orjson.dumps(listed)).hexdigest()[:16] if listed else "none"
        self.fingerprint = f"patterns:{_VERSION}:{digest}"

    async def extract(self, windows: Mapping[bytes, str], ledger: Ledger) -> None:
        await settle_here(ENTITIES, windows, self._find_all, ledger, self._turns)

    def find(self, window: str) -> list[Mention]:
        """All mentions, in the order of the text. Those by patterns do not overlap, but may contain words of lists."""
        found = [*_find_patterns(window), *self._find_phrases(window)]
        return sorted(found, key=lambda one: (one.start, one.end, one.type))

    def _find_all(self, windows: Sequence[str]) -> list[bytes]:
        return [dump_mentions(self.find(window)) for window in windows]

    def _add(self, type: str, phrase: str) -> None:
        words = tuple(_TOKEN.findall(phrase.casefold()))
        if not type or not 1 <= len(words) <= _PHRASE_WORDS_MAX:
            raise ConfigurationError(
                f"{phrase!r} in the list of {type!r} has {len(words)} words and signs; use 1 to {_PHRASE_WORDS_MAX}"
            )
        self._phrases.setdefault(words, set()).add(type)
        lengths = self._lengths.setdefault(words[0], [])
        if len(words) not in lengths:
            lengths.append(len(words))
            lengths.sort(reverse=True)

    def _find_phrases(self, window: str) -> Iterator[Mention]:
        """The longest phrase at each word; the next one begins after it."""
        if not self._phrases:
            return
        spans = [found.span() for found in _TOKEN.finditer(window)]
        words = [window[start:end].casefold() for start, end in spans]
        place = 0
        while place < len(words):
            for length in self._lengths.get(words[place], ()):
                types = self._phrases.get(tuple(words[place : place + length]), ())
                if types and place + length <= len(words):
                    start, end = spans[place][0], spans[place + length - 1][1]
                    yield from (Mention(type, window[start:end], start, end) for type in types)
                    place += length - 1
                    break
            place += 1


def _find_patterns(window: str) -> Iterator[Mention]:
    """A pattern skips what an earlier one has matched: the digits of a date are not a phone number."""
    taken = bytearray(len(window))
    for type, pattern, trim in _PATTERNS:
        for found in pattern.finditer(window):
            text = trim(found)
            start, end = found.start(), found.start() + len(text)
            if text and not any(taken[start:end]):
                taken[start:end] = b"\x01" * (end - start)
                yield Mention(type, text, start, end)


def _whole(found: re.Match[str]) -> str:
    return found.group()


def _trim_url(found: re.Match[str]) -> str:
    """Strip the punctuation that ends the sentence around it, but keep brackets that it has opened."""
    text = found.group().rstrip(_SENTENCE)
    behind = len(text) - len(text.rstrip(")]"))
    unopened = sum(map(text.count, ")]")) - sum(map(text.count, "(["))
    text = text[: len(text) - max(0, min(behind, unopened))].rstrip(_SENTENCE)
    return text if len(text) > len("www.") and not text.endswith("//") else ""


def _check_date(found: re.Match[str]) -> str:
    part = found.groupdict()
    try:
        if part["y"] is not None:
            date(int(part["y"]), int(part["m"]), int(part["d"]))
        elif part["y2"] is not None:
            date(int(part["y2"]) + (2000 if len(part["y2"]) == 2 else 0), int(part["m2"]), int(part["d2"]))
        elif part["y3"] is not None:
            month, day = sorted((int(part["a3"]), int(part["b3"])))
            date(int(part["y3"]), month, day)
        elif not 1 <= int(part["d4"] or part["d5"] or 1) <= 31:
            return ""
    except ValueError:
        return ""
    return found.group()


def _check_phone(found: re.Match[str]) -> str:
    text = found.group().rstrip(" \u00a0./-(")
    digits = sum(one.isdigit() for one in text)
    is_grouped = text.startswith("+") or any(not one.isdigit() for one in text)
    return text if 7 <= digits <= 15 and is_grouped else ""


_PATTERNS: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    ("email", _EMAIL, _whole),
    ("url", _URL, _trim_url),
    ("date", _DATE, _check_date),
    ("money", _MONEY, _whole),
    ("percentage", _PERCENTAGE, _whole),
    ("phone", _PHONE, _check_phone),
)
