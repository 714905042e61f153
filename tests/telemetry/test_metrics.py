"""Counting in plain Python: labels are bounded, histograms are exact, and the flat form adds up."""

import itertools
import random

import pytest

from windlass.telemetry.metrics import (
    INFINITY,
    OTHER,
    SUM,
    VALUES_MAX,
    Counts,
    Metric,
    bounded,
    difference,
    series,
    together,
)

BOUNDS = (0.01, 0.1, 1.0, 10.0)
METRICS = (
    Metric("pages_total", "Pages.", ("printer", "colour")),
    Metric("jams_total", "Jams."),
    Metric("open", "Open trays.", kind="gauge"),
    Metric("print_seconds", "Time.", ("printer",), "histogram", BOUNDS),
)


def test_a_counter_adds_by_its_labels():
    counts = Counts(METRICS)
    counts.add("pages_total", 2, ("a", "red"))
    counts.add("pages_total", 3, ("a", "red"))
    counts.add("pages_total", 1, ("b", "red"))
    counts.add("jams_total")
    assert series(counts.flat()) == {"pages_total": {("a", "red"): 5, ("b", "red"): 1}, "jams_total": {(): 1}}
    assert counts.total("pages_total") == 6


def test_a_gauge_goes_down_again():
    counts = Counts(METRICS)
    counts.add("open", 2)
    counts.add("open", -1)
    assert series(counts.flat())["open"] == {(): 1}


def test_an_unknown_metric_and_wrong_labels_are_mistakes_of_the_program():
    counts = Counts(METRICS)
    with pytest.raises(KeyError):
        counts.add("pagse_total")
    with pytest.raises(ValueError):
        counts.add("pages_total", 1, ("only one",))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_histogram_counts_as_an_independent_count_does(at_once):
    rolled = random.Random(7)
    values = [rolled.choice([rolled.uniform(0, 20), *BOUNDS]) for _ in range(500)]
    counts = Counts(METRICS)
    if at_once:
        counts.observe_all("print_seconds", values, ("a",))
    else:
        for value in values:
            counts.observe("print_seconds", value, ("a",))
    found = series(counts.flat())["print_seconds"]
    edges = (float("-inf"), *BOUNDS, float("inf"))
    for low, high in itertools.pairwise(edges):
        place = INFINITY if high == float("inf") else str(high)
        assert found[("a", place)] == sum(low < value <= high for value in values), "a value on a bound is below it"
    assert found[("a", SUM)] == pytest.approx(sum(values))


def test_too_many_label_values_are_counted_under_other():
    counts = Counts(METRICS)
    for n in range(VALUES_MAX + 50):
        counts.add("pages_total", 1, (f"printer {n}", "red"))
        counts.add("pages_total", 1, (f"printer {n}", "red"))
    pages = series(counts.flat())["pages_total"]
    assert len(pages) == VALUES_MAX + 1
    assert pages[(OTHER, "red")] == 100
    assert pages[("printer 0", "red")] == 2


def test_the_sum_of_many_processes_is_bounded_too_and_other_never_goes_down():
    pages = {(f"{n:05}", "red"): 1.0 for n in range(0, 3 * VALUES_MAX, 2)}
    before = bounded(pages, 2)
    assert len(before) == VALUES_MAX + 1
    assert sum(before.values()) == len(pages)
    for n in range(1, 3 * VALUES_MAX, 14):  # new names come between those that are there
        pages[(f"{n:05}", "red")] = 1.0
        after = bounded(pages, 2)
        assert after[(OTHER, "red")] >= before[(OTHER, "red")]
        before = after
    assert sum(before.values()) == len(pages)


def test_labels_may_hold_anything_and_come_back_the_same():
    counts = Counts(METRICS)
    counts.add("pages_total", 1, ('a"],b', "ré\n\\"))
    assert series(counts.flat())["pages_total"] == {('a"],b', "ré\n\\"): 1}


def test_difference_and_together_undo_each_other():
    counts = Counts(METRICS)
    counts.add("jams_total", 2)
    before = counts.flat()
    counts.add("jams_total", 3)
    counts.add("pages_total", 1, ("a", "red"))
    since = difference(counts.flat(), before)
    assert series(since) == {"jams_total": {(): 3}, "pages_total": {("a", "red"): 1}}
    assert together(before, since) == counts.flat()
