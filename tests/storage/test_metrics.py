"""Calls to the object store, counted with the labels of llm-d's batch gateway."""

import inspect
import re

import pytest

from batchwright.errors import StorageUnavailable
from batchwright.storage import StorageSettings, Store, metrics
from batchwright.storage import store as store_module
from batchwright.storage.local import Local
from batchwright.storage.metrics import STORAGE_METRIC, StorageCounts
from batchwright.telemetry.metrics import Counts, series


@pytest.fixture
def counts():
    return Counts([STORAGE_METRIC])


def operations(counts):
    return series(counts.flat())["file_storage_operations_total"]


async def test_calls_to_the_store_are_counted_with_the_labels_of_the_batch_gateway(counts, tmp_path):
    store = Store(Local(tmp_path), counts=StorageCounts(counts), component="apiserver")
    await store.put("a", b"x")
    await store.put("b", b"y")
    assert await store.read("a", 0, 1) == b"x"
    await store.delete("a")
    found = operations(counts)
    assert found[("store", "apiserver", "success")] == 2
    assert found[("retrieve", "apiserver", "success")] == 2, "one call for the size, and one for the only part"
    assert found[("delete", "apiserver", "success")] == 1
    assert sum(found.values()) == 5


async def test_a_store_that_does_not_answer_is_tried_again_until_it_is_exhausted(counts, tmp_path, monkeypatch):
    async def away(*_):
        raise StorageUnavailable("away")

    async def no_pause(_):
        pass

    backend = Local(tmp_path)
    monkeypatch.setattr(backend, "delete", away)
    settings = StorageSettings(attempts=3)
    store = Store(backend, settings, counts=StorageCounts(counts), component="garbage-collector", pause=no_pause)
    with pytest.raises(StorageUnavailable):
        await store.delete("a")
    assert operations(counts) == {
        ("delete", "garbage-collector", "retry"): 2,
        ("delete", "garbage-collector", "exhausted"): 1,
    }


def test_every_call_of_the_store_has_a_label_of_the_batch_gateway():
    calls = set(re.findall(r'_retry\(\s*"(\w+)"', inspect.getsource(store_module)))
    assert len(calls) >= 6
    assert calls == metrics._OPERATIONS.keys()
    assert {*metrics._OPERATIONS.values()} == {"store", "retrieve", "delete"}
