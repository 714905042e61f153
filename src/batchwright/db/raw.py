"""Values that are already in PostgreSQL's binary form: the driver passes them on unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format


@dataclass(frozen=True, slots=True)
class Raw:
    """A parameter in binary form. The statement gives its type with a cast; the driver does not know it."""

    data: bytes


class _RawDumper(Dumper):
    format = Format.BINARY
    oid = 0

    def dump(self, obj: Raw) -> Buffer | None:
        return obj.data


psycopg.adapters.register_dumper(Raw, _RawDumper)
