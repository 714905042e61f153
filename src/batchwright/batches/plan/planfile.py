"""The files of a plan: one per model, one of rejected lines, and the model map, which is written last.

    model_map.json          a plan exists if, and only if, this file does
    rejected.plan           lines whose model no gateway serves, in input order
    plans/<safe name>.plan  16 bytes per request, in the order in which to send them

A file is written under `.tmp`, synced and renamed. The same input gives the same bytes, so planning again after a crash
writes the same files over what is there.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import orjson
from xxhash import xxh3_64_hexdigest

from batchwright.private import open_private

MODEL_MAP = "model_map.json"
PLANS = "plans"
REJECTED = "rejected.plan"

_ENTRY = struct.Struct("<qII")
ENTRY_BYTES = _ENTRY.size
_NAME_CHARACTERS_MAX = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9_]+")


class Entry(NamedTuple):
    """Where a line is in the input, its newline not counted, and the group whose leader it waits for; 0 is none."""

    offset: int
    length: int
    group: int


def safe_name(model: str) -> str:
    """A file name for a model; the eight hex digits distinguish models whose names differ only in replaced characters.

    >>> safe_name("org/model-A:1")
    'org_model_A_1-5150ca27'
    """
    name = _UNSAFE.sub("_", model)[:_NAME_CHARACTERS_MAX]
    return f"{name}-{xxh3_64_hexdigest(model.encode())[:8]}"


def plan_path(folder: Path, safe: str) -> Path:
    return folder / PLANS / f"{safe}.plan"


def plan_paths(folder: Path) -> list[Path]:
    """The plans that the model map names; others were left by a planner that knew other models, and died."""
    names = orjson.loads((folder / MODEL_MAP).read_bytes())["safe_to_model"]
    return sorted(plan_path(folder, safe) for safe in names)


def pack_entries(entries: Iterable[Entry]) -> bytes:
    return b"".join([_ENTRY.pack(*entry) for entry in entries])


def unpack_entries(data: bytes) -> list[Entry]:
    return list(map(Entry._make, _ENTRY.iter_unpack(data)))


def read_entries(file: Path, start: int = 0, count: int | None = None) -> list[Entry]:
    """All entries of a plan file, or the slice that a shard names."""
    with file.open("rb") as plan:
        plan.seek(start * ENTRY_BYTES)
        return unpack_entries(plan.read(-1 if count is None else count * ENTRY_BYTES))


def write_file(file: Path, data: bytes) -> None:
    """Write all or nothing, and sync it; once the folder is synced too, the file survives a crash."""
    unfinished = file.with_name(file.name + ".tmp")
    with open_private(unfinished, "wb") as target:
        target.write(data)
        target.flush()
        os.fsync(target.fileno())
    unfinished.replace(file)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
