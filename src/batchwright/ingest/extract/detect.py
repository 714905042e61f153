"""The format of a document, by its content. The extension only decides between text formats that look alike."""

from __future__ import annotations

import json
import re
from pathlib import PurePath

from batchwright.errors import SchemaInvalid
from batchwright.ingest.extract.archive import open_archive
from batchwright.ingest.extract.document import Document, empty, encrypted
from batchwright.ingest.extract.encoding import find_encoding

_BY_EXTENSION = {
    "csv": "csv",
    "docx": "docx",
    "eml": "eml",
    "htm": "html",
    "html": "html",
    "json": "json",
    "jsonl": "json",
    "log": "text",
    "markdown": "markdown",
    "md": "markdown",
    "ndjson": "json",
    "pdf": "pdf",
    "pptx": "pptx",
    "text": "text",
    "tsv": "csv",
    "txt": "text",
    "xhtml": "html",
    "xlsx": "xlsx",
}
EXTENSIONS = frozenset(_BY_EXTENSION)
_BINARY = {"docx", "pdf", "pptx", "xlsx"}
_OFFICE = {"word/": "docx", "xl/": "xlsx", "ppt/": "pptx"}
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ENCRYPTED_PACKAGE = "EncryptedPackage".encode("utf-16-le")
_UNSUPPORTED = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"II*\x00", "a TIFF image"),
    (b"MM\x00*", "a TIFF image"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"7z\xbc\xaf", "a 7-Zip archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x7fELF", "a program"),
    (b"{\\rtf", "an RTF document"),
    (_OLE, "a document of Office 97 to 2003"),
)
_HTML = re.compile(
    rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body|title)\b", re.IGNORECASE | re.DOTALL
)
_HEADER = re.compile(rb"[!-9;-~]+:[ \t]?[^\r\n]*\r?\n(?:[ \t][^\r\n]*\r?\n)*")
_MAIL_HEADERS = {b"from", b"received", b"return-path", b"subject", b"to", b"date", b"message-id", b"mime-version"}
_MAIL_HEADERS_MIN = 3
_CONTROLS = bytes(code for code in range(32) if code not in b"\t\n\f\r\x1b")
_TEXT_PER_CONTROL = 50  # a log may have a stray zero; compressed data has a control character for every nine bytes
_HEAD_BYTES = 65_536


def detect(document: Document) -> str:
    """One of the formats that have an extractor. Anything else is refused; the error says what it seems to be."""
    expected = expected_format(document.name)
    head = document.data[:_HEAD_BYTES]
    if not head.strip(b"\x00 \t\r\n\f\xef\xbb\xbf\xff\xfe"):
        raise empty()
    found = _detect_binary(document, head)
    if found is None:
        _refuse_binary(document.name, head)
        found = _detect_text(document.data, head, expected)
        if expected in _BINARY:
            message = (
                f"{document.name} is {found}, not {expected.upper()}; it may be an error page or an incomplete download"
            )
            raise SchemaInvalid(message, code="wrong_format")
    return found


def is_expected(name: str, format: str) -> bool:
    """Whether the extension of a name fits this format, or is unknown."""
    return (expected_format(name) or format) == format


def expected_format(name: str) -> str | None:
    """The format that the extension of a name stands for; None if it is unknown."""
    return _BY_EXTENSION.get(PurePath(name).suffix.lower().removeprefix("."))


def _detect_binary(document: Document, head: bytes) -> str | None:
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _detect_office(document)
    if head.startswith(_OLE) and _ENCRYPTED_PACKAGE in document.data:
        raise encrypted()
    return None


def _detect_office(document: Document) -> str:
    with open_archive(document) as archive:
        names = archive.namelist()
    for folder, format in _OFFICE.items():
        if "[Content_Types].xml" in names and any(name.startswith(folder) for name in names):
            return format
    raise _unsupported(document.name, "a ZIP archive")


def _refuse_binary(name: str, head: bytes) -> None:
    for magic, what in _UNSUPPORTED:
        if head.startswith(magic):
            raise _unsupported(name, what)
    controls = len(head) - len(head.translate(None, _CONTROLS))
    if controls > len(head) // _TEXT_PER_CONTROL and find_encoding(head) is None:
        raise _unsupported(name, "binary data")


def _detect_text(data: bytes, head: bytes, expected: str | None) -> str:
    encoding = find_encoding(head)
    if encoding is not None:
        head = head.decode(encoding, "ignore").encode()
    if _HTML.match(head):
        return "html"
    if _has_mail_headers(head):
        return "eml"
    if expected in _BINARY or expected is None:
        return "json" if head.lstrip()[:1] in (b"{", b"[") and _is_json(data) else "text"
    return "text" if expected == "eml" else expected


def _is_json(data: bytes) -> bool:
    """Whether all of it is JSON, or else its first line."""
    for candidate in (data, data.lstrip().partition(b"\n")[0]):
        try:
            json.loads(candidate)
        except (RecursionError, ValueError):
            continue
        return True
    return False


def _has_mail_headers(head: bytes) -> bool:
    found: set[bytes] = set()
    position = 0
    while header := _HEADER.match(head, position):
        found.add(header[0].split(b":", 1)[0].lower())
        position = header.end()
    ends_well = position == len(head) or head.startswith((b"\r\n", b"\n"), position)
    return ends_well and len(found & _MAIL_HEADERS) >= _MAIL_HEADERS_MIN


def _unsupported(name: str, what: str) -> SchemaInvalid:
    return SchemaInvalid(f"{name} is {what}, which cannot be read", code="unsupported_format")
