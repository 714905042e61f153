"""The emissions operations: rows become totals, whatever the files look like and whenever a worker dies."""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from batchwright import AsyncBatchwright, Job, NewJob, RetryLater, SchemaInvalid, Snooze
from batchwright.db.database import Pool
from batchwright.engine.jobs import JobId, new_id
from batchwright.errors import DatabaseError, Fatal, Transient, UnknownOperation
from batchwright.operations.builtin.emissions import csv_ingest, emission_recalc, factor_ingest, store, unit_sync
from batchwright.operations.builtin.emissions.entries import PAGE_ROWS
from batchwright.operations.builtin.emissions.files import DataFile
from batchwright.operations.builtin.emissions.rows import ENTRY_COLUMNS, Unit, Unusable, parse_entry
from batchwright.operations.builtin.emissions.table import LINE_BYTES_MAX, START, Page, Table
from batchwright.operations.registry import Registry
from batchwright.testing import drain
from tests.support import DATABASE

ALL = [csv_ingest, emission_recalc, factor_ingest, unit_sync]
HEADER = "reference,organisation_unit,activity,date,amount,unit"
UNITS = "code,dimension,to_base,name\nkm,distance,1,kilometre\nmi,distance,1.609344,mile\nkWh,energy,1,kilowatt hour\n"
FACTORS = "module,activity,unit,kg_co2e_per_unit\ntravel,train,km,0.0355\ntravel,taxi,mi,0.24\nenergy,power,kWh,0.2\n"
TRAVEL = {"path": "travel.csv", "module": "travel", "year": 2026}


def row(number: int, **changed: str) -> str:
    values = dict(zip(HEADER.split(","), (f"T{number}", "BIO", "train", "2026-05-04", "10.5", "km"), strict=True))
    return ",".join({**values, **changed}.values())


def rows(count: int, first: int = 1) -> str:
    return "\n".join([HEADER, *(row(number) for number in range(first, first + count))]) + "\n"


class World:
    """A data folder, a database, and jobs."""

    def __init__(self, folder: Path, batchwright: AsyncBatchwright) -> None:
        self.folder = folder
        self.batchwright = batchwright

    def file(self, name: str, text: str | bytes) -> None:
        (self.folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    async def run(self, operation: Any, payload: dict[str, Any], **options: Any) -> Job:
        """Enqueue a job, run all jobs, and return it."""
        id = await self.batchwright.enqueue(operation, payload, **options)
        await drain(self.batchwright, fast_forward=True, limit=100)
        return await self.batchwright.get(id)

    async def ingest(self, text: str | bytes, **options: Any) -> Job:
        self.file("travel.csv", text)
        return await self.run(csv_ingest, TRAVEL, **options)

    async def prepare(self) -> None:
        self.file("units.csv", UNITS)
        self.file("factors.csv", FACTORS)
        await self.run(unit_sync, {"path": "units.csv"})
        await self.run(factor_ingest, {"path": "factors.csv", "year": 2026})

    async def ask(self, sql: str, **params: Any) -> list[Any]:
        return await self.batchwright.pool.rows(sql, params or None)

    async def totals(self, module: str = "travel", tenant: str = "default") -> dict[tuple[str, str], Decimal]:
        sql = "SELECT organisation_unit, activity, kg_co2e FROM emissions.total WHERE module = %(m)s AND tenant = %(t)s"
        return {(unit, activity): amount for unit, activity, amount in await self.ask(sql, m=module, t=tenant)}

    async def events(self, id: JobId, name: str) -> list[dict[str, Any]]:
        return [event.fields or {} for event in await self.batchwright.events(id) if event.event == name]


@pytest.fixture
async def bare(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("EMISSIONS_DATA", str(folder))
    async with AsyncBatchwright(database_url=database_url, operations=ALL) as batchwright:
        yield World(folder, batchwright)


@pytest.fixture
async def world(bare: World) -> World:
    await bare.prepare()
    return bare


@dataclass
class Standing:
    """A context without a worker, to call an operation as a plain function."""

    pool: Pool
    job_id: JobId = field(default_factory=new_id)
    tenant: str = "default"
    job_type: str = "csv_ingest"
    stopping: bool = False
    emitted: list[str] = field(default_factory=list)

    def service(self, kind: type[Pool]) -> Pool:
        return self.pool

    def emit(self, event: str, *_: Any, **__: Any) -> None:
        self.emitted.append(event)

    def progress(self, *_: int) -> None: ...


# Reading ----------------------------------------------------------------------------------------------------------


def table(text: str | bytes) -> Table:
    return Table(io.BytesIO(text.encode() if isinstance(text, str) else text), "a.csv", ENTRY_COLUMNS)


def page(text: str | bytes) -> Page:
    found = table(text).page(10_000)
    assert found is not None
    return found


KNOWN = {"km": Unit("km", "distance", Decimal(1), "kilometre"), "old": Unit("old", "x", Decimal(1), "old", True)}


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("amount", "abc", "'abc' is not a number; write it as 1234.5, without thousands separators"),
        ("amount", '"1,5"', "'1,5' is not a number"),
        ("amount", "1e5", "'1e5' is not a number"),
        ("amount", "NaN", "'NaN' is not a number"),
        ("amount", "٣", "'٣' is not a number"),
        ("amount", "1" * 16, "is not a number"),
        ("amount", "-0.1", "'-0.1' is negative"),
        ("amount", "", "is empty"),
        ("unit", "furlong", "'furlong' is an unknown unit"),
        ("unit", "old", "'old' is a retired unit"),
        ("date", "2025-12-31", "'2025-12-31' is not in 2026"),
        ("date", "2026-02-30", "'2026-02-30' is not a date; write it as 2026-12-31"),
        ("date", "20260230", "'20260230' is not a date"),
        ("reference", " ", "is empty"),
        ("organisation_unit", "", "is empty"),
        ("activity", "x" * 101, "has 101 characters; the limit is 100"),
        ("activity", "a\x00b", "has characters that are not UTF-8 text"),
    ],
)
def test_a_bad_value_is_refused_with_line_column_and_reason(column: str, value: str, reason: str) -> None:
    (good, bad) = page("\n".join([HEADER, row(1), row(2, **{column: value})])).records
    assert not isinstance(parse_entry(good, 2026, KNOWN), Unusable)
    refused = parse_entry(bad, 2026, KNOWN)
    assert isinstance(refused, Unusable)
    (problem,) = refused.problems
    assert (problem.line, problem.column) == (3, column)
    assert reason in problem.reason


def test_every_bad_column_of_a_row_is_named_once() -> None:
    (record,) = page(f"{HEADER}\n,BIO,train,soon,-1,mile\n").records
    refused = parse_entry(record, 2026, KNOWN)
    assert isinstance(refused, Unusable)
    assert [problem.column for problem in refused.problems] == ["reference", "date", "amount", "unit"]


def test_without_any_units_the_reason_says_what_to_run() -> None:
    refused = parse_entry(page(rows(1)).records[0], 2026, {})
    assert isinstance(refused, Unusable)
    assert "run unit_sync first" in refused.problems[0].reason


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_separators_byte_order_marks_blank_lines_and_quoted_line_ends_are_read(separator: str, ending: str) -> None:
    lines = [HEADER.upper(), "", 'T1,"BIO\nold",train,2026-05-04,1,km', ",,,,,", row(2)]
    text = "\ufeff" + ending.join(lines).replace(",", separator)
    records = page(text).records
    assert [record.line for record in records] == [3, 6]
    assert records[0].values["organisation_unit"] == "BIO\nold"
    assert records[1].values["reference"] == "T2"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'T2,"BIO,train,2026-05-04,1,km', "quoted field spans more than 20 lines; is a quote not closed?"),
        (b'T2,"BIO"x,train,2026-05-04,1,km', "expected after"),
        (b"T2,BIO,train", "the row has 3 fields, the header has 6"),
        (b"T2," + b"x" * LINE_BYTES_MAX, "the line is longer than 65,536 bytes"),
        (b"T2,BIO,train,2026-05-04\r,1,km", "new-line character"),
    ],
)
def test_a_malformed_record_costs_one_line_only(line: bytes, reason: str) -> None:
    after = [row(number) for number in range(3, 40)]
    text = b"\n".join([HEADER.encode(), row(1).encode(), line, *(one.encode() for one in after)])
    records = page(text).records
    assert [record.line for record in records] == list(range(2, 41))
    assert [record.line for record in records if record.problem] == [3]
    assert records[1].problem is not None
    assert reason in records[1].problem.reason


def test_a_quote_that_is_open_at_the_end_costs_one_line_only() -> None:
    records = page("\n".join([HEADER, row(1), 'T2,"BIO', row(3), row(4)])).records
    assert [(record.line, record.problem is None) for record in records] == [
        (2, True),
        (3, False),
        (4, True),
        (5, True),
    ]


def test_bytes_that_are_not_text_affect_only_their_own_row() -> None:
    first, second = page(f"{HEADER}\n".encode() + b"T1,Z\xfcrich,train,2026-05-04,1,km\n" + row(2).encode()).records
    refused = parse_entry(first, 2026, KNOWN)
    assert isinstance(refused, Unusable)
    assert "not UTF-8 text" in refused.problems[0].reason
    assert not isinstance(parse_entry(second, 2026, KNOWN), Unusable)


def test_reading_can_resume_after_any_page() -> None:
    text = "\n".join([HEADER, row(1), 'T2,"BIO\nnew",train,2026-05-04,1,km', 'T3,"open', "", *map(row, range(4, 9))])
    whole = page(text).records
    for size in range(1, len(whole)):
        reader = table(text)
        first = reader.page(size)
        assert first is not None
        again = table(text)
        again.seek(first.end)
        rest = again.page(100)
        assert first.records + (rest.records if rest else []) == whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'a.csv' lacks the columns reference, .*; its first line has: nothing"),
        ("reference;organisation_unit;activity;date;unit", "lacks the column amount; its first line has: reference, "),
        (f"{HEADER},unit", "has the column unit twice"),
        (HEADER + "".join(f",c{number}" for number in range(100)), "has more than 100 columns"),
        ("x" * (LINE_BYTES_MAX + 1), "has no header that can be read: the line is longer"),
    ],
)
def test_an_unusable_header_fails_the_file(text: str, message: str) -> None:
    with pytest.raises(SchemaInvalid, match=message):
        table(text)


# Files that may be read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["../secret.csv", "/etc/passwd", "link.csv", "folder/../../secret.csv", "away/secret.csv"]
)
async def test_a_path_that_leads_out_of_the_data_folder_is_refused(bare: World, path: str) -> None:
    (bare.folder.parent / "secret.csv").write_text(rows(1))
    (bare.folder / "link.csv").symlink_to(bare.folder.parent / "secret.csv")
    (bare.folder / "away").symlink_to(bare.folder.parent)
    job = await bare.run(csv_ingest, {**TRAVEL, "path": path})
    assert (job.status, job.error["code"]) == ("FAILED", "file_refused")
    assert "is outside the data folder; name a file inside it" in job.error["message"]
    assert await bare.ask("SELECT FROM emissions.dataset") == []


def test_a_path_that_is_not_a_readable_file_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMISSIONS_DATA", str(tmp_path))
    (tmp_path / "inner").mkdir()
    (tmp_path / "large.csv").write_text("x" * 11)
    os.mkfifo(tmp_path / "pipe.csv")
    for path, reason in [
        ("none.csv", "there is no file 'none.csv'"),
        ("inner", "'inner' is not a regular file"),
        ("pipe.csv", "'pipe.csv' is not a regular file"),
        ("large.csv", "'large.csv' has 11 bytes; the limit is 10"),
        ("a\x00b", "is not a usable path"),
    ]:
        with pytest.raises(Fatal, match=reason):
            DataFile(path, "default", bytes_max=10)


def test_each_tenant_can_have_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMISSIONS_DATA", str(tmp_path / "{tenant}"))
    (tmp_path / "north").mkdir()
    (tmp_path / "north" / "a.csv").write_text("x")
    with DataFile("a.csv", "north", bytes_max=10) as file:
        assert file.size == 1
    for tenant, path in [("south", "../north/a.csv"), ("..", "north/a.csv"), ("a/b", "a.csv")]:
        with pytest.raises(Fatal, match=r"is outside|cannot be the name"):
            DataFile(path, tenant, bytes_max=10)


def test_a_file_that_changes_while_it_is_read_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMISSIONS_DATA", str(tmp_path))
    (tmp_path / "a.csv").write_text("one")
    with DataFile("a.csv", "default", bytes_max=10) as file:
        file.refuse_change()
        (tmp_path / "a.csv").write_text("two!")
        with pytest.raises(Transient, match=r"'a\.csv' changed while it was read"):
            file.refuse_change()


# csv_ingest -------------------------------------------------------------------------------------------------------


async def test_good_rows_are_kept_and_bad_ones_reported(world: World) -> None:
    text = "\n".join([HEADER, row(1), row(2, amount="x"), row(3), row(1, amount="9"), row(4, unit="mi")])
    job = await world.ingest(text)
    assert (job.status, job.result["rows"], job.result["bad"]) == ("SUCCEEDED", 3, 2)
    assert [(error["line"], error["column"]) for error in job.result["errors"]] == [(3, "amount"), (5, "reference")]
    assert job.result["errors"][1]["reason"] == "'T1' was already used in line 2"
    assert await world.ask("SELECT line FROM emissions.entry ORDER BY line") == [(2,), (4,), (6,)]
    assert await world.ask("SELECT line, column_name, value FROM emissions.row_error ORDER BY line") == [
        (3, "amount", "x"),
        (5, "reference", "T1"),
    ]
    (told,) = await world.events(job.id, "csv_ingest.bad_rows")
    assert told["bad"] == 2
    assert (job.progress_current, job.progress_total) == (len(text), len(text))


async def test_a_reference_is_used_once_over_all_pages(world: World) -> None:
    job = await world.ingest(rows(PAGE_ROWS + 5) + row(3) + "\n")
    assert (job.result["rows"], job.result["bad"]) == (PAGE_ROWS + 5, 1)
    assert len(await world.events(job.id, "csv_ingest.page_done")) == 2


async def test_all_bad_rows_are_counted_and_a_thousand_kept(world: World) -> None:
    bad = "".join(row(number, unit="?") + "\n" for number in range(1100))
    job = await world.ingest(rows(1, first=5000) + bad)
    assert (job.status, job.result["rows"], job.result["bad"]) == ("SUCCEEDED", 1, 1100)
    assert await world.ask("SELECT count(*), max(line) FROM emissions.row_error") == [(1000, 1002)]
    assert len(job.result["errors"]) == 20


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (f"{HEADER}\n{row(1, amount='?')}\n", "no_usable_row", "no usable row: line 2: amount: '\\?' is not a number"),
        (HEADER, "no_usable_row", "there are no rows below the header"),
        ("when,what\n1,2\n", "missing_column", "lacks the columns reference, .* its first line has: when, what"),
    ],
)
async def test_a_file_without_a_usable_row_fails_and_changes_nothing(world: World, text, code, message) -> None:
    await world.ingest(rows(2))
    job = await world.ingest(text)
    assert (job.status, job.error["kind"], job.error["code"], job.attempts) == ("FAILED", "schema_invalid", code, 1)
    assert re.search(message, job.error["message"])
    assert await world.ask("SELECT rows_ok FROM emissions.dataset WHERE is_current AND kind = 'entries'") == [(2,)]


async def test_a_new_file_retires_only_the_former_one_of_its_key(world: World) -> None:
    first = await world.ingest(rows(3))
    other = await world.run(csv_ingest, {**TRAVEL, "data_type": "claims"})
    second = await world.ingest(rows(1))
    current = await world.ask("SELECT job_id FROM emissions.dataset WHERE is_current AND kind = 'entries' ORDER BY id")
    assert current == [(other.id,), (second.id,)]
    assert await world.totals() == {("BIO", "train"): Decimal("1.491000")}  # 3 + 1 rows of 10.5 km
    await world.ingest(rows(1))
    left = (
        "SELECT count(*) FROM emissions.entry JOIN emissions.dataset ON dataset.id = dataset_id WHERE job_id = %(id)s"
    )
    assert await world.ask(left, id=first.id) == [(0,)]
    assert await world.ask("SELECT rows_ok FROM emissions.dataset WHERE job_id = %(id)s", id=first.id) == [(3,)]


async def test_ingests_of_one_key_hold_one_exclusive_key_with_five_parts(world: World) -> None:
    job = await world.ingest(rows(1))
    assert job.exclusive_key == '["csv_ingest","travel","activities","entries","csv",2026]'
    ((key,),) = await world.ask(
        "SELECT exclusive_key FROM batchwright.job WHERE job_type = 'emission_recalc' AND pipeline_id = %(id)s",
        id=job.id,
    )
    assert key == '["emission_recalc","travel","recalc","totals","computed",2026]'


async def interrupted(world: World, text: str) -> JobId:
    """A job whose worker was asked to stop after its first page."""
    world.file("travel.csv", text)
    standing = Standing(world.batchwright.pool, stopping=True)
    outcome = await csv_ingest(standing, **TRAVEL)
    assert isinstance(outcome, Snooze)
    assert await world.ask("SELECT count(*) FROM emissions.entry") == [(PAGE_ROWS,)]
    return standing.job_id


async def test_a_job_resumes_after_the_last_page(world: World) -> None:
    id = await interrupted(world, rows(3 * PAGE_ROWS))
    before = await world.ask("SELECT line, xmin::text, ctid::text FROM emissions.entry ORDER BY line")
    job = await world.run(csv_ingest, TRAVEL, id=id)
    assert (job.status, job.result["rows"], job.result["bad"]) == ("SUCCEEDED", 3 * PAGE_ROWS, 0)
    pages = await world.events(id, "csv_ingest.page_done")
    assert [one["first_line"] for one in pages] == [2 + PAGE_ROWS, 2 + 2 * PAGE_ROWS]
    after = await world.ask("SELECT line, xmin::text, ctid::text FROM emissions.entry ORDER BY line")
    assert after[:PAGE_ROWS] == before
    assert [line for line, _, _ in after] == list(range(2, 2 + 3 * PAGE_ROWS))


async def test_a_job_that_was_stopped_after_its_last_page_only_has_to_end(world: World) -> None:
    id = await interrupted(world, rows(PAGE_ROWS))
    job = await world.run(csv_ingest, TRAVEL, id=id)
    assert (job.status, job.result["rows"]) == ("SUCCEEDED", PAGE_ROWS)
    assert await world.events(id, "csv_ingest.page_done") == []


async def test_a_job_starts_over_when_its_file_has_changed(world: World) -> None:
    id = await interrupted(world, rows(2 * PAGE_ROWS))
    world.file("travel.csv", rows(PAGE_ROWS + 7, first=3))
    job = await world.run(csv_ingest, TRAVEL, id=id)
    assert job.result["rows"] == PAGE_ROWS + 7
    assert await world.ask(
        "SELECT min(reference), count(*) FROM emissions.entry JOIN emissions.dataset ON dataset.id = dataset_id "
        "WHERE is_current AND reference = 'T3'"
    ) == [("T3", 1)]
    assert await world.totals() == {("BIO", "train"): (PAGE_ROWS + 7) * Decimal("10.5") * Decimal("0.0355")}


async def test_an_unfinished_file_of_another_job_is_removed_and_can_be_rerun(world: World) -> None:
    abandoned = await interrupted(world, rows(2 * PAGE_ROWS))
    await world.ingest(rows(2))
    assert await world.ask("SELECT count(*) FROM emissions.entry") == [(2,)]
    world.file("travel.csv", rows(2 * PAGE_ROWS))
    assert (await world.run(csv_ingest, TRAVEL, id=abandoned)).result["rows"] == 2 * PAGE_ROWS


async def test_the_unfinished_file_of_an_open_job_is_left_alone(world: World) -> None:
    id = await interrupted(world, rows(2 * PAGE_ROWS))
    await world.batchwright.enqueue(csv_ingest, TRAVEL, id=id, delay_seconds=3600, exclusive_key=["another"])
    other = await world.run(csv_ingest, TRAVEL)
    assert [other.result["rows"], (await world.batchwright.get(id)).result["rows"]] == [2 * PAGE_ROWS] * 2
    assert len(await world.events(id, "csv_ingest.page_done")) == 1


async def test_a_page_is_written_once_whichever_worker_writes_it(world: World) -> None:
    """A worker that was taken for dead continues with pages that its successor has written or is writing."""
    world.file("travel.csv", rows(PAGE_ROWS))
    pool, standing = world.batchwright.pool, Standing(world.batchwright.pool)
    key = store.DatasetKey(kind="entries", module="travel", data_type="a", target="b", method="c", year=2026)
    with DataFile("travel.csv", "default", bytes_max=10**6) as file:
        dataset = await store.begin(pool, standing, key, file, START)
        staged = store.Staged(start=START, end=store.Position(file.size, 9), bad=1)
        answers = await asyncio.gather(*(store.stage(pool, dataset, staged) for _ in range(4)), return_exceptions=True)
        assert sorted(type(answer).__name__ for answer in answers) == [
            "Dataset",
            "RetryLater",
            "RetryLater",
            "RetryLater",
        ]
        assert await world.ask("SELECT rows_bad FROM emissions.dataset WHERE id = %(id)s", id=dataset.id) == [(1,)]
        async with pool.transaction() as session:
            await store.swap(session, standing, key, dataset.id)
        with pytest.raises(RetryLater, match="another worker has continued this file"):
            await store.stage(pool, dataset, staged)
        unfinished = await store.begin(pool, standing, key, file, START)
        with pytest.raises(RetryLater):
            async with pool.transaction() as session:
                await store.swap(session, standing, key, unfinished.id)
    assert await world.ask("SELECT id FROM emissions.dataset WHERE is_current AND target = 'b'") == [(dataset.id,)]


async def test_two_files_of_a_key_that_end_at_once_leave_one_current(world: World) -> None:
    world.file("travel.csv", rows(1))
    pool = world.batchwright.pool
    key = store.DatasetKey(kind="entries", module="travel", data_type="a", target="b", method="c", year=2026)

    async def end(file: DataFile) -> None:
        standing = Standing(pool)
        dataset = await store.begin(pool, standing, key, file, store.Position(file.size, 2))
        async with pool.transaction() as session:
            await store.swap(session, standing, key, dataset.id)

    with DataFile("travel.csv", "default", bytes_max=10**6) as file:
        await asyncio.gather(*(end(file) for _ in range(5)))
    found = "SELECT count(*), count(*) FILTER (WHERE is_current) FROM emissions.dataset WHERE target = 'b'"
    assert await world.ask(found) == [(5, 1)]


# Factors, units, totals -------------------------------------------------------------------------------------------


async def test_amounts_are_converted_between_units_of_a_dimension(world: World) -> None:
    text = [HEADER, row(1, amount="100", unit="mi"), row(2, activity="taxi", amount="16.09344"), row(3, amount="1")]
    job = await world.ingest("\n".join(text))
    assert await world.totals() == {
        ("BIO", "train"): Decimal("5.748671"),  # (160.9344 + 1) km of 0.0355
        ("BIO", "taxi"): Decimal("2.400000"),  # 10 miles of 0.24
    }
    (result,) = await world.ask(
        "SELECT result FROM batchwright.job WHERE job_type = 'emission_recalc' AND pipeline_id = %(id)s", id=job.id
    )
    assert result[0] == {"kg_co2e": "8.148671", "rows": 3, "rows_without_factor": 0, "totals": 2}


async def test_rows_without_a_factor_in_their_dimension_are_counted_and_reported(world: World) -> None:
    text = [HEADER, row(1), row(2, activity="rocket"), row(3, activity="rocket"), row(4, unit="kWh")]
    job = await world.ingest("\n".join(text))
    ((id, result),) = await world.ask(
        "SELECT id, result FROM batchwright.job WHERE job_type = 'emission_recalc' AND pipeline_id = %(id)s", id=job.id
    )
    assert (result["rows"], result["rows_without_factor"]) == (1, 3)
    (told,) = await world.events(id, "emission_recalc.no_factor")
    assert told == {"rows": 3, "first": [{"activity": "rocket", "rows": 2}, {"activity": "train", "rows": 1}]}


async def test_three_simultaneous_factor_files_cause_one_recalculation_per_module(
    world: World, database_url: str
) -> None:
    await world.ingest(rows(2))
    for name, kg in [("a.csv", "1"), ("b.csv", "2"), ("c.csv", "3")]:
        world.file(name, FACTORS.replace("0.0355", kg))
    async with AsyncBatchwright(database_url=database_url, operations=[factor_ingest]) as only_factors:
        jobs = [NewJob(factor_ingest, {"path": name, "year": 2026}) for name in ("a.csv", "b.csv", "c.csv")]
        await only_factors.enqueue(jobs)
        with pytest.raises(UnknownOperation, match="due jobs of 'emission_recalc'"):
            await drain(only_factors, fast_forward=True, limit=20)
    waiting = "SELECT payload->>'module', count(*) FROM batchwright.job WHERE status = 'QUEUED' GROUP BY 1 ORDER BY 1"
    assert await world.ask(waiting) == [("energy", 1), ("travel", 1)]
    await drain(world.batchwright, fast_forward=True, limit=20)
    assert await world.totals() == {("BIO", "train"): Decimal(63)}


async def test_a_factor_file_replaces_all_factors_of_its_modules(world: World) -> None:
    world.file("new.csv", "module,activity,unit,kg_co2e_per_unit\ntravel,bus,km,0.1\nenergy,power,kWh,0.3\n")
    job = await world.run(factor_ingest, {"path": "new.csv", "year": 2026, "module": "travel"})
    assert (job.result["rows"], job.result["bad"], job.result["modules"]) == (1, 1, ["travel"])
    assert job.result["errors"][0]["reason"] == "'energy' is not 'travel', the module of this file"
    assert await world.ask("SELECT module, activity FROM emissions.factor ORDER BY 1") == [
        ("energy", "power"),
        ("travel", "bus"),
    ]


async def test_a_factor_may_be_given_once(world: World) -> None:
    world.file("factors.csv", FACTORS + "travel,train,km,9\nenergy,train,kWh,1\n")
    job = await world.run(factor_ingest, {"path": "factors.csv", "year": 2026})
    assert (job.result["rows"], job.result["errors"][0]["reason"]) == (4, "'train' was already used in line 2")


async def test_units_are_added_changed_and_retired(world: World) -> None:
    await world.ingest("\n".join([HEADER, row(1, amount="10", unit="mi")]))
    before = await world.totals()
    changed = UNITS.replace("mi,distance,1.609344", "mi,distance,2").replace("kWh,energy,1", "MWh,energy,1000")
    world.file("units.csv", changed)
    job = await world.run(unit_sync, {"path": "units.csv"})
    assert {name: job.result[name] for name in ("added", "changed", "retired")} == {
        "added": 1, "changed": 1, "retired": 1,
    }  # fmt: skip
    assert (before, await world.totals()) == (
        {("BIO", "train"): Decimal("0.571317")},
        {("BIO", "train"): Decimal("0.710000")},
    )
    late = await world.ingest("\n".join([HEADER, row(1), row(2, unit="kWh")]))
    assert late.result["errors"][0]["reason"] == "'kWh' is a retired unit"


async def test_a_unit_of_which_only_the_name_changes_causes_no_recalculation(world: World) -> None:
    await world.ingest(rows(1))
    world.file("units.csv", UNITS.replace("kilometre", "Kilometer").replace("km,distance,1,", "km,distance,1.0,"))
    job = await world.run(unit_sync, {"path": "units.csv"})
    assert job.result["changed"] == 0
    assert await world.ask("SELECT count(*) FROM batchwright.job WHERE pipeline_id = %(id)s", id=job.id) == [(1,)]


async def test_a_unit_file_with_bad_rows_retires_nothing(world: World) -> None:
    world.file("units.csv", "code,dimension,to_base,name\nkm,distance,1,kilometre\nmi,distance,zero,mile\n")
    job = await world.run(unit_sync, {"path": "units.csv"})
    assert (job.status, job.result["bad"], job.result["retired"]) == ("SUCCEEDED", 1, 0)
    assert await world.ask("SELECT count(*) FROM emissions.unit WHERE retired_at IS NULL") == [(3,)]


async def test_a_plan_that_new_data_has_made_outdated_is_made_again(world: World) -> None:
    """A file becomes current after the plan was made; its totals depend on the new unit, too."""
    world.file("units.csv", UNITS.replace("1.609344", "2"))
    standing = Standing(world.batchwright.pool, job_type="unit_sync")
    outcome = await unit_sync(standing, path="units.csv")
    assert [job.payload for job in outcome.then] == [{"module": "travel", "year": 2026}]  # by its factor for taxis
    await world.ask("UPDATE emissions.dataset SET kind = 'entries', module = 'late', year = 2026, units = '{mi}'")
    with pytest.raises(RetryLater, match="other files became current meanwhile"):
        async with world.batchwright.pool.transaction() as session:
            await outcome.write(session.driver)
    assert await world.ask("SELECT to_base FROM emissions.unit WHERE code = 'mi'") == [(Decimal("1.609344"),)]


async def test_tenants_share_nothing(world: World) -> None:
    mine = await world.ingest(rows(2))
    theirs = await world.run(csv_ingest, TRAVEL, tenant="north")
    assert (mine.status, theirs.status) == ("SUCCEEDED", "FAILED")
    assert "unknown unit; run unit_sync first" in theirs.error["message"]
    await world.run(unit_sync, {"path": "units.csv"}, tenant="north")
    again = await world.run(csv_ingest, TRAVEL, tenant="north")
    assert again.status == "SUCCEEDED"
    assert await world.totals(tenant="north") == {}
    assert await world.totals() == {("BIO", "train"): Decimal("0.745500")}


# The tables, and the package --------------------------------------------------------------------------------------


async def test_workers_that_start_at_the_same_time_create_the_tables_once(database_url: str) -> None:
    async with Pool(DATABASE, database_url) as first, Pool(DATABASE, database_url) as second:
        await asyncio.gather(*(store.opened(Standing(pool)) for pool in (first, second) * 5))
        made = "SELECT count(*) FROM pg_tables WHERE schemaname = 'emissions'"
        assert await first.rows(made) == [(6,)]


async def test_every_statement_can_be_prepared(world: World) -> None:
    for name, sql in {**store.SQL, **store.SCHEMA}.items():
        if name not in ("create", "allow_long_statement"):
            text = re.sub(r"%\((\w+)\)s", "NULL", sql).replace("%%", "%")
            try:
                await world.ask(f"PREPARE try_{name} AS {text}")
            except DatabaseError as error:
                pytest.fail(f"{name}: {error}")


def test_the_package_is_a_source_of_operations() -> None:
    registry = Registry.load(["batchwright.operations.builtin.emissions"], entry_points=False)
    assert registry.names() == ["csv_ingest", "emission_recalc", "factor_ingest", "unit_sync"]
    assert set(registry.sources.values()) == {"batchwright.operations.builtin.emissions"}
