"""What users can do with runs: create, park, resume, cancel, retry. Each is one transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import orjson

from batchwright.db.database import Session
from batchwright.db.retry import retry_deadlocks, retry_unavailable
from batchwright.engine.catalog import Catalog
from batchwright.engine.jobs import JobId, new_id
from batchwright.engine.metadata import check_metadata
from batchwright.errors import Conflict, InvalidInput
from batchwright.ingest.config import Overrides, make_config, required_models
from batchwright.ingest.coordinator import item_job
from batchwright.ingest.items import PAGE, Item, Items, Wanted
from batchwright.ingest.models import Models
from batchwright.ingest.money import Prices
from batchwright.ingest.pending import Pending
from batchwright.ingest.pipeline import Graph
from batchwright.ingest.runs import NewRun, Run, Runs
from batchwright.ingest.settings import IngestSettings, Lane
from batchwright.ingest.sources import FileSource, ObjectSource, Sources, UrlList, parse_source
from batchwright.states import RunStatus

NAME_CHARACTERS_MAX = 100
_TRIES_MAX = 4
_KINDS = {FileSource: "folder", ObjectSource: "store", UrlList: "urls"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRun:
    """A run as a user describes it."""

    tenant: str
    collection: str
    sources: Sequence[str]
    overrides: Overrides = field(default_factory=Overrides)
    lane: Lane | None = None
    budget: Decimal | None = None
    estimate: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] | None = None
    priority: int = 5
    deadline_seconds: float | None = None
    idempotency_key: str | None = None
    traceparent: str | None = None

    @property
    def digest(self) -> bytes:
        """Digest of the request: the same key with a different request is a conflict."""
        left_out = ("idempotency_key", "traceparent", "estimate")
        said = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out}
        return hashlib.sha256(orjson.dumps(said, default=str, option=orjson.OPT_SORT_KEYS)).digest()


class Submission:
    """Checks a user's request, and carries it out."""

    def __init__(
        self,
        runs: Runs,
        items: Items,
        catalog: Catalog,
        settings: IngestSettings,
        models: Models,
        graph: Graph,
        sources: Sources,
        prices: Prices,
    ) -> None:
        self._runs = runs
        self._items = items
        self._catalog = catalog
        self._settings = settings
        self._models = models
        self._graph = graph
        self._sources = sources
        self._prices = prices
        self._pending = Pending(runs.queue)

    # Create -----------------------------------------------------------------------------------------------------

    async def create(self, wanted: WantedRun, *, must_be_served: bool = False) -> tuple[Run, bool]:
        """Create the run with its job. Returns whether it is new. If InvalidInput is raised, nothing was created."""
        from batchwright.ingest.operations import run_job  # imported here, because building its schema is slow

        repeated = await self._runs.find_repeated(wanted.tenant, wanted.idempotency_key, wanted.digest)
        if repeated is not None:
            return repeated, False
        new = self.prepare(wanted)
        (job,) = await self._catalog.prepare([run_job(new, must_be_served=must_be_served)])
        return await retry_unavailable(lambda: self._runs.create(new, job), tries_max=_TRIES_MAX)

    def prepare(self, wanted: WantedRun) -> NewRun:
        """The run as `create` would store it, or InvalidInput. Creates nothing."""
        check_collection_name(wanted.collection)
        check_metadata(wanted.metadata or {})
        config = make_config(self._settings, self._models, wanted.overrides, wanted.metadata)
        # This also checks the sources, before anything is created.
        self._sources.list(wanted.sources, include=config["include"], exclude=config["exclude"], roots=config["roots"])
        lane = wanted.lane or self._settings.lane
        self._check_lane(lane, config)
        self._check_budget(wanted.budget, config, lane)
        kinds = {_KINDS.get(type(parse_source(source)), "urls") for source in wanted.sources}
        return NewRun(
            tenant=wanted.tenant,
            collection=wanted.collection,
            kind=kinds.pop() if len(kinds) == 1 else "mixed",
            sources=wanted.sources,
            config=config,
            recipe=self._graph.recipe(config),
            lane=lane,
            priority=wanted.priority,
            metadata=wanted.metadata,
            budget=wanted.budget,
            estimate=wanted.estimate,
            deadline_seconds=wanted.deadline_seconds,
            idempotency_key=wanted.idempotency_key,
            idempotency_digest=wanted.digest if wanted.idempotency_key is not None else None,
            traceparent=wanted.traceparent,
        )

    def _check_lane(self, lane: str, config: Mapping[str, Any]) -> None:
        for _, model in required_models(config):
            if lane == "realtime" and self._models.is_at_provider(model):
                raise InvalidInput(
                    f"only the batch API of a provider serves {model!r}, so it does not answer in realtime; choose the "
                    "lane batch or auto",
                    param="lane",
                )

    def _check_budget(self, budget: Decimal | None, config: Mapping[str, Any], lane: str) -> None:
        """Refuse a budget that cannot be enforced: it would be worse than none."""
        if budget is None:
            return
        if not budget > 0:
            raise InvalidInput(f"the budget is {budget}; it must be above 0", param="budget")
        for _, model in required_models(config):
            if self._prices.find(model, lane) is None:
                raise InvalidInput(
                    f"the price of {model!r} is unknown, so no budget can be enforced; write into batchwright.toml "
                    f'[ingest.prices."{model}"] input = …, output = … (dollars per million tokens)',
                    param="budget",
                )

    # Park and resume --------------------------------------------------------------------------------------------

    async def park(self, id: str, *, tenant: str | None, message: str = "parked by a user") -> Run:
        run = await self._runs.get(id, tenant=tenant)
        if await self._runs.park(run.id, "user", message) is None:
            raise Conflict(f"the run {id} is {run.status.value}; only a PENDING or RUNNING one can be parked")
        return await self._runs.get(id, tenant=tenant)

    @retry_deadlocks
    async def resume(self, id: str, *, tenant: str | None, budget: Decimal | None = None) -> Run:
        """Resume a parked run, optionally with a new budget."""
        run = await self._runs.get(id, tenant=tenant)
        self._check_budget(budget, run.config, run.lane)
        async with self._runs.queue.database.transaction() as session:
            if await self._runs.resume(run.id, budget=budget, session=session) is None:
                raise Conflict(f"the run {id} is {run.status.value}; only a PARKED one can be resumed")
            await self._items.clear_waits(run.id, session=session)
            await self._runs.queue.wake([run.job_id, *run.gather_job_ids[-1:]], session=session)
        await self._wake(run.id)
        return await self._runs.get(id, tenant=tenant)

    async def _wake(self, run_id: str) -> None:
        """Wake the jobs page by page, without a lock on the run. Upkeep wakes any job that is missed here."""
        after = ""
        while page := await self._items.open_jobs(run_id, after):
            await self._runs.queue.wake([job for _, job in page])
            after = page[-1][0]

    # Cancel -----------------------------------------------------------------------------------------------------

    @retry_deadlocks
    async def cancel(self, id: str, *, tenant: str | None, reason: str = "the run was cancelled") -> Run:
        """Cancel a run with its open items; completed work stays. Jobs come first: workers lock in this order, too."""
        run = await self._runs.get(id, tenant=tenant)
        async with self._runs.queue.database.transaction() as session:
            if run.has_ended:
                raise Conflict(f"the run {id} is already {run.status.value}, and cannot be cancelled")
            await self._runs.queue.cancel([JobId(run.job_id)], reason=reason, owned=True, session=session)
            await self._runs.queue.wake(run.gather_job_ids[-1:], session=session)
            await self._cancel_others(run.id, reason, session)
            await self._items.cancel(run.id, session=session)
            if await self._runs.cancel(run.id, session=session) is None:
                raise Conflict(f"the run {id} has just ended")
        return await self._runs.get(id, tenant=tenant)

    async def _cancel_others(self, run_id: str, reason: str, session: Session) -> None:
        """Cancel the jobs of retried items, which are not children of the run's job."""
        while page := await self._items.open_jobs(run_id, session=session):
            jobs = [JobId(job) for _, job in page]
            await self._runs.queue.cancel(jobs, reason=reason, owned=True, session=session)
            if len(page) < PAGE:
                return

    # Retry ------------------------------------------------------------------------------------------------------

    async def retry(
        self, wanted: Wanted, *, tenant: str | None, run_id: str | None = None, anew: bool = False
    ) -> dict[str, int]:
        """Retry failed and cancelled items of a run, or those of the inbox. Returns how many, by run."""
        runs: Sequence[str]
        if run_id is not None:
            runs = [(await self._runs.get(run_id, tenant=tenant)).id]
        else:
            wanted = wanted._replace(only_inbox=True, only_latest=wanted.ids is None)
            runs = await self._items.runs_with_failures(tenant, wanted)
        counts = {}
        for id in runs:
            if count := await self._retry_run(id, wanted, anew=anew):
                counts[id] = count
        return counts

    async def retry_item(self, id: str, *, tenant: str | None, anew: bool = False) -> Item:
        item = await self._items.get(id, tenant=tenant)
        if not await self._retry_run(item.run_id, Wanted([item.id]), anew=anew):
            raise Conflict(f"the item {id} is {item.status.value}; only a FAILED or CANCELLED one can be retried")
        return await self._items.get(id, tenant=tenant)

    @retry_deadlocks
    async def _retry_run(self, run_id: str, wanted: Wanted, *, anew: bool) -> int:
        """Open an ended run again, with a new job that waits for the items. Items of an open run join the others."""
        total = 0
        async with self._runs.queue.database.transaction() as session:
            run = await self._runs.lock(run_id, tenant=None, session=session)
            await self._pending.forget_errors(run_id, session=session)
            opened: list[tuple[str, Any]] = []
            while page := await self._items.retry(run_id, wanted, anew=anew, session=session):
                opened += page
                if len(page) < PAGE:
                    break
            total = len(opened)
            if opened and run.has_ended:
                await self._reopen(run, session)
            elif opened:
                rows = await self._catalog.prepare(
                    [item_job(run, id, JobId(job)) for id, job in opened], session=session
                )
                await self._runs.queue.enqueue(rows, session=session)
        return total

    async def reopen(self, id: str, *, tenant: str | None) -> Run:
        """Retry a run that has failed as a whole: list its sources again."""
        async with self._runs.queue.database.transaction() as session:
            run = await self._runs.lock(id, tenant=tenant, session=session)
            if run.status is not RunStatus.FAILED:
                raise Conflict(f"the run {id} is {run.status.value}; only a FAILED one can be started again")
            await self._reopen(run, session)
        return await self._runs.get(id, tenant=tenant)

    async def _reopen(self, run: Run, session: Session) -> None:
        from batchwright.ingest.operations import run_job

        job_id = new_id()
        new = NewRun(
            id=run.id,
            job_id=job_id,
            tenant=run.tenant,
            collection=run.collection,
            kind=run.kind,
            sources=run.sources,
            config=run.config,
            recipe=run.recipe,
            priority=run.priority,
            traceparent=run.traceparent,
        )
        rows = await self._catalog.prepare([run_job(new)], session=session)
        await self._runs.reopen(run.id, job_id, session=session)
        await self._runs.queue.enqueue(rows, session=session)


def check_collection_name(name: str) -> None:
    if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable() or "/" in name or name != name.strip():
        raise InvalidInput(
            f"{name[:NAME_CHARACTERS_MAX]!r} is not a collection name: use 1 to {NAME_CHARACTERS_MAX} characters, "
            "no slash, and no spaces at either end",
            param="collection",
        )
