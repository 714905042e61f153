"""`batchwright ingest run` and `resume`: from sources to a searchable collection in one command."""

from __future__ import annotations

import sys
from dataclasses import replace
from decimal import Decimal
from typing import Annotated

import orjson
import typer

from batchwright.app import AsyncBatchwright
from batchwright.cli.flags import Config, DatabaseUrl, Json, Yes, check_length, parse_pairs, warn_if_no_worker
from batchwright.cli.show import print_json
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.errors import Conflict, InvalidInput
from batchwright.ingest.commands.estimate import print_forecast
from batchwright.ingest.commands.follow import Follower, run_command
from batchwright.ingest.commands.options import (
    Budget,
    ChunkCharacters,
    Collection,
    Detach,
    EmbeddingModel,
    EntityModel,
    Exclude,
    ForceAll,
    Include,
    OfLane,
    RunId,
    RunTenant,
    Sources,
    Urls,
    make_overrides,
    name_sources,
    parse_budget,
    parse_time,
)
from batchwright.ingest.commands.show import Seen, as_json
from batchwright.ingest.forecast import forecast
from batchwright.ingest.local import find_open
from batchwright.ingest.part import IngestPart
from batchwright.ingest.runs import QUEUE, Run
from batchwright.ingest.submission import WantedRun
from batchwright.states import RunStatus
from batchwright.telemetry import tracing

_TENANT_CHARACTERS_MAX = 100


def run_(
    collection: Collection,
    sources: Sources = None,
    urls: Urls = None,
    include: Include = None,
    exclude: Exclude = None,
    lane: OfLane = None,
    embedding_model: EmbeddingModel = None,
    entities: EntityModel = None,
    chunk_characters: ChunkCharacters = None,
    budget: Budget = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Time in which the run should be done, from 1m to 30d.")
    ] = None,
    force: ForceAll = False,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Your own metadata; may be repeated.", show_default=False),
    ] = None,
    priority: Annotated[int, typer.Option(min=0, max=9, help="From 0 (first) to 9 (last).")] = 5,
    tenant: RunTenant = DEFAULT_TENANT,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Show an estimate of the cost first, and ask for confirmation.")
    ] = False,
    yes: Yes = False,
    detach: Detach = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Read documents into a collection, and show the progress; needs no other process.

    If no worker runs documents on this database, this command does it itself. Documents that have not changed since
    the last run are left alone, and those whose source is gone are removed.

    Started again with the same sources and collection, it resumes the run that is open. Ctrl-C lets steps in progress
    end; press it again to quit now. Nothing that is done is lost, and nothing is paid twice.

    The exit code is 0 if every document is done, 4 if some failed, 3 if the run was cancelled, 1 if it failed or is
    parked, and 130 after Ctrl-C. Example:

    batchwright ingest run ./papers --collection papers
    """
    check_length("--tenant", tenant, _TENANT_CHARACTERS_MAX)
    names = name_sources(sources or (), urls)
    overrides = make_overrides(names, include, exclude, embedding_model, entities, chunk_characters, force)
    wanted = WantedRun(
        tenant=tenant,
        collection=collection,
        sources=names,
        overrides=overrides,
        lane=lane.value if lane is not None else None,
        budget=parse_budget(budget),
        metadata=parse_pairs("--metadata", metadata or (), "project=archive") or None,
        priority=priority,
        deadline_seconds=parse_time("--deadline", deadline),
    )
    if estimate and not (yes or sys.stdin.isatty()):
        raise InvalidInput("there is no terminal to confirm the estimate on: add --yes, or see: ingest estimate")

    async def begin(batchwright: AsyncBatchwright) -> int:
        part = batchwright.part(IngestPart)
        run = await _find_or_create(part, wanted, estimate=estimate, yes=yes, json=json)
        return await _follow_or_detach(batchwright, run, detach=detach, json=json) if run is not None else 1

    run_command(begin, database_url, config)


def resume(
    id: RunId,
    budget: Budget = None,
    detach: Detach = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Resume a run that is parked, was interrupted, or has failed as a whole, and show its progress.

    If no worker runs documents on this database, this command does it itself. The exit code is that of
    batchwright ingest run.
    """
    amount = parse_budget(budget)

    async def begin(batchwright: AsyncBatchwright) -> int:
        part = batchwright.part(IngestPart)
        run = await part.runs.get(id, tenant=None)
        if run.status is RunStatus.FAILED:
            run = await part.submission.reopen(id, tenant=None)
        elif run.has_ended:
            raise Conflict(
                f"the run {id} is {run.status.value}; to retry its failed documents: batchwright ingest retry "
                f"--run {id}"
            )
        else:
            run = await _continue(part, run, amount)
        return await _follow_or_detach(batchwright, run, detach=detach, json=json)

    run_command(begin, database_url, config)


# The run -------------------------------------------------------------------------------------------------------------


async def _find_or_create(part: IngestPart, wanted: WantedRun, *, estimate: bool, yes: bool, json: bool) -> Run | None:
    """The open run of the same sources, or a new one; None if the user does not agree to the estimate."""
    known = await find_open(part.runs, wanted)
    if known is not None:
        _refuse_other_settings(part, known, wanted)
        if not json:
            typer.echo("resuming the open run of the same sources", err=True)
        return await _continue(part, known, wanted.budget)
    if estimate:
        found = await forecast(part, wanted)
        if not json:
            print_forecast(found)
        if not yes and not typer.confirm("begin?", err=True):
            return None
        wanted = replace(wanted, estimate=found.document())
    with tracing.span("create-run") as creating:
        run, _ = await part.submission.create(replace(wanted, traceparent=creating.traceparent))
    part.core.doorbell.ring([QUEUE])
    return run


def _refuse_other_settings(part: IngestPart, known: Run, wanted: WantedRun) -> None:
    config = orjson.loads(orjson.dumps(part.submission.prepare(wanted).config, default=str))
    if other := sorted(name for name in config if config[name] != known.config.get(name)):
        raise Conflict(
            f"the run {known.id} of the same sources is open with other settings ({', '.join(other)}); finish it: "
            f"batchwright ingest resume {known.id}, or cancel it: batchwright ingest cancel {known.id}"
        )


async def _continue(part: IngestPart, run: Run, budget: Decimal | None) -> Run:
    """Let an open run continue. To change its budget, park it for a moment."""
    if run.status is not RunStatus.PARKED:
        if budget is None or budget == run.budget:
            return run
        await part.submission.park(run.id, tenant=None, message="its budget is being changed")
    run = await part.submission.resume(run.id, tenant=None, budget=budget)
    part.core.doorbell.ring([QUEUE])
    return run


async def _follow_or_detach(batchwright: AsyncBatchwright, run: Run, *, detach: bool, json: bool) -> int:
    """Print the id at once, so that users still know it if they interrupt the wait."""
    if not detach:
        if not json:
            name = "" if sys.stdout.isatty() else f"{run.id} into {run.collection!r}; "
            typer.echo(f"{name}Ctrl-C stops, the same command resumes", err=True)
        return await Follower(batchwright, json=json).run(run)
    if json:
        print_json(as_json(Seen(run=run)))
    else:
        typer.echo(run.id)
        await warn_if_no_worker(batchwright, run.job_id, "documents")
    return 0
