"""The payloads of `compute_embeddings` and its children. Importing it is cheap for processes that only submit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

COMPUTE = "compute_embeddings"
BATCH = "compute_embeddings.batch"
QUEUE = "embeddings"
FILE_ID = r"^file-[0-9a-f]{32}$"
BATCH_ROWS = 1_000
BATCH_ROWS_MAX = 10_000

Scalar = str | int | float | bool | None
Name = Annotated[str, Field(min_length=1, max_length=200)]
Output = Literal["jsonl", "parquet"]


@dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class Table:
    """Rows of a table in Batchwright's own database, read by Batchwright's role."""

    table: Name
    """The table with its schema, such as public.articles."""
    id: Name
    """The column that identifies rows: a primary key, or unique and never null."""
    text: Name
    where: Mapping[Name, Scalar] = dataclasses.field(default_factory=dict)
    """Only rows that have these values in these columns; null means is null."""


FileId = Annotated[str, Field(pattern=FILE_ID)]
Source = FileId | Table


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Whole lines of a JSONL file, as a range of bytes."""

    kind: Literal["lines"] = "lines"
    start: int
    end: int
    first: int
    """The number of the first line, from 1."""
    is_too_long: bool = False
    """Whether this is one line that exceeds the size limit, so that it is not read."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one row group of a Parquet file."""

    kind: Literal["rows"] = "rows"
    group: int
    start: int
    """Number of rows in the group before these."""
    count: int
    first: int
    """The number of the first row in the file, from 1."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Rows of a table after the first id, up to and including the second; None at either end of the table."""

    kind: Literal["keys"] = "keys"
    after: str | None
    upto: str | None


Piece = Annotated[Lines | Rows | Keys, Field(discriminator="kind")]


@dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class ComputeEmbeddings:
    """Compute a vector for every row of the source, and write one file with all of them."""

    source: Source
    """The id of a stored JSONL or Parquet file, or a table."""
    model: Name | None = None
    """A model that a gateway serves; None embeds in the worker without a network."""
    dimensions: Annotated[int, Field(ge=1, le=16_000)] | None = None
    """Length of a vector, if the model lets you choose."""
    text_field: Name = "text"
    """The field or column of a file that holds the text."""
    id_field: Name = "id"
    """The field or column of a file that the result repeats; rows without one get their number."""
    batch_size: Annotated[int, Field(ge=1, le=BATCH_ROWS_MAX)] = BATCH_ROWS
    """Maximum number of rows of one batch."""
    output: Output = "jsonl"


@dataclass(frozen=True, kw_only=True)
class EmbedBatch:
    """One batch of a coordinator."""

    parent: str
    """The coordinator's job."""
    number: int
    fingerprint: str
    """Fingerprint of the coordinator's embedder: all batches must use the same one."""
    piece: Piece
    request: ComputeEmbeddings
