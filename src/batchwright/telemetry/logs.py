"""Log lines: text on a terminal, one JSON object per line elsewhere; both name the job they are about.

A context variable holds that job, so the lines of any logger have it: the engine's, the operation's, and those of
libraries that the operation calls. Payloads and results are never logged.
"""

from __future__ import annotations

import contextvars
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal, Protocol, TextIO
from uuid import UUID

import orjson

from batchwright.jsonl import one_line
from batchwright.terminal import columns_of, wrap

Form = Literal["auto", "text", "json"]
_MESSAGE_COLUMN = len("19:31:02 warning ")
_BOUND = ("job_id", "job_type", "attempt", "worker", "trace_id")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_CUT_ON_PURPOSE = "ASGI callable returned without completing response."
_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


class JobInHand(Protocol):
    """The fields of a log line about a job."""

    @property
    def id(self) -> UUID: ...
    @property
    def job_type(self) -> str: ...
    @property
    def attempts(self) -> int: ...
    @property
    def traceparent(self) -> str | None: ...


job_in_hand: contextvars.ContextVar[JobInHand | None] = contextvars.ContextVar("batchwright_job", default=None)
"""The current job: set in the task, thread or process that runs its operation."""


def about(job: JobInHand) -> dict[str, Any]:
    """The log fields of this job; pass them as `extra` outside the job's own task."""
    fields = {"job_id": str(job.id), "job_type": job.job_type, "attempt": job.attempts}
    if job.traceparent is not None and (found := _TRACEPARENT.match(job.traceparent)):
        fields["trace_id"] = found[1]
    return fields


def configure_logs(level: str = "INFO", form: Form = "auto") -> None:
    """Send the process's logs to standard error, including uvicorn's; single requests only at DEBUG."""
    is_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if is_json else _TextLines(sys.stderr))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.addFilter(_is_worth_logging)
    logging.getLogger("uvicorn.access").setLevel(logging.NOTSET if root.level <= logging.DEBUG else logging.WARNING)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """False for the server's line about a stream that we cut on purpose, to show clients that it is incomplete."""
    return record.msg != _CUT_ON_PURPOSE


def configured_logs() -> dict[str, str] | None:
    """How the logs of this process were configured, for its child processes; None if we did not configure them."""
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler.formatter, _Lines):
            return {"level": logging.getLevelName(root.level), "form": handler.formatter.form}
    return None


class _Lines(logging.Formatter):
    form: Literal["text", "json"]

    @staticmethod
    def fields(record: logging.LogRecord) -> dict[str, Any]:
        """The line's own fields, completed by those of the current job."""
        job = job_in_hand.get()
        given = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if job is None or given.get("job_id", str(job.id)) != str(job.id):  # the line is about another job
            return given
        return about(job) | given


class _TextLines(_Lines):
    form = "text"

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields(record)
        bound = " ".join(f"{name}={fields[name]}" for name in _BOUND if name in fields)
        clock = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        line = f"{clock} {record.levelname.lower():7} {record.getMessage()}"
        line = wrap(f"{line}  [{bound}]" if bound else line, columns_of(self._stream), indent=_MESSAGE_COLUMN)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLines(_Lines):
    form = "json"

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = line | self.fields(record) | line
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        try:
            document = orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS)
        except TypeError:  # numbers beyond 64 bits, lone surrogates: an imperfect line is better than none
            document = orjson.dumps({name: _readable(value) for name, value in line.items()})
        return one_line(document).decode()


def _readable(value: object) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()
