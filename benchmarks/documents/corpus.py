"""Generated documents: words by Zipf's law, in sentences, paragraphs and pages; the same seed gives the same text."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from batchwright.demo.papers import make_pdf

PAGE_CHARACTERS = 2_400
LINE_CHARACTERS = 90
VOCABULARY = 20_000
STOP_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "with",
    "as",
    "be",
    "at",
    "by",
)
SYLLABLES = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "ar", "en", "is")]


def make_vocabulary(size: int = VOCABULARY) -> list[str]:
    """The commonest are real stop words, as in any text."""
    draw = random.Random(1)
    words = dict.fromkeys(STOP_WORDS)
    while len(words) < size:
        words["".join(draw.choices(SYLLABLES, k=draw.choice((1, 2, 2, 3, 3, 4))))] = None
    return list(words)


class Writer:
    """Writes text of common and rare words."""

    words = make_vocabulary()
    weights = list(itertools.accumulate(1 / (rank + 2.7) for rank in range(VOCABULARY)))

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def sentence(self) -> str:
        words = self.draw.choices(self.words, cum_weights=self.weights, k=self.draw.randint(8, 22))
        return f"{' '.join(words).capitalize()}."

    def paragraph(self) -> str:
        return " ".join(self.sentence() for _ in range(self.draw.randint(3, 7)))

    def text(self, characters: int) -> str:
        """Paragraphs with a blank line between them; a little longer than asked for."""
        written: list[str] = []
        while sum(map(len, written)) < characters:
            written.append(self.paragraph())
        return "\n\n".join(written)

    def pdf(self, pages: int) -> bytes:
        return make_pdf([list(fold(self.text(PAGE_CHARACTERS)[:PAGE_CHARACTERS])) for _ in range(pages)])


def fold(text: str) -> Iterator[str]:
    line = ""
    for word in text.split():
        if len(line) + len(word) >= LINE_CHARACTERS:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


def write_texts(folder: Path, count: int, characters: int) -> None:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:05}.txt").write_text(Writer(number).text(characters))


def write_mixed(folder: Path, count: int, pages: int) -> None:
    """Every second one is a PDF file."""
    folder.mkdir()
    for number in range(count):
        writer = Writer(number)
        if number % 2:
            (folder / f"{number:05}.pdf").write_bytes(writer.pdf(pages))
        else:
            (folder / f"{number:05}.md").write_text(writer.text(pages * PAGE_CHARACTERS))
