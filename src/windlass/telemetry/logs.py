"""Log lines: readable on a terminal, one JSON object each elsewhere; both carry the job they are about."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Literal

import orjson

Form = Literal["auto", "text", "json"]
_BOUND = ("job_id", "job_type", "attempt", "worker")


def configure_logs(level: str = "INFO", form: Form = "auto") -> None:
    """Send the process's logs to standard error."""
    is_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if is_json else _TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)


class _TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        bound = " ".join(f"{name}={getattr(record, name)}" for name in _BOUND if hasattr(record, name))
        clock = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        line = f"{clock} {record.levelname.lower():7} {record.getMessage()}"
        line = f"{line}  [{bound}]" if bound else line
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _BOUND if hasattr(record, name)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()
