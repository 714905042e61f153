"""The metrics of a process: numbers and histograms in plain Python, and a flat form that can be added up."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import orjson

Flat = dict[str, float]
"""Every number under one key: the JSON list of its metric, its label values and, in a histogram, its bucket."""
Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]

INFINITY = "+Inf"
OTHER = "other"
PREFIX = "batchwright_"
SUM = "sum"
VALUES_MAX = 200
"""Maximum number of values of one label; the rest is counted under `other`."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What is kept of a metric every minute, for the dashboard."""

    figure: str
    """The figure that it adds to, such as `requests`; several metrics may add to the same one."""
    by: str
    """The label whose values are kept separate; the others are summed."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with its help text; `bounds` are the upper bounds of a histogram."""

    name: str
    help: str
    labels: Labels = ()
    kind: Kind = "counter"
    bounds: tuple[float, ...] = ()
    prefix: str = PREFIX
    """The prefix of the name on the page; empty for a name that is already established elsewhere."""
    expected: tuple[Labels, ...] = ()
    """Labels that are on the page from the start, as 0, so that their first increase is visible."""
    sampled: Sampled | None = None
    """What is kept of it every minute; None if nothing is."""

    @property
    def full_name(self) -> str:
        return self.prefix + self.name

    def fits(self, key: Labels) -> bool:
        """Whether a key of the flat form is one of ours; another version may have had other labels."""
        return len(key) == len(self.labels) + (self.kind == "histogram")


@dataclass(frozen=True, slots=True)
class LabelLimit:
    """Which values a label may take: the named ones, and a number of others."""

    named: frozenset[str] = frozenset()
    others_max: int = VALUES_MAX

    def kept(self, values: set[str]) -> set[str]:
        """The first values by name. Values are only added, so one that is under `other` stays there."""
        return (values & self.named) | set(sorted(values - self.named - {OTHER})[: self.others_max])


LabelLimits = Mapping[str, LabelLimit]
"""The limit of each label; a label without one takes the first VALUES_MAX values."""
_ANY = LabelLimit()


class Counts:
    """The numbers of one process. They belong to one thread, the event loop's: an increment takes no lock.

    >>> counts = Counts([Metric("pages_total", "Pages printed.", ("printer",))])
    >>> counts.add("pages_total", 3, ("upstairs",))
    """

    def __init__(self, metrics: Iterable[Metric], label_limits: LabelLimits | None = None) -> None:
        self.is_crowded = False
        """Whether a label was full, so that a value was counted under `other`."""
        self._metrics = {metric.name: metric for metric in metrics}
        self._numbers: dict[str, dict[Labels, float]] = {
            metric.name: {} for metric in self._metrics.values() if metric.kind != "histogram"
        }
        self._spreads: dict[str, tuple[tuple[float, ...], dict[Labels, list[float]]]] = {
            metric.name: (metric.bounds, {}) for metric in self._metrics.values() if metric.kind == "histogram"
        }
        self._label_limits = label_limits or {}
        self._values: dict[str, set[str]] = {}
        self._on_read: list[Callable[[], None]] = []

    @property
    def metrics(self) -> list[Metric]:
        return list(self._metrics.values())

    def on_read(self, count: Callable[[], None]) -> None:
        """Call `count` before numbers are read: for code that first only notes things, and counts them later."""
        self._on_read.append(count)

    def know(self, flat: Iterable[str]) -> None:
        """Reserve places for values that other processes have counted, so that a value has the same name everywhere."""
        found: dict[str, set[str]] = {}
        for name, numbers in series(dict.fromkeys(flat, 0)).items():
            if (metric := self._metrics.get(name)) is not None:
                for key in filter(metric.fits, numbers):
                    for label, value in zip(metric.labels, key, strict=False):
                        found.setdefault(label, set()).add(value)
        for label, values in found.items():
            limit = self._label_limits.get(label, _ANY)
            self._values.setdefault(label, set()).update(limit.kept(values) - limit.named)

    def add(self, name: str, n: float = 1, labels: Labels = ()) -> None:
        """Add to a counter or a gauge; `labels` are the values in the order of the metric's labels."""
        numbers = self._numbers[name]
        if labels in numbers:
            numbers[labels] += n
        else:
            labels = self._bounded(name, labels)
            numbers[labels] = numbers.get(labels, 0) + n

    def set_all(self, name: str, numbers: Mapping[Labels, float]) -> None:
        """Set a gauge to these numbers, and remove all others."""
        kept: dict[Labels, float] = {}
        for given, n in numbers.items():
            labels = self._bounded(name, given)
            kept[labels] = kept.get(labels, 0) + n
        self._numbers[name] = kept

    def observe(self, name: str, value: float, labels: Labels = ()) -> None:
        """Add one value to a histogram."""
        bounds, spread = self._spread(name, labels)
        spread[bisect_left(bounds, value)] += 1
        spread[-1] += value

    def observe_all(self, name: str, values: Sequence[float], labels: Labels = ()) -> None:
        """Add many values at once, at a fifth of the cost."""
        bounds, spread = self._spread(name, labels)
        for place, n in Counter(map(functools.partial(bisect_left, bounds), values)).items():
            spread[place] += n
        spread[-1] += sum(values)

    def total(self, name: str) -> int:
        """The sum of a counter over all its labels."""
        self._read()
        return int(sum(self._numbers[name].values()))

    def flat(self, *kinds: Kind) -> Flat:
        """The numbers of these types, or of all."""
        self._read()
        wanted = {name for name, metric in self._metrics.items() if metric.kind in (kinds or get_args(Kind))}
        flat = {
            _key(name, labels): n
            for name, numbers in self._numbers.items()
            if name in wanted
            for labels, n in numbers.items()
        }
        for name in self._spreads.keys() & wanted:
            bounds, spreads = self._spreads[name]
            places = (*map(str, bounds), INFINITY, SUM)
            for labels, spread in spreads.items():
                flat |= {_key(name, (*labels, place)): n for place, n in zip(places, spread, strict=True) if n}
        return flat

    def _read(self) -> None:
        for count in self._on_read:
            count()

    def _spread(self, name: str, labels: Labels) -> tuple[tuple[float, ...], list[float]]:
        """The bounds of a histogram, and its counts between them with the sum of all values at the end."""
        bounds, spreads = self._spreads[name]
        spread = spreads.get(labels)
        if spread is None:
            spread = spreads.setdefault(self._bounded(name, labels), [0] * (len(bounds) + 2))
        return bounds, spread

    def _bounded(self, name: str, labels: Labels) -> Labels:
        """These labels, with values beyond the limit replaced: users' data must not fill our memory."""
        return tuple(
            self._admitted(label, str(value)) for label, value in zip(self._metrics[name].labels, labels, strict=True)
        )

    def _admitted(self, label: str, value: str) -> str:
        limit, known = self._label_limits.get(label, _ANY), self._values.setdefault(label, set())
        if value in known or value in limit.named:
            return value
        if len(known) >= limit.others_max:
            self.is_crowded = True
            return OTHER
        known.add(value)
        return value


def difference(now: Mapping[str, float], before: Mapping[str, float]) -> Flat:
    """The increase from `before` to `now`; counts only grow, so it is never negative."""
    return {key: n - before.get(key, 0) for key, n in now.items() if n != before.get(key, 0)}


def together(one: Mapping[str, float], other: Mapping[str, float]) -> Flat:
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *(key for key in other if key not in one))}


def series(flat: Mapping[str, float]) -> dict[str, dict[Labels, float]]:
    """Split the flat form by metric."""
    found: dict[str, dict[Labels, float]] = {}
    for key, n in flat.items():
        name, *labels = orjson.loads(key)
        found.setdefault(name, {})[tuple(labels)] = n
    return found


def bounded(numbers: Mapping[Labels, float], label_limits: Sequence[LabelLimit]) -> dict[Labels, float]:
    """Limit the values of each label; the numbers of all other values are added up under `other`."""
    kept = [limit.kept({key[place] for key in numbers}) for place, limit in enumerate(label_limits)]
    summed: dict[Labels, float] = {}
    for key, n in numbers.items():
        named = tuple(value if value in kept[place] else OTHER for place, value in enumerate(key[: len(label_limits)]))
        summed[(*named, *key[len(label_limits) :])] = summed.get((*named, *key[len(label_limits) :]), 0) + n
    return summed


def _key(name: str, labels: Labels) -> str:
    return orjson.dumps((name, *labels)).decode()
