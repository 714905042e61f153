"""Tasks in a browser: the list, a task with a row per job, its result, and who may see it."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from batchwright.states import TaskStatus
from tests.batches.browser import browsing, check_access
from tests.batches.test_pages import look, signed_in, token_of
from tests.providers.task_stage import task_stage


@pytest.fixture
async def stage(database_url, tmp_path):
    async with task_stage(database_url, tmp_path) as stage:
        yield stage


@pytest.mark.thorough
async def test_a_task_is_shown_with_a_row_for_each_job_and_its_result_is_downloaded(stage):
    server = await stage.batchwright.server()
    server.start()
    try:
        stage.work()
        models = ["openai/gpt-5-mini", "mistral/small"]
        task = await stage.ended(await stage.complete(models, "a", "fail", "b"))
        assert task.status is TaskStatus.PARTIAL_COMPLETE
        async with browsing(server.url) as seen:
            page = await seen.page()
            await look(page, "/ui/tasks")
            await page.get_by_role("table").get_by_role("link").first.click()
            await check_access(page)
            jobs = page.locator("#live_jobs tbody tr")
            await expect(jobs).to_have_count(2)
            await expect(jobs.nth(0)).to_contain_text("openai/gpt-5-mini")
            await expect(page.locator("#live_status")).to_contain_text("partial complete")
            async with page.expect_download() as downloading:
                await page.get_by_role("link", name="Download result").click()
            path = await (await downloading.value).path()
            assert len(path.read_bytes().splitlines()) == 6
            await look(page, "/ui/tasks/providers")
            await expect(page.get_by_role("rowheader", name="openai").first).to_be_visible()
            await look(page, "/ui/tasks?status=failed")
            await expect(page.get_by_text("No such tasks")).to_be_visible()

        waiting = await stage.complete(["openai/gpt-5-mini"], "c")
        async with (
            signed_in(stage, server.url, "read") as reader,
            signed_in(stage, server.url, "read", "submit", tenant="other") as stranger,
            signed_in(stage, server.url, "read", "submit") as submitter,
        ):
            for path in (f"/ui/tasks/{task.id}", f"/ui/tasks/{task.id}/download"):
                assert (await reader.get(path)).status_code == 200
                assert (await stranger.get(path)).status_code == 404
            for client, status in ((reader, 403), (stranger, 404), (submitter, 303)):
                form = {"csrf": token_of((await client.get("/ui/tasks")).text)}
                answer = await client.post(f"/ui/tasks/{waiting}/cancel", data=form)
                assert answer.status_code == status
            assert (await reader.get("/ui/tasks?status=odd")).status_code == 400
    finally:
        await server.close()
