"""Flags and arguments that several commands of documents share."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from batchwright.cli.flags import parse_time_span
from batchwright.errors import InvalidInput
from batchwright.ingest.config import Overrides
from batchwright.ingest.sources import FileSource, UrlList, local_roots, parse_source

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", show_default=False)]
CollectionName = Annotated[str, typer.Argument(metavar="NAME", help="The collection's name.", show_default=False)]
OwnTenant = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Tenant of the collection.")]
Budget = Annotated[
    str | None,
    typer.Option(metavar="5.00", help="Maximum cost of models in dollars; then the run is parked."),
]
Detach = Annotated[bool, typer.Option("--detach", help="Print the run's id, and do not wait for its end.")]
Anew = Annotated[bool, typer.Option("--anew", help="Repeat all steps, including completed ones.")]


class LaneChoice(StrEnum):
    """The ways to call models."""

    REALTIME = "realtime"
    BATCH = "batch"
    AUTO = "auto"


Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCE...",
        help="Folder or file of this machine, URL, or prefix in an object store, such as s3://bucket/papers.",
        show_default=False,
    ),
]
Collection = Annotated[
    str, typer.Option("--collection", "-c", metavar="NAME", help="Collection that gets the documents.")
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Names to read, such as *.pdf; may be repeated.", show_default=False),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Names to leave out, such as drafts/; may be repeated.", show_default=False),
]
Urls = Annotated[Path | None, typer.Option(metavar="FILE", help="File with one URL on each line.", show_default=False)]
EmbeddingModel = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Model for vectors; local needs no server. By default that of the settings.",
        show_default=False,
    ),
]
EntityModel = Annotated[
    str | None,
    typer.Option(
        "--entities",
        metavar="MODEL",
        help="How to find entities: patterns, none, or a chat model. By default as in the settings.",
        show_default=False,
    ),
]
ChunkCharacters = Annotated[
    int | None,
    typer.Option(
        min=16,
        max=20_000,
        help="Maximum number of characters in a chunk; by default as in the settings.",
        show_default=False,
    ),
]
OfLane = Annotated[
    LaneChoice | None,
    typer.Option("--lane", help="How to call models; batch is cheaper and slower.", show_default=False),
]
ForceAll = Annotated[bool, typer.Option("--force", help="Read every document again, changed or not.")]
RunTenant = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Tenant of the run and its collection.")]


def parse_budget(text: str | None) -> Decimal | None:
    if text is None:
        return None
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or amount <= 0:
        raise InvalidInput(f"--budget {text!r} is not an amount: write dollars above 0, such as 5.00", param="budget")
    return amount


def parse_time(flag: str, text: str | None) -> float | None:
    """`24h`, `90m`, `7d`: from one minute to thirty days."""
    return parse_time_span(flag, text, least="1m", most="30d")


def name_sources(given: Sequence[str], urls: Path | None) -> list[str]:
    """Absolute paths, because a worker may run in another folder. A missing source is an error."""
    texts = [*given, *([f"@{urls}"] if urls is not None else [])]
    if not texts:
        raise InvalidInput("there is no source: give folders, files or URLs, or a file of URLs with --urls")
    return [_name_source(text) for text in texts]


def _name_source(text: str) -> str:
    source = parse_source(text)
    if not isinstance(source, FileSource | UrlList):
        return text
    if not source.path.exists():
        raise InvalidInput(f"there is no file or folder {str(source.path)!r} on this machine")
    return f"@{source.path}" if isinstance(source, UrlList) else str(source.path)


def make_overrides(
    sources: Sequence[str],
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    embedding_model: str | None,
    entities: str | None,
    chunk_characters: int | None,
    force: bool,
) -> Overrides:
    return Overrides(
        include=include or None,
        exclude=exclude or None,
        embedding_model=embedding_model,
        entities=entities,
        chunk_characters=chunk_characters,
        roots=local_roots(sources),
        force=force,
    )
