"""Charts are SVG with a description in words, and accept every value."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

from batchwright.web.charts import Node, Series, bars, graph, line_chart, spark

BEGIN = datetime(2026, 11, 18, tzinfo=UTC)


def points(*values: float | None) -> list[tuple[datetime, float | None]]:
    return [(BEGIN + timedelta(minutes=n), value) for n, value in enumerate(values)]


def parsed(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{picture}</div>")


def test_a_chart_describes_its_highest_and_its_latest_value():
    chart = parsed(line_chart([Series("jobs", points(1, 5, 2))], label="Jobs per second", unit="/s"))
    assert chart[0].attrib["aria-label"] == "Jobs per second: at most 5 /s, now jobs 2"
    assert chart[0].attrib["role"] == "img"


def test_the_ticks_of_an_axis_differ_however_short_the_span_is():
    for step in (timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=6), timedelta(days=2)):
        samples = [(BEGIN + n * step, 1.0) for n in range(13)]
        ticks = [
            one.text for one in parsed(line_chart([Series("a", samples)], label="x")).iter() if one.get("data-stamp")
        ]
        assert len(set(ticks)) == len(ticks) == 4, ticks


def test_a_gap_in_the_samples_is_a_gap_in_the_line():
    lines = [
        one
        for one in parsed(line_chart([Series("a", points(1, 2, None, 3, 4))], label="x")).iter()
        if "line" in one.get("class", "")
    ]
    assert len(lines) == 2


def test_a_chart_without_samples_says_so():
    for chart in (
        line_chart([], label="Jobs"),
        line_chart([Series("a", points(None))], label="Jobs"),
        spark([], label="Jobs"),
    ):
        assert parsed(chart)[0].attrib["aria-label"] == "Jobs: no samples yet"


def test_names_in_charts_are_escaped():
    evil = '<script>alert(1)</script>"'
    for picture in (
        line_chart([Series(evil, points(1, 2)), Series("b", points(1, 2))], label=evil),
        bars([(evil, 3.0)], label=evil),
        graph([Node("a", evil, evil, href=f"/ui?x={evil}")], [], label=evil),
    ):
        assert "<script>" not in picture
        parsed(picture)


def test_a_graph_puts_each_stage_after_its_predecessors_and_accepts_a_cycle():
    nodes = [Node("a", "first"), Node("b", "second"), Node("c", "third")]
    drawn = parsed(graph(nodes, [("a", "b"), ("b", "c"), ("c", "a")], label="Pipeline"))
    boxes = {
        one.find("title").text.strip(): float(one[1].attrib["x"])
        for one in drawn.iter()
        if "node" in one.get("class", "")
    }
    assert set(boxes) == {"first", "second", "third"}
    plain = parsed(graph(nodes, [("a", "b"), ("b", "c")], label="Pipeline"))
    places = {
        one.find("title").text.strip(): float(one[1].attrib["x"])
        for one in plain.iter()
        if "node" in one.get("class", "")
    }
    assert places["first"] < places["second"] < places["third"]
