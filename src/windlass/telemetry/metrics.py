"""What a process counts: numbers and histograms in plain Python, and a flat form of them that can be added up."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

Flat = dict[str, float]
"""Every number under one key: the JSON list of its metric, its label values and, in a histogram, its place there."""
Labels = tuple[str, ...]

INFINITY = "+Inf"
OTHER = "other"
SUM = "sum"
VALUES_MAX = 200
"""Values that one label may take; the rest is counted under `other`."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing that is measured, and the words that explain it; `bounds` are the upper ends of a histogram."""

    name: str
    help: str
    labels: Labels = ()
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    bounds: tuple[float, ...] = ()


class Counts:
    """The numbers of one process. They belong to one thread, the event loop's: an increment takes no lock.

    >>> counts = Counts([Metric("pages_total", "Pages printed.", ("printer",))])
    >>> counts.add("pages_total", 3, ("upstairs",))
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._numbers: dict[str, dict[Labels, float]] = {
            metric.name: {} for metric in self._metrics.values() if metric.kind != "histogram"
        }
        self._spreads: dict[str, tuple[tuple[float, ...], dict[Labels, list[float]]]] = {
            metric.name: (metric.bounds, {}) for metric in self._metrics.values() if metric.kind == "histogram"
        }
        self._values: dict[str, set[str]] = {}

    def add(self, name: str, n: float = 1, labels: Labels = ()) -> None:
        """Add to a counter or a gauge; `labels` are the values in the order of the metric's labels."""
        numbers = self._numbers[name]
        if labels in numbers:
            numbers[labels] += n
        else:
            labels = self._bounded(name, labels)
            numbers[labels] = numbers.get(labels, 0) + n

    def observe(self, name: str, value: float, labels: Labels = ()) -> None:
        """Note one value in a histogram."""
        bounds, spread = self._spread(name, labels)
        spread[bisect_left(bounds, value)] += 1
        spread[-1] += value

    def observe_all(self, name: str, values: Sequence[float], labels: Labels = ()) -> None:
        """Note many values at once, which costs a fifth."""
        bounds, spread = self._spread(name, labels)
        for place, n in Counter(map(functools.partial(bisect_left, bounds), values)).items():
            spread[place] += n
        spread[-1] += sum(values)

    def total(self, name: str) -> int:
        """The sum of a counter over all its labels."""
        return int(sum(self._numbers[name].values()))

    def flat(self) -> Flat:
        flat = {_key(name, labels): n for name, numbers in self._numbers.items() for labels, n in numbers.items()}
        for name, (bounds, spreads) in self._spreads.items():
            places = (*map(str, bounds), INFINITY, SUM)
            for labels, spread in spreads.items():
                flat |= {_key(name, (*labels, place)): n for place, n in zip(places, spread, strict=True) if n}
        return flat

    def _spread(self, name: str, labels: Labels) -> tuple[tuple[float, ...], list[float]]:
        """The bounds of a histogram, and its counts between them with the sum of all values at the end."""
        bounds, spreads = self._spreads[name]
        spread = spreads.get(labels)
        if spread is None:
            spread = spreads.setdefault(self._bounded(name, labels), [0] * (len(bounds) + 2))
        return bounds, spread

    def _bounded(self, name: str, labels: Labels) -> Labels:
        """These labels, with values beyond the limit replaced: somebody else's data must not fill our memory."""
        bounded = []
        for label, value in zip(self._metrics[name].labels, labels, strict=True):
            known = self._values.setdefault(label, set())
            if len(known) < VALUES_MAX:
                known.add(str(value))
            bounded.append(str(value) if str(value) in known else OTHER)
        return tuple(bounded)


def difference(now: Mapping[str, float], before: Mapping[str, float]) -> Flat:
    """What came to `before` until `now`; that is never less than nothing."""
    return {key: n - before.get(key, 0) for key, n in now.items() if n != before.get(key, 0)}


def together(one: Mapping[str, float], other: Mapping[str, float]) -> Flat:
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *(key for key in other if key not in one))}


def series(flat: Mapping[str, float]) -> dict[str, dict[Labels, float]]:
    """The flat form taken apart again, by metric."""
    found: dict[str, dict[Labels, float]] = {}
    for key, n in flat.items():
        name, *labels = orjson.loads(key)
        found.setdefault(name, {})[tuple(labels)] = n
    return found


def bounded(numbers: Mapping[Labels, float], labels: int) -> dict[Labels, float]:
    """The numbers with at most VALUES_MAX values in each of the first `labels` places, and the rest under `other`."""
    kept = [_kept({key[place] for key in numbers}) for place in range(labels)]
    summed: dict[Labels, float] = {}
    for key, n in numbers.items():
        named = tuple(value if value in kept[place] else OTHER for place, value in enumerate(key[:labels]))
        summed[(*named, *key[labels:])] = summed.get((*named, *key[labels:]), 0) + n
    return summed


def _kept(values: set[str]) -> set[str]:
    """The first by name: values only ever come, so who was under `other` stays there, and that never goes down."""
    return set(sorted(values - {OTHER})[:VALUES_MAX])


def _key(name: str, labels: Labels) -> str:
    return orjson.dumps((name, *labels)).decode()
