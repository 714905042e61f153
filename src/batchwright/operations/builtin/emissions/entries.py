"""`csv_ingest`: a CSV file of activities becomes the current dataset of its key, and the totals are recomputed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from batchwright.db.database import Pool
from batchwright.engine.context import Context
from batchwright.engine.jobs import NewJob
from batchwright.engine.outcomes import Done, Snooze
from batchwright.operations.builtin.emissions import store
from batchwright.operations.builtin.emissions.files import DataFile
from batchwright.operations.builtin.emissions.payload import KEY, DataPath, PauseSeconds, Word, Year
from batchwright.operations.builtin.emissions.recalc import emission_recalc
from batchwright.operations.builtin.emissions.report import ERRORS_SHOWN, counted, refuse_empty, report_bad
from batchwright.operations.builtin.emissions.rows import ENTRY_COLUMNS, Entry, Unit, parse_entry
from batchwright.operations.builtin.emissions.store import Dataset, DatasetKey, Staged
from batchwright.operations.builtin.emissions.table import Problem, Table
from batchwright.operations.decorator import operation

FILE_BYTES_MAX = 256 * 1024 * 1024
PAGE_ROWS = 500


@operation("csv_ingest", exclusive_key=KEY, max_attempts=10, retry_on=(OSError,))
async def csv_ingest(
    ctx: Context,
    path: DataPath,
    module: Word,
    year: Year,
    data_type: Word = "activities",
    target: Word = "entries",
    method: Word = "csv",
    pause_seconds: PauseSeconds = 0.0,
) -> Done | Snooze:
    """Read a CSV of activities (reference, organisation_unit, activity, date, amount, unit) page by page.

    Bad rows are reported with line and reason, good ones are kept. If a worker dies, at most one page is lost. When
    the whole file is staged, it replaces the previous one of the same key. `pause_seconds` is a pause between two
    pages: it reduces the load of the database, and makes a run slow enough to watch.
    """
    key = DatasetKey(kind="entries", module=module, data_type=data_type, target=target, method=method, year=year)
    pool = await store.opened(ctx)
    units = await store.units(pool, ctx.tenant)
    with await asyncio.to_thread(DataFile, path, ctx.tenant, bytes_max=FILE_BYTES_MAX) as file:
        table = await asyncio.to_thread(Table, file.reader, path, ENTRY_COLUMNS)
        dataset = await store.begin(pool, ctx, key, file, table.position)
        await store.clear(pool, ctx, key)
        if dataset.position != table.position:
            table.seek(dataset.position)
            ctx.emit("csv_ingest.resumed", f"resumes at line {dataset.position.line:,}", rows=dataset.rows)
        while page := await asyncio.to_thread(_read_page, table, year, units):
            file.refuse_change()
            dataset = await store.stage(pool, dataset, page)
            _report(ctx, file, page, dataset)
            if ctx.stopping:
                return Snooze(0, "the worker is stopping; another one resumes after the last page")
            await asyncio.sleep(pause_seconds)
        file.refuse_change()
    return await _finish(ctx, pool, key, file, dataset)


def _read_page(table: Table, year: int, units: Mapping[str, Unit]) -> Staged | None:
    page = table.page(PAGE_ROWS)
    if page is None:
        return None
    entries: list[Entry] = []
    problems: list[Problem] = []
    for record in page.records:
        parsed = parse_entry(record, year, units)
        if isinstance(parsed, Entry):
            entries.append(parsed)
        else:
            problems += parsed.problems
    return Staged(
        start=page.start, end=page.end, entries=entries, problems=problems, bad=len(page.records) - len(entries)
    )


def _report(ctx: Context, file: DataFile, page: Staged, dataset: Dataset) -> None:
    ctx.progress(page.end.offset, file.size)
    ctx.emit(
        "csv_ingest.page_done",
        f"{dataset.rows:,} rows, {100 * page.end.offset // file.size} %",
        first_line=page.start.line,
        last_line=page.end.line - 1,
        rows=dataset.rows,
        bad=dataset.bad,
    )


async def _finish(ctx: Context, pool: Pool, key: DatasetKey, file: DataFile, dataset: Dataset) -> Done:
    problems = await store.first_errors(pool, dataset.id, ERRORS_SHOWN)
    refuse_empty(file, dataset.rows, problems)
    report_bad(ctx, dataset.bad, problems)

    async def write(connection: Any) -> None:
        await store.swap(store.Written(connection), ctx, key, dataset.id)

    return Done(
        {"dataset": dataset.id, "sha256": file.sha256, **counted(dataset.rows, dataset.bad, problems)},
        progress=(file.size, file.size),
        write=write,
        then=[NewJob(emission_recalc, {"module": key.module, "year": key.year}, on_held="coalesce")],
    )
