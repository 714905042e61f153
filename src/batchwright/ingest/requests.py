"""Gets answers from models for a step: at once, or in a batch with requests of other documents.

realtime   the step sends its requests, and waits for the answers
batch      the step stores its requests in a table and frees its worker; `gather` does the rest
auto       realtime for small runs, for the first documents of large ones, and when the deadline is near
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from batchwright.db.retry import retry_deadlocks
from batchwright.engine.catalog import Catalog
from batchwright.engine.jobs import NewJob
from batchwright.engine.owned import fenced
from batchwright.errors import Fatal, OperationError, SchemaInvalid
from batchwright.inference.calls import EMBEDDING, InputRefused
from batchwright.ingest.lines import Ask, ask_of, error_from
from batchwright.ingest.models import Models
from batchwright.ingest.pending import Pending, State
from batchwright.ingest.results import Deferred
from batchwright.ingest.runs import GATHER_JOB, QUEUE, Run, Runs
from batchwright.ingest.settings import IngestSettings
from batchwright.states import RunStatus

if TYPE_CHECKING:
    from batchwright.ingest.context import StepContext

FIRST_ITEMS = 20
"""Number of documents of a large run that run in realtime first, so that its user sees results within minutes."""
_GATHER_SECONDS = 0.5
_OTHERS_SECONDS = (3.0, 60.0)
"""Nothing wakes an item that waits for answers that another run has requested, so it polls."""
_CANCELLED_SECONDS = 15.0
_AGE_SHARE = 0.5
_FIRST_SECONDS = 5.0
_WAIT_SECONDS = (120.0, 1800.0)
"""The gatherer wakes the items. They also poll, less often the longer they wait. The first poll comes soon, because
a quick batch may be complete before the item is recorded as waiting for it."""


class Requests:
    """Gets missing answers from models and stores them in the cache."""

    def __init__(
        self,
        pending: Pending,
        catalog: Catalog,
        models: Models,
        settings: IngestSettings,
        ring: Callable[[Sequence[str]], None],
    ) -> None:
        self.pending = pending
        self._catalog = catalog
        self._models = models
        self._ring = ring
        self._runs = Runs(pending.queue)
        self._settings = settings

    async def answer(self, ctx: StepContext, kind: str, model: Any, texts: Mapping[bytes, str]) -> None:
        """Store all answers that arrived, then raise the worst error. Raises Deferred while a batch is running."""
        if model.model is not None and await self._goes_by_batch(ctx, model.model):
            if (reason := await self._leave(ctx, ask_of(model), texts)) is not None:
                raise reason
            return
        waiting = set() if model.model is None else await self._withdraw(ctx, model.fingerprint, texts)
        now = {hash: text for hash, text in texts.items() if hash not in waiting}
        if now:
            ledger = ctx.ledger(model.fingerprint)
            await (model.embed(now, ledger) if kind == EMBEDDING else model.extract(now, ledger))
        if waiting:
            message = f"{len(waiting)} requests are in a batch that is being cancelled"
            raise Deferred(message, _CANCELLED_SECONDS, waits_for="batch")

    # Lanes ------------------------------------------------------------------------------------------------------

    async def _goes_by_batch(self, ctx: StepContext, model: str) -> bool:
        run = ctx.run
        if self._models.is_at_provider(model):
            return True
        if run.lane != "auto":
            return run.lane == "batch"
        if run.item_count_total - run.item_count_unchanged <= self._settings.batch_from_documents:
            return False
        if self.is_late(run):
            return False
        return await self.pending.count_before(run.id, ctx.item.id, FIRST_ITEMS) >= FIRST_ITEMS

    def is_late(self, run: Run) -> bool:
        """Whether a batch might not be complete before the deadline of the run."""
        if run.lane != "auto" or run.deadline_at is None:
            return False
        now = self.pending.queue.database.clock() or datetime.now(UTC)
        return (run.deadline_at - now).total_seconds() < self._settings.batch_deadline_margin_seconds

    async def _withdraw(self, ctx: StepContext, fingerprint: str, texts: Mapping[bytes, str]) -> set[bytes]:
        """Withdraw the requests that are in no batch yet. Returns those that are in a batch."""
        if ctx.run.lane != "auto":
            return set()
        states = await self.pending.states(ctx.run, fingerprint, list(texts))
        ours = [state for state in states if state.run_id == ctx.run.id]
        if ours:
            await self.pending.withdraw(ctx.run, fingerprint, [state.hash for state in ours])
        return {state.hash for state in ours if state.batch_id is not None}

    # Storing requests -------------------------------------------------------------------------------------------

    async def _leave(self, ctx: StepContext, ask: Ask, texts: Mapping[bytes, str]) -> Exception | None:
        """Leave missing requests to the gatherer. Returns the reason why the step cannot continue, if there is one."""
        states, is_new = await self._add(ctx, ask, texts)
        if is_new:
            self._ring([QUEUE])
        errors = {one.hash: one.error for one in states if one.error is not None and one.run_id == ctx.run.id}
        if errors:
            return await self._fail(ctx, ask, errors, len(texts))
        if not states:
            return None  # the answers have just arrived
        is_woken = all(state.run_id == ctx.run.id for state in states)
        age = max(state.age for state in states)
        least, most = _WAIT_SECONDS if is_woken else _OTHERS_SECONDS
        seconds = min(most, max(least, _AGE_SHARE * age)) if age >= _FIRST_SECONDS else _FIRST_SECONDS
        return Deferred(describe(ask, states), seconds, waits_for="batch")

    @retry_deadlocks
    async def _add(self, ctx: StepContext, ask: Ask, texts: Mapping[bytes, str]) -> tuple[list[State], bool]:
        """Lock the run, so that the gatherer does not end between our check for it and the commit."""
        async with fenced(self.pending.queue, ctx.held) as session:
            run = await self._runs.lock(ctx.run.id, tenant=None, session=session)
            if run.status is not RunStatus.RUNNING:
                raise Deferred(f"the run is {run.status.value}", 600.0, waits_for="user")
            hashes = list(texts)
            states = await self.pending.states(run, ask.fingerprint, hashes, session=session)
            known = {one.hash for one in states if one.batch_id is not None or one.item_id == ctx.item.id}
            if missing := {hash: text for hash, text in texts.items() if hash not in known}:
                await self.pending.add(run, ctx.item.id, ask, missing, session=session)
                states = await self.pending.states(run, ask.fingerprint, hashes, session=session)
            needs_gatherer = any(state.run_id == run.id and state.error is None for state in states)
            if not needs_gatherer or await self.pending.has_gatherer(run.id, session=session):
                return states, False
            job = gather_job(run)
            rows = await self._catalog.prepare([job], session=session)
            await self.pending.queue.enqueue(rows, session=session)
            await self.pending.add_gatherer(run.id, job.id, session=session)
            return states, True

    async def _fail(
        self, ctx: StepContext, ask: Ask, errors: Mapping[bytes, Mapping[str, Any]], count: int
    ) -> OperationError:
        """The worst error. A temporary one is deleted, so that the next attempt resends the request. Others stay, for
        all documents that share the text, until a user retries the failed documents."""
        found = {hash: error_from(shown) for hash, shown in errors.items()}
        fatal = [error for error in found.values() if isinstance(error, Fatal)]
        if fatal:
            return fatal[0]
        invalid = {hash: error.code or "" for hash, error in found.items() if isinstance(error, SchemaInvalid)}
        if invalid:
            return InputRefused(ask.model, invalid, count=count)
        await self.pending.withdraw(ctx.run, ask.fingerprint, list(found))
        return next(iter(found.values()))


def gather_job(run: Run) -> NewJob:
    """This job is not a child of the run's job, because it also fetches what a cancelled run has paid for."""
    return NewJob(
        GATHER_JOB,
        {"run_id": run.id},
        queue=QUEUE,
        tenant=run.tenant,
        priority=run.priority,
        traceparent=run.traceparent,
        owner=run.id,
        delay_seconds=_GATHER_SECONDS,
    )


def describe(ask: Ask, states: Sequence[State]) -> str:
    """What a step waits for. The text stays the same as long as the state does."""
    since = min(state.created_at for state in states).astimezone(UTC)
    where = Counter(state.batch_id or "no batch yet" for state in states)
    places = ", ".join(f"{count:,} in {place}" for place, count in sorted(where.items()))
    what = "embeddings" if ask.kind == EMBEDDING else "answers about entities"
    return f"{what} by {ask.model}: {places}; since {since:%Y-%m-%d %H:%M} UTC"
