"""`batchwright ingest search, collections, collection, documents, export, delete`."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from batchwright.ingest.commands.search import _passage, _window
from batchwright.ingest.search import Hit
from tests.ingest.commands.conftest import Shell
from tests.ingest.documents import make_pdf

WHALES = "# Animals\n\n## Whales\n\nWhales are mammals that live in the sea. A whale sings.\n"


@pytest.fixture
def filled(shell: Shell) -> Shell:
    shell.write("whales.md", WHALES)
    shell.write("ships.pdf", make_pdf(["The first page is about ships.", "The second page is about harbours."]))
    shell("run", "papers", "-c", "papers")
    return shell


def test_search_prints_passages_with_their_place_and_marked_words(filled: Shell) -> None:
    said = filled("search", "papers", "whale songs")
    head, passage, *_ = said.splitlines()
    assert head.startswith("1. whales.md · Animals · 0.0")
    assert "**Whales** are mammals" in passage
    assert "A **whale** sings" in passage
    (hit, *_) = filled.json("search", "papers", "harbours", "--mode", "words")["hits"]
    assert (hit["name"], hit["page_first"]) == ("ships.pdf", 1)
    assert [hit["text"][start:end] for start, end in hit["marks"]] == ["harbours"]
    (only,) = filled.json("search", "papers", "the sea", "--filter", "name=whales.md")["hits"]
    assert only["name"] == "whales.md"
    assert len(filled.json("search", "papers", "page", "--limit", "1")["hits"]) == 1
    assert "no passage matches" in filled.errors("search", "papers", "zebra", "--mode", "words")
    assert "no collection 'nothing'" in filled.refused("search", "nothing", "whales")
    assert "--filter 'sea' is not NAME=VALUE" in filled.refused("search", "papers", "whales", "--filter", "sea")


def hit(text: str, *marks: tuple[int, int]) -> Hit:
    known = dict.fromkeys(Hit.__dataclass_fields__)
    return Hit(**{**known, "text": text, "marks": list(marks)})


@pytest.mark.parametrize("width", [40, 80])
def test_a_long_passage_is_cut_to_where_its_words_are(width: int) -> None:
    text = "dull words " * 200 + "whales sing\nand whales dive " + "dull words " * 200
    at = text.index("whales")
    found = hit(text, (3, 8), (at, at + 6), (at + 16, at + 22))
    start, end = _window(found, 480)
    assert (end - start, start <= at <= at + 22 <= end) == (480, True)
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")
    out.print(_passage(found, 480))
    assert isinstance(out.file, io.StringIO)
    drawn = out.file.getvalue()
    assert "\x1b[1;7mwhales\x1b[0m" in drawn
    assert drawn.startswith("… ")
    assert _passage(found, None).plain.count("whales") == 2


def test_collections_are_listed_shown_and_deleted(filled: Shell) -> None:
    (listed,) = filled.json("collections")
    assert (listed["name"], listed["documents"]) == ("papers", 2)
    assert "papers" in filled("collections")
    said = filled("collection", "papers")
    assert "256 dimensions" in said
    assert "english" in said
    assert {one["name"] for one in filled.json("documents", "papers")} == {"ships.pdf", "whales.md"}
    assert len(filled.json("documents", "papers", "--limit", "1")) == 1
    assert "add --yes to delete 'papers'" in filled.refused("delete", "papers")
    assert filled("delete", "papers", "--yes").startswith("deleted 'papers' with 2 documents")
    assert "no collection 'papers'" in filled.refused("collection", "papers")
    assert "no collections; create one: batchwright ingest run" in filled.errors("collections")
    assert "no collections of the tenant 'us'; create one" in filled.errors("collections", "--tenant", "us")


def test_a_collection_with_an_open_run_is_not_deleted(filled: Shell) -> None:
    run = filled.detach("--force")
    assert f"has an open run, {run}: cancel it first" in filled.refused("delete", "papers", "--yes")


def test_a_collection_is_exported_as_lines_or_parquet(filled: Shell) -> None:
    rows = [json.loads(line) for line in filled("export", "papers").splitlines()]
    assert {row["name"] for row in rows} == {"ships.pdf", "whales.md"}
    assert "vector" not in rows[0]
    assert filled.errors("export", "papers", "-o", "out.jsonl", "--vectors").startswith("wrote ")
    lines = (filled.folder / "out.jsonl").read_text().splitlines()
    assert len(json.loads(lines[0])["vector"]) == 256
    assert "--force" in filled.refused("export", "papers", "-o", "out.jsonl")
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    said = filled.json("export", "papers", "-o", "out.parquet", "--format", "parquet", "--vectors", "--force")
    assert said["chunks"] == len(rows)
    assert pyarrow.parquet.read_table(filled.folder / "out.parquet").num_rows == len(rows)
    assert "no collection 'nothing'" in filled.refused("export", "nothing", "-o", "nothing.jsonl")
    assert not (filled.folder / "nothing.jsonl").exists()
