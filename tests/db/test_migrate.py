"""Migrations: applied once, safe with many processes, and refused for programs that they do not support."""

import asyncio
import dataclasses

import pytest

from batchwright.db import migrate as module
from batchwright.db.database import Pool
from batchwright.db.migrate import Migration, migrate, migrations, pending, require_current
from batchwright.engine.upkeep import make_event_partitions
from batchwright.errors import ConfigurationError, DatabaseError
from tests.support import DATABASE


@pytest.fixture
async def empty(empty_database_url):
    async with Pool(DATABASE, empty_database_url) as pool:
        yield pool


def with_extra(monkeypatch, *extra: Migration) -> None:
    known = migrations()
    monkeypatch.setattr(module, "migrations", lambda: [*known, *extra])


async def test_the_second_run_finds_nothing_to_do(empty):
    assert [migration.number for migration in await migrate(empty, "0.1.0")] == [m.number for m in migrations()]
    assert await migrate(empty, "0.1.0") == []
    assert await pending(empty) == []


async def test_processes_that_migrate_at_once_apply_each_migration_once(empty_database_url):
    async def one() -> int:
        async with Pool(DATABASE, empty_database_url) as pool:
            return len(await migrate(pool, "0.1.0"))

    applied = await asyncio.gather(*(one() for _ in range(6)))
    assert sorted(applied) == [0, 0, 0, 0, 0, len(migrations())]


async def test_a_schema_that_is_behind_is_refused_with_the_remedy(empty):
    with pytest.raises(ConfigurationError, match="run: batchwright migrate"):
        await require_current(empty, "0.1.0")


async def test_a_program_that_a_migration_no_longer_supports_is_refused(empty, monkeypatch):
    await migrate(empty, "0.1.0")
    number = len(migrations()) + 1
    with_extra(monkeypatch, Migration(number, "leap", "SELECT 1", "2.0.0"))
    await migrate(empty, "2.0.0")
    monkeypatch.undo()
    with pytest.raises(
        ConfigurationError, match=r"this is Batchwright 0\.1\.0.*_leap.*needs Batchwright 2\.0\.0.*pip install"
    ):
        await require_current(empty, "0.1.0")
    with pytest.raises(ConfigurationError, match="upgrade"):
        await migrate(empty, "0.1.0")
    await require_current(empty, "2.0.0")


async def test_a_newer_schema_that_still_supports_the_program_is_accepted(empty, monkeypatch):
    await migrate(empty, "0.1.0")
    with_extra(monkeypatch, Migration(len(migrations()) + 1, "small", "SELECT 1", "0.1.0"))
    await migrate(empty, "0.2.0")
    monkeypatch.undo()
    await require_current(empty, "0.1.0")


async def test_a_migration_that_fails_leaves_nothing_behind(empty, monkeypatch):
    broken = Migration(len(migrations()) + 1, "broken", "CREATE TABLE batchwright.half (); SELECT 1/0", "0.1.0")
    with_extra(monkeypatch, broken)
    with pytest.raises(DatabaseError):
        await migrate(empty, "0.1.0")
    assert await empty.rows("SELECT to_regclass('batchwright.half'), to_regclass('batchwright.job')") == [(None, None)]


async def test_a_migration_whose_text_changed_is_refused(empty, monkeypatch):
    await migrate(empty, "0.1.0")
    changed = [dataclasses.replace(migration, sql=migration.sql + "\n") for migration in migrations()]
    monkeypatch.setattr(module, "migrations", lambda: changed)
    with pytest.raises(ConfigurationError, match="migrations never change"):
        await migrate(empty, "0.1.0")


async def test_event_partitions_are_made_a_week_ahead_and_only_once(queue, clock):
    assert await make_event_partitions(queue.database) == 0
    await clock.advance(queue, 7 * 86_400)
    assert await make_event_partitions(queue.database) == 1
    assert await make_event_partitions(queue.database) == 0


async def test_events_of_a_week_without_a_partition_go_to_the_default_one(queue, clock):
    from tests.support import put_one

    await clock.advance(queue, 60 * 86_400)
    id = await put_one(queue)
    rows = await queue.database.rows("SELECT tableoid::regclass::text FROM batchwright.job_event")
    assert rows[0][0].endswith("job_event_default")
    await make_event_partitions(queue.database)
    assert [event.job_id for event in await queue.events(id)] == [id]
