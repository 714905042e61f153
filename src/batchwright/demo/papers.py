"""Documents for the demo: the project's own pages, and invented reports as PDF files."""

from __future__ import annotations

import importlib.metadata
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import batchwright
from batchwright.private import make_folders, open_private, write_private

_LINE_CHARACTERS = 90
_PAGES = 4
_SENTENCES_PER_PAGE = 18
_PLACES = ("Arven", "Belmoor", "Corsund", "Dunholt", "Eskwater", "Farrow", "Grenna", "Halvick", "Isbrook", "Jarnes")
_THINGS = ("lighthouse", "harbour", "observatory", "weather station", "tide gauge", "ferry line")
_VERBS = ("was inspected", "was repaired", "was measured", "was closed", "was painted", "was reported")
_TIMES = ("in early spring", "after the storm", "before noon", "during the night", "in late autumn", "at low tide")
_DETAILS = (
    "by two engineers who stayed for a week",
    "with instruments on loan from the university",
    "although the road was under water",
    "without any interruption of the service",
    "at the expense of the county",
    "as the council had asked a year before",
)


class Fact(NamedTuple):
    """A sentence that occurs in one report only, and a question in other words that it answers."""

    place: str
    page: int
    sentence: str
    question: str
    answer: str


FACTS = (
    Fact(
        "Corsund",
        3,
        "The lamp of the lighthouse at Corsund turns once every 41 seconds.",
        "How long does one rotation of the lamp in Corsund take?",
        "41 seconds",
    ),
    Fact(
        "Grenna",
        2,
        "The observatory at Grenna keeps its oldest star charts in a former salt cellar.",
        "Where are the oldest maps of the stars stored in Grenna?",
        "salt cellar",
    ),
    Fact(
        "Halvick",
        4,
        "Captain Ilse Thorsen commanded the ferry from Halvick for 27 years.",
        "Who was captain of the Halvick ferry?",
        "Ilse Thorsen",
    ),
)


def write_papers(folder: Path, reports: int) -> int:
    """Write the demo's documents. Returns how many there are."""
    make_folders(folder)
    pages = list(_own_pages())
    for name, text in pages:
        write_private(folder / name, text)
    for number in range(reports):
        place = _PLACES[number % len(_PLACES)]
        facts = [fact for fact in FACTS if fact.place == place and number < len(_PLACES)]
        with open_private(folder / f"report-{number + 1:03}-{place.lower()}.pdf", "wb") as file:
            file.write(make_pdf(_write_report(number, place, facts)))
    return len(pages) + reports


def make_pdf(pages: Sequence[Sequence[str]]) -> bytes:
    """A minimal PDF with these lines of text on its pages."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    streams: dict[int, bytes] = {}
    kids = []
    for lines in pages:
        text = ") Tj T* (".join(line.replace("\\", "").replace("(", "[").replace(")", "]") for line in lines)
        packed = zlib.compress(f"BT /F1 10 Tf 14 TL 50 790 Td ({text}) Tj ET".encode("latin-1", "replace"))
        number = len(objects) + 1
        kids.append(f"{number} 0 R")
        fonts = "<< /Font << /F1 3 0 R >> >>"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Resources {fonts} /Contents {number + 1} 0 R >>"
        )
        objects.append(f"<< /Length {len(packed)} /Filter /FlateDecode >>")
        streams[number + 1] = packed
    objects[1] = f"<< /Type /Pages /Count {len(kids)} /Kids [{' '.join(kids)}] >>"
    return _assemble(objects, streams)


def _assemble(objects: Sequence[str], streams: dict[int, bytes]) -> bytes:
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{content}\n".encode()
        if number in streams:
            out += b"stream\n" + streams[number] + b"\nendstream\n"
        out += b"endobj\n"
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(out)


def _own_pages() -> Iterator[tuple[str, str]]:
    """The documentation pages of a checkout; an installed package has only its README."""
    docs = Path(batchwright.__file__).parents[2] / "docs"
    found = sorted(docs.glob("*.md")) if (docs / "quickstart.md").is_file() else []
    for path in found:
        yield path.name, path.read_text(encoding="utf-8")
    if not found:
        described = importlib.metadata.distribution("batchwright").read_text("METADATA") or ""
        yield "readme.md", described.partition("\n\n")[2]


def _write_report(number: int, place: str, facts: Sequence[Fact]) -> list[list[str]]:
    """The same for the same number, so that a second demo finds the same text."""
    draw = random.Random(number)
    pages = []
    for page in range(1, _PAGES + 1):
        sentences = [_sentence(draw, place) for _ in range(_SENTENCES_PER_PAGE)]
        for fact in facts:
            if fact.page == page:
                sentences.insert(draw.randrange(len(sentences)), fact.sentence)
        heading = [f"Report {number + 1} from {place}, page {page}", ""]
        pages.append(heading + list(_fold(" ".join(sentences))))
    return pages


def _sentence(draw: random.Random, place: str) -> str:
    year = draw.randrange(1950, 2020)
    thing, verb, time, detail = (draw.choice(words) for words in (_THINGS, _VERBS, _TIMES, _DETAILS))
    return f"In {year} the {thing} of {place} {verb} {time} {detail}."


def _fold(text: str) -> Iterator[str]:
    line = ""
    for word in text.split():
        if len(line) + len(word) >= _LINE_CHARACTERS:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line
