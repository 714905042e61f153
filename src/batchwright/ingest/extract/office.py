"""What the three Office formats share: parts of an archive, read as a stream of XML elements."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterator
from xml.etree import ElementTree

Element = ElementTree.Element


def read_part(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[str, Element]]:
    """Each element at its start and its end, as (event, element); expat itself stops entity expansion attacks,
    and no external entity is ever loaded.

    The caller must clear elements that it has used; otherwise a large part fills the memory.
    """
    with archive.open(name) as file:
        yield from ElementTree.iterparse(file, events=("start", "end"))  # noqa: S314 (the sandbox bounds it)


def local(name: str) -> str:
    """A name without its namespace: transitional and strict documents differ only in the namespace."""
    return name.rpartition("}")[2]


def attribute(element: Element, name: str) -> str | None:
    return next((value for key, value in element.attrib.items() if local(key) == name), None)


def read_listed(archive: zipfile.ZipFile, part: str, tag: str) -> Iterator[tuple[Element, str]]:
    """Elements of a part that refer to other parts, such as sheets and slides, in order and with their targets."""
    targets = read_relations(archive, part)
    for event, element in read_part(archive, part):
        if event == "end" and local(element.tag) == tag:
            relation = next((value for key, value in element.attrib.items() if key.endswith("}id")), "")
            if relation in targets:
                yield element, targets[relation]


def read_relations(archive: zipfile.ZipFile, part: str) -> dict[str, str]:
    """Parts of the archive that a part refers to, by its ids for them."""
    folder, name = posixpath.split(part)
    relations = f"{folder}/_rels/{name}.rels"
    names = set(archive.namelist())
    if relations not in names:
        return {}
    found = {}
    for event, element in read_part(archive, relations):
        target = posixpath.normpath(posixpath.join("/", folder, element.get("Target", ""))).removeprefix("/")
        if event == "end" and target in names:
            found[element.get("Id", "")] = target
    return found
