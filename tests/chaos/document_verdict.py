"""What must hold after a run over documents, whoever died: every step once, correct counters, and one bill."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from batchwright.app import AsyncBatchwright
from batchwright.ingest.items import Item
from batchwright.ingest.part import IngestPart
from batchwright.ingest.runs import Run
from batchwright.states import ItemStatus
from tests.chaos.verdict import Breach

STEPS = ("FETCHED", "CONTENT_EXTRACTED", "CHUNKED", "EMBEDDED", "ENTITY_EXTRACTED", "PERSISTED", "INDEXED")
EVENTS = """
SELECT item.id, event.event, event.fields ->> 'step', event.fields ->> 'call', event.prompt_tokens,
       event.completion_tokens
FROM batchwright.ingest_item AS item
JOIN batchwright.job_event AS event ON event.job_id = ANY(item.job_ids)
WHERE item.run_id = %(id)s AND event.event IN (
    'step_completed', 'step_undone', 'model_called', 'model_failed', 'model_call_in_doubt')
"""
DONE_STEPS = """
SELECT step.item_id, step.step FROM batchwright.ingest_step AS step
JOIN batchwright.ingest_item AS item ON item.id = step.item_id AND item.generation = step.generation
WHERE item.run_id = %(id)s AND step.state = 'done'
"""
COUNTS = """
SELECT count(*), count(*) FILTER (WHERE status = 'DONE'), count(*) FILTER (WHERE status = 'UNCHANGED'),
       count(*) FILTER (WHERE status = 'FAILED'), count(*) FILTER (WHERE status = 'CANCELLED')
FROM batchwright.ingest_item WHERE run_id = %(id)s
"""
CALLS = "SELECT id, is_doubtful FROM batchwright.ingest_call WHERE run_id = %(id)s"
SPENT = """
WITH spending AS (
    SELECT coalesce(sum(calls), 0)::integer AS calls, coalesce(sum(cost), 0) AS cost
    FROM batchwright.spending WHERE tenant = %(tenant)s
),
runs AS (
    SELECT coalesce(sum(calls), 0)::integer AS calls, coalesce(sum(spent), 0) AS cost
    FROM batchwright.ingest_run WHERE tenant = %(tenant)s
)
SELECT spending.calls, spending.cost, runs.calls, runs.cost FROM spending, runs
"""

LIVE = """
SELECT item.id, document.live_version = version.id FROM batchwright.ingest_item AS item
JOIN batchwright.ingest_document AS document ON document.id = item.document_id
LEFT JOIN batchwright.ingest_version AS version ON version.item_id = item.id AND version.state = 'live'
WHERE item.run_id = %(id)s AND item.status = 'DONE'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known after a run."""

    run: Run
    items: Sequence[Item]
    events: Sequence[tuple[Any, ...]]
    """(item, event, step, call, tokens of the prompt, tokens of the answer)"""
    done_steps: Sequence[tuple[str, str]]
    recount: tuple[int, ...]
    calls: dict[str, bool]
    """Requests that began and were not settled, and whether they are marked as in doubt."""
    is_live: dict[str, bool]
    bill: Sequence[dict[str, Any]]
    bad: set[str]
    spent: tuple[int, Decimal, int, Decimal]
    """Calls and cost of the tenant, and the same in all its runs, seen at one moment: others may still be running."""

    @classmethod
    async def collect(
        cls, batchwright: AsyncBatchwright, run: Run, bill: Sequence[dict[str, Any]], bad: set[str]
    ) -> Evidence:
        part, pool, params = batchwright.part(IngestPart), batchwright.pool, {"id": run.id}
        return cls(
            run=await part.runs.get(run.id, tenant=None),
            items=await part.items.list(run.id, limit=1_000_000),
            events=[tuple(row) for row in await pool.rows(EVENTS, params)],
            done_steps=[(id, step) for id, step in await pool.rows(DONE_STEPS, params)],
            recount=tuple((await pool.rows(COUNTS, params))[0]),
            calls=dict(await pool.rows(CALLS, params)),
            is_live=dict(await pool.rows(LIVE, params)),
            bill=bill,
            bad=bad,
            spent=tuple((await pool.rows(SPENT, {"tenant": run.tenant}))[0]),
        )

    def told(self, *events: str) -> list[tuple[Any, ...]]:
        return [row for row in self.events if row[1] in events]

    @property
    def counts(self) -> dict[str, int | float]:
        statuses = Counter(item.status.value for item in self.items)
        events = Counter(row[1] for row in self.events)
        causes = Counter(item.cause for item in self.items if item.cause)
        return {
            "documents": len(self.items),
            **{f"items {status}": n for status, n in sorted(statuses.items())},
            "requests on the bill": len(self.bill),
            **dict(sorted(events.items())),
            **{f"cause {cause}": n for cause, n in sorted(causes.items())},
        }


def judge(found: Evidence) -> dict[str, list[Breach]]:
    """The breaches of each goal."""
    return {
        "documents that have not ended as they should": list(_endings(found)),
        "steps lost or completed twice": list(_steps(found)),
        "counters that are wrong": list(_counters(found)),
        "paid requests that are not accounted for once": list(_bill(found)),
        "passages paid for twice without a doubt": list(_doubles(found)),
    }


def _endings(found: Evidence) -> Iterator[Breach]:
    if not found.run.has_ended:
        yield found.run.id, f"the run is {found.run.status.value}"
    for item in found.items:
        if item.status is ItemStatus.DONE and item.name in found.bad:
            yield item.name, "is done, and cannot be"
        elif item.status is ItemStatus.DONE and not found.is_live.get(item.id):
            yield item.name, "is done, and search does not find it"
        elif item.status is ItemStatus.FAILED and item.name not in found.bad:
            if item.last_error_kind != "SchemaInvalid":  # only an unusable answer is an excuse
                yield item.name, f"has failed: {item.last_error}"
        elif item.status not in (ItemStatus.DONE, ItemStatus.FAILED):
            yield item.name, f"is {item.status.value} at {item.step}"


def _steps(found: Evidence) -> Iterator[Breach]:
    completed, undone = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for id, event, step, *_ in found.told("step_completed", "step_undone"):
        (completed if event == "step_completed" else undone)[id, step] += 1
    for place, count in completed.items():
        if count != 1 + undone[place]:
            yield f"{place[0]} {place[1]}", f"was completed {count} times"
    rows = set(found.done_steps)
    if rows != set(completed):
        yield "rows and events", f"{len(rows ^ set(completed))} steps are done in one and not in the other"
    for item in found.items:
        if item.status is ItemStatus.DONE and (lost := [step for step in STEPS if (item.id, step) not in rows]):
            yield item.name, f"is done without {', '.join(lost)}"


def _counters(found: Evidence) -> Iterator[Breach]:
    run = found.run
    counted = (
        run.item_count_total,
        run.item_count_done,
        run.item_count_unchanged,
        run.item_count_failed,
        run.item_count_cancelled,
    )
    if counted != found.recount:
        yield "items", f"{counted} in the run, {found.recount} in its items"
    told = found.told("model_called", "model_failed")
    prompt, answer = sum(row[4] or 0 for row in told), sum(row[5] or 0 for row in told)
    counted_calls = (run.calls, run.prompt_tokens, run.completion_tokens)
    if counted_calls != (len(told), prompt, answer):
        yield "calls", f"{counted_calls} in the run, {(len(told), prompt, answer)} in the events"
    if found.spent[:2] != found.spent[2:]:
        yield "spending", f"calls and cost are {found.spent[:2]} of the tenant, {found.spent[2:]} in its runs"
    if sum(item.cost for item in found.items) != run.spent:
        yield "money", f"{run.spent} in the run, {sum(item.cost for item in found.items)} in its items"


def _bill(found: Evidence) -> Iterator[Breach]:
    billed = {entry["id"]: entry for entry in found.bill}
    if len(billed) != len(found.bill):
        yield "the bill", "a request was sent twice under one id"
    told = Counter(row[3] for row in found.told("model_called", "model_failed"))
    for id in billed:
        places = told[id] + found.calls.get(id, False)
        if places != 1:
            yield id, f"was paid for, and is told {told[id]} times and in doubt {found.calls.get(id, False)}"
    for _, event, _, id, prompt, answer in found.told("model_called", "model_failed"):
        paid = billed.get(id, {"input_tokens": 0, "output_tokens": 0})
        if (prompt or 0, answer or 0) != (paid["input_tokens"], paid["output_tokens"]):
            yield id, f"{event} tells {prompt} and {answer} tokens, and the bill {paid}"
        if event == "model_called" and id not in billed:
            yield id, "is told, and the provider does not know it"
    for id, is_doubtful in found.calls.items():
        if not is_doubtful:
            yield id, "was begun, and nobody knows what became of it"


def _doubles(found: Evidence) -> Iterator[Breach]:
    """A passage is requested again only if its answer was lost or unusable."""
    without = {row[3] for row in found.told("model_call_in_doubt", "model_failed")}
    paid: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in found.bill:
        for text in entry["texts"]:
            paid[entry["kind"], text].append(entry["id"])
    for (kind, text), ids in paid.items():
        if len(ids) > 1 + len(without.intersection(ids)):
            yield f"{kind} {text}", f"was paid for by {', '.join(ids)}"
