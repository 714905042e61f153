"""Cron expressions in a time zone, and their ticks: five fields, read as Debian's cron reads them."""

from __future__ import annotations

import difflib
import itertools
import zoneinfo
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo

from cronsim import CronSim, CronSimError

from batchwright.errors import InvalidInput

TICKS_SHOWN_MAX = 1000
_EXPRESSION_LENGTH_MAX = 200
_HOWTO = "write five fields: minute hour day-of-month month day-of-week, as in '0 6 * * MON-FRI'"
_FIELDS = {
    "minute": (0, "use 0 to 59"),
    "hour": (1, "use 0 to 23"),
    "day-of-month": (2, "use 1 to 31 or L for the last day, and a month that has it"),
    "month": (3, "use 1 to 12 or JAN to DEC"),
    "day-of-week": (4, "use 0 to 7 or SUN to SAT; FRI#2 is the second Friday, 5L the last"),
}
_NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_DST_SHIFT_MAX = timedelta(hours=3)
_UNNAMED_ZONES = frozenset({"Factory", "localtime", "posixrules"})
"""Files in the time zone database that are not time zones."""


@dataclass(frozen=True, slots=True)
class Cron:
    """A checked cron expression with its time zone."""

    expression: str
    timezone: str
    zone: tzinfo

    @classmethod
    def parse(cls, expression: str, timezone: str = "UTC") -> Cron:
        """Refuse an invalid expression; `first_after` finds out whether it ever fires."""
        fields = _fields(expression)
        cron = cls(" ".join(fields), timezone, _zone(timezone))
        try:
            cron._simulate(datetime(2000, 1, 1, tzinfo=UTC))
        except CronSimError as error:
            raise InvalidInput(f"the cron expression {expression!r}: {_why(error, fields)}", param="cron") from error
        return cron

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """Every tick later than `after`, in UTC; the ticks do not depend on the start."""
        last = after
        for local in self._simulate(after):
            tick = local.astimezone(UTC)
            # One hour occurs twice when daylight saving time ends; from a start in it, the library returns the first.
            if tick > last:
                last = tick
                yield tick

    def first_after(self, after: datetime) -> datetime:
        """The next tick; an expression without one in 50 years, the library's limit, is refused."""
        tick = next(self.ticks(after), None)
        if tick is None:
            raise InvalidInput(f"the cron expression {self.expression!r} does not fire in 50 years", param="cron")
        return tick

    def newest(self, first: datetime, now: datetime) -> datetime:
        """The last tick up to `now`, given an earlier one; searches backwards from `now`, so a long gap is cheap."""
        back = next(self._simulate(now, reverse=True), None)
        start = first if back is None else max(first, back.astimezone(UTC) - _DST_SHIFT_MAX)
        newest = first
        for tick in itertools.takewhile(lambda tick: tick <= now, self.ticks(start)):
            newest = tick
        return newest

    def _simulate(self, begin: datetime, *, reverse: bool = False) -> CronSim:
        return CronSim(self.expression, begin.astimezone(self.zone), reverse)


def preview(cron: str, timezone: str = "UTC", n: int = 5, *, after: datetime | None = None) -> list[datetime]:
    """The next ticks in UTC, from `after` or from this machine's clock; needs no database."""
    if not 1 <= n <= TICKS_SHOWN_MAX:
        raise InvalidInput(f"n is {n}; use 1 to {TICKS_SHOWN_MAX}", param="n")
    parsed = Cron.parse(cron, timezone)
    first = parsed.first_after(after or datetime.now(UTC))
    return [first, *itertools.islice(parsed.ticks(first), n - 1)]


def _fields(expression: str) -> list[str]:
    if len(expression) > _EXPRESSION_LENGTH_MAX:
        raise InvalidInput(
            f"the cron expression has {len(expression)} characters; the limit is {_EXPRESSION_LENGTH_MAX}", param="cron"
        )
    fields = expression.split()
    if len(fields) == 5:
        return fields
    if len(fields) == 6:
        problem = "six fields; leave out the field for seconds"
    elif plain := _NICKNAMES.get(expression.strip().lower()):
        problem = f"nicknames are not supported; write {plain!r}"
    else:
        problem = f"{len(fields)} field{'' if len(fields) == 1 else 's'}; {_HOWTO}"
    raise InvalidInput(f"the cron expression {expression!r}: {problem}", param="cron")


def _why(error: CronSimError, fields: list[str]) -> str:
    name = str(error).removeprefix("Bad ")
    if name not in _FIELDS:
        return f"{error}; {_HOWTO}"
    place, allowed = _FIELDS[name]
    return f"the {name} {fields[place]!r} is not possible; {allowed}"


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC  # for this object the library skips its handling of daylight saving time
    if name in _UNNAMED_ZONES:
        raise InvalidInput(
            f"{name!r} differs from machine to machine; name the time zone you mean, such as 'Europe/Berlin' or 'UTC'",
            param="timezone",
        )
    try:
        return zoneinfo.ZoneInfo(name)
    except (LookupError, ValueError, OSError) as error:
        known = {zone.lower(): zone for zone in zoneinfo.available_timezones() - _UNNAMED_ZONES}
        close = difflib.get_close_matches(name[:100].lower().replace(" ", "_"), known, n=1)
        hint = f"did you mean {known[close[0]]!r}?" if close else "write it as 'Europe/Berlin' or 'UTC'"
        raise InvalidInput(f"there is no time zone {name[:100]!r}; {hint}", param="timezone") from error
