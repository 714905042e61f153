"""Documents that cannot be read end with a cause, within limits."""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import replace

import pytest

from batchwright.errors import Fatal, SchemaInvalid
from batchwright.ingest.limits import Limits
from tests.ingest.conftest import SMALL
from tests.ingest.documents import make_docx, make_encrypted_pdf, make_mail, make_pdf, make_scan, make_zip, paragraph

OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500)
LAUGHS = (
    '<?xml version="1.0"?><!DOCTYPE d [<!ENTITY a0 "ha">'
    + "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10))
    + "]><d>&a9;</d>"
)
DOCX = make_docx(paragraph("text " * 2_000))
PDF = make_pdf(["some text"] * 20)


@pytest.mark.parametrize(
    ("data", "name", "error", "code", "message"),
    [
        (make_encrypted_pdf(), "a.pdf", Fatal, "encrypted_document", "remove its password"),
        (OLE + "EncryptedPackage".encode("utf-16-le"), "a.docx", Fatal, "encrypted_document", "is encrypted"),
        (PDF[: len(PDF) // 2], "a.pdf", Fatal, "damaged_document", "part of it is missing"),
        (b"%PDF-1.7 nothing %%EOF", "a.pdf", Fatal, "damaged_document", "cannot open it"),
        (DOCX[: len(DOCX) // 2], "a.docx", Fatal, "damaged_document", "not a zip file"),
        (make_docx("<w:p>"), "a.docx", Fatal, "damaged_document", "mismatched tag"),
        (b"", "a.pdf", SchemaInvalid, "empty_document", "is empty"),
        (b"\xef\xbb\xbf \n", "a.txt", SchemaInvalid, "empty_document", "is empty"),
        (b"<html><script>x()</script></html>", "a.html", SchemaInvalid, "empty_document", "is empty"),
        (make_docx(""), "a.docx", SchemaInvalid, "empty_document", "is empty"),
        (make_scan(), "a.pdf", SchemaInvalid, "no_text_layer", "no page of 1 has a text layer"),
        (make_docx("", x=bytes(11_000_000)), "a.docx", Fatal, "unpacked_too_large", "unpacks to 11,000"),
        (make_docx("", **{"word/document.xml": LAUGHS}), "a.docx", Fatal, "damaged_document", "amplification"),
        (make_pdf(["x"] * 10_000), "a.pdf", Fatal, "too_many_pages", "has 10,000 pages; the limit is 1,000"),
        (b"<!DOCTYPE html><html>Sign in</html>", "a.pdf", SchemaInvalid, "wrong_format", "html, not PDF"),
        (b"sorry, not found", "a.docx", SchemaInvalid, "wrong_format", "text, not DOCX"),
        (make_zip({"a.txt": "text"}), "a.docx", SchemaInvalid, "unsupported_format", "is a ZIP archive"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "a.txt", SchemaInvalid, "unsupported_format", "is a PNG image"),
        (bytes(range(256)), "a.txt", SchemaInvalid, "unsupported_format", "is binary data"),
        (OLE, "a.doc", SchemaInvalid, "unsupported_format", "Office 97"),
        (b"[" * 100_000, "a.json", Fatal, "damaged_document", "nested too deep"),
        (b'{"a": 1,}', "a.json", Fatal, "damaged_document", "its JSON is invalid"),
        (b"long " * 1_100_000, "a.txt", Fatal, "text_too_large", "larger than 5,000,000 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else "",
)
async def test_a_bad_document_ends_with_its_cause(extract, data, name, error, code, message):
    with pytest.raises(error, match=message) as raised:
        await extract(data, name)
    assert raised.value.code == code
    assert getattr(raised.value, "scope", "item") == "item"


async def test_a_wrong_size_in_an_archive_is_found(extract):
    """The directory gives too small a size; zipfile reads no more than that, so the checksum is wrong."""
    data = make_docx(paragraph("ha" * 1_000_000))
    declared = next(entry.file_size for entry in _entries(data) if entry.filename == "word/document.xml")
    lie = data.replace(declared.to_bytes(4, "little"), (1_000).to_bytes(4, "little"))
    assert lie != data
    with pytest.raises(Fatal) as raised:
        await extract(lie, "a.docx")
    assert raised.value.code == "damaged_document"


async def test_a_bomb_inside_a_pdf_ends_at_the_memory_limit(extract):
    bomb = zlib.compress(b" " * 300_000_000, 1)
    data = make_pdf(["x"], content=bomb)
    with pytest.raises(Fatal, match=r"more than 400 MB of memory") as raised:
        await extract(data, "a.pdf", limits=replace(SMALL, memory_bytes=400_000_000))
    assert raised.value.code in {"extractor_crash", "out_of_memory"}


async def test_a_document_over_the_limit_is_not_read(extract):
    with pytest.raises(Fatal, match="larger than 10 bytes") as raised:
        await extract("x" * 11, limits=replace(SMALL, document_bytes=10))
    assert raised.value.code == "document_too_large"


async def test_html_of_50_megabytes_with_a_tag_for_every_word_is_refused_within_the_memory_limit(extract):
    page = "<html><body>" + "<div><p>one <b>two</b></p></div>" * 1_600_000
    with pytest.raises(Fatal, match="the page has about 4,800,001 elements") as raised:
        await extract(page, "a.html")
    assert raised.value.code == "out_of_memory"


@pytest.mark.thorough
async def test_html_of_50_megabytes_of_text_is_read(extract):
    page = "<html><body><h1>Long</h1>" + f"<p>{'word ' * 200}</p>\n" * 50_000
    text = await extract(page, "a.html", limits=Limits(output_bytes=60_000_000))
    assert len(text.text) == len("Long") + 50_000 * (2 + 999)


async def test_a_mail_with_itself_attached_is_read_once(extract):
    mail = make_mail(body="Only once.", Message_ID="<1@example.com>")
    inner = make_mail(body="Only once.", Message_ID="<1@example.com>")
    mail.add_attachment(inner)
    mail.add_attachment(inner.as_bytes(), maintype="application", subtype="octet-stream", filename="same.eml")
    text = await extract(mail.as_bytes(), "a.eml")
    assert text.text.count("Only once.") == 1
    assert text.warnings == ("the mail <1@example.com> is attached to itself; it was read once",) * 2


@pytest.mark.parametrize("depth", [6, 400])
async def test_nested_mails_are_read_up_to_a_limit(extract, depth):
    data = make_mail("Innermost").as_bytes()
    for number in range(depth):
        lines = f"From: a@example.com\nTo: b@example.com\nSubject: Forward {number}\n"
        mime = f'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="b{number}"\n\n'
        part = f"--b{number}\nContent-Type: message/rfc822\n\n".encode()
        data = (lines + mime).encode() + part + data + f"\n--b{number}--\n".encode()
    with pytest.raises(Fatal, match="nested more than 4 deep") as raised:
        await extract(data, "a.eml")
    assert raised.value.code == "nested_too_deep"


async def test_an_attachment_that_cannot_be_read_is_mentioned_and_the_mail_is_kept(extract):
    mail = make_mail()
    mail.add_attachment(b"\x89PNG\r\n", maintype="image", subtype="png", filename="logo.png")
    text = await extract(mail.as_bytes())
    assert text.text.endswith("See the attachment.\n\nlogo.png")
    assert text.warnings == ("logo.png was left out: logo.png is a PNG image, which cannot be read",)


def _entries(data):
    return zipfile.ZipFile(io.BytesIO(data)).infolist()
