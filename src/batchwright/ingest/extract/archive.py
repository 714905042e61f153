"""Zip archives, such as office documents. Their size is checked before anything is unpacked."""

from __future__ import annotations

import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from xml.etree import ElementTree

from batchwright.ingest.extract.document import Document, damaged, encrypted, unpacked_too_large

_DAMAGE = (
    EOFError,
    ElementTree.ParseError,
    LookupError,
    NotImplementedError,
    OSError,
    ValueError,
    lzma.LZMAError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)  # what zipfile and expat raise for damaged data
_ENTRIES_MAX = 20_000
_IS_ENCRYPTED = 0x1


@contextmanager
def open_archive(document: Document) -> Iterator[zipfile.ZipFile]:
    """Check the declared sizes. They are a hard limit: zipfile stops reading at them."""
    try:
        with zipfile.ZipFile(io.BytesIO(document.data)) as archive:
            _check(archive, document.limits.unpacked_bytes)
            yield archive
    except _DAMAGE as error:
        raise damaged(str(error) or type(error).__name__) from error


def _check(archive: zipfile.ZipFile, limit: int) -> None:
    entries = archive.infolist()
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > limit:
        raise unpacked_too_large(unpacked, limit)
    if len(entries) > _ENTRIES_MAX:
        raise damaged(f"its archive has {len(entries):,} files; the limit is {_ENTRIES_MAX:,}")
    if any(entry.flag_bits & _IS_ENCRYPTED for entry in entries):
        raise encrypted()
