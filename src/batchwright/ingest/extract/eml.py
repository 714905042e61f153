"""Mail: headers, the text that a reader sees, and attachments as separate sections."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from email import policy
from email.errors import MessageError
from email.message import EmailMessage, MIMEPart
from email.parser import BytesParser
from typing import cast

from batchwright.errors import OperationError
from batchwright.ingest.extract.dispatch import extract_into, load_extractor
from batchwright.ingest.extract.document import Document, damaged, nested_too_deep, unpacked_too_large
from batchwright.ingest.extract.encoding import decode
from batchwright.ingest.text import TextBuilder

_SHOWN_HEADERS = ("From", "To", "Cc", "Date", "Subject")
_LIMITS = frozenset(("nested_too_deep", "text_too_large", "too_many_pages", "unpacked_too_large"))
_POLICY = policy.default.clone(max_line_length=None)


def extract(document: Document, builder: TextBuilder) -> None:
    try:
        message = BytesParser(policy=_POLICY).parsebytes(document.data)
        _Reader(document, builder).read(message, document.depth)
    except RecursionError as error:
        raise nested_too_deep(document.limits.nesting) from error
    except (MessageError, LookupError, ValueError) as error:
        raise damaged(f"the mail cannot be parsed: {type(error).__name__}") from error


class _Reader:
    """Reads a mail and the mails inside it, each once: a mail that contains itself is recognized by its bytes or id."""

    def __init__(self, document: Document, builder: TextBuilder) -> None:
        self._document = document
        self._builder = builder
        self._seen = document.seen
        self._unpacked = 0

    def read(self, message: EmailMessage, depth: int) -> None:
        if depth > self._document.limits.nesting:
            raise nested_too_deep(self._document.limits.nesting)
        identity = _header(message, "Message-ID")
        if identity and identity in self._seen:
            self._builder.warn(f"the mail {identity} is attached to itself; it was read once")
            return
        self._seen.add(identity)
        headers = {name: _header(message, name) for name in _SHOWN_HEADERS}
        self._builder.begin_section(headers["Subject"] or "Mail", level=2 * depth + 1, is_in_text=False)
        self._builder.add("\n".join(f"{name}: {value}" for name, value in headers.items() if value))
        body = message.get_body(preferencelist=("plain", "html"))
        if body is not None:
            self._read_body(body)
        for part in message.iter_attachments() if message.is_multipart() else ():
            self._read_attachment(part, depth)

    def _read_attachment(self, part: EmailMessage, depth: int) -> None:
        if part.get_content_type() == "message/rfc822":
            self.read(cast("EmailMessage", part.get_content()), depth + 1)
        elif part.get_content_maintype() == "multipart":
            for inner in part.iter_parts():
                self._read_attachment(cast("EmailMessage", inner), depth)
        elif name := part.get_filename():
            self._builder.begin_section(name, level=2 * depth + 2)
            self._read_file(part, name, depth + 1)
        elif part.get_content_maintype() == "text":
            self._read_body(part)

    def _read_body(self, body: MIMEPart) -> None:
        """Skip format detection for plain text: a quoted mail would look like a mail."""
        data = self._content(body)
        if body.get_content_subtype() == "html":
            inner = replace(self._document, data=data, name="body.html")
            load_extractor(self._document.extractors["html"])(inner, self._builder)
        else:
            self._builder.add(data.decode("utf-8", "replace"))

    def _read_file(self, part: EmailMessage, name: str, depth: int) -> None:
        """For an attachment that cannot be read, warn and keep the mail's text. Exceeded limits still fail."""
        data = self._content(part)
        digest = hashlib.sha256(data).hexdigest()
        if not data.strip() or digest in self._seen:
            return
        self._seen.add(digest)
        try:
            extract_into(replace(self._document, data=data, name=name, depth=depth), self._builder)
        except OperationError as error:
            if error.code in _LIMITS:
                raise
            self._builder.warn(f"{name} was left out: {error}")

    def _content(self, part: MIMEPart) -> bytes:
        """Text parts as UTF-8, whatever their encoding; others unchanged."""
        payload = part.get_payload(decode=True)
        data = payload if isinstance(payload, bytes) else b""
        self._unpacked += len(data)
        if self._unpacked > self._document.limits.unpacked_bytes:
            raise unpacked_too_large(self._unpacked, self._document.limits.unpacked_bytes)
        if part.get_content_maintype() != "text":
            return data
        text, warning = decode(data, part.get_content_charset())
        if warning is not None:
            self._builder.warn(warning)
        return text.encode("utf-8", "replace")


def _header(message: EmailMessage, name: str) -> str:
    """Python's parser fails on some headers of real mails; those are shown as they were sent."""
    try:
        return " ".join(str(message.get(name, "")).split())
    except Exception:
        raw = (value for key, value in message.raw_items() if key.lower() == name.lower())
        return " ".join(str(next(raw, "")).split())
