"""Messages between a worker and its extraction process: msgpack structs, each preceded by its length."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

from batchwright.ingest.limits import Limits
from batchwright.ingest.text import CanonicalText

LENGTH = struct.Struct("!I")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    name: str
    limits: Limits
    extractors: Mapping[str, str]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error that the extractor was able to report itself."""

    kind: str
    code: str | None
    message: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    text: CanonicalText | None = None
    failure: Failure | None = None


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How the extractor's process ended; `answer_bytes` of its answer follow."""

    answer_bytes: int
    cpu_seconds: float
    exit_code: int
    """As in subprocess: negative if a signal ended the process."""
    is_answer_too_large: bool
    peak_bytes: int
