"""Numbered, immutable SQL files, applied once each under a lock.

A migration names, in a line `-- serves: VERSION`, the oldest program that still works with the new schema. An older
program is refused when it starts; one that already runs is not stopped.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

from batchwright.db.database import Session, Source
from batchwright.errors import ConfigurationError, DatabaseError

_LOCK = 0x42575249  # "BWRI"
_SERVES = re.compile(r"^-- serves: (\d+\.\d+\.\d+)$", re.MULTILINE)
_MIGRATION_TABLE = """
CREATE SCHEMA IF NOT EXISTS batchwright;
CREATE TABLE IF NOT EXISTS batchwright.migration (
    number         integer PRIMARY KEY,
    name           text NOT NULL,
    checksum       text NOT NULL,
    serves         text NOT NULL,
    applied_at     timestamptz NOT NULL DEFAULT now()
)
"""


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    sql: str
    serves: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations() -> list[Migration]:
    """All migrations of this program, in order, without gaps."""
    found = []
    for file in files("batchwright.db").joinpath("migrations").iterdir():
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            sql = file.read_text(encoding="utf-8")
            serves = _SERVES.search(sql)
            if serves is None:
                raise AssertionError(f"{file.name} does not say which program it serves")
            found.append(Migration(int(number), name, sql, serves[1]))
    found.sort(key=lambda migration: migration.number)
    assert [m.number for m in found] == list(range(1, len(found) + 1)), "migrations have a gap"
    return found


async def migrate(database: Source, program: str) -> list[Migration]:
    """Apply missing migrations; a second process waits for the first and then finds nothing left to do."""
    await check_server(database)
    applied = []
    async with database.transaction() as session:
        await session.rows("SET LOCAL lock_timeout = '5min'; SET LOCAL statement_timeout = '5min'")
        await session.rows(f"SELECT pg_advisory_xact_lock({_LOCK})")
        await session.rows(_MIGRATION_TABLE)
        done: dict[int, str] = dict(await session.rows("SELECT number, checksum FROM batchwright.migration"))
        await refuse_old_program(session, program)
        for migration in migrations():
            if migration.number in done:
                _refuse_changed(migration, done[migration.number])
                continue
            await session.rows(migration.sql)
            await session.rows(
                "INSERT INTO batchwright.migration (number, name, checksum, serves) "
                "VALUES (%(number)s, %(name)s, %(checksum)s, %(serves)s)",
                {
                    "number": migration.number,
                    "name": migration.name,
                    "checksum": migration.checksum,
                    "serves": migration.serves,
                },
            )
            applied.append(migration)
    return applied


async def pending(database: Session) -> list[Migration]:
    """Migrations of this program that the database does not have yet."""
    try:
        rows = await database.rows("SELECT number FROM batchwright.migration")
    except DatabaseError as error:
        if "does not exist" in str(error):
            return migrations()
        raise
    done = {number for (number,) in rows}
    return [migration for migration in migrations() if migration.number not in done]


async def require_current(database: Source, program: str) -> None:
    """Refuse to start on a schema that is too old or too new for this program."""
    await check_server(database)
    missing = await pending(database)
    if missing:
        raise ConfigurationError(
            f"the database is {len(missing)} migration(s) behind this program "
            f"(next: {missing[0].number:04d}_{missing[0].name}); run: batchwright migrate"
        )
    await refuse_old_program(database, program)


async def refuse_old_program(session: Session, program: str) -> None:
    rows = await session.rows("SELECT number, name, serves FROM batchwright.migration ORDER BY number DESC")
    for number, name, serves in rows:
        if _version(serves) > _version(program):
            raise ConfigurationError(
                f"this is Batchwright {program}, but the database has migration {number:04d}_{name}, "
                f"which needs Batchwright {serves} or newer; upgrade: pip install 'batchwright>={serves}'"
            )


async def check_server(database: Source) -> None:
    """PostgreSQL 15 or newer."""
    ((number, text),) = await database.rows(
        "SELECT current_setting('server_version_num')::int, current_setting('server_version')"
    )
    if number < 150000:
        raise ConfigurationError(f"PostgreSQL 15 or newer is needed, this is {text}; upgrade the server")


def _refuse_changed(migration: Migration, checksum: str) -> None:
    if checksum != migration.checksum:
        raise ConfigurationError(
            f"migration {migration.number:04d}_{migration.name} was applied with other contents; "
            "migrations never change: restore the file, or use the program that applied it"
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3])
