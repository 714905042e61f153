"""`batchwright ingest collections`: list collections, and show, export or delete one of them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.text import Text

from batchwright.cli.flags import Config, DatabaseUrl, Force, Json, OfTenant, OutputFile, Yes, on_part, open_part, run
from batchwright.cli.paging import read_pages
from batchwright.cli.show import (
    ago,
    as_dict,
    compact,
    number,
    print_facts,
    print_json,
    print_table,
    size,
    time_text,
)
from batchwright.cli.stop import end_if_nobody_reads
from batchwright.cli.targets import STANDARD_OUTPUT, open_target
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.errors import InvalidInput
from batchwright.ingest.collections import Collection, StoredDocument
from batchwright.ingest.commands.options import CollectionName, OwnTenant
from batchwright.ingest.part import IngestPart
from batchwright.ingest.spaces import Space

_PAGE = 1000


class Format(StrEnum):
    """Output format of an export."""

    JSONL = "jsonl"
    PARQUET = "parquet"


Limit = Annotated[int, typer.Option(min=1, max=1_000_000, help="Maximum number of rows to show.")]


def collections(
    tenant: OfTenant = None,
    limit: Limit = 50,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List collections by name, with their sizes."""

    async def go() -> list[Collection]:
        async with open_part(IngestPart, database_url, config) as part:

            def fetch(last: Collection | None, n: int) -> Awaitable[list[Collection]]:
                if tenant is None:
                    return part.collections.page_everywhere(after=last, limit=n)
                return part.collections.page(tenant, after=last.name if last else "", limit=n)

            return await read_pages(fetch, limit, page=_PAGE)

    found = run(go())
    if json:
        print_json([_as_json(one) for one in found])
    elif found:
        _print_collections(found)
    else:
        whose = "" if tenant is None else f" of the tenant {tenant!r}"
        typer.echo(f"no collections{whose}; create one: batchwright ingest run ./papers -c papers", err=True)


def collection(
    name: CollectionName,
    tenant: OwnTenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Show a collection: its size, its language, and how its vectors are found."""

    async def go() -> Collection:
        async with open_part(IngestPart, database_url, config) as part:
            return await part.collections.get(tenant, name)

    found = run(go())
    if json:
        print_json(_as_json(found))
    else:
        _print_collection(found)


def documents(
    name: CollectionName,
    tenant: OwnTenant = DEFAULT_TENANT,
    limit: Limit = 50,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List the documents of a collection that search finds."""

    async def go() -> list[StoredDocument]:
        async with open_part(IngestPart, database_url, config) as part:
            return await read_pages(
                lambda last, n: part.collections.documents(tenant, name, after=last.id if last else 0, limit=n),
                limit,
                page=_PAGE,
            )

    found = run(go())
    if json:
        print_json([as_dict(one) for one in found])
    elif found:
        _print_documents(found)
    else:
        typer.echo(f"the collection {name!r} is empty", err=True)


def export(
    name: CollectionName,
    output: OutputFile = STANDARD_OUTPUT,
    format: Annotated[Format, typer.Option(help="JSON lines, or Parquet for data tools.")] = Format.JSONL,
    vectors: Annotated[bool, typer.Option("--vectors", help="Add the vector of each chunk, and its model.")] = False,
    force: Force = False,
    tenant: OwnTenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Write a collection, one row for each chunk with its document, page, section, text and entities.

    A file that exists already is only overwritten with --force. With --json the command also prints the number of
    chunks: on standard output if --output names a file, otherwise on standard error.
    """
    target = open_target("--output", output)
    if not force:
        target.refuse_to_overwrite("--output")
    if format is Format.PARQUET and target.stream is not None and sys.stdout.isatty():
        raise InvalidInput("Parquet is binary, so a terminal cannot show it: name a file with --output papers.parquet")

    async def go(part: IngestPart) -> int:
        from batchwright.ingest.export import write_jsonl, write_parquet

        await part.collections.find(tenant, name)
        rows = part.export.rows(tenant, name, with_vectors=vectors)
        with target.replace() as stream:
            if format is Format.PARQUET:
                return await write_parquet(rows, stream, with_vectors=vectors)
            return await write_jsonl(rows, stream)

    def tell(count: int) -> int:
        said = {"collection": name, "chunks": count, "output": target.name}
        if json and target.stream is None:
            print_json(said)
        elif json:
            typer.echo(compact(said), err=True)
        elif target.stream is None:
            typer.echo(f"wrote {number(count)} chunks to {target}", err=True)
        return 0

    with end_if_nobody_reads():
        on_part(IngestPart, go, tell, database_url, config)


def delete(
    name: CollectionName,
    yes: Yes = False,
    tenant: OwnTenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Delete a collection and everything in it. The source files are not touched."""
    if not (yes or sys.stdin.isatty()):
        raise InvalidInput(f"there is no terminal to confirm on; add --yes to delete {name!r}")

    async def go() -> Collection:
        async with open_part(IngestPart, database_url, config) as part:
            found = await part.collections.get(tenant, name)
            if not yes:
                typer.confirm(f"delete {name!r} with {_count(found)} documents?", abort=True, err=True)
            await part.collections.delete(tenant, name)
            return found

    found = run(go())
    if json:
        print_json({"deleted": name, "documents": found.documents})
    else:
        typer.echo(f"deleted {name!r} with {_count(found)} documents; a worker removes what it held")


# Output --------------------------------------------------------------------------------------------------------------


def _as_json(found: Collection) -> dict[str, Any]:
    spaces = [{**as_dict(space), "index": space.index} for space in found.spaces]
    return {**as_dict(found), "spaces": spaces}


def _count(found: Collection) -> str:
    return f"{number(found.documents)}{' or more' if found.is_more else ''}"


def _print_collections(found: Sequence[Collection]) -> None:
    now = datetime.now(UTC)
    print_table(
        {
            "name": [Text(one.name) for one in found],
            "documents": [Text(_count(one)) for one in found],
            "chunks": [Text(number(one.chunks)) for one in found],
            "text": [Text(size(one.text_bytes)) for one in found],
            "changed": [Text(ago(now, one.updated_at)) for one in found],
            "tenant": [Text(one.tenant if one.tenant != DEFAULT_TENANT else "") for one in found],
            "embedded by": [Text(", ".join(map(_model, one.spaces))) for one in found],
        },
        elastic=("tenant", "embedded by"),
    )


def _model(space: Space) -> str:
    return space.model or space.fingerprint.partition(":")[0]


def _print_collection(found: Collection) -> None:
    spaces = [f"{_model(space)}, {space.dimensions} dimensions, {space.index}" for space in found.spaces]
    print_facts(
        [
            ("collection", found.name),
            ("documents", _count(found)),
            ("chunks", number(found.chunks)),
            ("text", size(found.text_bytes)),
            ("language", found.language),
            ("vectors", "\n".join(spaces)),
            ("created", time_text(found.created_at)),
            ("changed", time_text(found.updated_at)),
        ]
    )


def _print_documents(found: Sequence[StoredDocument]) -> None:
    print_table(
        {
            "id": [Text(str(one.id)) for one in found],
            "chunks": [Text("" if one.chunks is None else str(one.chunks)) for one in found],
            "text": [Text("" if one.text_bytes is None else size(one.text_bytes)) for one in found],
            "name": [Text(one.name) for one in found],
            "source": [Text(one.source) for one in found],
        },
        elastic=("name", "source"),
    )
