"""A store is tested before it is used."""

import pytest

from batchwright.errors import StorageError
from batchwright.storage import StorageSettings, open_store
from batchwright.storage.probe import FOLDER, probe


async def test_a_good_store_is_left_as_it_was(store):
    await probe(store)
    assert [found.key async for found in store.list()] == []


@pytest.mark.parametrize("faults", [["", "", *["whole"] * 9], [503] * 9, ["", "", "", 403], ["", "", "", "", 403, 403]])
async def test_a_store_that_lacks_a_needed_feature_is_refused(s3, tmp_path, faults):
    """A store that ignores ranges, one that is down, one that does not list, and one that does not delete."""
    settings = StorageSettings(url=f"s3://{s3.bucket}", retry_seconds_max=0.0)
    bucket = open_store(settings, beside=tmp_path)
    s3.fail(*faults)
    with pytest.raises(StorageError) as caught:
        await probe(bucket)
    assert s3.bucket in str(caught.value)


async def test_a_store_that_answers_wrongly_is_named(folder, monkeypatch):
    async def another(*_):
        return b"?" * 100

    monkeypatch.setattr(folder._backend, "read", another)
    with pytest.raises(
        StorageError, match="does not serve ranges: bytes 100 to 200 of an object are not those that were written"
    ):
        await probe(folder)
    assert [found.key async for found in folder.list(FOLDER)] == []
