"""Whatever a parser does, the worker gets an error with a cause in limited time, and the next document is extracted."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from batchwright.errors import ConfigurationError, Fatal, SchemaInvalid, Transient
from batchwright.ingest import sandbox
from batchwright.ingest.limits import Limits
from tests.ingest.conftest import SMALL

TIGHT = replace(SMALL, cpu_seconds=1, seconds=10)
IMPATIENT = replace(SMALL, seconds=0.3)


@pytest.mark.parametrize(
    ("parser", "limits", "error", "code", "message"),
    [
        ("allocate_without_end", SMALL, Fatal, "out_of_memory", "needs more than 600 MB of memory"),
        ("ask_for_a_retry", SMALL, Transient, "dictionary_locked", "the dictionary is locked"),
        ("crash", SMALL, Fatal, "extractor_crash", "ended by SIGSEGV"),
        ("exit_at_once", SMALL, Fatal, "extractor_crash", "ended with code 3"),
        ("hang", IMPATIENT, Transient, "extraction_timeout", "longer than 0.3 s"),
        ("kill_itself", SMALL, Transient, "extractor_killed", "was killed with"),
        ("loop", TIGHT, Fatal, "cpu_limit", "used its 1 s of processor time"),
        ("raise_something", SMALL, Fatal, "extractor_error", "ZeroDivisionError: in a table of no columns"),
        ("talk_without_end", SMALL, Fatal, "text_too_large", "larger than 5,000,000 bytes"),
    ],
)
async def test_a_bad_parser_fails_with_a_cause_and_the_sandbox_still_works(
    extract, parser, limits, error, code, message
):
    with pytest.raises(error, match=message) as raised:
        await extract("text", parser=parser, limits=limits)
    assert raised.value.code == code
    assert getattr(raised.value, "scope", "item") == "item"
    server = extract.sandboxes[parser]._server.pid
    assert (await extract("# Next\n\nfine", "next.md", parser=parser)).text == "# Next\n\nfine"
    assert extract.sandboxes[parser]._server.pid == server


async def test_a_parser_that_ignores_its_alarm_is_killed_from_outside(extract, monkeypatch):
    monkeypatch.setattr(sandbox, "_GRACE_SECONDS", 0.3)
    await extract("# Start the server", "first.md", parser="hang_deaf")
    with pytest.raises(Transient, match=r"longer than 0.3 s") as raised:
        await extract("text", parser="hang_deaf", limits=IMPATIENT)
    assert raised.value.code == "extraction_timeout"
    monkeypatch.undo()
    assert (await extract("# Next", "next.md", parser="hang_deaf")).text == "# Next"


async def test_a_server_that_is_killed_is_started_again(extract):
    await extract("one")
    os.killpg(extract.sandboxes[""]._server.pid, signal.SIGKILL)
    with pytest.raises(Transient) as raised:
        await extract("two")
    assert raised.value.code == "sandbox_lost"
    assert (await extract("three")).text == "three"


async def test_a_cancelled_extraction_leaves_no_process_and_no_answer_behind(extract):
    await extract("# Start the server", "first.md", parser="hang")
    server = extract.sandboxes["hang"]._server
    waiting = asyncio.create_task(extract("text", parser="hang"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert server.returncode == -signal.SIGKILL
    assert (await extract("# Next", "next.md", parser="hang")).text == "# Next"


async def test_documents_that_come_at_once_get_their_own_text(tmp_path):
    async with sandbox.Sandbox(SMALL) as one:
        for number in range(10):
            (tmp_path / f"{number}.txt").write_text(f"document {number}")
        texts = await asyncio.gather(*(one.extract(tmp_path / f"{number}.txt") for number in range(10)))
    assert [text.text for text in texts] == [f"document {number}" for number in range(10)]


async def test_output_of_a_parser_does_no_harm(extract):
    assert (await extract("text", parser="print_noise")).text == "quiet"


async def test_a_parser_cannot_write_files(extract, tmp_path):
    with pytest.raises(Fatal, match="File too large"):
        await extract(str(tmp_path / "mine"), parser="write_a_file")


async def test_a_parser_sees_no_secrets(extract, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert "OPENAI_API_KEY" not in (await extract("text", parser="answer_with_environment")).text


async def test_an_inconsistent_answer_is_refused(extract):
    with pytest.raises(Fatal, match="answer is invalid") as raised:
        await extract("text", parser="say_nothing_of_use")
    assert raised.value.code == "extractor_error"


async def test_a_file_that_is_gone_is_transient(tmp_path):
    async with sandbox.Sandbox() as one:
        with pytest.raises(Transient, match="No such file") as raised:
            await one.extract(tmp_path / "gone.pdf")
    assert raised.value.code == "document_unreadable"


async def test_a_missing_library_says_what_to_install(extract, monkeypatch, tmp_path):
    """Python imports our module instead of the library, and that module raises an import error."""
    (tmp_path / "selectolax.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"needs selectolax: pip install 'batchwright\[documents\]'"):
        await extract("<html><body>text</body></html>")


async def test_a_format_without_extractor_is_refused(tmp_path):
    (tmp_path / "a.md").write_text("# A")
    async with sandbox.Sandbox(extractors={}) as one:
        with pytest.raises(SchemaInvalid, match=r"a.md is markdown, which has no extractor"):
            await one.extract(tmp_path / "a.md")


def test_a_limit_of_zero_is_refused():
    with pytest.raises(ConfigurationError, match="the limit pages is 0"):
        Limits(pages=0)
