"""The filter of a job list: as text in the address, and as the engine's filter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Request

from batchwright.engine.views import JobFilter
from batchwright.errors import InvalidInput
from batchwright.states import JobStatus

_RELATIVE = re.compile(r"(\d{1,5})\s*(min|m|h|d|w)")
_UNITS = {"m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_TEXT_MAX = 200
_LABELS = {"begin": "created after", "end": "created before", "error": "error code"}
"""Names of fields on the page, where they differ."""
_DEPTH_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsWanted:
    """The texts of a filter, as the user typed them."""

    status: tuple[str, ...] = ()
    type: str = ""
    queue: str = ""
    pipeline: str = ""
    parent: str = ""
    error: str = ""
    begin: str = ""
    end: str = ""
    payload: str = ""

    @classmethod
    def of(cls, given: Any) -> JobsWanted:
        """From a query or a form; a name may occur several times in either."""
        statuses = [str(one).upper() for one in given.getlist("status") if one]
        others = {one.name: str(given.get(one.name, "")).strip() for one in fields(cls) if one.name != "status"}
        for name, text in others.items():
            if len(text) > _TEXT_MAX or "\0" in text:
                raise InvalidInput(f"{_label(name)}: at most {_TEXT_MAX} characters, and no NUL", param=name)
        return cls(status=tuple(dict.fromkeys(statuses)), **others)

    @property
    def query(self) -> dict[str, Any]:
        """For an address that shows the same jobs."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name)}

    @property
    def is_empty(self) -> bool:
        return not self.query

    def in_words(self) -> list[tuple[str, str]]:
        return [(_label(name), ", ".join(value) if name == "status" else value) for name, value in self.query.items()]

    def filter(self, tenant: str | None, now: datetime | None = None) -> JobFilter:
        """The engine's filter; an invalid text raises an error with its remedy."""
        now = now or datetime.now(UTC)
        path, value = _payload(self.payload)
        return JobFilter(
            tenant=tenant,
            statuses=tuple(_status(word) for word in self.status),
            job_type=self.type or None,
            queue=self.queue or None,
            pipeline_id=_id("pipeline", self.pipeline),
            parent_job_id=_id("parent", self.parent),
            error_code=self.error or None,
            created_from=_moment("begin", self.begin, now),
            created_to=_moment("end", self.end, now),
            payload_path=path,
            payload_value=value,
        )


def wanted(request: Request) -> JobsWanted:
    return JobsWanted.of(request.query_params)


Wanted = Annotated[JobsWanted, Depends(wanted)]


def _label(name: str) -> str:
    return _LABELS.get(name, name)


def _status(word: str) -> JobStatus:
    try:
        return JobStatus(word)
    except ValueError:
        known = ", ".join(JobStatus).lower()
        raise InvalidInput(f"there is no status {word!r}; use {known}", param="status") from None


def _id(name: str, text: str) -> UUID | None:
    try:
        return UUID(text) if text else None
    except ValueError:
        raise InvalidInput(f"{name}: {text!r} is not an id; copy it from the job's page", param=name) from None


def _moment(name: str, text: str, now: datetime) -> datetime | None:
    """2h (ago), 2026-11-18, or 2026-11-18 10:30; without a time zone it is UTC."""
    if not text:
        return None
    if found := _RELATIVE.fullmatch(text.removesuffix(" ago")):
        return now - timedelta(**{_UNITS[found[2]]: int(found[1])})
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        words = f"{_label(name)}: {text!r} is not a time; write 2h, 3d, 2026-11-18 or 2026-11-18T10:30Z"
        raise InvalidInput(words, param=name) from None


def _payload(text: str) -> tuple[tuple[str, ...] | None, str | None]:
    """`customer.id = 42`: the path of the field, from the outside in, and its text."""
    if not text:
        return None, None
    key, sep, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not sep or not all(path) or len(path) > _DEPTH_MAX:
        raise InvalidInput(f"payload: {text!r} is not a pair; write key=value, or customer.id=42", param="payload")
    value = value.strip()
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = value[1:-1]
    return path, value


def hidden(query: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The filter as hidden fields of a form."""
    pairs: list[tuple[str, str]] = []
    for name, value in query.items():
        pairs += [(name, one) for one in value] if isinstance(value, tuple) else [(name, str(value))]
    return pairs
