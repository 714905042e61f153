"""Failed jobs by type and cause: look at an example, then rerun or dismiss them all."""

from __future__ import annotations

import time
from typing import Any

from starlette.responses import Response

from batchwright.engine.views import JobFilter
from batchwright.errors import InvalidInput
from batchwright.states import JobStatus
from batchwright.web.pages import Link, Pages
from batchwright.web.visit import Operator, Reader, Visit

pages = Pages("inbox", package="batchwright.web", links=[Link("Inbox", "/ui/inbox", group="", order=10)])

_GROUPS_SHOWN = 25
_GROUPS_MAX = 1_000
_SECONDS_MAX = 20.0
_NAME_MAX = 100


@pages.get("/ui/inbox")
async def show_inbox(visit: Reader) -> Response:
    core, tenant = visit.services.core, visit.tenant

    async def load() -> dict[str, Any]:
        of_parts = [group for part in core.parts for group in await part.inbox(tenant)]
        groups = await core.views.inbox(tenant=tenant, limit=_GROUPS_MAX)
        return {
            "of_parts": of_parts[:_GROUPS_SHOWN],
            "groups": groups[:_GROUPS_SHOWN],
            "more": max(0, len(of_parts) - _GROUPS_SHOWN) + max(0, len(groups) - _GROUPS_SHOWN),
        }

    return await visit.show("inbox.html", load, title="Inbox")


@pages.post("/ui/inbox/rerun")
async def rerun_group(visit: Operator) -> Response:
    changed, is_whole = await _do(visit, "rerun")
    core = visit.services.core
    core.doorbell.ring(await core.named_queues.all() if changed else ())
    return visit.go("/ui/inbox", done=_done_text(changed, "queued again", is_whole))


@pages.post("/ui/inbox/dismiss")
async def dismiss_group(visit: Operator) -> Response:
    changed, is_whole = await _do(visit, "dismiss")
    return visit.go("/ui/inbox", done=_done_text(changed, "dismissed; they stay failed", is_whole))


async def _do(visit: Visit, verb: str) -> tuple[int, bool]:
    """Work in steps, for as long as a browser waits; returns how many were changed, and whether that was all."""
    job_type, code = await visit.field("job_type"), await visit.field("code")
    if not 1 <= len(job_type) <= _NAME_MAX or len(code) > _NAME_MAX:
        raise InvalidInput("name the type of the jobs, and their error code", param="job_type")
    bulk, ends_at = visit.services.core.bulk, time.monotonic() + _SECONDS_MAX
    wanted = JobFilter(
        tenant=visit.tenant,
        statuses=(JobStatus.FAILED,),
        job_type=job_type,
        error_code=code or None,
        dismissed=False,
    )
    changed, after = 0, None
    while True:
        done = await (bulk.rerun if verb == "rerun" else bulk.dismiss)(wanted, after=after)
        changed, after = changed + done.changed, done.next
        if after is None or time.monotonic() > ends_at:
            return changed, after is None


def _done_text(changed: int, what: str, is_whole: bool) -> str:
    more = "" if is_whole else " There are more; repeat to continue."
    return f"{changed:,} {'job' if changed == 1 else 'jobs'} {what}.{more}"
