"""Rows of a source, and the errors of rows that get no vector."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from batchwright.ingest.embeddings.payloads import Piece

TEXT_CHARACTERS_MAX = 1_000_000
CHARACTERS_PER_TOKEN_MAX = 8
"""No text in a human language has more characters per token. For texts closer to the limit, the server decides."""
_ID_CHARACTERS_MAX = 1_000
NO_TEXT = "no_text"
TOO_LONG = "too_long"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that gets no vector, and why."""

    code: str
    message: str
    id: Any = None
    number: int | None = None

    def document(self) -> dict[str, Any]:
        return {"row": self.number, "id": self.id, "code": self.code, "message": self.message}


@dataclass(frozen=True, slots=True)
class GoodRow:
    """A row with a text."""

    id: Any
    text: str
    number: int | None = None


Row = GoodRow | BadRow


class Reader(Protocol):
    """A source of rows: cut into pieces once, and then read piece by piece by any worker."""

    def split(self, batch_size: int) -> AsyncIterator[Piece]:
        """Pieces in the order of the input, with a maximum number of rows."""

    def read(self, piece: Any) -> AsyncIterator[Row]:
        """The rows of one piece, the same every time as long as the source is the same."""


def make_row(id: Any, text: Any, number: int | None) -> Row:
    """A row from the values of its two fields, checked."""
    if not isinstance(id, (str, int)) or isinstance(id, bool):
        id = number if id is None else str(id)
    if isinstance(id, str):
        id = id[:_ID_CHARACTERS_MAX]
    if text is None or (isinstance(text, str) and not text.strip()):
        return BadRow(NO_TEXT, "there is no text", id, number)
    if not isinstance(text, str):
        return BadRow("not_text", f"the text is of the type {type(text).__name__}; it must be a string", id, number)
    if len(text) > TEXT_CHARACTERS_MAX:
        message = f"the text has {len(text):,} characters; the limit is {TEXT_CHARACTERS_MAX:,}"
        return BadRow(TOO_LONG, message, id, number)
    if any("\ud800" <= character <= "\udfff" for character in _suspicious(text)):
        return BadRow("invalid_text", "the text contains half a character and cannot be sent as UTF-8", id, number)
    return GoodRow(id, text, number)


def _suspicious(text: str) -> Iterator[str]:
    """Characters that UTF-8 cannot encode; nearly all texts have none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        yield text[error.start]
