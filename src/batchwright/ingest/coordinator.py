"""The job of a run: it lists the sources, creates a child job for each document, and ends after the last of them.

    begin ─▶ list ─▶ wait for the items ─▶ (some are open again? wait for those) ─▶ retire what is gone ─▶ end

Every part is safe to repeat: a run whose worker dies resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.db.database import wrap_connection
from batchwright.engine.context import Context
from batchwright.engine.jobs import JobId, NewJob
from batchwright.engine.outcomes import Done, Outcome, Snooze, Wait
from batchwright.engine.owned import Held, fenced
from batchwright.errors import (
    DatabaseError,
    Fatal,
    Fenced,
    InvalidInput,
    NotFound,
    OperationError,
    RateLimited,
    RetryLater,
    StorageError,
    Transient,
)
from batchwright.ingest.context import Tools
from batchwright.ingest.items import ITEM_JOB, Items
from batchwright.ingest.machine import PARKED_SECONDS
from batchwright.ingest.runs import QUEUE, Run, Runs
from batchwright.ingest.sources import FileSource, Listed, Listing, ObjectSource, parse_source
from batchwright.ingest.sources.parse import uri_of
from batchwright.states import RunStatus

_PAGE = 1000
_CHILDREN_MAX = 50_000
_RETRIED_SECONDS = 2.0
_LIST_SECONDS = 10.0
_SKIPPED_SHOWN = 100


class Coordinator:
    """Runs `ingest.run`."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.runs = Runs(tools.queue)
        self.items = Items(tools.queue)

    async def run(self, ctx: Context, run_id: str) -> Outcome:
        try:
            return await self._run(ctx, run_id)
        except (DatabaseError, Fenced) as error:
            raise RetryLater(str(error), 1.0) from error
        except StorageError as error:
            raise RetryLater(str(error), _LIST_SECONDS) from error

    async def _run(self, ctx: Context, run_id: str) -> Outcome:
        try:
            run = await self.runs.get(run_id, tenant=None)
        except NotFound:
            return Done({"run_id": run_id, "status": "removed"})
        if run.has_ended:
            return Done({"run_id": run.id, "status": run.status.value})
        if ctx.job_id != run.job_id:
            raise Fatal(f"{ctx.job_type} belongs to {run.id}, whose own job runs it; enqueue nothing for it")
        held = Held(ctx.job_id, ctx.claim, ctx.worker)
        if run.status is RunStatus.PENDING:
            async with fenced(self.tools.queue, held) as session:
                await self.runs.begin(run.id, session=session)
        elif run.status is RunStatus.PARKED:
            return Snooze(PARKED_SECONDS, run.parked_message)
        if run.listed_at is None:
            try:
                await self._list(ctx, run, held)
            except (InvalidInput, Fatal) as error:
                return self._fail(run, error)
            except (Transient, RateLimited, OSError) as error:
                raise RetryLater(f"the sources cannot be listed now: {error}", _LIST_SECONDS) from error
        return await self._wait_or_end(ctx, run, held)

    # Listing ----------------------------------------------------------------------------------------------------

    async def _list(self, ctx: Context, run: Run, held: Held) -> None:
        """List page by page, with a commit for each page. A source that was added before is not added again."""
        config = run.config
        listing = self.tools.sources.list(
            run.sources, include=config["include"], exclude=config["exclude"], roots=config["roots"]
        )
        page: list[Listed] = []
        async for listed in listing:
            page.append(listed)
            if len(page) == _PAGE:
                await self._add(run, held, page)
                ctx.emit("run.listed", f"{listing.count} documents so far", documents=listing.count)
                page = []
        await self._add(run, held, page)
        skipped = _describe_skipped(listing)
        async with fenced(self.tools.queue, held) as session:
            await self.runs.end_listing(run.id, is_complete=listing.is_complete, skipped=skipped, session=session)
        ctx.emit("run.listed", f"{listing.count} documents, {listing.skipped_total} skipped", documents=listing.count)

    async def _add(self, run: Run, held: Held, page: Sequence[Listed]) -> None:
        if not page:
            return
        rows = [
            {
                "source": one.uri,
                "name": one.name,
                "etag": one.etag,
                "size": one.size,
                "metadata": dict(one.metadata),
            }
            for one in page
        ]
        async with fenced(self.tools.queue, held) as session:
            await self.runs.add_items(run, rows, force=run.config["force"], session=session)

    # Waiting ----------------------------------------------------------------------------------------------------

    async def _wait_or_end(self, ctx: Context, run: Run, held: Held) -> Outcome:
        jobless = await self.items.jobless(run.id, _CHILDREN_MAX)
        if jobless:
            children = [item_job(run, item_id, JobId(job_id)) for item_id, job_id in jobless]
            return Wait(children, on_join="resume", allow_failures=True)
        if await self.items.count_open(run.id):
            return Snooze(_RETRIED_SECONDS, "documents that are retried")
        await self._retire_missing(run, held)
        return self._end(run)

    async def _retire_missing(self, run: Run, held: Held) -> None:
        """Retire documents whose source is gone, page by page. Only a complete listing can know that.

        A listing that found nothing is ignored: an unmounted disk looks like an empty folder.
        """
        found_any = (await self.runs.get(run.id, tenant=None)).item_count_total > 0
        prefixes = _prefixes(run.sources) if found_any else []
        while prefixes:
            async with fenced(self.tools.queue, held) as session:
                found = await self.runs.missing(run.id, prefixes, _PAGE, session=session)
                for document_id, version_id in found:
                    await self.tools.library.retire(document_id, version_id, session=session)
                await self.runs.count_retired(run.id, len(found), session=session)
            if len(found) < _PAGE:
                return

    # The end ----------------------------------------------------------------------------------------------------

    def _end(self, run: Run) -> Outcome:
        async def write(connection: Any) -> None:
            session = await wrap_connection(connection)
            now = await self.runs.lock(run.id, tenant=None, session=session)
            if now.status is RunStatus.PARKED:
                raise RetryLater(now.parked_message or "the run is parked", PARKED_SECONDS)
            if await self.items.count_open(run.id, session=session):
                raise RetryLater("documents were just retried", 0.5)
            move = self.runs.complete_with_errors if now.item_count_failed else self.runs.complete
            await move(run.id, session=session)

        return Done({"run_id": run.id}, write=write)

    def _fail(self, run: Run, error: OperationError | InvalidInput) -> Outcome:
        code = getattr(error, "code", None) or "invalid_sources"
        shown = {"kind": "Fatal", "code": code, "message": str(error)}

        async def write(connection: Any) -> None:
            await self.runs.fail(run.id, shown, session=await wrap_connection(connection))

        return Done({"run_id": run.id, "error": shown}, write=write)


def item_job(run: Run, item_id: str, job_id: JobId) -> NewJob:
    """The job that runs the steps of a document."""
    return NewJob(
        ITEM_JOB,
        {"item_id": item_id},
        queue=QUEUE,
        tenant=run.tenant,
        priority=run.priority,
        traceparent=run.traceparent,
        owner=run.id,
        id=job_id,
    )


def _prefixes(sources: Sequence[str]) -> list[str]:
    """Prefixes of the documents of these sources. URLs have none, so a URL that is no longer listed stays."""
    found = []
    for source in map(parse_source, sources):
        if isinstance(source, FileSource):
            found.append(uri_of(str(source.path)).rstrip("/") + "/")
        elif isinstance(source, ObjectSource):
            found.append(source.uri.rstrip("/") + "/")
    return found


def _describe_skipped(listing: Listing) -> Mapping[str, Any]:
    shown = [
        {"name": one.name, "reason": one.reason.value, "message": one.message}
        for one in listing.skipped[:_SKIPPED_SHOWN]
    ]
    counts = {reason.value: count for reason, count in listing.skipped_counts.items()}
    return {"total": listing.skipped_total, "counts": counts, "shown": shown}
