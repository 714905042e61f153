"""A table of Batchwright's own database as a source: cut into ranges of its ids, and read page by page.

Names are looked up in the server's catalog, and statements only contain names from there, quoted by the server. Values
are parameters. A batch reads the rows that exist when it runs.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchwright.db.database import Database
from batchwright.db.database import Row as Record
from batchwright.db.statements import statements
from batchwright.errors import DatabaseError, DatabaseUnavailable, Fatal
from batchwright.ingest.embeddings.payloads import Keys, Table
from batchwright.ingest.embeddings.rows import TEXT_CHARACTERS_MAX, Row, make_row
from batchwright.ingest.embeddings.settings import EmbeddingSettings, is_internal

SQL = statements(__package__, "tables.sql")
_PAGE = 100
_WHOLE = ("smallint", "integer", "bigint")
_NAMES = re.compile(r"(?<!:):(table|id|text|conditions)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """The table as the server writes it."""

    table: str
    id: str
    type: str
    text: str
    filters: tuple[str, ...]

    def statement(self, name: str, *conditions: str) -> str:
        # All text in the statement comes from the catalog, quoted.
        names = {
            "table": self.table,
            "id": self.id,
            "text": self.text,
            "conditions": " AND ".join([*self.filters, *conditions]) or "true",
        }
        return _NAMES.sub(lambda found: names[found[1]], SQL[name])

    def between(self, after: str | None, upto: str | None) -> list[str]:
        found = []
        if after is not None:
            found.append(f"{self.id} > %(after)s::text::{self.type}")
        if upto is not None:
            found.append(f"{self.id} <= %(upto)s::text::{self.type}")
        return found


class TableReader:
    """The rows of one table."""

    def __init__(self, database: Database, source: Table, settings: EmbeddingSettings) -> None:
        self._database = database
        self._source = source
        self._settings = settings
        self._described: _Described | None = None

    async def split(self, batch_size: int) -> AsyncIterator[Keys]:
        described = await self._describe()
        after: str | None = None
        while True:
            conditions = described.between(after, None)
            rows = await self._ask(described.statement("boundary", *conditions), after=after, rows=batch_size)
            if not rows:
                break
            ((upto,),) = rows
            yield Keys(after=after, upto=upto)
            after = upto
        if await self._ask(described.statement("exists", *described.between(after, None)), after=after):
            yield Keys(after=after, upto=None)

    async def read(self, piece: Keys) -> AsyncIterator[Row]:
        described = await self._describe()
        after = piece.after
        while True:
            statement = described.statement("page", *described.between(after, piece.upto))
            params = {"after": after, "upto": piece.upto, "rows": _PAGE, "characters": TEXT_CHARACTERS_MAX}
            rows = await self._ask(statement, **params)
            for id, text in rows:
                yield make_row(int(id) if described.type in _WHOLE else id, text, None)
            if len(rows) < _PAGE:
                return
            after = rows[-1][0]

    async def _ask(self, statement: str, **params: Any) -> list[Record]:
        """Use a transaction that cannot write, whatever a view or a column does."""
        filters = {f"value_{place}": value for place, value in enumerate(self._source.where.values())}
        try:
            async with self._database.transaction() as session:
                await session.rows("SET TRANSACTION READ ONLY")
                return await session.rows(statement, {**params, **filters})
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            said = str(error).splitlines()[0]
            raise Fatal(f"the table {self._source.table} cannot be read: {said}", code="table_unreadable") from error

    async def _describe(self) -> _Described:
        if self._described is None:
            self._described = await self._look_up()
        return self._described

    async def _look_up(self) -> _Described:
        source = self._source
        rows = await self._ask(SQL["describe"], table=source.table)
        if not rows:
            raise Fatal(f"there is no table {source.table}; write it with its schema: public.articles", code="no_table")
        ((schema, table, quoted, columns, unique, is_readable),) = rows
        if not self._settings.allows(schema, table):
            allow = f'allow it: [embeddings] tables = ["{schema}.{table}"]'
            why = "it belongs to Batchwright or to the server" if is_internal(schema) else allow
            raise Fatal(
                f"the table {schema}.{table} may not be read; {why}",
                code="table_not_allowed",
            )
        if not is_readable:
            raise Fatal(f"Batchwright's role may not read {quoted}: grant it SELECT", code="no_privilege")
        for name in (source.id, source.text, *source.where):
            if name not in columns:
                known = ", ".join(sorted(columns))
                raise Fatal(f"{schema}.{table} has no column {name!r}; it has {known}", code="no_column")
        if source.id not in unique or not columns[source.id]["not_null"]:
            raise Fatal(
                f"{schema}.{table}.{source.id} does not identify rows: it needs a primary key, or a unique index and "
                "NOT NULL",
                code="id_not_unique",
            )
        return _described(source, quoted, columns)


def _described(source: Table, table: str, columns: Mapping[str, Mapping[str, str]]) -> _Described:
    # A percent sign in a name would look like a parameter.
    def name(column: str) -> str:
        return "source." + columns[column]["name"].replace("%", "%%")

    filters = tuple(
        f"{name(column)} IS NULL" if value is None else f"{name(column)} = %(value_{place})s"
        for place, (column, value) in enumerate(source.where.items())
    )
    return _Described(
        table=table.replace("%", "%%"),
        id=name(source.id),
        type=columns[source.id]["type"],
        text=name(source.text),
        filters=filters,
    )
