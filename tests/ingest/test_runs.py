"""Whole runs over folders of documents."""

import pytest

from batchwright.states import ItemStatus, RunStatus
from tests.ingest.documents import make_pdf
from tests.ingest.stage import ingest_stage

STEPS = [
    "FETCHED",
    "CONTENT_EXTRACTED",
    "CHUNKED",
    "EMBEDDED",
    "ENTITY_EXTRACTED",
    "PERSISTED",
    "INDEXED",
]


@pytest.fixture
async def stage(database_url, tmp_path):
    async with ingest_stage(database_url, tmp_path) as stage:
        yield stage


async def test_a_folder_goes_through_every_step(stage):
    stage.write("a.md", "# Whales\n\nWhales are mammals. Write to whale@example.com.")
    stage.write("sub/b.txt", "Trees grow slowly in the north.")
    stage.write("c.pdf", make_pdf(["The first page is about ships.", "The second page is about harbours."]))
    stage.work()
    run = await stage.succeed()
    assert run.status is RunStatus.COMPLETED
    assert (run.item_count_total, run.item_count_done) == (3, 3)
    items = await stage.items(run.id)
    assert {item.status for item in items.values()} == {ItemStatus.DONE}
    for item in items.values():
        events = await stage.step_events(item)
        assert sorted(step for event, step in events if event == "step_completed") == sorted(STEPS)
        assert events.index(("step_completed", "CONTENT_EXTRACTED")) < events.index(("step_started", "EMBEDDED"))
    ((chunks, live),) = await stage.rows(
        "SELECT count(*), count(words) FROM batchwright.ingest_chunk WHERE collection_id = %(id)s", id=run.collection_id
    )
    assert chunks == live >= 3
    assert await stage.rows("SELECT text FROM batchwright.ingest_mention WHERE type = 'email'") == [
        ("whale@example.com",)
    ]


async def test_a_second_run_over_unchanged_files_does_nothing(stage):
    for number in range(5):
        stage.write(f"{number}.txt", f"Document number {number} speaks of rivers.")
    stage.work()
    await stage.succeed()
    again = await stage.succeed()
    assert (again.status, again.item_count_unchanged, again.item_count_done) == (RunStatus.COMPLETED, 5, 0)
    for item in (await stage.items(again.id)).values():
        assert await stage.events(item) == []
