"""The emissions example, run as its README says: from a shell, with a worker that is killed half way."""

from __future__ import annotations

import csv
import importlib.util
import math
import re
import shutil
import signal
from collections import defaultdict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
import pytest

from batchwright.operations.registry import Registry
from tests.cli.conftest import Cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "emissions"
READY = "runs .*csv_ingest, emission_recalc, factor_ingest, .*provider.task, unit_sync"
ROWS = 6_000
PAGE_ROWS = 500


@pytest.fixture
def cli(tmp_path: Path, database_url: str) -> Cli:
    """The command line in a copy of the example, with short leases."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("travel_large.csv"))
    cli = Cli(tmp_path, database_url)
    cli.environment.pop("EMISSIONS_DATA", None)
    cli.environment["BATCHWRIGHT_ENGINE_LEASE_SECONDS"] = "1"
    return cli


def submit(cli: Cli, operation: str, **payload: Any) -> str:
    return cli("job", "submit", operation, "--payload", orjson.dumps(payload).decode()).stdout.strip()


def ended(cli: Cli, id: str) -> tuple[str, Any]:
    """Status and result once the whole pipeline has ended."""
    cli.until(
        "SELECT WHERE NOT EXISTS (SELECT FROM batchwright.job WHERE pipeline_id = %s AND finished_at IS NULL)", id
    )
    ((status, result),) = cli.rows("SELECT status::text, result FROM batchwright.job WHERE id = %s", id)
    return status, result


def prepare(cli: Cli) -> None:
    for operation, payload in [("unit_sync", {"path": "units.csv"}), ("factor_ingest", FACTORS)]:
        assert ended(cli, submit(cli, operation, **payload))[0] == "SUCCEEDED"


FACTORS = {"path": "factors.csv", "year": 2026}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_large", EXAMPLE / "make_large.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def totals_by_hand(folder: Path, name: str) -> dict[tuple[str, str], Decimal]:
    """The same totals, computed independently: with exact fractions, and with separate rules for bad rows."""
    units = {unit["code"]: Fraction(unit["to_base"]) for unit in table(folder / "units.csv")}
    factors = {
        factor["activity"]: Fraction(factor["kg_co2e_per_unit"]) / units[factor["unit"]]
        for factor in table(folder / "factors.csv")
        if factor["module"] == "travel"
    }
    sums: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    seen: set[str] = set()
    for trip in table(folder / name):
        is_number = re.fullmatch(r"\d+(\.\d+)?", trip["amount"])
        is_good = is_number and trip["organisation_unit"] and trip["date"].startswith("2026-") and trip["unit"] in units
        if not is_good or trip["reference"] in seen or trip["activity"] not in factors:
            continue
        seen.add(trip["reference"])
        kg = Fraction(trip["amount"]) * units[trip["unit"]] * factors[trip["activity"]]
        sums[trip["organisation_unit"], trip["activity"]] += kg
    return {place: Decimal(math.floor(kg * 10**6 + Fraction(1, 2))) / 10**6 for place, kg in sums.items()}


def totals(cli: Cli) -> dict[tuple[str, str], Decimal]:
    rows = cli.rows("SELECT organisation_unit, activity, kg_co2e FROM emissions.total WHERE module = 'travel'")
    return {(organisation_unit, activity): kg for organisation_unit, activity, kg in rows}


@pytest.mark.thorough
def test_the_totals_of_the_sample_files_are_correct(cli: Cli) -> None:
    with cli.start("worker") as worker:
        worker.until(READY)
        prepare(cli)
        id = submit(cli, "csv_ingest", path="travel_2026.csv", module="travel", year=2026)
        status, result = ended(cli, id)
    assert (status, result["rows"], result["bad"]) == ("SUCCEEDED", 396, 8)
    assert [error["line"] for error in result["errors"]] == [52, 102, 152, 202, 252, 302, 352, 402]
    assert cli.rows("SELECT exclusive_key FROM batchwright.job WHERE id = %s", id) == [
        ('["csv_ingest","travel","activities","entries","csv",2026]',)
    ]
    assert totals(cli) == totals_by_hand(cli.folder / "data", "travel_2026.csv")


def test_a_suspect_job_that_runs_alone_can_use_the_database(cli: Cli) -> None:
    with cli.start("worker") as worker:
        worker.until(READY)
        id = cli("job", "submit", "unit_sync", "--delay", "3600", "-p", '{"path": "units.csv"}').stdout.strip()
        cli.rows("UPDATE batchwright.job SET rescues = 2, run_after = now() WHERE id = %s RETURNING id", id)
        status, result = ended(cli, id)
    assert (status, result["added"]) == ("SUCCEEDED", 12)


@pytest.mark.thorough
def test_a_killed_worker_costs_one_page_and_another_one_finishes(cli: Cli) -> None:
    make_large = generator()
    with (cli.folder / "data" / "travel_large.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, make_large.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(make_large.rows(ROWS, 2026, 7))
    payload = {"path": "travel_large.csv", "module": "travel", "year": 2026}
    with cli.start("worker") as worker:
        worker.until(READY)
        prepare(cli)
        id = submit(cli, "csv_ingest", **payload, pause_seconds=0.1)
        cli.until("SELECT FROM emissions.dataset WHERE job_id = %s AND next_line > %s", id, 2 + 3 * PAGE_ROWS)
        worker.signal(signal.SIGKILL)
        worker.ended()

    # The last transaction of the dead worker may still commit; then the position no longer changes.
    cli.until(
        "SELECT WHERE NOT EXISTS (SELECT FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'batchwright')"
    )
    ((next_line, is_current),) = cli.rows("SELECT next_line, is_current FROM emissions.dataset WHERE job_id = %s", id)
    staged = cli.rows("SELECT line, xmin::text, ctid::text FROM emissions.entry ORDER BY line")
    assert (next_line - 2) % PAGE_ROWS == 0
    assert 3 * PAGE_ROWS < next_line < ROWS
    assert (is_current, totals(cli)) == (False, {})

    with cli.start("worker") as worker:
        worker.until(READY)
        status, result = ended(cli, id)
    assert (status, result["rows"], result["bad"]) == ("SUCCEEDED", ROWS - 7, 7)
    entries = cli.rows("SELECT line, xmin::text, ctid::text FROM emissions.entry ORDER BY line")
    assert entries[: len(staged)] == staged, "rows of the first worker were written again"
    bad = {error["line"] for error in result["errors"]}
    assert [line for line, _, _ in entries] == [line for line in range(2, ROWS + 2) if line not in bad]
    pages = cli.rows(
        "SELECT claim, (fields->>'first_line')::int FROM batchwright.job_event "
        "WHERE job_id = %s AND event = 'csv_ingest.page_done' ORDER BY id",
        id,
    )
    assert [line for claim, line in pages if claim == 2] == list(range(next_line, ROWS + 2, PAGE_ROWS))
    assert all(line < next_line for claim, line in pages if claim == 1)
    assert totals(cli) == totals_by_hand(cli.folder / "data", "travel_large.csv")


def test_the_payloads_in_the_readme_are_valid_for_the_operations() -> None:
    registry = Registry.load(["batchwright.operations.builtin.emissions"], entry_points=False)
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    bodies = [orjson.loads(body) for body in re.findall(r"submit '(\{.*\})'", text)]
    assert {body["job_type"] for body in bodies} == {"unit_sync", "factor_ingest", "csv_ingest"}
    for body in bodies:
        operation = registry.get(body["job_type"])
        assert operation is not None
        assert operation.encode(body["payload"])["method"] == "csv"


def test_the_sample_is_what_the_generator_writes_and_some_lines_by_hand() -> None:
    sample = table(EXAMPLE / "data" / "travel_2026.csv")
    assert sample[:400] == list(generator().rows(400, 2026, 7))
    assert len(sample) == 404
