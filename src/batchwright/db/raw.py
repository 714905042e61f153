"""Values that are in PostgreSQL's own binary form already: the driver hands them on as they are."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format


@dataclass(frozen=True, slots=True)
class Raw:
    """A parameter in binary form. The statement says its type, by a cast; the driver does not know it."""

    data: bytes


class _RawDumper(Dumper):
    format = Format.BINARY
    oid = 0

    def dump(self, obj: Raw) -> Buffer | None:
        return obj.data


psycopg.adapters.register_dumper(Raw, _RawDumper)
