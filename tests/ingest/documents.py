"""Small documents of every format, including broken ones."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from email.message import EmailMessage
from xml.sax.saxutils import escape


def make_pdf(
    pages: Sequence[str], *, bookmarks: Mapping[str, int] | None = None, content: bytes = b"", trailer: str = ""
) -> bytes:
    """Each line of text becomes a line of its page; a bookmark is a title and the number of its page, from 0."""
    objects = [
        "<< /Type /Catalog /Pages 2 0 R /Outlines 4 0 R >>",
        "",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    objects.append("")
    first = len(objects) + 1
    for number, text in enumerate(pages):
        lines = ") Tj T* (".join(line.replace("(", "").replace(")", "") for line in text.split("\n"))
        stream = content or zlib.compress(f"BT /F1 10 Tf 12 TL 50 800 Td ({lines}) Tj ET".encode("latin-1"))
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {first + 2 * number + 1} 0 R >>"
        )
        objects.append(
            f"<< /Length {len(stream)} /Filter /FlateDecode >>\nstream\n{stream.decode('latin-1')}\nendstream"
        )
    kids = " ".join(f"{first + 2 * number} 0 R" for number in range(len(pages)))
    objects[1] = f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>"
    marks = list((bookmarks or {}).items())
    at = len(objects) + 1
    for number, (title, page) in enumerate(marks):
        following = f" /Next {at + number + 1} 0 R" if number + 1 < len(marks) else ""
        objects.append(f"<< /Title ({title}) /Parent 4 0 R /Dest [{first + 2 * page} 0 R /Fit]{following} >>")
    outline = f" /First {at} 0 R /Last {at + len(marks) - 1} 0 R /Count {len(marks)}" if marks else ""
    objects[3] = f"<< /Type /Outlines{outline} >>"
    return _write_pdf(objects, trailer)


def make_scan() -> bytes:
    """A page that contains a drawing and no text."""
    return make_pdf([""]).replace(b"/F1", b"/F2")


def make_encrypted_pdf() -> bytes:
    """Its user password is not empty, so its text cannot be read."""
    owner, user = "41" * 32, "42" * 32
    handler = f"<< /Filter /Standard /V 1 /R 2 /O <{owner}> /U <{user}> /P -4 >>"
    return make_pdf(["secret"], trailer=f"/Encrypt {handler} /ID [<{'43' * 16}> <{'43' * 16}>]")


def _write_pdf(objects: Sequence[str], trailer: str) -> bytes:
    file = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(file))
        file += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = len(file)
    file += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    file += b"".join(f"{offset:010d} 00000 n \n".encode() for offset in offsets)
    file += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{table}\n%%EOF\n".encode()
    return bytes(file)


def make_zip(parts: Mapping[str, str | bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file.getvalue()


WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def make_docx(body: str, **parts: str | bytes) -> bytes:
    """`body` is WordprocessingML; see `paragraph`."""
    styles = (
        f'<w:styles {WORD}><w:style w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style>'
        '<w:style w:styleId="Mine"><w:basedOn w:val="berschrift1"/></w:style></w:styles>'
    )
    return make_zip(
        {
            "[Content_Types].xml": "<Types/>",
            "word/document.xml": f"<w:document {WORD}><w:body>{body}</w:body></w:document>",
            "word/styles.xml": styles,
            **parts,
        }
    )


def paragraph(text: str, style: str = "") -> str:
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{properties}<w:r><w:t>{escape(text)}</w:t></w:r></w:p>"


def make_mail(subject: str = "Report", body: str = "See the attachment.", **headers: str) -> EmailMessage:
    message = EmailMessage()
    message["From"] = "anna@example.com"
    message["To"] = "bob@example.com"
    message["Date"] = "Mon, 16 Nov 2026 10:00:00 +0000"
    message["Subject"] = subject
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    message.set_content(body)
    return message
