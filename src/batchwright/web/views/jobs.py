"""The list of jobs, and verbs on many jobs, which first show the count."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated, Any, Literal, cast
from uuid import UUID

from fastapi import Query
from starlette.responses import Response

from batchwright.engine.bulk import COUNT_MAX
from batchwright.engine.jobs import JobId
from batchwright.engine.views import Cursor, JobFilter
from batchwright.errors import Conflict, InvalidInput, NotFound
from batchwright.states import JobStatus
from batchwright.web.pages import Finder, Link, Pages
from batchwright.web.views.job_filter import JobsWanted, Wanted, hidden
from batchwright.web.visit import Operator, Reader, Visit

_ID = r"[0-9a-fA-F]{8}-?([0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}"
pages = Pages(
    "jobs",
    package="batchwright.web",
    links=[Link("Jobs", "/ui/jobs", group="Work", order=10)],
    finders=[Finder(_ID, "/ui/jobs/{}")],
)

_PER_PAGE = 50
_BULK_SECONDS_MAX = 20.0
_REASON_MAX = 500
Verb = Literal["cancel", "rerun"]
_DONE = {"cancel": "cancelled", "rerun": "rerun"}


@pages.get("/ui/jobs")
async def list_jobs(
    visit: Reader, wanted: Wanted, cursor: Annotated[str | None, Query(max_length=200)] = None
) -> Response:
    """Newest first, one page at a time."""
    core, tenant = visit.services.core, visit.tenant
    after = None if cursor is None else Cursor.parse(cursor)
    wanted.filter(tenant)  # refuse an invalid filter before the page is loaded

    async def load() -> dict[str, Any]:
        ids, next = await core.views.ids(wanted.filter(tenant), limit=_PER_PAGE, after=after)
        return {"jobs": await core.briefs.of(ids, tenant=tenant), "next": None if next is None else str(next)}

    return await visit.show(
        "jobs.html",
        load,
        title="Jobs",
        wanted=wanted,
        cursor=cursor,
        statuses=list(JobStatus),
        hidden=hidden(wanted.query),
    )


@pages.post("/ui/jobs/choose")
async def choose(visit: Operator) -> Response:
    """Show how many jobs a verb would change, before it is applied."""
    form = await visit.form()
    verb = _verb(str(form.get("verb", "")))
    ids = _ids(form.getlist("id"))
    wanted = JobsWanted.of(form)
    is_all = form.get("scope") == "all"
    if not is_all and not ids:
        raise InvalidInput("no job is selected; select some, or choose all that match the filter")
    if is_all and wanted.is_empty:
        raise InvalidInput("set a filter first; this cannot be applied to all jobs at once")
    if is_all:
        ids = []
        count = await visit.services.core.bulk.count(verb, wanted.filter(visit.tenant))
    else:
        count = len(ids)
    return visit.draw(
        "jobs_confirm.html",
        title=f"{verb.capitalize()} jobs",
        verb=verb,
        count=count,
        is_at_least=count >= COUNT_MAX,
        ids=ids,
        wanted=wanted,
        hidden=hidden(wanted.query),
    )


@pages.post("/ui/jobs/apply")
async def apply(visit: Operator) -> Response:
    """Apply the verb: to the selected jobs, or to all that match now."""
    form = await visit.form()
    verb = _verb(str(form.get("verb", "")))
    reason = str(form.get("reason", "")).strip()[:_REASON_MAX] or "cancelled by request"
    wanted = JobsWanted.of(form)
    if ids := _ids(form.getlist("id")):
        changed, is_whole = await _on_some(visit, verb, ids, reason), True
    elif wanted.is_empty:
        raise InvalidInput("set a filter first; this cannot be applied to all jobs at once")
    else:
        changed, is_whole = await _on_all(visit, verb, wanted.filter(visit.tenant), reason)
    if verb == "rerun" and changed:
        core = visit.services.core
        core.doorbell.ring(await core.named_queues.all())
    words = f"{changed:,} {'job' if changed == 1 else 'jobs'} {_DONE[verb]}."
    if ids and changed < len(ids):
        words += (
            f" {len(ids) - changed:,} could not be changed: they have ended, or belong to a batch, a task or a parent."
        )
    if not is_whole:
        words += " There are more; repeat to continue."
    return visit.go("/ui/jobs", done=words, **wanted.query)


async def _on_some(visit: Visit, verb: Verb, ids: list[JobId], reason: str) -> int:
    """One by one, so that a job that cannot be changed does not stop the others."""
    queue = visit.services.core.queue
    changed = 0
    for id in ids:
        with suppress(Conflict, NotFound):
            if verb == "cancel":
                changed += 1 if await queue.cancel([id], tenant=visit.tenant, reason=reason) else 0
            else:
                await queue.rerun(id, tenant=visit.tenant)
                changed += 1
    return changed


async def _on_all(visit: Visit, verb: Verb, wanted: JobFilter, reason: str) -> tuple[int, bool]:
    """Work in steps, for as long as a browser waits; returns how many were changed, and whether that was all."""
    bulk, ends_at = visit.services.core.bulk, time.monotonic() + _BULK_SECONDS_MAX
    changed, after = 0, None
    while True:
        if verb == "cancel":
            done = await bulk.cancel(wanted, after=after, reason=reason)
        else:
            done = await bulk.rerun(wanted, after=after)
        changed, after = changed + done.changed, done.next
        if after is None or time.monotonic() > ends_at:
            return changed, after is None


def _verb(word: str) -> Verb:
    if word not in _DONE:
        raise InvalidInput(f"there is no verb {word!r} for many jobs; use cancel or rerun", param="verb")
    return cast("Verb", word)


def _ids(given: list[Any]) -> list[JobId]:
    try:
        return [JobId(UUID(str(one))) for one in given[: 2 * _PER_PAGE]]
    except ValueError:
        raise InvalidInput("a selected job has no id; reload the list and select again", param="id") from None
