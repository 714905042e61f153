"""What a batch has paid for: each request is written down before it is sent, and its answers are kept by content.

    begin ── the intent is committed, by the claim that holds the job ──▶ sent
    settle ─ answers, and the event with tokens and cost, in one commit
    fail ─── nothing to keep; the event says what it cost all the same

A batch that runs again finds the answers, and pays only for those that never came.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from batchwright.db.database import Session
from batchwright.db.statements import statements
from batchwright.engine import owned
from batchwright.engine.jobs import JobEvent, JobId
from batchwright.engine.owned import Held, fenced, note
from batchwright.engine.queue import Queue
from batchwright.errors import OperationError
from batchwright.files.store import persist
from batchwright.inference.answers import Answer, Failure, Usage
from batchwright.inference.calls import Call, share_usage
from batchwright.inference.prices import ListedPrice, cost_of
from batchwright.inference.spending import Spending, Spent, Sums
from batchwright.ingest.ledger import Answers
from batchwright.ingest.rates import Rates

SQL = statements(__package__, "ledger.sql", parts=owned.JOBS_VIEW)
CALLED = "embedding.called"
FAILED = "embedding.failed"
IN_DOUBT = "embedding.in_doubt"
log = logging.getLogger(__name__)
_NO_ANSWER = frozenset({Failure.LOST, Failure.TIMEOUT, Failure.DEADLINE})
_EVENTS_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Bill:
    """What was paid: known only if the cost of every call is."""

    calls: int = 0
    prompt_tokens: int = 0
    cost: Decimal | None = Decimal(0)
    in_doubt: int = 0
    """Calls of which nobody knows whether they were answered, and what they cost."""

    def __add__(self, other: Bill) -> Bill:
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        tokens = self.prompt_tokens + other.prompt_tokens
        return Bill(self.calls + other.calls, tokens, cost, self.in_doubt + other.in_doubt)

    @classmethod
    def of(cls, events: Sequence[JobEvent]) -> Bill:
        """From the history of a job: what all its claims have paid."""
        total = cls()
        for event in events:
            if event.event in (CALLED, FAILED):
                total += cls(1, event.prompt_tokens or 0, None if event.cost is None else Decimal(event.cost))
            elif event.event == IN_DOUBT:
                total += cls(in_doubt=1)
        return total


@dataclass(slots=True, kw_only=True)
class BatchLedger:
    """The calls of one batch."""

    queue: Queue
    held: Held
    tenant: str
    fingerprint: str
    price: ListedPrice | None
    rates: Rates
    values: dict[bytes, bytes] = field(default_factory=dict)
    """What came of this process. Of a local model nothing else is kept: to make it again costs nothing."""

    async def begin(self, call: Call) -> None:
        if call.model is None:
            return
        await self.rates.reserve(call.model, call.tokens_guess, holder=call.id)
        try:
            await self._commit_intent(call)
            await self.rates.wait(call.id)
        except BaseException:
            await self.rates.cancel(call.id)
            raise

    async def settle(self, call: Call, values: Mapping[bytes, bytes], usage: Usage, answer: Answer) -> None:
        self.values.update(values)
        if call.model is None:
            return
        await self._settle_rate(call, usage, answer)
        tokens = {key: part.input for key, part in share_usage(call, usage).items()}
        event = self._event(CALLED, call, usage, cost=self._cost(usage))
        await self._end(call, event, values, tokens)

    async def fail(self, call: Call, error: OperationError, answer: Answer) -> None:
        if call.model is None:
            return
        usage = answer.usage
        await self._settle_rate(call, usage, answer)
        name, cost = FAILED, self._cost(usage) if answer.succeeded or usage.total is not None else Decimal(0)
        if answer.code in _NO_ANSWER and usage.total is None:
            name, cost = IN_DOUBT, None
        event = self._event(name, call, usage, cost=cost)
        event |= {"level": "warning", "message": str(error), "error_kind": error.kind}
        await self._end(call, event, {}, {})

    async def end_older(self) -> None:
        """Requests of a worker that died with this job: they may have been paid for, and the history says so."""
        params = {"job_id": self.held.id, "claim": self.held.claim}
        async with fenced(self.queue, self.held) as session:
            for id, model, tokens, cost in await self.queue.database.ask(SQL["end_older"], params, session):
                message = f"the worker died before the answer to {id} was kept; it may have been paid for"
                fields = {"call": id, "tokens_guess": tokens, "cost_guess": cost}
                event = {"event": IN_DOUBT, "level": "warning", "message": message, "fields": fields, "model": model}
                await note(self.queue, self.held, event, session=session)

    async def bill(self) -> Bill:
        """What this job has paid, by all of its claims."""
        events: list[JobEvent] = []
        after = 0
        while page := await self.queue.events(JobId(self.held.id), after=after, limit=_EVENTS_PAGE):
            events += page
            after = page[-1].id
        return Bill.of(events)

    async def _commit_intent(self, call: Call) -> None:
        params = {
            "id": call.id,
            "tenant": self.tenant,
            "job_id": self.held.id,
            "claim": self.held.claim,
            "kind": call.kind,
            "model": call.model,
            "inputs": len(call.keys),
            "tokens": call.tokens_guess,
            "cost": cost_of(self.price, prompt_tokens=call.tokens_guess, completion_tokens=0),
        }
        async with fenced(self.queue, self.held) as session:
            await self.queue.database.ask(SQL["begin"], params, session)

    async def _end(
        self,
        call: Call,
        event: Mapping[str, Any],
        values: Mapping[bytes, bytes],
        tokens: Mapping[bytes, int | None],
    ) -> None:
        """Once, whatever becomes of the first commit's answer: the row of the call is there only once."""

        async def commit() -> None:
            async with self.queue.database.transaction() as session:
                if values:
                    answers = Answers(self.queue.database)
                    await answers.keep(self.tenant, self.fingerprint, values, tokens, session=session)
                if await self.queue.database.ask(SQL["end"], {"id": call.id}, session):
                    await note(self.queue, self.held, event, session=session)
                    await self._add_up(event, session)

        await persist(commit)

    async def _add_up(self, event: Mapping[str, Any], session: Session) -> None:
        if event["event"] != IN_DOUBT:
            sums = Sums.of_call(event["prompt_tokens"], event["completion_tokens"], event["cost"])
            spent = Spent(self.tenant, event["model"], "realtime", sums)
            await Spending(self.queue.database).add(spent, session=session)

    async def _settle_rate(self, call: Call, usage: Usage, answer: Answer) -> None:
        """A budget that cannot be corrected now corrects itself with time; what was paid for must be kept."""
        try:
            await self.rates.settle(call.id, usage.total, answer)
        except Exception:
            log.warning("the rate budget of %s was not settled", call.model, exc_info=True)

    def _cost(self, usage: Usage) -> Decimal | None:
        return cost_of(self.price, prompt_tokens=usage.input, completion_tokens=0, cached_tokens=usage.cached or 0)

    def _event(self, name: str, call: Call, usage: Usage, *, cost: Decimal | None) -> dict[str, Any]:
        return {
            "event": name,
            "model": call.model,
            "prompt_tokens": usage.input,
            "completion_tokens": usage.output,
            "cost": cost,
            "fields": {"call": call.id, "inputs": len(call.keys)},
        }
