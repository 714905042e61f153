"""`batchwright check`: the configuration, the database and the workers, each with its remedy."""

from __future__ import annotations

import asyncio
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.text import Text

from batchwright.app import AsyncBatchwright
from batchwright.batches.metrics import STORAGE_METRIC
from batchwright.batches.store import PROCESS
from batchwright.cli.flags import Config, DatabaseUrl, Json, run, settings_from
from batchwright.cli.serve import Processes, load_operations
from batchwright.cli.show import console, print_json
from batchwright.cli.stop import end
from batchwright.db.check import Finding, Level, check_database, describe, explained
from batchwright.engine.worker import host_name
from batchwright.errors import BatchwrightError, ConfigurationError, DatabaseError, DatabaseUnavailable, StorageError
from batchwright.settings import Settings
from batchwright.storage.probe import probe
from batchwright.telemetry.logs import configure_logs
from batchwright.telemetry.metrics import Counts

_CONNECT_SECONDS = 3.0
_STORE_PATIENCE_SECONDS = 3.0
_SIGNS = {Level.OK: ("✓", "green"), Level.WARNING: ("!", "yellow"), Level.ERROR: ("✗", "red")}

Sources = Annotated[
    list[str] | None,
    typer.Argument(metavar="SOURCES", help="Operations to load: modules, files or folders.", show_default=False),
]


def check(
    sources: Sources = None,
    processes: Processes = 1,
    database_url: DatabaseUrl = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Look at configuration, database and workers, and say what to do about what is wrong."""
    configure_logs("ERROR", "text")
    try:
        settings = settings_from(database_url, config)
    except BatchwrightError as error:
        _tell([Finding("settings", Level.ERROR, str(error), "correct the setting and check again")], json)
        raise typer.Exit(1) from error
    findings = run(_check(settings, sources or [], processes))
    _tell(findings, json)
    end(1 if any(finding.level is Level.ERROR for finding in findings) else 0, settings)


def _tell(findings: list[Finding], json: bool) -> None:
    if json:
        print_json(findings)
    else:
        print_findings(findings)


async def _check(settings: Settings, sources: list[str], processes: int) -> list[Finding]:
    findings = [Finding("settings", Level.OK, "read"), _operations(settings, sources)]
    return [*findings, *await _check_gateways(settings), *await _check_database(settings, processes)]


def _operations(settings: Settings, sources: list[str]) -> Finding:
    try:
        names = load_operations(settings, sources).names()
    except BatchwrightError as error:
        return Finding("operations", Level.ERROR, str(error), "correct the source and check again")
    if names:
        return Finding("operations", Level.OK, ", ".join(names))
    remedy = "name modules, files or folders in `operations` of batchwright.toml, or to `batchwright up`"
    return Finding("operations", Level.WARNING, "none here", remedy)


async def _check_gateways(settings: Settings) -> list[Finding]:
    """Keys, certificates and secrets, as a worker reads them at its start; and whether the servers are there."""
    if not settings.has_gateways:
        return []
    from batchwright.batches.webhooks import Webhooks  # here, because they load an HTTP client
    from batchwright.inference.gateway import Gateways

    try:
        async with Gateways(settings.global_inference_gateway, settings.model_gateways, settings.inference) as gateways:
            endpoints = sorted({gateway.endpoint for gateway in gateways.all()})
        await Webhooks(settings.webhooks).close()
    except ConfigurationError as error:
        return [Finding("gateways", Level.ERROR, str(error), "correct that: no worker starts with it")]
    if settings.passthrough_headers:
        try:
            AsyncBatchwright(settings=settings).seal.check()
        except ConfigurationError as error:
            text = f"headers are passed through, but batches that have them cannot be created: {error}"
            return [Finding("gateways", Level.ERROR, text, "set batches.header_key_file, or passthrough_headers = []")]
    reached = await asyncio.gather(*(_is_reached(endpoint) for endpoint in endpoints))
    if away := [endpoint for endpoint, is_there in zip(endpoints, reached, strict=True) if not is_there]:
        text = f"{', '.join(away)} cannot be reached from here"
        return [
            Finding("gateways", Level.WARNING, text, "start the model server, or correct its url; batches wait for it")
        ]
    return [Finding("gateways", Level.OK, f"{', '.join(endpoints)} can be reached")]


async def _is_reached(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _check_database(settings: Settings, processes: int) -> list[Finding]:
    """In the order in which one thing needs the other: reachable, sessions, the server, then the workers."""
    batchwright = AsyncBatchwright(settings=settings)
    where = "embedded PostgreSQL" if settings.database.url is None else describe(settings.database.url)
    try:
        await batchwright.open(migrated=False)
    except (ConfigurationError, DatabaseError) as error:
        reason = explained(error) if isinstance(error, DatabaseUnavailable) else error
        return [Finding("database", Level.ERROR, f"{where}: {reason}")]
    try:
        answer = f"an answer takes {batchwright.pool.answer_seconds * 1000:.1f} ms"
        reached = Finding("database", Level.OK, f"{where}: reached, and it keeps sessions; {answer}")
        found = await check_database(batchwright.pool, settings.database, processes=processes)
        if any(finding.name == "schema" and finding.level is not Level.OK for finding in found):
            return [reached, *found]
        return [reached, *found, *await _check_workers(batchwright), *await _check_store(batchwright)]
    finally:
        await batchwright.close()


async def _check_workers(batchwright: AsyncBatchwright) -> list[Finding]:
    alive = [worker for worker in await batchwright.views.workers() if worker.is_alive]
    known = sorted({name for worker in alive for name in worker.operations})
    unknown = await batchwright.queue.unknown_types(known)
    return [_workers(len(alive)), _types(unknown)]


async def _check_store(batchwright: AsyncBatchwright) -> list[Finding]:
    """Where batches run: can it be reached, and by all who must?"""
    if not batchwright.settings.has_gateways:
        return []
    store = batchwright.open_store("check", Counts([STORAGE_METRIC]), patience_seconds=_STORE_PATIENCE_SECONDS)
    try:
        await probe(store)
    except StorageError as error:
        return [Finding("store", Level.ERROR, str(error), "repair that, or correct storage.url: batches need it")]
    workers = await batchwright.views.workers()
    hosts = {host_name(), *(worker.host for worker in workers if worker.is_alive and PROCESS in worker.operations)}
    if batchwright.settings.storage.url is None and len(hosts) > 1:
        text = f"{store} is a folder of this machine, and batches run on {', '.join(sorted(hosts))}"
        return [Finding("store", Level.WARNING, text, "set storage.url to a store that all of them share")]
    return [Finding("store", Level.OK, f"{store} takes, lists, reads and deletes objects")]


def _workers(n: int) -> Finding:
    if n:
        return Finding("workers", Level.OK, f"{n} alive")
    return Finding(
        "workers", Level.WARNING, "none alive: jobs wait", "start one: batchwright up, or batchwright worker"
    )


def _types(unknown: dict[str, int]) -> Finding:
    if not unknown:
        return Finding("due jobs", Level.OK, "every type is known to a live worker")
    listed = ", ".join(f"{name} ({n})" for name, n in unknown.items())
    return Finding("due jobs", Level.WARNING, f"no live worker knows {listed}", "start a worker with these operations")


def print_findings(findings: list[Finding]) -> None:
    """Plain lines, which wrap as the terminal likes: remedies hold commands to be copied."""
    out = console()
    for finding in findings:
        sign, colour = _SIGNS[finding.level]
        out.print(Text.assemble((f"{sign} {finding.name:12}", colour), finding.text), soft_wrap=True)
        if finding.remedy:
            out.print(Text(f"  {'':12}→ {finding.remedy}"), soft_wrap=True)
