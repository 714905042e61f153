"""What batches leave in the store for their coordinator: a part of the result, and a part of the list of bad rows.

The key contains the claim. A worker that has lost its batch may still write a part, but nothing refers to that part.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

import orjson

from batchwright.ingest.embeddings.payloads import Output
from batchwright.ingest.embeddings.rows import BadRow

FOLDER = "embeddings"
_DIGITS = 9
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a batch reports to its coordinator, as its result."""

    rows: int
    """Number of rows with a vector."""
    failed: int
    key: str | None
    """None if no row got a vector."""
    errors_key: str | None
    dimensions: int | None
    has_text_ids: bool
    asked: int
    """Number of different texts that were sent to a model; the vectors of others were known."""
    calls: int
    tokens: int
    in_doubt: int
    cost: str | None
    """A decimal as text, so that sums stay exact; None if unknown."""
    codes: dict[str, int]
    first_error: dict[str, Any] | None

    def document(self) -> dict[str, Any]:
        return asdict(self)


def part_key(parent: UUID | str, number: int, claim: int, what: str) -> str:
    return f"{FOLDER}/{parent}/{number:08}.{claim}.{what}"


def encode_errors(rows: Sequence[BadRow]) -> bytes:
    return b"".join(orjson.dumps(row.document(), option=orjson.OPT_APPEND_NEWLINE) for row in rows)


def encode_rows(output: Output, ids: Sequence[Any], vectors: Sequence[bytes]) -> bytes:
    """Lines of the result if its format is text; otherwise ids and numbers for its columns."""
    if output == "jsonl":
        return b"".join(_line(id, vector) for id, vector in zip(ids, vectors, strict=True))
    head = orjson.dumps(ids)
    return len(head).to_bytes(_LENGTH_BYTES, "little") + head + b"".join(vectors)


def decode_rows(data: bytes) -> tuple[list[Any], bytes]:
    """The ids, and the numbers of all vectors."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    return orjson.loads(data[_LENGTH_BYTES:end]), data[end:]


def _line(id: Any, vector: bytes) -> bytes:
    numbers = [round(number, _DIGITS) for number in array("f", vector)]
    return orjson.dumps({"id": id, "embedding": numbers}, option=orjson.OPT_APPEND_NEWLINE)
