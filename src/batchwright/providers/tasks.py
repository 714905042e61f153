"""The rows of tasks: every transition is a compare-and-set.

A task is driven by its job, `provider.task`. The job verbs refuse jobs that belong to a task; the verbs here take their
place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import orjson

from batchwright.db.database import Row, Session
from batchwright.db.retry import retry_deadlocks
from batchwright.db.statements import statements
from batchwright.engine import owned
from batchwright.engine.jobs import JobId, new_id
from batchwright.engine.queue import Queue
from batchwright.engine.views import InboxGroup
from batchwright.errors import Conflict, NotFound
from batchwright.providers.contract import Input
from batchwright.states import TASK, TaskStatus

SQL = statements(__package__, "tasks.sql", parts=owned.JOBS_VIEW)
PROCESS = "provider.task"
QUEUE = "tasks/"
"""Tasks wait in one queue per provider, so that a slow provider delays only its own tasks."""
_RACES_MAX = 10
_PAGE = 1_000
_PARKED_COUNT_MAX = 10_000


class Target(NamedTuple):
    """A provider, and the model to use; a transcription may have none."""

    provider: str
    model: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task, as its row was when it was read."""

    id: str
    tenant: str
    status: TaskStatus
    task_type: str
    provider: str | None
    targets: list[Target]
    inputs: list[Input]
    invalid_urls: list[str]
    options: dict[str, Any]
    metadata: dict[str, str] | None
    job_id: UUID
    queue: str
    priority: int
    traceparent: str | None
    provider_state: dict[str, Any] | None
    error: dict[str, Any] | None
    succeeded: int
    failed: int
    input_tokens: int | None
    output_tokens: int | None
    audio_seconds: float | None
    cost: float | None
    """None if unknown."""
    result_file_id: str | None
    result_expires_seconds: int | None
    cancel_note: str | None
    waits_for: str | None
    """What the task waits for, as text; None if it is not known to wait."""
    created_at: datetime
    in_progress_at: datetime | None
    cancel_requested_at: datetime | None
    deadline_at: datetime
    ended_at: datetime | None
    seconds_left: float
    """Seconds until its timeout, by the database's clock."""

    @property
    def has_ended(self) -> bool:
        return self.status in TASK.terminal

    @property
    def file_ids(self) -> list[str]:
        """Its inputs that are stored files."""
        return [input.uri.removeprefix("file:") for input in self.inputs if input.uri.startswith("file:")]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTask:
    """A task to create."""

    tenant: str
    task_type: str
    provider: str | None
    targets: Sequence[Target]
    inputs: Sequence[Input]
    timeout_seconds: float
    invalid_urls: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] | None = None
    priority: int = 5
    result_expires_seconds: int | None = None
    idempotency_key: str | None = None
    idempotency_digest: bytes | None = None
    traceparent: str | None = None
    id: str = field(default_factory=lambda: f"task_{new_id().hex}")
    job_id: JobId = field(default_factory=lambda: new_id())

    @property
    def queue(self) -> str:
        return QUEUE + self.targets[0].provider


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is known of a task when it ends."""

    provider_state: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    succeeded: int = 0
    failed: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    audio_seconds: float | None = None
    cost: float | None = None
    result_file_id: str | None = None


class Abandoned(NamedTuple):
    """An open task that no job drives any more."""

    id: str
    tenant: str
    job_id: UUID
    job_status: str | None


class Tasks:
    """The tasks of all tenants."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._database = queue.database

    # Users ------------------------------------------------------------------------------------------------------

    @retry_deadlocks
    async def create(self, new: NewTask, job: Mapping[str, Any]) -> tuple[Task, bool]:
        """Create the task together with its job; returns it, and whether it is new. After a lost answer, call it again.

        The same idempotency key with the same digest returns the first task; with another digest it is a Conflict.
        """
        params = {
            **{name: getattr(new, name) for name in NewTask.__dataclass_fields__},
            "queue": new.queue,
            "targets": _json([target._asdict() for target in new.targets]),
            "inputs": _json([_input_document(input) for input in new.inputs]),
            "invalid_urls": list(new.invalid_urls),
            "options": _json(new.options),
            "metadata": _json(new.metadata),
        }
        async with self._database.transaction() as session:
            for _ in range(_RACES_MAX):
                if rows := await self._database.ask(SQL["insert"], params, session):
                    task = _task(rows[0])
                    await self._database.ask(SQL["use_files"], {"id": task.id, "file_ids": task.file_ids}, session)
                    await self.queue.enqueue([job], session=session)
                    return task, True
                if known := await self._find_known(params, session):
                    return known, known.id == new.id
                # The key was cleared between the two statements, so this task can have it now.
        raise Conflict("other requests with this Idempotency-Key are being processed; resend the request")

    async def find_repeated(self, tenant: str, key: str | None, digest: bytes | None) -> Task | None:
        """The existing task with this idempotency key; with another digest it is a Conflict."""
        params = {"id": "", "tenant": tenant, "idempotency_key": key, "idempotency_digest": digest}
        return await self._find_known(params, None) if key is not None else None

    async def _find_known(self, params: Mapping[str, Any], session: Session | None) -> Task | None:
        for digest, *row in await self._database.ask(SQL["known"], params, session):
            if row[0] != params["id"] and bytes(digest or b"") != params["idempotency_digest"]:
                raise Conflict("the Idempotency-Key was used before with another body", holder=row[0])
            return _task(row)
        return None

    async def get(self, id: str, *, tenant: str | None) -> Task:
        for row in await self._database.ask(SQL["get"], {"id": id, "tenant": tenant}):
            return _task(row)
        raise NotFound(f"there is no task {id!r}", kind="task", id=id)

    async def list(
        self,
        tenant: str | None,
        *,
        after: str | None = None,
        limit: int = 20,
        statuses: Sequence[TaskStatus] | None = None,
    ) -> list[Task]:
        """Newest first."""
        wanted = [status.value for status in statuses] if statuses else None
        params = {"tenant": tenant, "after": after, "limit": limit, "statuses": wanted}
        by_tenant = "list" if tenant is not None else "list_everywhere"
        statement = "list_by_status" if statuses else by_tenant
        return [_task(row) for row in await self._database.ask(SQL[statement], params)]

    @retry_deadlocks
    async def cancel(self, id: str, *, tenant: str | None) -> Task:
        """Order the task to end; a task that is being cancelled, or was cancelled, is returned unchanged."""
        async with self._database.transaction() as session:
            rows = await self._database.ask(SQL["request_cancel"], {"id": id, "tenant": tenant}, session)
            if rows:
                task = _task(rows[0])
                await self.queue.wake([task.job_id], session=session)
                return task
        task = await self.get(id, tenant=tenant)
        if task.status is not TaskStatus.CANCELLED:
            raise Conflict(f"Cannot cancel a task with status '{task.status.value}'.")
        return task

    # Workers ----------------------------------------------------------------------------------------------------

    async def begin(self, id: str, provider_state: Mapping[str, Any], *, session: Session | None = None) -> Task | None:
        """Move it from PENDING to IN_PROGRESS; None if another process moved it."""
        params = {"id": id, "provider_state": _json(provider_state)}
        rows = await self._database.ask(SQL["begin"], params, session)
        return _task(rows[0]) if rows else None

    async def save(
        self,
        id: str,
        *,
        provider_state: Mapping[str, Any] | None,
        waits_for: str | None,
        cancel_note: str | None,
        session: Session,
    ) -> None:
        """Save the outcome of a round."""
        params = {
            "id": id,
            "provider_state": _json(provider_state),
            "waiting_message": waits_for,
            "cancel_note": cancel_note,
        }
        await self._database.ask(SQL["save"], params, session)

    async def wake_parked(self, provider: str) -> int:
        """Resume tasks that wait for the credential of this provider; returns how many."""
        target = _json([{"provider": provider}])
        woken, after = 0, ("", "")
        while True:
            params = {"target": target, "after_tenant": after[0], "after": after[1], "limit": _PAGE}
            page = await self._database.ask(SQL["parked"], params)
            found = [job for _, _, job, is_meant in page if is_meant]
            woken += await self.queue.wake(found) if found else 0
            if len(page) < _PAGE:
                return woken
            after = (page[-1][0], page[-1][1])

    async def parked(self, tenant: str | None) -> Sequence[InboxGroup]:
        """Tasks that wait for a credential, by provider: an operator must act."""
        rows = await self._database.ask(SQL["count_parked"], {"tenant": tenant, "count_max": _PARKED_COUNT_MAX})
        return [
            InboxGroup(
                job_type=PROCESS,
                code=code or "credential_refused",
                kind="fatal",
                count=n,
                first_at=since,
                last_at=last_at or since,
                samples=latest,
                message=f"{provider} refuses its credential, and {n}{'+' * has_more} tasks wait for it: {message}",
                has_more=has_more,
            )
            for provider, code, message, since, n, last_at, latest, has_more in rows
        ]

    # The last transition: returns the new state, or None if another process moved the task -------------------------

    async def complete(self, id: str, ending: Ending, *, session: Session | None = None) -> TaskStatus | None:
        return await self._end("complete", id, ending, session)

    async def complete_in_part(self, id: str, ending: Ending, *, session: Session | None = None) -> TaskStatus | None:
        return await self._end("complete_in_part", id, ending, session)

    async def fail(self, id: str, ending: Ending, *, session: Session | None = None) -> TaskStatus | None:
        return await self._end("fail", id, ending, session)

    async def end_cancelled(self, id: str, ending: Ending, *, session: Session | None = None) -> TaskStatus | None:
        return await self._end("end_cancelled", id, ending, session)

    async def _end(self, verb: str, id: str, ending: Ending, session: Session | None) -> TaskStatus | None:
        params = {name: getattr(ending, name) for name in Ending.__dataclass_fields__}
        params |= {"id": id, "provider_state": _json(ending.provider_state), "error": _json(ending.error)}
        async with self._database.within(session) as session:
            rows = await self._database.ask(SQL[verb], params, session)
            if not rows:
                return None
            await self._database.ask(SQL["release_files"], {"id": id}, session)
            return TaskStatus(rows[0][0])

    # Upkeep -----------------------------------------------------------------------------------------------------

    async def abandoned(self, limit: int, *, session: Session | None = None) -> Sequence[Abandoned]:
        """Open tasks whose job ended without them, or that no worker picked up before their timeout."""
        return [Abandoned(*row) for row in await self._database.ask(SQL["abandoned"], {"limit": limit}, session)]

    async def wake_cancelled(self, *, session: Session | None = None) -> int:
        """Wake tasks that were cancelled while a run was about to snooze them: they must not wait for the next poll."""
        found = [id for (id,) in await self._database.ask(SQL["just_cancelled"], {"limit": _PAGE}, session)]
        return await self.queue.wake(found, session=session) if found else 0

    async def remove_old(self, keep_seconds: float, limit: int) -> Sequence[str]:
        """Remove ended tasks with their jobs' rows; retention removes the engine's jobs. Returns the tasks' ids."""
        removed = []
        for id, job_id in await self._database.ask(SQL["old"], {"keep_seconds": keep_seconds, "limit": limit}):
            async with self._database.transaction() as session:
                await self.queue.disown(job_id, id, session=session)
                if await self._database.ask(SQL["remove"], {"id": id}, session):
                    removed.append(id)
        return removed

    async def clear_keys(self, keep_seconds: float, limit: int) -> int:
        """Remove idempotency keys that are older than this; returns how many."""
        cleared, after = 0, ("", "")
        while True:
            params = {"keep_seconds": keep_seconds, "limit": limit, "after": after[0], "after_id": after[1]}
            page = await self._database.ask(SQL["keys"], params)
            old = [id for _, _, id, is_old in page if is_old]
            if old:
                cleared += len(await self._database.ask(SQL["clear_keys"], {"ids": old}))
            if len(page) < limit:
                return cleared
            after = (page[-1][0], page[-1][1])


def _task(row: Row | list[Any]) -> Task:
    values = dict(zip(Task.__dataclass_fields__, row, strict=True))
    values["status"] = TaskStatus(values["status"])
    values["targets"] = [Target(**target) for target in values["targets"]]
    values["inputs"] = [Input(**input) for input in values["inputs"]]
    return Task(**values)


def _input_document(input: Input) -> dict[str, Any]:
    return {name: getattr(input, name) for name in Input.__dataclass_fields__}


def _json(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()
