"""Checking the files of a batch against its manifest finds every change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from batchwright.batches.output.verify import verify
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batch
from batchwright.batches.submission import create, retry_of
from batchwright.db.check import Level
from batchwright.errors import Conflict
from tests.batches.stage import Stage, request, staged

LINES = [request("a"), request("b", prompt="[[fault:400]]"), request("c"), request("d")]


async def made(stage: Stage) -> Batch:
    stage.work()
    return await stage.ended(await stage.submit(LINES))


async def findings(stage: Stage, batch: Batch) -> dict[str, tuple[Level, str]]:
    return {one.name: (one.level, one.text) for one in await verify(stage.batchwright.part(BatchesPart).files, batch)}


def stored(folder: Path, file_id: str | None) -> Path:
    (path,) = (folder / "files").rglob(str(file_id))
    return path


def with_manifest(batch: Batch, **values: object) -> Batch:
    assert batch.manifest is not None
    return replace(batch, manifest={**batch.manifest, **values})


async def test_unchanged_files_agree_with_the_manifest(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        batch = await made(stage)
        found = await findings(stage, batch)
    assert [level for level, _ in found.values()] == [Level.OK] * 4
    assert found["output"][1].endswith(": 3 lines, SHA-256 as in the manifest")
    assert found["custom_ids"][1] == "all 4 of the input exactly once"


async def test_a_batch_that_repeats_another_has_only_its_failed_lines(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        first = await made(stage)
        batchwright = stage.batchwright
        new, _ = await create(
            batchwright.part(BatchesPart).batches, batchwright.catalog, retry_of(first, None), must_be_served=False
        )
        batchwright.doorbell.ring([new.queue])
        found = await findings(stage, await stage.ended(new.id))
    assert found["output"] == (Level.OK, "none, as the manifest says")
    assert found["custom_ids"] == (Level.OK, "all 1 of the failed lines exactly once")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("input", lambda data: data.replace(b'"a"', b'"x"')),
        ("output", lambda data: data.replace(b'"a"', b'"x"')),
        ("errors", lambda data: data + data),
    ],
)
async def test_a_changed_file_has_another_checksum(database_url, tmp_path, name: str, change: Callable[[bytes], bytes]):
    async with staged(database_url, tmp_path) as stage:
        batch = await made(stage)
        assert batch.manifest is not None
        path = stored(tmp_path, batch.manifest["files"][name])
        path.write_bytes(change(path.read_bytes()))
        level, text = (await findings(stage, batch))[name]
    assert level is Level.ERROR
    assert "and the manifest says" in text


async def test_wrong_counts_in_a_manifest_are_found(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        batch = await made(stage)
        assert batch.manifest is not None
        counts = {**batch.manifest["counts"], "completed": 2}
        found = await findings(stage, with_manifest(batch, counts=counts, lines=5))
    assert found["output"] == (Level.ERROR, f"{batch.output_file_id} has 3 lines, and the manifest says 2")
    assert found["custom_ids"] == (Level.ERROR, "there are 4, and the manifest says 5")


async def test_a_line_that_is_repeated_or_from_another_batch_is_found(database_url, tmp_path):
    """The checksums agree, as if we had written wrong files."""
    async with staged(database_url, tmp_path) as stage:
        batch = await made(stage)
        output = stored(tmp_path, batch.output_file_id)
        first, *rest = output.read_bytes().splitlines(keepends=True)
        output.write_bytes(b"".join([first, first, *rest[1:]]))
        assert (await findings(stage, batch))["custom_ids"] == (Level.ERROR, "1 occur more than once")
        output.write_bytes(b"".join([first.replace(b'"a"', b'"elsewhere"'), *rest]))
        found = await findings(stage, batch)
    assert found["custom_ids"] == (Level.ERROR, "1 of the input are in no file, and 1 are not from the input")


async def test_a_missing_file_cannot_be_checked_and_a_broken_one_is_reported(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        batch = await made(stage)
        await stage.batchwright.part(BatchesPart).files.delete(batch.input_file_id, tenant="default")
        found = await findings(stage, batch)
        assert found["input"] == (Level.WARNING, f"{batch.input_file_id} was deleted, and cannot be checked")
        assert found["custom_ids"] == (Level.OK, "all 4 exactly once; there is no input to compare with")
        stored(tmp_path, batch.error_file_id).write_bytes(b"oops\n")
        stored(tmp_path, batch.output_file_id).unlink()
        found = await findings(stage, batch)
    assert found["errors"][0] is Level.ERROR
    assert found["errors"][1].startswith(f"{batch.error_file_id} cannot be read: ")
    assert found["output"][1].startswith(f"{batch.output_file_id} cannot be read: there is no object")


async def test_a_byte_that_is_not_valid_text_is_reported(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        batch = await made(stage)
        for name, id in (("input", batch.input_file_id), ("output", batch.output_file_id)):
            file = stored(tmp_path, id)
            file.write_bytes(file.read_bytes().replace(b'"a"', b'"\xff"'))
            found = await findings(stage, batch)
            assert (found[name][0], found[name][1].partition(": ")[0]) == (Level.ERROR, f"{id} cannot be read")
    assert "custom_ids" not in found


async def test_a_file_that_the_manifest_counts_but_does_not_name_is_an_error(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        batch = await made(stage)
        assert batch.manifest is not None
        unnamed = {**batch.manifest["files"], "errors": None}
        found = await findings(stage, with_manifest(batch, files=unnamed))
    assert found["errors"] == (Level.ERROR, "there is no such file, and the manifest counts 1 lines in it")


async def test_without_a_manifest_there_is_nothing_to_verify(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit(LINES)
        with pytest.raises(Conflict, match=f"the batch {id} has no manifest: it is validating"):
            await verify(stage.batchwright.part(BatchesPart).files, await stage.get(id))
