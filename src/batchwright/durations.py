"""Durations as people write them: `90s`, `5m`, `1h`, `2d`, `1h30m`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

DURATION_FORM = "write 90s, 5m, 1h or 2d"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(ms|s|m|h|d)", re.ASCII)
_NUMBER = re.compile(r"\d{1,15}(?:\.\d{1,15})?", re.ASCII)
_NAMED = re.compile(r"(?:^|_)(seconds|minutes|hours|days)(?:_|$)")
_NAMED_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86_400.0}


def parse_duration(text: str, *, unit_seconds: float = 1.0) -> float | None:
    """Seconds, or None if this is not a duration. A bare number is a number of units, by default of seconds."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return float(text) * unit_seconds
    if not text or _PART.sub("", text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


def unit_seconds_of(name: str) -> float | None:
    """The unit in the name of a setting, such as `lease_seconds` or `poll_seconds_max`; None if it has no unit."""
    found = _NAMED.search(name)
    return None if found is None else _NAMED_SECONDS[found[1]]


def replace_durations(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings such as `90s` or `2d` to numbers in the unit of their names; everything else stays as it is."""
    return {name: _replace(name, value) for name, value in values.items()}


def _replace(name: str, value: Any) -> Any:
    if name == "headers":  # users choose these names
        return value
    if isinstance(value, Mapping):
        return replace_durations(value)
    unit = unit_seconds_of(name)
    if unit is None or not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    seconds = parse_duration(value)
    return value if seconds is None else _as_number(seconds / unit)


def _as_number(n: float) -> int | float:
    """Whole numbers stay whole, for settings that are integers."""
    whole = round(n)
    return whole if math.isclose(n, whole, rel_tol=1e-12) else n
