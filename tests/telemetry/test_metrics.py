"""Counting in plain Python: labels are bounded, histograms are exact, and the flat form can be summed."""

import itertools
import random

import pytest

from batchwright.telemetry.metrics import (
    INFINITY,
    OTHER,
    SUM,
    VALUES_MAX,
    Counts,
    LabelLimit,
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


def test_a_gauge_can_decrease():
    counts = Counts(METRICS)
    counts.add("open", 2)
    counts.add("open", -1)
    assert series(counts.flat())["open"] == {(): 1}


def test_an_unknown_metric_and_wrong_labels_are_programming_errors():
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
    before = bounded(pages, (LabelLimit(), LabelLimit()))
    assert len(before) == VALUES_MAX + 1
    assert sum(before.values()) == len(pages)
    for n in range(1, 3 * VALUES_MAX, 14):  # new names are sorted between existing ones
        pages[(f"{n:05}", "red")] = 1.0
        after = bounded(pages, (LabelLimit(), LabelLimit()))
        assert after[(OTHER, "red")] >= before[(OTHER, "red")]
        before = after
    assert sum(before.values()) == len(pages)


def test_labels_may_contain_anything_and_are_read_back_unchanged():
    counts = Counts(METRICS)
    counts.add("pages_total", 1, ('a"],b', "ré\n\\"))
    assert series(counts.flat())["pages_total"] == {('a"],b', "ré\n\\"): 1}


def test_difference_and_together_are_inverse():
    counts = Counts(METRICS)
    counts.add("jams_total", 2)
    before = counts.flat()
    counts.add("jams_total", 3)
    counts.add("pages_total", 1, ("a", "red"))
    since = difference(counts.flat(), before)
    assert series(since) == {"jams_total": {(): 3}, "pages_total": {("a", "red"): 1}}
    assert together(before, since) == counts.flat()


def test_named_values_always_have_room_and_others_share_the_rest():
    limit = LabelLimit(frozenset({"z", "y"}), 2)
    counts = Counts(METRICS, {"printer": limit})
    for printer in ("a", "b", "c", "z", "y", "x", "a"):
        counts.add("pages_total", 1, (printer, "red"))
    found = {printer: n for (printer, _), n in series(counts.flat())["pages_total"].items()}
    assert found == {"a": 2, "b": 1, "z": 1, "y": 1, OTHER: 2}
    assert counts.is_crowded
    pages = {(printer, "red"): 1.0 for printer in ("c", "b", "a", "z", OTHER)}
    assert bounded(pages, (limit, LabelLimit())) == {(printer, "red"): 1 for printer in "abz"} | {(OTHER, "red"): 2}


def test_values_that_others_have_counted_are_counted_under_the_same_names():
    label_limits = {"printer": LabelLimit(others_max=3)}
    one, two = Counts(METRICS, label_limits), Counts(METRICS, label_limits)
    for printer in ("a", "b", "c"):
        one.observe("print_seconds", 1.0, (printer,))
    two.add("pages_total", 1, ("x", "red"))
    assert not two.is_crowded
    two.know(one.flat())
    for printer in ("a", "b", "c", "x", "y"):
        two.add("pages_total", 1, (printer, "red"))
    found = {printer: n for (printer, _), n in series(two.flat())["pages_total"].items()}
    assert found == {"a": 1, "b": 1, "c": 1, "x": 2, OTHER: 1}


def test_counts_of_another_version_with_other_labels_are_not_learned_from():
    counts = Counts(METRICS, {"printer": LabelLimit(others_max=1)})
    counts.know(['["pages_total","a"]', '["pages_total","a","red","big"]', '["moons_total","a"]'])
    counts.add("pages_total", 1, ("b", "red"))
    assert series(counts.flat())["pages_total"] == {("b", "red"): 1}


def test_a_gauge_can_be_given_all_its_numbers_at_once():
    metric = Metric("trays", "Trays.", ("printer",), "gauge")
    counts = Counts([metric], {"printer": LabelLimit(others_max=2)})
    counts.set_all("trays", {(printer,): n for n, printer in enumerate("abcd", 1)})
    assert series(counts.flat())["trays"] == {("a",): 1, ("b",): 2, (OTHER,): 7}
    counts.set_all("trays", {("b",): 5})
    assert series(counts.flat())["trays"] == {("b",): 5}


def test_noted_values_are_counted_before_a_read():
    counts = Counts(METRICS)
    put_down = [3]
    counts.on_read(lambda: counts.add("jams_total", put_down.pop() if put_down else 0))
    assert counts.total("jams_total") == 3
    put_down.append(4)
    assert series(counts.flat())["jams_total"] == {(): 7}


def test_numbers_can_be_read_by_their_kind():
    counts = Counts(METRICS)
    counts.add("jams_total")
    counts.add("open", 2)
    counts.observe("print_seconds", 1.0, ("a",))
    assert series(counts.flat("gauge")) == {"open": {(): 2}}
    assert series(counts.flat("counter", "histogram")).keys() == {"jams_total", "print_seconds"}
    assert counts.flat() == counts.flat("gauge") | counts.flat("counter", "histogram")


def test_a_metric_may_do_without_our_prefix():
    assert METRICS[0].full_name == "batchwright_pages_total"
    assert Metric("pages_total", "", prefix="").full_name == "pages_total"
