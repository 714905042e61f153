"""Parquet in and out."""

import io
import sys

import pyarrow
import pyarrow.parquet
import pytest

from batchwright.errors import JobFailed
from batchwright.ingest.embeddings import columns
from tests.ingest.embeddings.stage import embedding_stage, jsonl, near, rows


@pytest.fixture
async def idle(database_url, tmp_path):
    """A stage without workers."""
    async with embedding_stage(database_url, tmp_path) as stage:
        yield stage


@pytest.fixture
async def stage(idle):
    idle.work()
    return idle


def parquet(table, **options):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table), file, **options)
    return file.getvalue()


async def test_row_groups_are_read_in_batches_and_in_order(stage):
    table = {"other": [0.5] * 2500, "id": list(range(2500)), "text": [f"text {n}" for n in range(2500)]}
    result = await stage.run(parquet(table, row_group_size=1000), batch_size=300)
    found = await stage.lines(result["file_id"])
    assert [line["id"] for line in found] == list(range(2500))
    assert all(near(found[n]["embedding"], f"text {n}") for n in (0, 299, 300, 999, 1000, 1299, 2499))


async def test_columns_without_text_or_id_are_bad_rows_or_numbered(stage):
    table = {"body": ["a", None, " ", "b"]}
    result = await stage.run(parquet(table), text_field="body")
    assert [line["id"] for line in await stage.lines(result["file_id"])] == [1, 4]
    assert [(one["row"], one["code"]) for one in await stage.lines(result["errors_file_id"])] == [
        (2, "no_text"),
        (3, "no_text"),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (parquet({"a": ["x"]}), r"has no column 'text' \(text_field\); it has a"),
        (parquet({"text": ["x"]})[:-20], "cannot be read"),
        (parquet({"text": pyarrow.array([], pyarrow.string())}), "empty_source"),
    ],
)
async def test_a_file_that_cannot_be_used_says_why(stage, data, message):
    id = await stage.submit(data)
    with pytest.raises(JobFailed, match=message):
        await stage.batchwright.wait(id, timeout=30)


async def test_a_row_group_that_unpacks_to_too_much_is_refused(stage, monkeypatch):
    monkeypatch.setattr(columns, "GROUP_BYTES_MAX", 1000)
    id = await stage.submit(parquet({"text": ["x" * 5000]}))
    with pytest.raises(JobFailed, match="children did not succeed"):
        await stage.batchwright.wait(id, timeout=30)
    (child,) = await stage.children(id)
    assert child.error["code"] == "row_group_too_large"
    assert "smaller row groups" in child.error["message"]


async def test_the_result_can_be_parquet(stage):
    result = await stage.run(jsonl(*rows(50)), output="parquet", batch_size=20)
    table = await stage.table(result["file_id"])
    assert table.schema.names == ["id", "embedding"]
    assert table.column("id").to_pylist() == [f"row-{n}" for n in range(50)]
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), 256)
    assert near(table.column("embedding").to_pylist()[33], "text number 33")


async def test_ids_are_numbers_as_long_as_all_of_them_are(stage):
    numbers = await stage.run(jsonl(*({"id": n, "text": "x"} for n in range(4))), output="parquet", batch_size=2)
    assert (await stage.table(numbers["file_id"])).column("id").to_pylist() == [0, 1, 2, 3]
    given = [{"id": 1, "text": "x"}, {"id": 2, "text": "x"}, {"id": "three", "text": "x"}]
    mixed = await stage.run(jsonl(*given), output="parquet", batch_size=2)
    assert (await stage.table(mixed["file_id"])).column("id").to_pylist() == ["1", "2", "three"]


async def test_without_pyarrow_the_error_names_the_extra(idle, monkeypatch):
    stage = idle
    id = await stage.submit(parquet({"text": ["x"]}))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    stage.work()
    with pytest.raises(JobFailed, match=r"library_missing: Parquet files need pyarrow: pip install 'batchwright\[par"):
        await stage.batchwright.wait(id, timeout=30)
