"""What a batch has paid for: each request is recorded before it is sent, and its answers are stored by content.

    begin ── the intent is committed, by the claim that holds the job ──▶ sent
    settle ─ answers, and the event with tokens and cost, in one commit
    fail ─── no answer to store; the event says what it cost

A batch that runs again finds the stored answers, and pays only for the missing ones.
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
    """What was paid; it is only known if the cost of every call is known."""

    calls: int = 0
    prompt_tokens: int = 0
    cost: Decimal | None = Decimal(0)
    in_doubt: int = 0
    """Calls that may or may not have been answered, so that their cost is unknown."""

    def __add__(self, other: Bill) -> Bill:
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        tokens = self.prompt_tokens + other.prompt_tokens
        return Bill(self.calls + other.calls, tokens, cost, self.in_doubt + other.in_doubt)

    @classmethod
    def of(cls, events: Sequence[JobEvent]) -> Bill:
        """What all claims of a job have paid, from its history."""
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
    """Vectors from this process. Those of a local model are stored nowhere else, because recomputing them is free."""

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
        """Record requests of a worker that died with this job: they may have been paid for."""
        params = {"job_id": self.held.id, "claim": self.held.claim}
        async with fenced(self.queue, self.held) as session:
            for id, model, tokens, cost in await self.queue.database.ask(SQL["end_older"], params, session):
                message = f"the worker died before it stored the answer to {id}; it may have been paid for"
                fields = {"call": id, "tokens_guess": tokens, "cost_guess": cost}
                event = {"event": IN_DOUBT, "level": "warning", "message": message, "fields": fields, "model": model}
                await note(self.queue, self.held, event, session=session)

    async def bill(self) -> Bill:
        """What all claims of this job have paid."""
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
        """Count a call once, even if the response to the first commit is lost: the call's row is deleted only once."""

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
        """Ignore errors here: the budget corrects itself with time, but answers that were paid for must be stored."""
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
