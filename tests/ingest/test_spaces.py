"""Vectors of one embedder in one collection."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import struct

import pytest

from batchwright.db.database import Database, Pool
from batchwright.errors import Conflict, DatabaseError, DataRefused
from batchwright.ingest.exact import ExactScan
from batchwright.ingest.spaces import Space, Spaces
from tests.ingest.stored import DIMENSIONS, Meanings, Shelf, vector
from tests.support import DATABASE


async def nearest(shelf: Shelf, space: Space, query: bytes, limit: int = 3) -> list[str]:
    """The texts that are nearest to a vector."""
    search = shelf.search
    shelf.embedder.embed_query = lambda _: asyncio.sleep(0, query)
    (name,) = (await shelf.database.rows("SELECT min(name) FROM batchwright.ingest_collection"))[0]
    found = await search.search("default", name, "x", limit=limit, mode="vectors")
    return [hit.text for hit in found.hits]


async def add(shelf: Shelf, space: Space, vectors: dict[int, bytes]) -> None:
    async with shelf.database.transaction() as session:
        await shelf.spaces.add(space, vectors, session=session)


async def test_eight_workers_that_ask_for_a_space_at_once_get_the_same(shelf, database_url):
    collection = await shelf.collection()

    async def ask() -> Space:
        async with Pool(DATABASE, database_url) as pool:
            spaces = Spaces(Database(pool), use_pgvector=await shelf.spaces.has_pgvector())
            return await spaces.ensure(collection, fingerprint="f", model="m", dimensions=8)

    found = set(await asyncio.gather(*(ask() for _ in range(8))))
    assert len(found) == 1
    assert await shelf.spaces.of(collection) == list(found)


async def test_a_deleted_collection_cannot_get_a_space(shelf):
    collection = await shelf.collection()
    await shelf.collections.delete("default", "papers")
    with pytest.raises(Conflict, match="being deleted"):
        await shelf.space(collection)


async def test_a_vector_of_another_size_is_refused_by_name(shelf):
    space = await shelf.space(await shelf.collection())
    with pytest.raises(ValueError, match="chunk 7 has 3 dimensions, not 32"):
        await add(shelf, space, {7: b"\0" * 12})


async def test_a_transaction_that_is_rolled_back_leaves_no_vectors(shelf):
    collection = await shelf.collection()
    space = await shelf.space(collection)
    _, version = await shelf.put(collection, "a.txt", "alpha")
    ((chunk, _),) = await shelf.chunks(version)
    with pytest.raises(RuntimeError):
        async with shelf.database.transaction() as session:
            await shelf.spaces.add(space, {chunk: vector(1.0)}, session=session)
            raise RuntimeError
    assert await nearest(shelf, space, vector(1.0)) == []
    await add(shelf, space, {chunk: vector(1.0)})
    assert await nearest(shelf, space, vector(1.0)) == ["alpha"]


@pytest.mark.parametrize("settled", [0, 2, 4])
async def test_the_nearest_are_found_whether_they_are_in_the_index_or_new(shelf, settled):
    collection = await shelf.collection()
    space = await shelf.space(collection)
    _, version = await shelf.put(collection, "a.txt", "north", "north-east", "east", "south")
    directions = [(0.0, 1.0), (0.5, 0.8), (1.0, 0.0), (0.0, -1.0)]
    chunks = [id for id, _ in await shelf.chunks(version)]
    await add(shelf, space, {id: vector(*direction) for id, direction in zip(chunks, directions, strict=True)})
    if space.has_table and settled:
        assert await shelf.spaces.settle(settled) == settled
    assert await nearest(shelf, space, vector(0.1, 1.0), limit=4) == ["north", "north-east", "east", "south"]
    assert await nearest(shelf, space, vector(0.9, 0.1), limit=2) == ["east", "north-east"]


async def test_settling_covers_all_spaces_and_ends(shelf):
    if not await shelf.spaces.has_pgvector():
        assert await shelf.spaces.settle() == 0
        return
    for name in ("one", "two"):
        collection = await shelf.collection(name)
        space = await shelf.space(collection)
        await shelf.put(collection, "a.txt", *(f"text {n}" for n in range(30)), space=space)
    assert [await shelf.spaces.settle(40), await shelf.spaces.settle(40), await shelf.spaces.settle(40)] == [40, 20, 0]


async def test_a_vector_that_is_added_again_is_there_once(shelf):
    collection = await shelf.collection()
    space = await shelf.space(collection)
    _, version = await shelf.put(collection, "a.txt", "alpha", "beta")
    (alpha, _), (beta, _) = await shelf.chunks(version)
    await add(shelf, space, {alpha: vector(1.0)})
    await shelf.spaces.settle()
    await add(shelf, space, {alpha: vector(1.0), beta: vector(0.7, 0.7)})
    assert await nearest(shelf, space, vector(1.0)) == ["alpha", "beta"]


async def test_vectors_of_a_retired_version_are_gone_from_all_spaces(shelf):
    collection = await shelf.collection()
    first, second = [await shelf.space(collection, fingerprint=name) for name in ("first", "second")]
    _, version = await shelf.put(collection, "a.txt", "alpha")
    _, other = await shelf.put(collection, "b.txt", "beta")
    for (chunk, _), *_ in (await shelf.chunks(version), await shelf.chunks(other)):
        for space in (first, second):
            await add(shelf, space, {chunk: vector(1.0)})
    async with shelf.database.transaction() as session:
        await shelf.spaces.remove_version(version, session=session)
    for space in (first, second):
        shelf.embedder.fingerprint = space.fingerprint
        assert await nearest(shelf, space, vector(1.0)) == ["beta"]


async def test_empty_spaces_are_dropped_but_never_the_newest_nor_young_ones(shelf):
    collection = await shelf.collection()
    spaces = [await shelf.space(collection, fingerprint=str(n)) for n in range(4)]
    _, version = await shelf.put(collection, "a.txt", "alpha")
    ((chunk, _),) = await shelf.chunks(version)
    await add(shelf, spaces[1], {chunk: vector(1.0)})
    assert await shelf.spaces.drop_empty() == []
    assert await shelf.spaces.drop_empty(keep_seconds=-1) == [spaces[0], spaces[2]]
    assert await shelf.spaces.of(collection) == [spaces[1], spaces[3]]
    with pytest.raises(Conflict, match="was just dropped"):
        await add(shelf, spaces[0], {chunk: vector(1.0)})


async def test_a_space_is_not_dropped_while_a_transaction_writes_to_it(shelf, database_url):
    collection = await shelf.collection()
    space = await shelf.space(collection, fingerprint="old")
    await shelf.space(collection, fingerprint="new")
    _, version = await shelf.put(collection, "a.txt", "alpha")
    ((chunk, _),) = await shelf.chunks(version)
    async with shelf.database.transaction() as session:
        await shelf.spaces.add(space, {chunk: vector(1.0)}, session=session)
        dropping = asyncio.create_task(shelf.spaces.drop_empty(keep_seconds=-1))
        await waits_for_a_lock(shelf.database)
    assert await dropping == []


async def waits_for_a_lock(database: Database) -> None:
    for _ in range(1000):
        ((count,),) = await database.rows(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        if count:
            return
    raise AssertionError("no session waits for a lock")


@pytest.mark.parametrize("dimensions", [1, 2000, 2001, 4000, 4001])
async def test_vectors_of_any_size_are_stored_and_found(shelf, dimensions):
    collection = await shelf.collection()
    space = await shelf.space(collection, dimensions=dimensions)
    assert space.has_index == (space.has_table and dimensions <= 4000)
    _, version = await shelf.put(collection, "a.txt", "near", "far")
    (near, _), (far, _) = await shelf.chunks(version)
    await add(shelf, space, {near: vector(1.0, dimensions=dimensions), far: vector(-1.0, dimensions=dimensions)})
    await shelf.spaces.settle()
    assert await nearest(shelf, space, vector(1.0, dimensions=dimensions)) == ["near", "far"]


async def test_a_vector_that_is_not_a_number_is_refused_by_pgvector(shelf):
    collection = await shelf.collection()
    space = await shelf.space(collection)
    if space.has_table:
        with pytest.raises(DataRefused):
            await add(shelf, space, {1: vector(float("nan"))})


async def test_without_pgvector_a_role_that_may_not_install_it_falls_back(pool):
    """The extension is available, but the server refuses to install it."""

    class Refusing(Database):
        async def rows(self, sql, params=None):
            if sql.startswith("CREATE EXTENSION"):
                raise DatabaseError("permission denied to create extension")
            return await super().rows(sql, params)

    assert not await Spaces(Refusing(pool)).has_pgvector()


async def test_no_task_waits_for_a_second_connection_while_it_holds_one(shelf, database_url):
    """A process that does not know yet whether pgvector exists, with a single connection."""
    collection = await shelf.collection()
    space = await shelf.space(collection)
    _, version = await shelf.put(collection, "a.txt", "alpha", space=space)
    settings = dataclasses.replace(DATABASE, pool_size=1, statement_timeout_seconds=2.0)
    async with Pool(settings, database_url) as pool:
        for verb in ("search", "remove", "add", "settle", "drop"):
            other = Shelf(Database(pool), use_pgvector=True)
            async with other.database.transaction() as session:
                if verb == "remove":
                    await other.spaces.remove_version(version, session=session)
                elif verb == "add":
                    await other.spaces.add(space, {1: vector(1.0)}, session=session)
            if verb == "search":
                assert [hit.text for hit in (await other.search.search("default", "papers", "alpha")).hits] == ["alpha"]
            elif verb == "settle":
                await other.spaces.settle()
            elif verb == "drop":
                await other.spaces.drop_empty(keep_seconds=-1)


class TestExactScan:
    """Without pgvector: in memory if the vectors fit."""

    @pytest.fixture
    async def filled(self, pool):
        shelf = Shelf(Database(pool), use_pgvector=False)
        collection = await shelf.collection()
        space = await shelf.space(collection)
        await shelf.put(collection, "a.txt", *(f"text number {n}" for n in range(200)), space=space)
        return shelf, collection, space

    async def ask(self, shelf, space, scan, text="text number 7", **options):
        async with shelf.database.transaction() as session:
            options = {"among": None, **options}
            return await scan.nearest(space, Meanings().embed(text), 5, session=session, **options)

    async def test_scans_in_pages_and_in_memory_give_the_same_result(self, filled, monkeypatch):
        shelf, _, space = filled
        monkeypatch.setattr("batchwright.ingest.exact._PAGE_BYTES", 4 * DIMENSIONS * 7)
        in_memory = await self.ask(shelf, space, ExactScan(shelf.database))
        in_pages = await self.ask(shelf, space, ExactScan(shelf.database, cache_bytes=1000))
        assert in_memory == in_pages
        assert len(in_memory) == 5

    async def test_vectors_in_memory_follow_every_change(self, filled):
        shelf, collection, space = filled
        scan = ExactScan(shelf.database)
        rng = random.Random(5)
        versions = []
        for turn in range(12):
            if versions and rng.random() < 0.4:
                async with shelf.database.transaction() as session:
                    version = versions.pop(rng.randrange(len(versions)))
                    await shelf.spaces.remove_version(version, session=session)
            else:
                _, version = await shelf.put(collection, f"{turn}.txt", f"number 7 text {turn}", space=space)
                versions.append(version)
            fresh = await self.ask(shelf, space, ExactScan(shelf.database))
            assert await self.ask(shelf, space, scan) == fresh

    async def test_vectors_are_read_once_until_something_changes(self, filled):
        shelf, _, space = filled
        statements = []

        class Watching(Database):
            def ask(self, sql, params=None, session=None):
                statements.append(sql)
                return super().ask(sql, params or {}, session)

        scan = ExactScan(Watching(shelf.database))
        await self.ask(shelf, space, scan)
        statements.clear()
        await self.ask(shelf, space, scan)
        assert len(statements) == 1
        assert "changes" in statements[0]

    async def test_the_memory_is_limited(self, filled):
        shelf, collection, space = filled
        other = await shelf.space(collection, fingerprint="other")
        async with shelf.database.transaction() as session:
            await shelf.spaces.add(other, {n: vector(1.0, n) for n in range(200)}, session=session)
        scan = ExactScan(shelf.database, cache_bytes=40_000)
        for one in (space, other, space):
            await self.ask(shelf, one, scan)
            assert list(scan._kept) == [one.id]

    async def test_only_allowed_chunks_are_compared(self, filled):
        shelf, _, space = filled
        everything = await self.ask(shelf, space, ExactScan(shelf.database))
        allowed = [everything[1], everything[3]]
        assert await self.ask(shelf, space, ExactScan(shelf.database), among=allowed) == allowed
        assert await self.ask(shelf, space, ExactScan(shelf.database), among=[]) == []


def test_vectors_are_sent_as_pgvector_receives_them():
    from batchwright.ingest.spaces import binary_vector

    assert binary_vector(struct.pack("<2f", 1.0, -2.5)) == struct.pack(">HHff", 2, 0, 1.0, -2.5)
