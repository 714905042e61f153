"""The arithmetic of docs/capacity.md: known figures give known tables, and a missing figure is never guessed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MACHINE = {"load": "0.1 before and 0.2 after", "memory": "24 GB", "postgresql": "18.4", "processors": "2"}
FIGURES = {
    "idle": {
        "common_core_percent": 1.0,
        "common_wal_bytes": 1_000.0,
        "connection_bytes": 2e6,
        "connections": 3.0,
        "core_percent": 0.05,
        "transactions": 1.0,
        "wal_bytes": 20.0,
        "worker_bytes": 80e6,
        "worker_core_percent": 0.2,
    },
    "queue": {
        "disk_bytes": 1_200.0,
        "enqueue_postgres_us": 10.0,
        "postgres_us": 40.0,
        "python_us": 30.0,
        "wal_bytes": 2_500.0,
    },
    "batch": {
        "database_bytes": 10.0,
        "postgres_all": 20.0,
        "wal_bytes": 50.0,
        "worker_us": 140.0,
        "written_bytes": 2_500.0,
    },
    "scale": {"busy_core_percent": 0.2, "busy_wal_bytes": 500.0, "share": 90.0},
    "thousand": {"expected_transactions_1000": 1_008.0, "transactions_1000": 1_000.0},
}


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_capacity", ROOT / "docs" / "generate_capacity.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, spec.name, module)  # its dataclasses look up their module there
        spec.loader.exec_module(module)
        yield module


def runs(*, without=(), is_quick=False):
    """Saved runs with the figures above, except those in `without`: (benchmark, figure)."""
    return {
        name: {
            "figures": {figure: value for figure, value in figures.items() if (name, figure) not in without},
            "is_quick": is_quick,
            "machine": MACHINE,
        }
        for name, figures in FIGURES.items()
    }


def row(tables, table, first):
    """The cells of the row whose first cell is `first`."""
    (line,) = [line for line in tables[table] if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_day_of_requests_becomes_workers_cores_and_connections(generator):
    # 10^8 ÷ 86,400 * 2 = 2,314.8/s; * 10 s ÷ (300 * 0.9) = 85.7 workers; their cores 86 * 0.002 + 2,314.8 * 140 µs;
    # PostgreSQL's 0.01 + 86 * 0.002 + 2,314.8 * 20 µs
    assert row(generator.make_tables(runs()), "requests", "100,000,000") == [
        "100,000,000", "2,310", "23,149", "86", "0.496", "6.88 GB", "0.228", "258, 860", "100", "516 MB"
    ]  # fmt: skip


def test_a_day_of_requests_becomes_log_disk_files_and_network(generator):
    # Log at the peak: 1,000 + 86 * 500 + 2,314.8 * 50 B/s; on disk 10^8 * 10 B a day; files of 4 kB and 1 kB.
    assert row(generator.make_tables(runs()), "request storage", "100,000,000") == [
        "100,000,000", "160 kB/s", "8.8 GB", "1 GB", "30 GB", "500 GB", "15 TB", "5.79 MB/s", "11.6 MB/s"
    ]  # fmt: skip


def test_a_rate_of_jobs_becomes_workers_cores_connections_log_and_disk(generator):
    # 1,000/s * 1 s ÷ 100 = 10 workers; 0.01 + 10 * 0.0005 + 1,000 * 50 µs = 0.065 cores; 86.4 million * 1.2 kB a day.
    tables = generator.make_tables(runs())
    assert row(tables, "jobs", "1,000") == [
        "1,000", "1,000", "1,000", "10", "0.05", "800 MB", "0.065", "30, 100", "30", "60 MB"
    ]  # fmt: skip
    assert row(tables, "job storage", "1,000") == ["1,000", "2.5 MB/s", "216 GB", "104 GB", "726 GB"]


def test_the_number_of_workers_is_the_larger_of_what_waiting_and_the_processor_need(generator):
    known = {each.name: each.value(runs()) for each in generator.COEFFICIENTS}
    # 2,314.8/s * 10 s in flight need 86 workers; at 10 ms of a core each, of which 70 % may be used, 34; at 40 ms 133.
    workers = [
        generator.calculate_requests({**known, "request_worker_us": us}, 10**8).workers for us in (140, 10_000, 40_000)
    ]
    assert workers == [86, 86, 133]


def test_the_first_limit_to_break_is_the_one_exceeded_most(generator):
    tables = generator.make_tables(runs())
    assert row(tables, "breaks", "100,000 requests per day")[1] == "nothing; the closest is connections (2 %)"
    assert row(tables, "breaks", "1,000,000,000 requests per day")[1] == "**connections (17.2 times)**"
    assert row(tables, "breaks", "10,000 jobs/s")[1] == "**disk (3.6 times), then connections (2.0 times)**"


@pytest.mark.parametrize(
    ("missing", "table", "first", "unknown"),
    [
        (("batch", "postgres_all"), "requests", "100,000,000", {6}),
        (("batch", "database_bytes"), "request storage", "100,000,000", {3, 4}),
        (("idle", "connection_bytes"), "jobs", "1,000", {9}),
        (("queue", "wal_bytes"), "job storage", "1,000", {1, 2}),
    ],
)
def test_without_a_figure_only_the_cells_computed_from_it_are_unknown(generator, missing, table, first, unknown):
    whole = row(generator.make_tables(runs()), table, first)
    found = row(generator.make_tables(runs(without=[missing])), table, first)
    assert found == ["not measured" if index in unknown else cell for index, cell in enumerate(whole)]


def test_the_table_of_limits_names_what_was_not_measured(generator):
    tables = generator.make_tables(runs(without=[("queue", "disk_bytes"), ("queue", "postgres_us")]))
    assert row(tables, "breaks", "10,000 jobs/s")[1] == ("**connections (2.0 times)**; not measured: processors, disk")


def test_without_any_figures_nothing_is_guessed(generator):
    tables = generator.make_tables({})
    assert row(tables, "sources", "`make bench-idle`")[1] == "not measured"
    assert {row(tables, "coefficients", f"`{each.name}`")[2] for each in generator.COEFFICIENTS} == {"not measured"}
    assert row(tables, "requests", "100,000,000")[3:8] == ["not measured"] * 4 + ["not measured, not measured"]
    assert row(tables, "thousand", "1,000")[1:] == ["not measured"] * 5


def test_each_coefficient_names_its_benchmark_and_its_figure(generator):
    tables = generator.make_tables(runs())
    assert row(tables, "coefficients", "`idle_core`")[2:] == ["0.0005", "`bench-idle`, `core_percent`"]
    assert row(tables, "coefficients", "`job_disk`")[2:] == ["1.2 kB", "`bench-queue`, `disk_bytes`"]


def test_quick_runs_are_marked(generator):
    assert "quick" not in "".join(generator.make_tables(runs())["sources"])
    quick = generator.make_tables(runs(is_quick=True))["sources"]
    assert quick[-1].startswith("**A quick run")


def test_a_measured_fleet_of_a_thousand_workers_is_shown_beside_its_estimate(generator):
    assert row(generator.make_tables(runs()), "thousand", "1,000")[1:3] == ["1,000", "1,010"]


def test_every_placeholder_of_the_page_has_a_table_and_every_table_a_placeholder(generator):
    page = (ROOT / "docs" / "capacity.md").read_text(encoding="utf-8")
    marks = [line[len("<!-- generated: ") : -len(" -->")] for line in page.splitlines() if "<!-- generated:" in line]
    assert sorted(marks) == sorted(generator.make_tables({}))
    assert generator.capacity() == page


def test_saved_figures_describe_the_kind_of_machine_and_nothing_that_identifies_it():
    files = list((ROOT / "benchmarks" / "figures").glob("*.json"))
    assert files
    for file in files:
        document = json.loads(file.read_text(encoding="utf-8"))
        assert set(document) == {"benchmark", "figures", "is_quick", "machine"}
        assert set(document["machine"]) == {"load", "memory", "postgresql", "processors", "python", "system"}
        assert all(isinstance(value, float) for value in document["figures"].values())
