"""The result of one request of a batch, for Python code."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from batchwright.batches.journal.envelopes import error_code_of, is_success

_MESSAGE_CHARACTERS_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """Why a request has no good answer."""

    code: str
    """The server's own code, or ours: `batch_expired`, `batch_cancelled`, `model_not_found` and so on."""
    message: str
    status_code: int | None
    """Status of the server's answer; None if there was none."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The result of one request: an answer or an error.

    >>> for result in batch.results():
    ...     print(result.custom_id, result.text if result.ok else result.error)
    """

    custom_id: str
    ok: bool
    """Whether the server answered with success."""
    status_code: int | None
    """Status of the server's answer; None if there was none."""
    body: Any
    """The server's answer, parsed; None if there was none."""
    error: RequestError | None
    """None if the request succeeded."""
    cursor: str | None = None
    """Pass it as `after` to `results()` to resume after this result. None if it was read from a file of the batch."""
    raw: dict[str, Any] = field(repr=False)
    """The line, as in the output file or the error file."""

    @cached_property
    def text(self) -> str | None:
        """The text of a chat completion, a completion or a response; None if it has none."""
        match self.body if self.ok else None:
            case {"choices": [{"message": {"content": str(text)}}, *_]} | {"choices": [{"text": str(text)}, *_]}:
                return text
            case {"output": [*items]}:
                contents = [part for item in items if isinstance(item, dict) for part in item.get("content") or ()]
                texts = [part["text"] for part in contents if isinstance(part, dict) and "text" in part]
                return "".join(texts) if texts else None
        return None


def parse_result(line: bytes) -> BatchResult:
    """Parse the result of a request from its line in a journal or a file."""
    raw = orjson.loads(line)
    cursor = raw.pop("cursor", None)
    answer, ok = raw["response"], is_success(line)
    return BatchResult(
        custom_id=raw["custom_id"],
        ok=ok,
        status_code=None if answer is None else answer["status_code"],
        body=None if answer is None else answer["body"],
        error=None if ok else _read_error(line, raw),
        cursor=cursor,
        raw=raw,
    )


def _read_error(line: bytes, raw: dict[str, Any]) -> RequestError:
    """Our own message for a request without an answer, or the server's message in a failed answer."""
    code, _ = error_code_of(line)
    if (ours := raw["error"]) is not None:
        return RequestError(code=code, message=ours["message"], status_code=ours.get("status_code"))
    match body := raw["response"]["body"]:
        case {"error": {"message": str(message)}} | {"message": str(message)} | {"detail": str(message)}:
            pass
        case _:
            message = orjson.dumps(body).decode()[:_MESSAGE_CHARACTERS_MAX]
    return RequestError(code=code, message=message, status_code=raw["response"]["status_code"])
