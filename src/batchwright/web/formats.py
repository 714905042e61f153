"""Formats of numbers, times and ids on pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import orjson
from jinja2 import pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

NONE = "\u2013"
"""Shown for a missing value."""
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_JSON_CHARACTERS_MAX = 20_000
_COMPACT = ((1_000_000_000, "B"), (1_000_000, "M"), (1_000, "k"))
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def number(value: float | Decimal | None, digits: int = 0) -> str:
    """1,234,567."""
    return NONE if value is None else f"{value:,.{digits}f}"


def compact(value: float | None) -> str:
    """1.2M: for axes and tiles."""
    if value is None:
        return NONE
    for size, unit in _COMPACT:
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def percent(share: float | None) -> str:
    return NONE if share is None else f"{share * 100:.1f}".removesuffix(".0") + " %"


def size(value: float | None) -> str:
    """12.3 MB, in thousands."""
    if value is None:
        return NONE
    at = 0
    while abs(value) >= 1000 and at < len(_BYTES) - 1:
        value, at = value / 1000, at + 1
    return f"{value:.3g} {_BYTES[at]}" if at else f"{value:,.0f} B"


def duration(seconds: float | None) -> str:
    """The two largest units: 2 h 5 min."""
    if seconds is None:
        return NONE
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    words: list[str] = []
    for length, unit in _UNITS:
        n, left = divmod(left, length)
        if n or words:
            words.append(f"{n} {unit}")
        if len(words) == 2:
            break
    return " ".join(word for word in words if not word.startswith("0 "))


def money(value: float | Decimal | None, currency: str = "USD") -> str:
    """US$ 1,234.50; small sums keep their significant digits."""
    if value is None:
        return NONE
    sign = "US$ " if currency == "USD" else f"{currency} "
    digits = 2 if value == 0 or abs(float(value)) >= 1 else 4
    return f"{sign}{value:,.{digits}f}"


def short(id: UUID | str | None) -> str:
    """The end of an id: ids created in the same second begin alike."""
    if id is None:
        return NONE
    text = str(id)
    prefix, sep, rest = text.partition("_") if "_" in text else ("", "", text)
    return text if len(rest) <= 12 else f"{prefix}{sep}…{rest[-8:]}"


def clip(text: Any, length: int = 120) -> str:
    words = " ".join(str(text).split())
    return words if len(words) <= length else words[: length - 1] + "…"


def as_json(value: Any, limit: int = _JSON_CHARACTERS_MAX) -> str:
    """Indented, and cut if it is too long for a page; the limit applies to the escaped text."""
    text = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str).decode()
    head = text[:limit]
    if (taken := len(escape(head))) > limit:
        head = head[: limit * len(head) // taken]
    return text if len(head) == len(text) else f"{head}\n… {len(text) - len(head):,} more characters"


def relative(moment: datetime, now: datetime) -> str:
    """3 min ago, in 2 h; the script uses the same words."""
    seconds = (now - moment).total_seconds()
    if abs(seconds) < 1:
        return "now"
    words = duration(max(1.0, abs(float(round(seconds))))).replace(".0 s", " s")
    coarse = " ".join(words.split(" ")[:2]) if abs(seconds) >= 60 else words
    return f"{coarse} ago" if seconds > 0 else f"in {coarse}"


def exact(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


@pass_context
def ago(context: Context, moment: datetime | None) -> Markup | str:
    """Relative, with the exact time on hover. Regions that are sent later have only the exact time, so that they do
    not differ each second; the script makes it relative."""
    if moment is None:
        return NONE
    words = exact(moment) if context.get("is_fragment") else relative(moment, context["now"])
    return _time(moment, words, "ago", exact(moment))


@pass_context
def since(context: Context, moment: datetime | None) -> Markup | str:
    """How long something has been running."""
    if moment is None:
        return NONE
    seconds = (context["now"] - moment).total_seconds()
    words = exact(moment) if context.get("is_fragment") else duration(max(0.0, seconds))
    return _time(moment, words, "since", exact(moment))


def clock(moment: datetime | None) -> Markup | str:
    """The exact time; the script shows it in the viewer's time zone."""
    return NONE if moment is None else _time(moment, exact(moment), "clock", None)


def _time(moment: datetime, words: str, kind: str, title: str | None) -> Markup:
    stamp = moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    hover = Markup(' title="{}"').format(title) if title else ""
    return Markup('<time datetime="{}" data-time="{}"{}>{}</time>').format(stamp, kind, hover, escape(words))


FILTERS: Mapping[str, Callable[..., Any]] = {
    "ago": ago,
    "bytes": size,
    "clip": clip,
    "clock": clock,
    "compact": compact,
    "duration": duration,
    "json": as_json,
    "money": money,
    "number": number,
    "percent": percent,
    "short": short,
    "since": since,
}
