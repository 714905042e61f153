"""A folder with good documents and with ones that cannot be read: each bad one fails with its cause."""

from __future__ import annotations

import zlib

import pytest

from batchwright.ingest.extract.dispatch import EXTRACTORS
from batchwright.ingest.sandbox import Sandbox
from batchwright.states import ItemStatus, RunStatus
from tests.ingest.conftest import PARSERS
from tests.ingest.documents import make_docx, make_encrypted_pdf, make_mail, make_pdf, make_scan, paragraph
from tests.ingest.stage import ingest_stage

LIMITS = {
    "cpu_seconds": 3,
    "memory_bytes": 400_000_000,
    "output_bytes": 1_000_000,
    "seconds": 3.0,
    "unpacked_bytes": 3_000_000,
    "pages": 100,
}
PDF = make_pdf(["some text"] * 20)
BOMB = zlib.compress(bytes(20_000_000), 9)
REPLACED = {"json": "hang", "csv": "crash", "markdown": "allocate_without_end"}
"""Parsers that misbehave, by the format whose parser they replace."""


def bad_documents():
    """By name: its bytes, and the code that it must fail with."""
    return {
        "encrypted.pdf": (make_encrypted_pdf(), "encrypted_document"),
        "truncated.pdf": (PDF[: len(PDF) // 2], "damaged_document"),
        "empty.txt": (b"", "empty_document"),
        "scanned.pdf": (make_scan(), "no_text_layer"),
        "bomb.docx": (make_docx(paragraph("x" * 5_000_000)), "unpacked_too_large"),
        "ten-thousand.pdf": (make_pdf(["page"] * 10_000), "too_many_pages"),
        "picture.pdf": (b"\x89PNG\r\n\x1a\n" + bytes(64), "unsupported_format"),
        "hanging.json": (b'{"a": 1}', "extraction_timeout"),
        "crashing.csv": (b"a,b\n1,2\n", "extractor_crash"),
        "memory.md": (b"# Title\n\nWords.", "out_of_memory"),
        "large.html": (b"<html><body>" + b"<p>words of fifty megabytes</p>" * 1_700_000, None),
    }


def itself_attached():
    mail = make_mail(body="Only once.", Message_ID="<1@example.com>")
    mail.add_attachment(make_mail(body="Only once.", Message_ID="<1@example.com>"))
    return mail.as_bytes()


@pytest.mark.timeout(180)
async def test_a_run_over_bad_documents_completes_and_says_what_is_wrong_with_each(database_url, tmp_path, monkeypatch):
    replaced = {format: f"{PARSERS}:{parser}" for format, parser in REPLACED.items()}
    monkeypatch.setattr("batchwright.ingest.context.Sandbox", lambda: Sandbox(extractors={**EXTRACTORS, **replaced}))
    good = {
        "a.txt": b"Good words.",
        "b.pdf": make_pdf(["Good words."]),
        "c.docx": make_docx(paragraph("Good words.")),
        "itself.eml": itself_attached(),
        "wrong-extension.txt": make_pdf(["Good words under a wrong name."]),
    }
    bad = bad_documents()
    async with ingest_stage(database_url, tmp_path, ingest={"limits": LIMITS, "sandboxes": 2}) as stage:
        for name, data in (*good.items(), *((name, data) for name, (data, _) in bad.items())):
            stage.write(name, data)
        stage.work()
        run = await stage.run(seconds=150.0)
        items = await stage.items(run.id)
        assert run.status is RunStatus.COMPLETED_WITH_ERRORS
        assert (run.item_count_done, run.item_count_failed) == (len(good), len(bad))
        assert {name for name, item in items.items() if item.status is ItemStatus.DONE} == set(good)
        codes = {name: items[name].last_error["code"] for name in bad}
        assert codes == {name: code or codes[name] for name, (_, code) in bad.items()}
        for name in bad:
            error = items[name].last_error
            assert error["step"] == "CONTENT_EXTRACTED", (name, error)
            assert len(error["message"]) > 15, (name, error)
            assert "traceback" not in error, (name, error)
