"""The tables of the emissions operations: the schema, the staging of files, and the swap that makes one current.

A page of a file is written in one transaction with the position where the next one starts, and only by a worker that
still has the current position. So each page is written once. If a worker that was presumed dead continues, it either
writes the page that its successor would have written, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

import orjson

from batchwright.db.database import Pool, Row, Session
from batchwright.db.statements import statements
from batchwright.engine.context import Context
from batchwright.engine.owned import JOBS_VIEW
from batchwright.errors import RetryLater, UniqueViolation
from batchwright.operations.builtin.emissions.files import DataFile
from batchwright.operations.builtin.emissions.rows import Entry, Factor, Unit
from batchwright.operations.builtin.emissions.table import START, Position, Problem

SCHEMA = statements(__package__, "schema.sql")
SQL = statements(__package__, "store.sql", parts=JOBS_VIEW)

ERRORS_KEPT_MAX = 1_000
_PURGE_ROWS = 5_000
_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetKey:
    """What a file is about; each key has one current dataset."""

    kind: str
    module: str | None
    data_type: str
    target: str
    method: str
    year: int | None

    def __str__(self) -> str:
        return orjson.dumps([self.kind, self.module, self.data_type, self.target, self.method, self.year]).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The state of a dataset between two pages."""

    id: int
    position: Position
    rows: int = 0
    bad: int = 0
    errors_kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A page whose rows were checked."""

    start: Position
    end: Position
    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    bad: int = 0


class Written:
    """The connection that a `write` function receives; it raises the driver's own errors, which the engine handles."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def rows(self, sql: str, params: Any = None) -> list[Row]:
        cursor = await self._connection.execute(sql, params)
        return await cursor.fetchall() if cursor.description is not None else []


async def opened(ctx: Context) -> Pool:
    """The worker's database with our tables; if several workers start at once, one of them creates the tables."""
    pool = ctx.service(Pool)
    ((exists,),) = await pool.rows(SCHEMA["exists"])
    if not exists:
        async with pool.transaction() as session:
            await session.rows(SCHEMA["lock"])
            await session.rows(SCHEMA["create"])
    return pool


# Staging ----------------------------------------------------------------------------------------------------------


async def begin(pool: Pool, ctx: Context, key: DatasetKey, file: DataFile, start: Position) -> Dataset:
    """The dataset of this job: where an earlier try left it, or a new one if there is none or the file has changed."""
    try:
        async with pool.transaction() as session:
            for id, sha256, offset, line, *counts in await session.rows(SQL["staging"], {"job_id": ctx.job_id}):
                if sha256 == file.sha256:
                    return _dataset(id, Position(offset, line), counts)
                await session.rows(SQL["abandon"], {"id": id})
            return Dataset(id=await insert(session, ctx, key, file, start), position=start)
    except UniqueViolation as error:
        raise _too_late() from error


async def insert(session: Session, ctx: Context, key: DatasetKey, file: DataFile, start: Position) -> int:
    values = {
        **asdict(key),
        "job_id": ctx.job_id,
        "tenant": ctx.tenant,
        "dataset_key": str(key),
        "file_name": file.name,
        "sha256": file.sha256,
        "bytes": file.size,
        "offset": start.offset,
        "line": start.line,
    }
    ((id,),) = await session.rows(SQL["begin"], values)
    return int(id)


async def clear(pool: Pool, ctx: Context, key: DatasetKey) -> None:
    """Remove the rows of this key's retired files, some at a time; their datasets stay as a record."""
    mine = {"tenant": ctx.tenant, "dataset_key": str(key), "job_id": ctx.job_id}
    await pool.rows(SQL["abandon_others"], mine)
    while len(await pool.rows(SQL["purge_entries"], {**mine, "limit": _PURGE_ROWS})) == _PURGE_ROWS:
        pass


async def stage(pool: Pool, dataset: Dataset, page: Staged) -> Dataset:
    """Write a page and the position after it; writes nothing if the page's start is no longer the current position."""
    async with pool.transaction() as session:
        held = await session.rows(SQL["hold"], {"id": dataset.id, "offset": page.start.offset})
        if not held:
            raise _too_late()
        ((kept,),) = held
        doubles = await _insert_entries(session, dataset.id, page.entries)
        problems = sorted([*page.problems, *doubles], key=lambda problem: (problem.line, problem.column))
        noted = await note_errors(session, dataset.id, problems[: max(0, ERRORS_KEPT_MAX - kept)])
        advance = {
            "id": dataset.id,
            "offset": page.end.offset,
            "line": page.end.line,
            "ok": len(page.entries) - len(doubles),
            "bad": page.bad + len(doubles),
            "kept": noted,
            "units": sorted({entry.unit for entry in page.entries}),
        }
        (counts,) = await session.rows(SQL["advance"], advance)
    return _dataset(dataset.id, page.end, counts)


async def _insert_entries(session: Session, id: int, entries: Sequence[Entry]) -> list[Problem]:
    """Insert rows; returns those whose reference an earlier line of the file has already used."""
    if not entries:
        return []
    lines, references, organisation_units, activities, dates, amounts, units = map(list, zip(*entries, strict=True))
    values = {
        "id": id,
        "lines": lines,
        "references": references,
        "organisation_units": organisation_units,
        "activities": activities,
        "dates": dates,
        "amounts": amounts,
        "units": units,
    }
    new = {line for (line,) in await session.rows(SQL["stage"], values)}
    doubled = [entry for entry in entries if entry.line not in new]
    if not doubled:
        return []
    wanted = {"id": id, "references": [entry.reference for entry in doubled]}
    first: dict[str, int] = dict(await session.rows(SQL["first_lines"], wanted))
    return [_double(entry, first[entry.reference]) for entry in doubled]


def _double(entry: Entry, first: int) -> Problem:
    reason = f"{entry.reference!r} was already used in line {first}"
    return Problem(line=entry.line, column="reference", value=entry.reference, reason=reason)


async def note_errors(session: Session, id: int, problems: Sequence[Problem]) -> int:
    kept = problems[:ERRORS_KEPT_MAX]
    values = {
        "id": id,
        "lines": [problem.line for problem in kept],
        "columns": [problem.column for problem in kept],
        "values": [problem.value for problem in kept],
        "reasons": [problem.reason for problem in kept],
    }
    if kept:
        await session.rows(SQL["note_errors"], values)
    return len(kept)


async def first_errors(session: Session, id: int, limit: int) -> list[Problem]:
    rows = await session.rows(SQL["first_errors"], {"id": id, "limit": limit})
    return [Problem(line=line, column=column, value=value, reason=reason) for line, column, value, reason in rows]


async def swap(session: Session, ctx: Context, key: DatasetKey, id: int) -> None:
    """Make a finished dataset the current one of its key; part of the commit in which its job succeeds."""
    mine = {"tenant": ctx.tenant, "dataset_key": str(key)}
    await session.rows(SQL["lock_swap"], mine)
    await session.rows(SQL["retire"], mine)
    if not await session.rows(SQL["make_current"], {"id": id}):
        raise _too_late()


async def record(
    session: Session, ctx: Context, key: DatasetKey, file: DataFile, rows: int, problems: Sequence[Problem]
) -> int:
    """A small file that is read and made current in one commit; returns the id of its dataset."""
    id = await insert(session, ctx, key, file, START)
    kept = await note_errors(session, id, problems)
    counts = {"ok": rows, "bad": len({problem.line for problem in problems}), "kept": kept}
    await session.rows(SQL["advance"], {"id": id, "offset": file.size, "line": 1, "units": [], **counts})
    await swap(session, ctx, key, id)
    return id


def _dataset(id: int, position: Position, counts: Sequence[int]) -> Dataset:
    rows, bad, kept = counts
    return Dataset(id=id, position=position, rows=rows, bad=bad, errors_kept=kept)


def _too_late() -> RetryLater:
    return RetryLater("another worker has continued this file", delay_seconds=_AGAIN_SECONDS)


# Units and factors ------------------------------------------------------------------------------------------------


async def units(session: Session, tenant: str) -> dict[str, Unit]:
    return {row[0]: Unit(*row) for row in await session.rows(SQL["units"], {"tenant": tenant})}


async def lock_units(session: Session, tenant: str) -> None:
    """Keep any file from becoming current until the end of the transaction."""
    await session.rows(SQL["lock_units"], {"tenant": tenant})


async def put_units(session: Session, tenant: str, id: int, found: Sequence[Unit], retired: Sequence[str]) -> None:
    values = {
        "tenant": tenant,
        "id": id,
        "codes": [unit.code for unit in found],
        "dimensions": [unit.dimension for unit in found],
        "factors": [unit.to_base for unit in found],
        "names": [unit.name for unit in found],
    }
    await session.rows(SQL["put_units"], values)
    await session.rows(SQL["retire_units"], {"tenant": tenant, "codes": list(retired)})


async def modules_using(session: Session, tenant: str, codes: Iterable[str]) -> list[tuple[str, int]]:
    """Modules and years whose totals depend on these units."""
    rows = await session.rows(SQL["modules_using_units"], {"tenant": tenant, "codes": list(codes)})
    return sorted((module, year) for module, year in rows)


async def put_factors(session: Session, tenant: str, year: int, id: int, factors: Sequence[Factor]) -> None:
    """Replace all factors of the modules that the file names: for these, a file is complete."""
    about = {"tenant": tenant, "year": year}
    modules = [factor.module for factor in factors]
    await session.rows(SQL["drop_factors"], {**about, "modules": sorted(set(modules))})
    values = {
        **about,
        "id": id,
        "modules": modules,
        "activities": [factor.activity for factor in factors],
        "units": [factor.unit for factor in factors],
        "factors": [factor.kg_per_unit for factor in factors],
    }
    await session.rows(SQL["put_factors"], values)


async def lock_factors(session: Session, tenant: str, year: int) -> None:
    await session.rows(SQL["lock_factors"], {"tenant": tenant, "year": year})


# Totals -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Total:
    """What one activity of one organisation unit emits, from how many rows, and how many rows have no factor."""

    organisation_unit: str
    activity: str
    kg_co2e: Decimal | None
    rows: int
    rows_without_factor: int


async def compute(pool: Pool, tenant: str, module: str, year: int, limit: int) -> list[Total]:
    """Totals of the current files, in one snapshot; at most `limit` of them."""
    about = {"tenant": tenant, "module": module, "year": year, "limit": limit}
    async with pool.transaction() as session:
        await session.rows(SQL["allow_long_statement"])
        return [Total(*row) for row in await session.rows(SQL["compute"], about)]


async def replace_totals(session: Session, ctx: Context, module: str, year: int, totals: Sequence[Total]) -> None:
    about = {"tenant": ctx.tenant, "module": module, "year": year}
    known = [total for total in totals if total.kg_co2e is not None]
    values = {
        **about,
        "job_id": ctx.job_id,
        "organisation_units": [total.organisation_unit for total in known],
        "activities": [total.activity for total in known],
        "amounts": [total.kg_co2e for total in known],
        "rows": [total.rows for total in known],
    }
    await session.rows(SQL["drop_totals"], about)
    await session.rows(SQL["put_totals"], values)
