"""Text, pages and sections of every format."""

from __future__ import annotations

import pytest

from batchwright.ingest.text import Page, Section
from tests.ingest.documents import WORD, make_docx, make_mail, make_pdf, make_zip, paragraph


def sections_of(text):
    return {section.path: text.text[section.start : section.end].strip() for section in text.sections}


async def test_pdf_has_pages_and_its_bookmarks_as_sections(extract):
    pages = ["Preface\nHello", "", "Methods\nWe measured.\nResults\nIt works."]
    text = await extract(make_pdf(pages, bookmarks={"Methods": 2, "Results": 2, "Missing title": 2}), "a.pdf")
    assert text.text == "Preface\nHello\n\nMethods\nWe measured.\n\nResults\nIt works."
    assert text.format == "pdf"
    assert text.pages == (Page(1, 0, 15), Page(2, 15, 15), Page(3, 15, 54))
    assert sections_of(text) == {
        ("Methods",): "Methods\nWe measured.",
        ("Missing title",): "Results\nIt works.",
    }
    assert text.warnings == ("1 of 3 pages have no text layer",)


async def test_docx_has_headings_tables_and_text_that_is_easily_lost(extract):
    table = f"<w:tbl><w:tr><w:tc>{paragraph('Name')}</w:tc><w:tc>{paragraph('City')}</w:tc></w:tr>"
    table += f"<w:tr><w:tc>{paragraph('Anna')}</w:tc><w:tc>{paragraph('Bern')}</w:tc></w:tr></w:tbl>"
    control = f"<w:sdt><w:sdtContent>{paragraph('In a control.')}</w:sdtContent></w:sdt>"
    deleted = "<w:del><w:r><w:delText>Gone.</w:delText></w:r></w:del>"
    inserted = f"<w:p><w:ins><w:r><w:t>Inserted.</w:t></w:r></w:ins>{deleted}</w:p>"
    tabs = '<w:p><w:pPr><w:tabs><w:tab w:pos="9"/></w:tabs></w:pPr><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t></w:r></w:p>'
    shape = f"<w:txbxContent>{paragraph('Boxed.')}</w:txbxContent>"
    boxes = f'<w:r><m:x xmlns:m="m"><m:Choice>{shape}</m:Choice><m:Fallback>{shape}</m:Fallback></m:x></w:r>'
    tabs = f"<w:p>{boxes}</w:p>{tabs}"
    notes = f"<w:footnotes {WORD}>{paragraph('A note.')}</w:footnotes>"
    body = paragraph("One", "berschrift1") + table + control + paragraph("Two", "Mine") + inserted + tabs
    text = await extract(make_docx(body, **{"word/footnotes.xml": notes}), "a.docx")
    assert sections_of(text) == {
        ("One",): "One\n\nName | City\nAnna | Bern\n\nIn a control.",
        ("Two",): "Two\n\nInserted.\n\nBoxed.\n\na\tb\n\nA note.",
    }


async def test_pptx_has_a_page_for_each_slide_in_the_order_of_the_presentation(extract):
    slide = '<p:sld xmlns:a="a" xmlns:p="p"><a:p><a:r><a:t>{}</a:t></a:r></a:p></p:sld>'
    listed = '<p:sldId id="256" r:id="x2"/><p:sldId id="257" r:id="x1"/><p:sldId id="258" r:id="gone"/>'
    parts = {
        "[Content_Types].xml": "<Types/>",
        "ppt/presentation.xml": f'<p:presentation xmlns:p="p" xmlns:r="r">{listed}</p:presentation>',
        "ppt/_rels/presentation.xml.rels": '<R><r Id="x1" Target="slides/slide1.xml"/>'
        '<r Id="x2" Target="/ppt/slides/slide2.xml"/></R>',
        "ppt/slides/slide1.xml": slide.format("First made"),
        "ppt/slides/slide2.xml": slide.format("First shown"),
        "ppt/slides/_rels/slide2.xml.rels": '<R><r Id="x1" Target="../notesSlides/notesSlide1.xml"/></R>',
        "ppt/notesSlides/notesSlide1.xml": slide.format("Spoken"),
    }  # fmt: skip
    text = await extract(make_zip(parts), "a.pptx")
    assert [text.text[page.start : page.end].strip() for page in text.pages] == ["First shown\nSpoken", "First made"]


async def test_xlsx_has_a_section_for_each_sheet(extract):
    text = await extract(
        make_zip(
            {
                "[Content_Types].xml": "<Types/>",
                "xl/workbook.xml": '<workbook xmlns:r="r"><sheets><sheet name="Staff" r:id="i1"/></sheets></workbook>',
                "xl/_rels/workbook.xml.rels": '<R><Relationship Id="i1" Target="worksheets/sheet7.xml"/></R>',
                "xl/sharedStrings.xml": "<sst><si><t>Na</t><t>me</t></si></sst>",
                "xl/worksheets/sheet7.xml": '<worksheet><row><c t="s"><v>0</v></c><c><f>A1</f><v>7</v></c></row>'
                '<row><c t="inlineStr"><is><t>Anna</t></is></c></row></worksheet>',
            }
        )
    )
    assert sections_of(text) == {("Staff",): "Staff\n\nName | 7\nAnna"}
    assert text.pages == (Page(1, 0, len(text.text)),)


async def test_html_has_what_a_reader_sees(extract):
    page = """<!doctype html><html><head><title>T</title><style>p {}</style></head><body><nav>Home</nav>
        <h1>Bread &amp; <i>butter</i></h1><p>One <b>two</b>\n three<br>four</p><script>no()</script>
        <h2>List</h2><ul><li>a<li>b</ul>tail<table><tr><td>1<td>2</tr></table><pre>x\n  y</pre></body></html>"""
    text = await extract(page, "a.html")
    assert sections_of(text) == {
        ("Bread & butter",): "Bread & butter\n\nOne two three\nfour",
        ("Bread & butter", "List"): "List\n\na\nb\n\ntail\n\n1 | 2\n\nx\n  y",
    }


async def test_markdown_keeps_its_source_and_knows_its_headings(extract):
    source = "before\n\n# One #\n\ntext\n\n```\n# code\n```\n\nTwo\n---\n\n- item\n---\n\n#hash\n### Deep\nend"
    text = await extract(source, "a.md")
    assert text.text == source.replace("#hash\n###", "#hash\n\n###")
    assert [section.path for section in text.sections] == [("One",), ("One", "Two"), ("One", "Two", "Deep")]
    assert text.section_at(0) == ()


@pytest.mark.parametrize(
    ("data", "name", "expected"),
    [
        ("plain \r\n\r\n\r\n\r\ntext", "a.txt", "plain\n\ntext"),
        ("log line " * 10 + "\x00end", "a.txt", "log line " * 10 + "end"),
        ("cafe\u0301", "a.txt", "caf\u00e9"),
        ("Grüße".encode("cp1252"), "a.txt", "Grüße"),
        ("Grüße".encode("utf-16"), "a.txt", "Grüße"),
        ("Some latin text".encode("utf-16-le"), "a.txt", "Some latin text"),
        ("<html><meta charset='iso-8859-2'><body>\u0142".encode("iso-8859-2"), "a.html", "\u0142"),
        ("name;city\nAnna;\"Bern;\nUlm\"\n", "a.csv", "name: Anna | city: Bern; Ulm"),
        ("1,2\n3,4\n", "a.csv", "1 | 2\n3 | 4"),
        ("name,city\n", "a.csv", "name | city"),
        ('{"a": [1, 2.50, {"b": "x"}], "c": true, "d": null}', "a.json", "a: 1\na: 2.50\na.b: x\nc: true"),
        ('{"a": 1}\n{"a": 12345678901234567890123}\n', "a.jsonl", "a: 1\n\na: 12345678901234567890123"),
        ('{"a": "found by content"}', "unnamed", "a: found by content"),
        ('[table]\nkey = "value"', "a.toml", '[table]\nkey = "value"'),
        ("<html><body>Skip to content<main>Content</main></body></html>", "a.html", "Content"),
    ],
)  # fmt: skip
async def test_text_of_small_formats(extract, data, name, expected):
    assert (await extract(data, name)).text == expected


async def test_mail_has_headers_body_and_attachments(extract):
    mail = make_mail(body="See below.\n")
    mail.add_alternative("<html><body>See <b>below</b>.</body></html>", subtype="html")
    mail.add_attachment(make_pdf(["In the PDF"]), maintype="application", subtype="pdf", filename="deep.pdf")
    mail.add_attachment(make_mail("Older", "Quoted."))
    text = await extract(mail.as_bytes(), "a.eml")
    headers = "From: anna@example.com\nTo: bob@example.com\nDate: Mon, 16 Nov 2026 10:00:00 +0000\nSubject: "
    assert sections_of(text) == {
        ("Report",): f"{headers}Report\n\nSee below.",
        ("Report", "deep.pdf"): "deep.pdf\n\nIn the PDF",
        ("Report", "deep.pdf", "Older"): f"{headers}Older\n\nQuoted.",
    }


async def test_mail_of_html_alone_is_read_as_html(extract):
    mail = make_mail()
    mail.set_content("<html><body><h1>Sale</h1>Today</body></html>", subtype="html")
    assert (await extract(mail.as_bytes(), "a.eml")).text.endswith("Subject: Report\n\nSale\n\nToday")


async def test_mail_that_breaks_the_rules_is_read(extract):
    headers = b"From: =?utf-8?q?J=C3=BCrgen?= <j@example.com>\nTo: :;,<@>\nDate: yesterday\nMessage-ID: <[x]>\n"
    mime = b"Subject: =?x?q?a?=\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=b\n\n"
    first = b"--b\nContent-Type: text/plain; charset=klingon\n\nGr\xc3\xbc\xc3\x9fe\n"
    mail = headers + mime + first + b"--b\nContent-Type: text/plain\n\nsecond part\n"
    text = (await extract(mail, "a.eml")).text
    assert text.startswith("From: Jürgen <j@example.com>\n")
    assert "Date: yesterday" in text
    assert text.endswith("Grüße\n\nsecond part")


async def test_a_wrong_extension_is_noticed_and_the_content_counts(extract):
    text = await extract(make_pdf(["I am a PDF"]), "a.docx")
    assert (text.text, text.format) == ("I am a PDF", "pdf")
    assert text.warnings == ("a.docx is pdf, although its name has another extension",)
    assert (await extract(make_mail().as_bytes(), "a.txt")).format == "eml"
    assert (await extract("<!doctype html><p>Hello", "a.md")).format == "html"
    assert (await extract("just words", "a.eml")).format == "text"


async def test_a_section_is_a_section(extract):
    text = await extract("# A\n\none\n\n# B", "a.md")
    assert text.sections == (Section(("A",), 0, 10), Section(("B",), 10, 13))
