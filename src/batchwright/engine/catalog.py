"""The known job types and their payload schemas: our own operations, and those that workers published.

Everything that enters the queue is prepared here, so a payload of the wrong shape is refused at enqueue and never
becomes a failed job.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

from batchwright.db.database import Database, Session
from batchwright.db.statements import statements
from batchwright.engine.jobs import JOBS_PER_CALL_MAX, PAYLOAD_BYTES_MAX, Claim, NewJob, OnHeld
from batchwright.engine.operation import Operation, Operations
from batchwright.errors import InvalidInput, PayloadInvalid, TooLarge, UnknownOperation

SQL = statements(__package__, "catalog.sql")
_PUBLISHED_SECONDS = 5.0
_PER_TURN = 500
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
MARK = "__batchwright_operation__"


@dataclass(frozen=True, slots=True)
class _Published:
    """An operation that a worker published, known only by its schema."""

    name: str
    validator: Any
    defaults: Mapping[str, Any]

    def encode(self, payload: Any) -> Any:
        from jsonschema.exceptions import best_match

        plain = orjson.loads(_dump({} if payload is None else payload, self.name))
        if problem := best_match(self.validator.iter_errors(plain)):
            where = "".join(f"[{part!r}]" for part in problem.absolute_path) or "the payload"
            raise PayloadInvalid(f"{self.name}: {where}: {problem.message}", param="payload")
        return {**self._defaults_of_schema(), **plain} if isinstance(plain, dict) else plain

    def _defaults_of_schema(self) -> dict[str, Any]:
        """The defaults that the function itself would fill in; the exclusive key may use them."""
        properties = self.validator.schema.get("properties", {})
        return {name: about["default"] for name, about in properties.items() if "default" in about}


class Catalog:
    """Prepares new jobs against the operations known here and those published by workers."""

    def __init__(self, database: Database, operations: Operations) -> None:
        self._database = database
        self._operations = operations
        self._published: dict[str, _Published] = {}
        self._published_at = float("-inf")

    async def prepare(
        self,
        jobs: Sequence[NewJob],
        *,
        parent: Claim | None = None,
        before: Claim | None = None,
        session: Session | None = None,
    ) -> list[dict[str, Any]]:
        """Validate jobs and turn them into rows; children inherit from `parent`, chained jobs from `before`."""
        if len(jobs) > JOBS_PER_CALL_MAX:
            raise TooLarge(f"{len(jobs)} jobs in one call; the limit is {JOBS_PER_CALL_MAX}", param="jobs")
        rows = []
        for place, job in enumerate(jobs, 1):
            if place % _PER_TURN == 0 and session is None:
                await asyncio.sleep(0)  # a hundred thousand children must not stop the event loop for seconds
            if not isinstance(job, NewJob):
                raise InvalidInput(f"expected a NewJob, found {type(job).__name__}", param="jobs")
            operation = await self._find(job.operation, session)
            defaults = operation.defaults if isinstance(operation, _Published) else operation.defaults()
            rows.append(_make_row(job, operation.name, operation.encode(job.payload), defaults, parent, before))
        return rows

    async def publish(self, worker: str) -> None:
        """Publish this worker's operations; other processes check their enqueues against them."""
        published = [
            {
                "name": operation.name,
                "payload_schema": operation.payload_schema,
                "defaults": operation.defaults(),
                "description": operation.description,
            }
            for name in self._operations.names()
            if (operation := self._operations.get(name)) is not None
        ]
        params = {"operations": orjson.dumps(published).decode(), "worker": worker}
        await self._database.ask(SQL["publish"], params)

    async def is_published(self, name: str) -> bool:
        """Whether any worker has published this operation; that worker may not be running now."""
        return name in {found for found, *_ in await self._database.ask(SQL["published"])}

    async def _find(self, operation: object, session: Session | None) -> Operation | _Published:
        """A function carries its own operation; a name is looked up here, then among the published ones."""
        if isinstance(operation, str):
            return self._operations.get(operation) or await self._find_published(operation, session)
        carried: Operation | None = getattr(operation, MARK, None)
        if carried is None:
            raise InvalidInput(f"{operation!r} is not an operation; decorate it with @operation", param="operation")
        return carried

    async def _find_published(self, name: str, session: Session | None) -> _Published:
        if name not in self._published or time.monotonic() - self._published_at > _PUBLISHED_SECONDS:
            from jsonschema import Draft202012Validator  # imported here: it loads slowly, and most never need it

            rows = await self._database.ask(SQL["published"], {}, session)
            self._published = {
                found: _Published(found, Draft202012Validator(schema), defaults) for found, schema, defaults, _ in rows
            }
            self._published_at = time.monotonic()
        if name in self._published:
            return self._published[name]
        known = sorted({*self._operations.names(), *self._published})
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "start a worker that has it: batchwright up FILE.py"
        raise UnknownOperation(f"no worker knows the operation {name!r}; {hint}", param="operation")


def _make_row(
    job: NewJob,
    name: str,
    payload: Any,
    defaults: Mapping[str, Any],
    parent: Claim | None,
    before: Claim | None,
) -> dict[str, Any]:
    origin = parent or before
    deadline, deadline_seconds = _read_deadline(job.deadline)
    if parent is not None and parent.deadline is not None:
        deadline = min(deadline or parent.deadline, parent.deadline)
    key = job.exclusive_key
    if key is None and defaults["exclusive_key"]:
        key = [name, *(payload.get(part) for part in defaults["exclusive_key"])]
    return {
        "id": job.id,
        "job_type": name,
        "queue": job.queue or defaults["queue"],
        "tenant": origin.tenant if origin else job.tenant,
        "owner": job.owner,
        "priority": _check_priority(job.priority, parent.priority if parent else defaults["priority"]),
        "delay_seconds": max(0.0, job.delay_seconds),
        "run_after": _to_utc(job.run_after, "run_after"),
        "deadline": deadline,
        "deadline_seconds": deadline_seconds,
        "payload": orjson.Fragment(_dump(payload, name)),
        "max_attempts": _check_attempts(job.max_attempts, defaults["max_attempts"]),
        "exclusive_key": _encode_key(key),
        "on_held": OnHeld.QUEUE if key is None else OnHeld(job.on_held or defaults["on_held"]),
        "pipeline_id": origin.pipeline_id if origin else job.pipeline_id,
        "parent_job_id": parent.id if parent else None,
        "round": None,
        "idempotency_key": job.idempotency_key,
        "traceparent": job.traceparent or (origin.traceparent if origin else None),
    }


def _dump(payload: Any, name: str) -> bytes:
    try:
        document = orjson.dumps(payload)
    except (TypeError, ValueError) as error:
        raise PayloadInvalid(f"{name}: the payload is not JSON: {error}", param="payload") from error
    if len(document) > PAYLOAD_BYTES_MAX:
        raise TooLarge(
            f"{name}: the payload has {len(document)} bytes; the limit is {PAYLOAD_BYTES_MAX}",
            param="payload",
        )
    if _NUL.search(document):
        raise PayloadInvalid(f"{name}: the payload contains a NUL character, which cannot be stored", param="payload")
    return document


def _encode_key(key: str | Sequence[Any] | None) -> str | None:
    """A key is the JSON array of its parts, so that null and the empty string stay distinct."""
    if key is None:
        return None
    parts = [key] if isinstance(key, str) else list(key)
    document = orjson.dumps(parts, default=str).decode()
    if not parts or len(document) > 1000:
        raise InvalidInput(
            f"the exclusive key {document[:80]} must have 1 to 1000 characters of JSON", param="exclusive_key"
        )
    return document


def _check_priority(priority: int | None, default: int) -> int:
    priority = default if priority is None else priority
    if not 0 <= priority <= 9:
        raise InvalidInput(f"priority is {priority}; use 0 (first) to 9 (last)", param="priority")
    return priority


def _check_attempts(max_attempts: int | None, default: int) -> int:
    max_attempts = default if max_attempts is None else max_attempts
    if max_attempts < 1:
        raise InvalidInput(f"max_attempts is {max_attempts}; it must be at least 1", param="max_attempts")
    return max_attempts


def _read_deadline(deadline: datetime | timedelta | None) -> tuple[datetime | None, float | None]:
    if isinstance(deadline, timedelta):
        return None, deadline.total_seconds()
    return _to_utc(deadline, "deadline"), None


def _to_utc(moment: datetime | None, param: str) -> datetime | None:
    """Convert to UTC, which fails at the ends of the range. A time that cannot be read back would stop every claim."""
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise InvalidInput(f"{param} has no time zone; use datetime.now(UTC) + …", param=param)
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise InvalidInput(f"{param} is {moment}, which is not a valid time in UTC", param=param) from error
