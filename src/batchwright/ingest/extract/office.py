"""What the three Office formats share: parts of an archive, read as a stream of XML elements."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from xml.etree import ElementTree

Element = ElementTree.Element


def read_part(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[str, Element]]:
    """Each element at its start and its end, as (event, element); expat itself stops entities that multiply.

    The caller clears what it has used, or a large part fills the memory.
    """
    with archive.open(name) as file:
        # The sandbox bounds time and memory, and no external entity is ever loaded.
        yield from ElementTree.iterparse(file, events=("start", "end"))  # noqa: S314


def local(name: str) -> str:
    """A name without its namespace: transitional and strict documents differ only in that."""
    return name.rpartition("}")[2]


def attribute(element: Element, name: str) -> str | None:
    return next((value for key, value in element.attrib.items() if local(key) == name), None)


def numbered_parts(archive: zipfile.ZipFile, prefix: str) -> list[str]:
    """Parts such as slide1.xml, slide2.xml, slide10.xml, in the order of their numbers."""
    found = {}
    for name in archive.namelist():
        number = name.removeprefix(prefix).removesuffix(".xml")
        if name.startswith(prefix) and number.isdigit():
            found[int(number)] = name
    return [found[number] for number in sorted(found)]
