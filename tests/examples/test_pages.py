"""The README, the quickstart and each guide run as printed, in order, on one data folder."""

import re
import shutil

import psycopg
import pytest
from typer.testing import CliRunner

from batchwright.commands import app
from tests.examples import test_docs
from tests.examples.reader import ROOT, SHELL, Block, Reader, blocks, shelf

folder = test_docs.folder

STORIES = shelf("Start here", "Guides")
# Output that a page must have beside the output that its console blocks show.
PROMISES = {
    "README.md": ["Hello, Ada!", "10 of 10 lines", "1 good, 0 failed", "tides.md"],
    "guarantees.md": ['"job.rescued"', '"csv_ingest.resumed"', "event: end", "SUCCEEDED", "emission_recalc"],
    "data.md": [r"\bdata\n", r"✓ schema +current"],
    "batches.md": ["word-2 ", "200 of 200 lines were answered"],
    "provider-batches.md": ["6 of 6 lines were answered", "1 anthropic, 1 openai"],
    "tasks.md": ["1 good, 0 failed", "6 good, 0 failed", '"text":"Transcript of call.wav."', '"name":"together"'],
    "documents.md": ["tides.md", "east pier", "2 unchanged"],
    "documents-http.md": ["thirty days of leave"],
    "embeddings.md": [r"rows\W+2\b"],
    "schedules.md": ["Europe/Berlin", "deleted schedule morning", r"\n20\d\d-"],
    "simulator.md": [r'"finish_reason": ?"length"'],
    "http.md": ["job.succeeded", r"\nSUCCEEDED\nlist\nTrue\n2\n2\n20\d\d-"],
}


def told(reader: Reader, page) -> str:
    said = reader.read(page)
    for promise in PROMISES.get(page.name, ()):
        assert re.search(promise, said), f"{page.name} does not print {promise!r}:\n{said}"
    return said


@pytest.mark.timeout(900)
def test_the_readme_and_the_quickstart_run_as_printed(folder):
    reader = Reader(folder)
    for page in shelf("Start here")[:2]:
        told(reader, page)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_every_guide_runs_as_printed_after_the_others_on_the_same_data(folder):
    shutil.copytree(ROOT / "examples", folder / "examples")
    reader = Reader(folder)
    for page in STORIES:
        told(reader, page)


@pytest.mark.parametrize("page", STORIES, ids=lambda page: page.stem)
def test_every_block_is_run_or_says_why_not(page):
    for block in blocks(page):
        assert block.mark == "" or block.is_terminal or block.file or block.not_run, f"{block.place}: {block.mark!r}"
        if block.language == "python":
            assert block.file or block.not_run, f"{block.place} is neither a file nor says why it is not run"
        if block.is_terminal:
            assert block.language in SHELL, f"{block.place}: only commands run in a terminal"


def test_a_reset_of_an_external_server_leaves_nothing_and_migrate_starts_over(database_url):
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(test_docs.example("reset.sql"))
        schemas = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' ORDER BY 1").fetchall()
        assert schemas == [("information_schema",), ("public",)]
        answer = CliRunner().invoke(app, ["migrate", "--database-url", database_url])
        assert answer.exit_code == 0, answer.output
        assert connection.execute("SELECT count(*) FROM batchwright.job").fetchall() == [(0,)]


def test_a_console_is_commands_and_what_they_print():
    page = ROOT / "README.md"
    text = "$ echo one \\\n    two\none two\n$ true\n"
    block = Block(page=page, line=1, section=0, language="console", text=text, mark="")
    assert block.commands() == "echo one \\\n    two\ntrue\n"
    assert block.printed() == ["one two"]


def test_a_page_with_wrong_output_is_found(tmp_path):
    page = tmp_path / "wrong.md"
    page.write_text("```console\n$ echo one\ntwo\n```\n")
    with pytest.raises(AssertionError, match=r"wrong.md:1 promises 'two'"):
        Reader(tmp_path).read(page)
    page.write_text("```console\n$ false\n```\n")
    with pytest.raises(AssertionError, match=r"wrong.md: exit 1"):
        Reader(tmp_path).read(page)
