"""Decides which files and buckets may be read: what we read with our own rights must be under a root.

A URL is fetched without any rights, so it needs no root. A file or an object is read with the rights of this process:
if HTTP callers could name any path, they could read whatever the server can.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import assert_never

from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.ingest.sources.parse import (
    FileSource,
    ObjectSource,
    Source,
    UrlList,
    UrlSource,
    parse_source,
    uri_of,
)


class Roots:
    """Folders and bucket prefixes below which documents may be read."""

    def __init__(self, roots: Iterable[str]) -> None:
        parsed = [parse_source(root) for root in roots]
        self._files = [str(root.path) for root in parsed if isinstance(root, FileSource)]
        self._objects = [root.uri.rstrip("/") for root in parsed if isinstance(root, ObjectSource)]

    def holds_file(self, real: str) -> bool:
        """Whether a path without links is under a root; links in the root are resolved now."""
        return any(_is_under(real, os.path.realpath(root)) for root in self._files)

    def holds_object(self, uri: str) -> bool:
        return any(_is_under(uri.rstrip("/"), root) for root in self._objects)

    def check(self, source: Source, shown: str) -> None:
        """Raises InvalidInput for a source outside the roots. The error does not show where its links lead."""
        match source:
            case FileSource() | UrlList():
                is_held = self.holds_file(os.path.realpath(source.path))
            case ObjectSource():
                is_held = self.holds_object(source.uri)
            case UrlSource():
                return
            case _:
                assert_never(source)
        if not is_held:
            raise InvalidInput(
                f"{shown!r} may not be read: it is outside the roots; an operator can add its folder or bucket "
                "to `roots` in [ingest], or run the command on the server",
                param="sources",
            )


def local_roots(sources: Iterable[str]) -> tuple[str, ...]:
    """The roots for users who run commands on this machine: the sources that they name."""
    roots: list[str] = []
    for source in map(parse_source, sources):
        match source:
            case FileSource() | UrlList():
                roots.append(uri_of(str(source.path)))
            case ObjectSource():
                roots.append(source.uri)
            case UrlSource():
                pass
    return tuple(dict.fromkeys(roots))


def check_root(root: str) -> None:
    """Raises ConfigurationError for a root that is neither an absolute path nor a bucket."""
    try:
        is_root = not root.startswith("@") and (root.startswith("/") or isinstance(parse_source(root), ObjectSource))
    except InvalidInput:
        is_root = False
    if not is_root:
        raise ConfigurationError(
            f"ingest.roots has {root!r}; write an absolute path like /data/papers, or s3://bucket/prefix"
        )


def _is_under(name: str, root: str) -> bool:
    return name == root or name.startswith(root.rstrip("/") + "/")
