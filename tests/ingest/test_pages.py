"""Documents in a browser: runs as a funnel, items with timelines, the inbox, collections, and search in context."""

from __future__ import annotations

from decimal import Decimal

import pytest
from playwright.async_api import expect

from batchwright.ingest.pages_search import in_context
from batchwright.ingest.search import Hit
from batchwright.states import RunStatus
from tests.batches.browser import browsing, check_access
from tests.batches.test_pages import look, signed_in, token_of
from tests.ingest.stage import ingest_stage


@pytest.mark.thorough
async def test_a_run_is_shown_as_a_funnel_and_search_shows_hits_in_context(database_url, tmp_path):
    async with ingest_stage(database_url, tmp_path) as stage:
        server = await stage.batchwright.server()
        server.start()
        try:
            stage.work()
            stage.write("whales.txt", "The blue whale is the largest animal.\n\nIt eats krill <b>all day</b>.")
            stage.write("ants.txt", "Ants live in colonies and carry leaves.")
            stage.write("broken.pdf", b"%PDF-1.4 nothing of a document")
            run = await stage.ended(await stage.submit(budget=Decimal("1.5")))
            assert run.status is RunStatus.COMPLETED_WITH_ERRORS
            async with browsing(server.url) as seen:
                page = await seen.page()
                await look(page, "/ui/documents")
                await look(page, f"/ui/documents/runs/{run.id}")
                funnel = page.locator("#live_funnel tr")
                await expect(funnel.filter(has_text="Fetched")).to_contain_text("3")
                await expect(funnel.filter(has_text="Content extracted")).to_contain_text("2")
                await expect(page.locator("#live_money")).to_contain_text("US$ 1.50")
                await expect(page.locator("#live_causes tbody tr")).to_have_count(1)
                await page.get_by_role("link", name="broken.pdf").click()
                await expect(page.get_by_role("heading", name="Timeline")).to_be_visible()
                await check_access(page)
                await look(page, "/ui/documents/inbox")
                await page.get_by_role("button", name="Retry all").click()
                await page.get_by_role("dialog").get_by_role("button", name="Retry all").click()
                await expect(page.get_by_text("1 documents are retried.")).to_be_visible()
                await stage.ended(run.id)
                await page.goto("/ui/documents")
                await page.get_by_label("Words to find in papers").fill("largest whale")
                await page.get_by_role("button", name="Search").click()
                await expect(page.locator("mark").first).to_be_visible()
                await expect(page.get_by_text("It eats krill <b>all day</b>.")).to_be_visible()
                await check_access(page)
                await page.get_by_role("link", name="whales.txt").first.click()
                await expect(page.get_by_text("The blue whale is the largest animal.")).to_be_visible()
                await check_access(page)
                await look(page, "/ui/documents/collections/papers")
                await page.goto(f"/ui/documents/runs/{run.id}")
                await page.get_by_role("button", name="Retry 1 failed").click()
                await expect(page.get_by_text("1 documents are retried.")).to_be_visible()
            await stage.ended(run.id)
            await _check_scopes(stage, server.url, run.id)
        finally:
            await server.close()


async def _check_scopes(stage, url, run_id):
    (item,) = [one.id for one in (await stage.items(run_id)).values() if one.status.value == "FAILED"]
    async with (
        signed_in(stage, url, "read") as reader,
        signed_in(stage, url, "read", "submit", "operate", tenant="other") as stranger,
        signed_in(stage, url, "read", "submit") as submitter,
    ):
        for path in (f"/ui/documents/runs/{run_id}", f"/ui/documents/items/{item}", "/ui/documents/collections/papers"):
            assert (await reader.get(path)).status_code == 200
            assert (await stranger.get(path)).status_code == 404
        verbs = (f"runs/{run_id}/park", f"runs/{run_id}/cancel", f"items/{item}/dismiss")
        for client, statuses in ((reader, {403}), (stranger, {404}), (submitter, {303, 409})):
            form = {"csrf": token_of((await client.get("/ui/documents")).text)}
            for verb in verbs:
                answer = await client.post(f"/ui/documents/{verb}", data=form)
                assert answer.status_code in statuses, verb
        form = {"csrf": token_of((await submitter.get("/ui/documents")).text), "budget": "much"}
        assert (await submitter.post(f"/ui/documents/runs/{run_id}/resume", data=form)).status_code == 400
        assert (await submitter.post("/ui/documents/inbox/retry", data=form)).status_code == 403
        assert (await reader.get(f"/ui/documents/runs/{run_id}?status=odd")).status_code == 400


def test_hits_are_marked_and_everything_else_is_escaped():
    values = dict.fromkeys(Hit.__dataclass_fields__)
    hit = Hit(**{**values, "text": "a <b> whale & a whale", "marks": [(6, 11), (16, 21), (7, 9)]})
    assert in_context(hit) == "a &lt;b&gt; <mark>whale</mark> &amp; a <mark>whale</mark>"
