"""Creating batches: input, idempotency keys, and retries."""

from __future__ import annotations

import hashlib

import pytest

from batchwright.batches.output.retries import follow_retries, merge_outputs
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import NewBatch
from batchwright.batches.submission import create, idempotency, retry_of, store_input
from batchwright.engine.metadata import check_metadata
from batchwright.errors import Conflict, InvalidInput, TooLarge
from tests.batches.stage import CHAT, request, staged


async def test_an_input_file_is_copied_and_not_linked(database_url, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"what it was\n")
    async with staged(database_url, tmp_path) as stage:
        batchwright = stage.batchwright
        file = await store_input(batchwright.part(BatchesPart).files, path, tenant="acme", bytes_max=100)
        path.write_bytes(b"what it is!\n")
        assert await batchwright.store.read(file.key, 0, 100) == b"what it was\n"
        assert (file.tenant, file.purpose, file.filename, file.bytes) == ("acme", "batch", "in.jsonl", 12)
        assert file.expires_at is not None


async def test_a_file_that_is_too_large_or_was_changed_leaves_nothing(database_url, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"what it is\n")
    async with staged(database_url, tmp_path) as stage:
        files = stage.batchwright.part(BatchesPart).files
        with pytest.raises(TooLarge, match="larger than 5 bytes"):
            await store_input(files, path, tenant="acme", bytes_max=5)
        with pytest.raises(Conflict, match=r"in\.jsonl changed while it was read"):
            await store_input(files, path, tenant="acme", bytes_max=100, sha256=hashlib.sha256(b"").hexdigest())
        assert await files.list("acme") == []
        assert [one async for one in files.store.list("files")] == []


async def test_a_new_batch_can_take_over_the_key_of_an_ended_batch_but_not_of_an_open_one(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        batches, catalog = stage.batchwright.part(BatchesPart).batches, stage.batchwright.catalog

        def new(file: str) -> NewBatch:
            key = idempotency("run", "k", {"same": True})
            return NewBatch(tenant="default", endpoint=CHAT, input_file_id=file, completion_window="24h", **key)

        first, _ = await create(batches, catalog, new(await stage.upload(b"oops\n")), must_be_served=False)
        second = new(first.input_file_id)
        same, is_new = await create(batches, catalog, second, must_be_served=False, instead_of=first.id)
        assert (same.id, is_new) == (first.id, False)
        stage.work()
        await stage.ended(first.id)
        made, is_new = await create(batches, catalog, second, must_be_served=False, instead_of=first.id)
        assert (made.id, is_new) == (second.id, True)
        known = await batches.find_repeated(new("file-0"))
        assert known is not None
        assert known.id == second.id


async def test_the_queues_of_a_private_batch_are_removed_when_it_has_ended(database_url, tmp_path):
    async with staged(database_url, tmp_path, worker={"queues": ["~mine", "batches"]}) as stage:
        stage.work()
        mine = await stage.ended(await stage.submit([request("a")], queue="~mine"))
        other = await stage.ended(await stage.submit([request("a")]))
        queues = stage.batchwright.named_queues.all
        assert set(await queues()) == {"~mine", "~mine/shard/small", "batches", "shard/small"}
        new = NewBatch(
            tenant="default", endpoint=CHAT, input_file_id=mine.input_file_id, completion_window="24h", queue="~mine"
        )
        for worker, _ in stage.workers:
            worker.stop()
        await create(stage.batchwright.part(BatchesPart).batches, stage.batchwright.catalog, new, must_be_served=False)
        assert await stage.batchwright.part(BatchesPart).batches.forget_queue(mine) == 0
        stage.work()
        await stage.ended(new.id)
        assert await stage.batchwright.part(BatchesPart).batches.forget_queue(mine) == 2
        assert set(await queues()) == {"batches", "shard/small"}
        assert not other.is_private


async def test_the_answers_of_a_batch_and_its_retries_are_merged_in_the_order_of_the_input(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        batchwright = stage.batchwright
        stage.work()
        stage.simulator.put_faults(["400:match=Say 2.", "400:match=Say 5.", "400:match=Say 7."])
        first = await stage.ended(await stage.submit([request(str(n)) for n in range(9)]))
        stage.simulator.put_faults(["400:match=Say 5."])
        second, _ = await create(
            batchwright.part(BatchesPart).batches, batchwright.catalog, retry_of(first, None), must_be_served=False
        )
        await stage.ended(second.id)
        stage.simulator.put_faults([])
        last = await stage.get(second.id)
        third, _ = await create(
            batchwright.part(BatchesPart).batches, batchwright.catalog, retry_of(last, None), must_be_served=False
        )
        family = await follow_retries(batchwright.part(BatchesPart).batches, await stage.ended(third.id))
        assert [one.id for one in family] == [third.id, second.id, first.id]
        data = b"".join([chunk async for chunk in merge_outputs(batchwright.part(BatchesPart).files, family)])
        single = b"".join([chunk async for chunk in merge_outputs(batchwright.part(BatchesPart).files, family[2:])])
        output, _ = await stage.results(first)
    assert [line.split(b'"')[7] for line in data.splitlines()] == [str(n).encode() for n in range(9)]
    assert len(single.splitlines()) == len(output) == 6


@pytest.mark.parametrize(
    "metadata",
    [{str(n): "" for n in range(17)}, {"": "x"}, {"n" * 65: "x"}, {"n": "x" * 513}, {"n": "\0"}],
    ids=["too many", "no name", "long name", "long value", "NUL"],
)
def test_metadata_has_limits(metadata: dict[str, str]):
    check_metadata({str(n): "x" * 512 for n in range(16)})
    with pytest.raises(InvalidInput, match="metadata"):
        check_metadata(metadata)


def test_an_idempotency_key_ignores_the_order_of_the_fields_of_the_body():
    assert idempotency("run", None, {"a": 1}) == {}
    one, same = idempotency("run", "k", {"a": 1, "b": 2}), idempotency("run", "k", {"b": 2, "a": 1})
    assert one == same
    assert one["idempotency_key"] == "run:k"
    assert one["idempotency_digest"] != idempotency("run", "k", {"a": 2, "b": 2})["idempotency_digest"]
