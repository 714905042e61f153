"""Collections: what they hold, their export, and their end."""

from __future__ import annotations

import asyncio
import io

import orjson
import psycopg
import pytest

from batchwright.db.database import connect_arguments
from batchwright.errors import Conflict, NotFound
from batchwright.ingest.collections import SQL
from batchwright.ingest.export import write_jsonl, write_parquet
from tests.engine.planning import nodes, plan
from tests.ingest.stored import Meanings, Shelf
from tests.support import DATABASE


async def fill(
    shelf: Shelf, name: str = "papers", documents: int = 3, chunks: int = 4, *, tenant: str = "default"
) -> int:
    collection = await shelf.collection(name, tenant=tenant)
    space = await shelf.space(collection)
    for n in range(documents):
        given = [f"document {n} chunk {m}" for m in range(chunks)]
        _, version = await shelf.put(collection, f"{n}.txt", *given, space=space, metadata={"n": str(n)}, section=["S"])
        await shelf.mention(version, "person", "Ada")
    return collection


async def exported(shelf: Shelf, name: str = "papers", **options) -> list[dict]:
    return [row async for row in shelf.export.rows("default", name, **options)]


class TestSizes:
    """The size and contents of a collection."""

    async def test_a_collection_is_shown_with_its_size(self, shelf):
        collection = await fill(shelf)
        shown = await shelf.collections.get("default", "papers")
        assert (shown.id, shown.name, shown.language) == (collection, "papers", "english")
        assert (shown.documents, shown.chunks, shown.text_bytes, shown.is_more) == (3, 12, 12 * 18, False)
        (space,) = shown.spaces
        assert (space.model, space.dimensions, space.has_table) == ("meanings", 32, await shelf.spaces.has_pgvector())
        assert shown.updated_at is not None

    async def test_an_empty_collection_has_nothing(self, shelf):
        await shelf.collection()
        shown = await shelf.collections.get("default", "papers")
        assert (shown.documents, shown.chunks, shown.spaces, shown.updated_at) == (0, 0, [], None)

    async def test_a_new_version_takes_the_place_of_the_old_one_in_the_sums(self, shelf):
        collection = await shelf.collection()
        document, _ = await shelf.put(collection, "a.txt", "one", "two", "three")
        version = await shelf.stage(document, ["four"])
        assert (await shelf.collections.get("default", "papers")).chunks == 3
        async with shelf.database.transaction() as session:
            await shelf.publish(version, None, session)
        assert (await shelf.collections.get("default", "papers")).chunks == 1

    async def test_collections_are_listed_by_name_and_tenant(self, shelf):
        for name in ("c", "a", "b"):
            await shelf.collection(name)
        await shelf.collection("foreign", tenant="other")
        first = await shelf.collections.page("default", limit=2)
        rest = await shelf.collections.page("default", limit=2, after=first[-1].name)
        assert [one.name for one in first + rest] == ["a", "b", "c"]

    async def test_counts_are_limited_and_say_so(self, shelf, monkeypatch):
        monkeypatch.setattr("batchwright.ingest.collections._COUNTED_MAX", 2)
        await fill(shelf)
        shown = await shelf.collections.get("default", "papers")
        assert (shown.documents, shown.is_more) == (2, True)

    async def test_documents_and_chunks_come_in_pages(self, shelf):
        await fill(shelf, documents=5, chunks=3)
        first = await shelf.collections.documents("default", "papers", limit=3)
        rest = await shelf.collections.documents("default", "papers", limit=3, after=first[-1].id)
        assert [one.name for one in first + rest] == [f"{n}.txt" for n in range(5)]
        assert (first[0].chunks, first[0].metadata) == (3, {"n": "0"})
        chunks = await shelf.collections.chunks("default", "papers", first[0].id, limit=2)
        chunks += await shelf.collections.chunks("default", "papers", first[0].id, after=chunks[-1].number)
        assert [(one.number, one.text) for one in chunks] == [(n, f"document 0 chunk {n}") for n in range(3)]

    async def test_collections_of_another_tenant_are_not_found(self, shelf):
        await fill(shelf, tenant="other")
        (document,) = await shelf.collections.documents("other", "papers", limit=1)
        await shelf.collection("papers")
        for asked in (shelf.collections.document, shelf.collections.chunks, shelf.collections.retire):
            with pytest.raises(NotFound, match="no document"):
                await asked("default", "papers", document.id)
        for asked in (shelf.collections.get, shelf.collections.delete, shelf.collections.documents):
            with pytest.raises(NotFound, match="no collection"):
                await asked("nobody", "papers")


class TestEnds:
    """Deleting and retiring."""

    async def test_a_deleted_collection_is_gone_at_once_and_its_name_is_free(self, shelf):
        await fill(shelf)
        await shelf.collections.delete("default", "papers")
        with pytest.raises(NotFound):
            await shelf.search.search("default", "papers", "chunk")
        assert await shelf.collections.page("default") == []
        await fill(shelf, documents=1)
        assert (await shelf.collections.get("default", "papers")).documents == 1

    @pytest.mark.parametrize("limit", [1, 5, 1000])
    async def test_upkeep_removes_all_of_it_and_nothing_else(self, shelf, limit):
        await fill(shelf)
        kept = await fill(shelf, "kept", documents=2)
        await shelf.collections.delete("default", "papers")
        turns = 1
        while await shelf.collections.remove_deleted(limit):
            turns += 1
            assert turns < 100
        counts = [
            await shelf.count(f"ingest_{name}") for name in ("collection", "document", "version", "chunk", "mention")
        ]
        assert counts == [1, 2, 2, 8, 8]
        (space,) = await shelf.spaces.of(kept)
        tables = await shelf.database.rows(
            "SELECT relname FROM pg_class WHERE relname LIKE 'ingest\\_vectors\\_%' AND relkind = 'r'"
        )
        assert tables == ([(f"ingest_vectors_{space.id}",)] if space.has_table else [])
        assert await shelf.count("ingest_vector") == (0 if space.has_table else 8)
        assert len(await exported(shelf, "kept", with_vectors=True)) == 8

    async def test_upkeep_with_nothing_to_do_does_nothing(self, shelf):
        await fill(shelf)
        assert not await shelf.collections.remove_deleted()
        assert await shelf.count("ingest_chunk") == 12

    async def test_a_collection_with_an_open_run_cannot_be_deleted_and_the_run_is_named(self, shelf):
        run = await shelf.open_run(await fill(shelf))
        with pytest.raises(Conflict, match=run) as caught:
            await shelf.collections.delete("default", "papers")
        assert caught.value.holder == run
        assert (await shelf.collections.get("default", "papers")).documents == 3

    async def test_while_its_runs_are_kept_a_deleted_collection_keeps_its_row_but_no_contents(self, shelf):
        collection = await fill(shelf)
        run = await shelf.open_run(collection)
        await shelf.database.ask(
            "UPDATE batchwright.ingest_run SET status = 'CANCELLED', ended_at = now() WHERE id = %(id)s", {"id": run}
        )
        await shelf.collections.delete("default", "papers")
        while await shelf.collections.remove_deleted():
            pass
        assert [await shelf.count("ingest_collection"), await shelf.count("ingest_chunk")] == [1, 0]
        await shelf.database.rows("DELETE FROM batchwright.ingest_run")
        assert not await shelf.collections.remove_deleted()
        assert await shelf.count("ingest_collection") == 0

    async def test_a_run_that_begins_meanwhile_is_seen(self, shelf):
        collection = await fill(shelf)
        async with shelf.database.transaction() as session:
            await session.rows("SELECT id FROM batchwright.ingest_collection FOR KEY SHARE")
            deleting = asyncio.create_task(shelf.collections.delete("default", "papers"))
            await asyncio.wait([deleting], timeout=0.05)
            assert not deleting.done()
            await shelf.open_run(collection)
        with pytest.raises(Conflict):
            await deleting

    async def test_a_document_is_retired_by_hand_once(self, shelf):
        await fill(shelf)
        document = (await shelf.collections.documents("default", "papers"))[1]
        await shelf.collections.retire("default", "papers", document.id)
        found = await shelf.search.search("default", "papers", "document chunk", limit=100)
        assert {hit.name for hit in found.hits} == {"0.txt", "2.txt"}
        assert (await shelf.collections.get("default", "papers")).documents == 2
        with pytest.raises(Conflict, match="already retired"):
            await shelf.collections.retire("default", "papers", document.id)


class TestExport:
    """All live chunks as rows."""

    async def test_each_live_chunk_is_a_row_with_its_vector(self, shelf):
        collection = await fill(shelf)
        document, _ = await shelf.put(collection, "new.txt", "old text", space=await shelf.space(collection))
        version = await shelf.stage(document, ["new text"])
        async with shelf.database.transaction() as session:
            await shelf.publish(version, await shelf.space(collection), session)
        rows = await exported(shelf, with_vectors=True)
        assert [row["text"] for row in rows] == [f"document {n} chunk {m}" for n in range(3) for m in range(4)] + [
            "new text"
        ]
        first = rows[0]
        assert (first["collection"], first["source"], first["name"]) == ("papers", "0.txt", "0.txt")
        assert (first["page_first"], first["section"], first["metadata"]) == (1, ["S"], {"n": "0"})
        assert first["entities"] == [{"type": "person", "text": "Ada", "char_start": 0, "char_end": 1}]
        assert first["model"] == "meanings"
        expected = memoryview(Meanings().embed("document 0 chunk 0")).cast("f").tolist()
        assert first["vector"] == pytest.approx(expected)
        assert "vector" not in (await exported(shelf))[0]

    async def test_pages_of_any_size_give_the_same_rows(self, shelf, monkeypatch):
        collection = await shelf.collection()
        sizes = [1, 7, 2, 2, 3, 12, 1, 1, 1, 5]
        for n, size in enumerate(sizes):
            await shelf.put(collection, f"{n}.txt", *(f"{n}/{m}" for m in range(size)))
        expected = [f"{n}/{m}" for n, size in enumerate(sizes) for m in range(size)]
        for page in (1, 2, 3, 5, 500):
            monkeypatch.setattr("batchwright.ingest.export._PAGE", page)
            assert [row["text"] for row in await exported(shelf)] == expected

    async def test_an_export_can_resume_after_a_document(self, shelf):
        await fill(shelf)
        rows = await exported(shelf)
        assert await exported(shelf, after=rows[3]["document_id"]) == rows[4:]

    async def test_a_document_that_changes_during_an_export_is_exported_in_one_version(self, shelf, monkeypatch):
        monkeypatch.setattr("batchwright.ingest.export._PAGE", 2)
        collection = await shelf.collection()
        document, _ = await shelf.put(collection, "a.txt", *(f"old {n}" for n in range(5)))
        seen = []
        async for row in shelf.export.rows("default", "papers"):
            if not seen:
                version = await shelf.stage(document, [f"new {n}" for n in range(5)])
                async with shelf.database.transaction() as session:
                    await shelf.publish(version, None, session)
            seen.append(row["text"])
        assert seen == [f"old {n}" for n in range(5)]

    async def test_json_lines_and_parquet_hold_the_same(self, shelf, monkeypatch):
        parquet = pytest.importorskip("pyarrow.parquet")
        monkeypatch.setattr("batchwright.ingest.export._ROW_GROUP", 5)
        await fill(shelf)
        lines, file = io.BytesIO(), io.BytesIO()
        assert await write_jsonl(shelf.export.rows("default", "papers", with_vectors=True), lines) == 12
        rows = shelf.export.rows("default", "papers", with_vectors=True)
        assert await write_parquet(rows, file, with_vectors=True) == 12
        table = parquet.read_table(file)
        assert parquet.ParquetFile(file).num_row_groups == 3
        expected = [orjson.loads(line) for line in lines.getvalue().splitlines()]
        found = [{**row, "metadata": orjson.loads(row["metadata"])} for row in table.to_pylist()]
        for one, other in zip(found, expected, strict=True):
            assert one.pop("vector") == pytest.approx(other.pop("vector"))
            assert one == other

    async def test_a_collection_without_documents_is_an_empty_file(self, shelf):
        await shelf.collection()
        assert await exported(shelf) == []
        with pytest.raises(NotFound):
            await exported(shelf, "missing")


async def test_the_sizes_of_a_large_collection_are_added_up_from_an_index_alone(shelf, database_url):
    collection = await shelf.collection()
    await shelf.database.ask(
        "WITH documents AS (INSERT INTO batchwright.ingest_document "
        "(collection_id, source, name, created_at, updated_at) "
        "SELECT %(id)s, n::text, n::text, now(), now() FROM generate_series(1, 5000) AS n RETURNING id) "
        "INSERT INTO batchwright.ingest_version "
        "(document_id, collection_id, item_id, generation, state, recipe, sha256, steps, "
        "chunk_count, text_bytes, created_at) "
        "SELECT id, %(id)s, id::text, 1, 'live', '', '', to_jsonb(repeat('x', 1000)), 20, 30000, now() FROM documents",
        {"id": collection},
    )
    await shelf.database.rows("VACUUM ANALYZE batchwright.ingest_version")
    await fill(shelf, "other")
    shown = await shelf.collections.get("default", "papers")
    assert (shown.documents, shown.chunks, shown.text_bytes) == (5_000, 100_000, 150_000_000)
    with psycopg.connect(database_url, **connect_arguments(DATABASE)) as connection:
        asked = {"tenant": "default", "after": "", "limit": 50, "counted": 100_000}
        found = plan(connection, "list", source=SQL, run=True, **asked)
    used = {node["Index Name"]: node for node in nodes(found) if "Index Name" in node}
    assert used["ingest_version_live_sizes"]["Node Type"] == "Index Only Scan"
