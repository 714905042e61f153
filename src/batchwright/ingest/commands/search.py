"""`batchwright ingest search`: passages with their sources, and the words of the question marked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from batchwright.cli.flags import Config, DatabaseUrl, Json, open_part, parse_pairs, run
from batchwright.cli.show import as_dict, console, print_json
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.ingest.commands.options import OwnTenant
from batchwright.ingest.part import IngestPart
from batchwright.ingest.search import LIMIT_MAX, Found, Hit

_CHARACTERS_MAX = 480
_BEFORE = 120
_MARK = "bold reverse"


class Mode(StrEnum):
    """The ways to find passages."""

    HYBRID = "hybrid"
    WORDS = "words"
    VECTORS = "vectors"


def search(
    collection: Annotated[
        str, typer.Argument(metavar="COLLECTION", help="The collection to search in.", show_default=False)
    ],
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help='Words or a question; "a phrase", -without.', show_default=False)
    ],
    limit: Annotated[int, typer.Option(min=1, max=LIMIT_MAX, help="Maximum number of passages.")] = 5,
    mode: Annotated[Mode, typer.Option(help="Search by words, by meaning (vectors), or by both.")] = Mode.HYBRID,
    filter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Only passages with this name, source, page, entity or metadata; may be repeated.",
            show_default=False,
        ),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Show passages in full.")] = False,
    tenant: OwnTenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Search a collection: passages with their document, page and section, and the matching words marked.

    On a terminal the words are highlighted, and long passages are cut to the part with the words. In a pipe the words
    are enclosed in **, and passages are printed in full, one after the other.
    """
    filters = parse_pairs("--filter", filter or (), "name=report.pdf")

    async def go() -> Found:
        async with open_part(IngestPart, database_url, config) as part:
            return await part.search.search(
                tenant, collection, question, limit=limit, mode=mode.value, filters=filters or None
            )

    found = run(go())
    if json:
        print_json({"hits": [as_dict(hit) for hit in found.hits], "used": found.used, "seconds": found.seconds})
    else:
        _print(found, is_whole=whole)


def _print(found: Found, *, is_whole: bool) -> None:
    if not found.hits:
        typer.echo("no passage matches", err=True)
    is_terminal = sys.stdout.isatty()
    out = console()
    for number, hit in enumerate(found.hits, 1):
        out.print(_head(number, hit), soft_wrap=True)
        passage = _passage(hit, _CHARACTERS_MAX if is_terminal and not is_whole else None)
        if is_terminal:
            out.print(Padding(passage, (0, 0, 0, 3)))
        else:
            sys.stdout.write(f"   {passage.plain}\n" if not hit.marks else f"   {_starred(hit)}\n")
            sys.stdout.flush()
    for line in found.used:
        if "left out" in line:
            typer.echo(line, err=True)


def _head(number: int, hit: Hit) -> Text:
    head = Text.assemble((f"{number}. ", "bright_black"), (hit.name, "bold"))
    if hit.page_first is not None:
        pages = f"{hit.page_first}" if hit.page_last in (None, hit.page_first) else f"{hit.page_first}-{hit.page_last}"
        head.append(f", page {pages}")
    if hit.section:
        head.append(f" · {' > '.join(hit.section)}", "cyan")
    return head.append(f" · {hit.score:.4f}", "bright_black")


def _passage(hit: Hit, most: int | None) -> Text:
    """The text on one line, with its marks. A long text is cut to the part with the first marks."""
    text = Text(hit.text)
    for start, end in hit.marks:
        text.stylize(_MARK, start, end)
    start, end = _window(hit, most)
    cut = text[start:end]
    cut = Text("… ").append_text(cut) if start else cut
    cut = cut.append(" …") if end < len(hit.text) else cut
    return _on_one_line(cut)


def _window(hit: Hit, most: int | None) -> tuple[int, int]:
    if most is None or len(hit.text) <= most:
        return 0, len(hit.text)
    first = _densest(hit.marks, most - _BEFORE) if hit.marks else 0
    start = max(0, min(first - _BEFORE, len(hit.text) - most))
    return start, start + most


def _densest(marks: Sequence[tuple[int, int]], span: int) -> int:
    """Start of the part of this length that has the most marks."""
    return max((start for start, _ in marks), key=lambda at: sum(at <= start < at + span for start, _ in marks))


def _on_one_line(text: Text) -> Text:
    lines = [line for line in text.split("\n") if line.plain.strip()]
    return Text(" ").join(lines) if lines else Text("")


def _starred(hit: Hit) -> str:
    """Marks for pipes, where there are no colours."""
    parts, at = [], 0
    for start, end in hit.marks:
        parts += [hit.text[at:start], "**", hit.text[start:end], "**"]
        at = end
    return " ".join("".join([*parts, hit.text[at:]]).split())
