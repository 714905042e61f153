"""Two runs over one document: an older version must not replace a newer one, and the inbox names a document once."""

from __future__ import annotations

import pytest

from batchwright.ingest.items import Wanted
from batchwright.states import ItemStatus, RunStatus
from tests.ingest.bench import remote
from tests.ingest.fake_provider import FakeProvider
from tests.ingest.stage import ingest_stage

LIVE = """
SELECT chunk.text FROM batchwright.ingest_document AS document
JOIN batchwright.ingest_chunk AS chunk ON chunk.version_id = document.live_version AND chunk.words IS NOT NULL
"""


@pytest.fixture
async def provider():
    async with FakeProvider() as provider:
        yield provider


@pytest.fixture
async def stage(database_url, tmp_path, provider):
    async with ingest_stage(database_url, tmp_path, **remote(provider, max_retries=0)) as stage:
        stage.work()
        yield stage


async def fail_once(stage, provider, text):
    """A run whose document is fetched and then fails at the provider."""
    stage.write("a.txt", text)
    provider.set(rates={"error": 1.0})
    run = await stage.run()
    assert (run.status, run.item_count_failed) == (RunStatus.COMPLETED_WITH_ERRORS, 1)
    provider.set(rates={})
    return run


@pytest.mark.parametrize("anew", [False, True])
async def test_a_retried_document_never_replaces_a_version_that_was_fetched_later(stage, provider, anew):
    old = await fail_once(stage, provider, "Anna found the old words.")
    stage.write("a.txt", "Berta found the new words.")
    await stage.succeed()
    if anew:
        stage.write("a.txt", "Clara found the newest words.")
    await stage.part.submission.retry(Wanted(), tenant=None, run_id=old.id, anew=anew)
    assert (await stage.ended(old.id)).status is RunStatus.COMPLETED
    assert (await stage.items(old.id))["a.txt"].status is ItemStatus.DONE
    expected = "Clara found the newest words." if anew else "Berta found the new words."
    assert [text for (text,) in await stage.rows(LIVE)] == [expected]
    stage.write("a.txt", "Berta found the new words.")
    assert (await stage.succeed()).item_count_total == 1
    assert [text for (text,) in await stage.rows(LIVE)] == ["Berta found the new words."]


async def test_the_inbox_names_a_document_once_however_many_runs_it_failed_in(stage, provider):
    old = await fail_once(stage, provider, "Anna.")
    new = await fail_once(stage, provider, "Anna.")
    (cause,) = await stage.part.items.inbox(None)
    assert (cause.count, cause.names) == (1, ["a.txt"])
    assert [one.count for one in await stage.part.items.inbox(None, run_id=old.id)] == [1]
    assert await stage.part.submission.retry(Wanted(), tenant=None) == {new.id: 1}
    assert (await stage.ended(new.id)).status is RunStatus.COMPLETED
    assert await stage.part.items.inbox(None) == []
    assert (await stage.items(old.id))["a.txt"].status is ItemStatus.FAILED


async def test_retrying_the_inbox_leaves_alone_what_was_dismissed_or_cancelled(stage, provider):
    run = await fail_once(stage, provider, "Anna.")
    assert await stage.part.items.dismiss(None, Wanted()) == 1
    stage.write("b.txt", "Berta.")
    provider.set(rates={"error": 1.0})
    both = await stage.run(collection="others")
    assert both.item_count_failed == 2
    failed = await stage.items(both.id)
    await stage.part.items.dismiss(None, Wanted([failed["a.txt"].id]))
    provider.set(rates={})
    assert await stage.part.submission.retry(Wanted(), tenant=None) == {both.id: 1}
    assert (await stage.ended(both.id)).item_count_failed == 1
    assert await stage.part.submission.retry(Wanted(), tenant=None, run_id=run.id) == {run.id: 1}
