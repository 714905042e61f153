"""`batchwright check`: problems of the configuration, the database and the workers, each with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from batchwright.access.check import check_access
from batchwright.app import AsyncBatchwright
from batchwright.cli.commands.serve import load_operations
from batchwright.cli.flags import Config, DatabaseUrl, Json, run, settings_from
from batchwright.cli.show import print_findings, print_json
from batchwright.cli.stop import end
from batchwright.db.check import Finding, Level, check_database, check_folder, describe, explained
from batchwright.db.sessions import describe_routes
from batchwright.engine.work import name_of_work
from batchwright.errors import BatchwrightError, ConfigurationError, DatabaseError, DatabaseUnavailable
from batchwright.part import Part
from batchwright.settings import Settings
from batchwright.telemetry.logs import configure_logs

Sources = Annotated[
    list[str] | None,
    typer.Argument(metavar="SOURCES", help="Operations to load: modules, files or folders.", show_default=False),
]
Fleet = Annotated[int, typer.Option("--processes", min=1, help="Number of worker processes, on all machines together.")]


def check(
    sources: Sources = None,
    processes: Fleet = 1,
    database_url: DatabaseUrl = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Check the configuration, the database and the workers, and say how to fix what is wrong."""
    configure_logs("ERROR", "text")
    try:
        settings = settings_from(database_url, config)
    except BatchwrightError as error:
        _print([Finding("settings", Level.ERROR, str(error), "correct the setting and check again")], json)
        raise typer.Exit(1) from error
    findings = run(_check(settings, sources or [], processes))
    _print(findings, json)
    end(1 if any(finding.level is Level.ERROR for finding in findings) else 0, settings)


def _print(findings: list[Finding], json: bool) -> None:
    if json:
        print_json(findings)
    else:
        print_findings(findings)


async def _check(settings: Settings, sources: list[str], processes: int) -> list[Finding]:
    findings = [Finding("settings", Level.OK, "read"), _check_operations(settings, sources)]
    batchwright = AsyncBatchwright(settings=settings)
    try:
        findings += await _check_database(batchwright, processes)
        findings += _check_folders(batchwright)
        return [*findings, *[finding for part in batchwright.parts for finding in await _check_part(part)]]
    finally:
        await batchwright.close()


def _check_operations(settings: Settings, sources: list[str]) -> Finding:
    try:
        names = load_operations(settings, sources).names()
    except BatchwrightError as error:
        return Finding("operations", Level.ERROR, str(error), "correct the source and check again")
    if names:
        return Finding("operations", Level.OK, ", ".join(names))
    remedy = "name modules, files or folders: operations in batchwright.toml, or batchwright up hello.py"
    return Finding("operations", Level.WARNING, "none here", remedy)


def _check_folders(batchwright: AsyncBatchwright) -> list[Finding]:
    """The folders of this machine; `batches.work_dir` is checked by its part."""
    found = check_folder("database.folder", batchwright.folder)
    try:
        store = batchwright.store.folder
    except BatchwrightError:  # the store's own check says what is wrong
        store = None
    return found if store is None else [*found, *check_folder("storage.url", store)]


async def _check_part(part: Part) -> Sequence[Finding]:
    """A check that fails must not hide the findings of the others."""
    try:
        return await part.check()
    except Exception as error:
        text = f"its check failed: {type(error).__name__}: {error}"
        return [Finding(part.name, Level.ERROR, text, "correct that part, or remove its package")]


async def _check_database(batchwright: AsyncBatchwright, processes: int) -> list[Finding]:
    """Each check needs the one before it: the connection, sessions, the server, then the workers.

    The client stays open if the database can be used, so that parts can read from it.
    """
    settings = batchwright.settings.database
    where = "embedded PostgreSQL" if settings.url is None else describe(settings.url)
    try:
        await batchwright.open(migrated=False)
        statements, leases = batchwright.pool.route, await batchwright.pool.explore_leases()
    except (ConfigurationError, DatabaseError) as error:
        reason = explained(error) if isinstance(error, DatabaseUnavailable) else error
        await batchwright.close()
        return [Finding("database", Level.ERROR, f"{where}: {reason}")]
    used = describe_routes(statements, leases, batchwright.settings.worker.poll_seconds_max)
    answer = f"an answer takes {statements.answer_seconds * 1000:.1f} ms"
    reached = Finding("database", Level.OK, f"{where}: reached; {used}; {answer}")
    found = await check_database(batchwright.pool, settings, leases=leases, processes=processes)
    if any(finding.name == "schema" and finding.level is not Level.OK for finding in found):
        await batchwright.close()
        return [reached, *found]
    access = check_access(batchwright.settings.api, has_key=await batchwright.keys.any())
    return [reached, *found, access, *await _check_workers(batchwright)]


async def _check_workers(batchwright: AsyncBatchwright) -> list[Finding]:
    alive = [worker for worker in await batchwright.views.workers() if worker.is_alive]
    known = sorted({name for worker in alive for name in worker.operations})
    due = _judge_due_types(await batchwright.queue.unknown_types(known))
    if alive:
        return [Finding("workers", Level.OK, f"{len(alive)} alive"), due]
    # One remedy for both: a worker for the due jobs is also a live worker.
    remedy = due.remedy or "start one: batchwright up, or batchwright worker"
    return [Finding("workers", Level.WARNING, "none alive: jobs wait", remedy), replace(due, remedy=None)]


def _judge_due_types(unknown: dict[str, int]) -> Finding:
    if not unknown:
        return Finding("due jobs", Level.OK, "every type is known to a live worker")
    work = sorted({name for one in unknown if (name := name_of_work(one)) is not None})
    own = {name: n for name, n in unknown.items() if name_of_work(name) is None}
    parts = [f"no live worker runs {' and '.join(work)}"] if work else []
    if own:
        parts.append("no live worker knows " + ", ".join(f"{name} ({n})" for name, n in own.items()))
    remedy = f"start one{' with these operations' if own else ''}: batchwright up, or batchwright worker"
    if "batches" in work:
        remedy += "; for batches it needs a model server: --url, or the setting global_inference_gateway.url"
    return Finding("due jobs", Level.WARNING, "; ".join(parts), remedy)
