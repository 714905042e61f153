"""Batches in a browser: upload, check, start, watch, pause, read and retry, with keys of all kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from playwright.async_api import Page, expect

from batchwright.access.keys import Scope
from batchwright.batches import store
from batchwright.batches.drawing import gist, prompt_of
from batchwright.batches.part import BatchesPart
from batchwright.simulator import Profile, SimulatorSettings
from tests.batches.browser import browsing, check_access, drop
from tests.batches.stage import Stage, jsonl, request, staged
from tests.web.conftest import form_in

SLOWLY = SimulatorSettings(any_model=Profile(decode_rate=8.0, output_sigma=0.0))
PRICES = {"prices": {"*": {"input": 1.0, "output": 2.0}}}


@asynccontextmanager
async def served(database_url: str, folder: Any, **parts: Any) -> AsyncIterator[tuple[Stage, str]]:
    parts = {"batches": {"checkpoint_seconds": 0.1, **PRICES}, **parts}
    async with staged(database_url, folder, **parts) as stage:
        server = await stage.batchwright.server()
        server.start()
        try:
            yield stage, server.url
        finally:
            await server.close()


def text(lines: list[Any]) -> str:
    return jsonl(lines).decode()


async def look(page: Page, path: str) -> None:
    answer = await page.goto(path)
    assert answer is not None
    assert answer.status == 200, path
    assert len(await answer.body()) <= 100_000
    await check_access(page)


async def test_a_dropped_file_is_checked_started_read_and_its_failed_lines_retried(database_url, tmp_path):
    lines = [request(f"line-{n}", model=("small", "large")[n % 2], prompt="Say something.") for n in range(20)]
    lines.append(request("doomed", max_tokens=-1))
    async with served(database_url, tmp_path) as (stage, url), browsing(url) as seen:
        stage.work()
        page = await seen.page(color_scheme="dark")
        await look(page, "/ui/batches")
        await page.get_by_role("link", name="New batch").first.click()
        await check_access(page)

        await drop(page, "broken.jsonl", "no json\n" + text([request("twice"), request("twice")]))
        await expect(page.get_by_text("2 problems in 3 requests:")).to_be_visible()
        rows = page.get_by_role("row")
        await expect(rows.nth(1)).to_contain_text("1This line is not parseable as valid JSON.")
        await expect(rows.nth(2)).to_contain_text("3")
        assert await page.get_by_role("button", name="Start").count() == 0

        await page.get_by_role("link", name="Choose another file").click()
        await drop(page, "good.jsonl", text(lines))
        await expect(page.get_by_text("This file can be run.")).to_be_visible()
        await expect(page.get_by_text("about US$")).to_be_visible()
        await check_access(page)
        await page.get_by_label("Window").fill("1y")
        await page.get_by_role("button", name="Start 21 requests").click()
        await expect(page.get_by_role("alert")).to_contain_text("Invalid value: '1y'")
        seen.forgive(400)
        await page.get_by_label("Window").fill("2h")
        await page.get_by_label("Note").fill("from a test")
        await page.get_by_role("button", name="Start 21 requests").click()

        await expect(page.get_by_text("The batch has started.")).to_be_visible()
        await page.evaluate("window.sameDocument = true")
        await expect(page.locator("#live_status")).to_contain_text("completed")
        assert await page.evaluate("window.sameDocument"), "the page is updated without a reload"
        await expect(page.locator("#live_errors")).to_contain_text("invalid_request_error")
        await expect(page.locator("#live_progress")).to_contain_text("large")
        await expect(page.get_by_text("from a test")).to_be_visible()
        await check_access(page)
        batch = page.url

        await page.get_by_role("link", name="doomed").click()
        await expect(page.get_by_text("max_tokens is -1").first).to_be_visible()
        await page.goto(batch)
        await page.get_by_label("custom_id contains").fill("line-7")
        await page.get_by_role("button", name="Find").click()
        await page.get_by_role("link", name="line-7").click()
        await expect(page.get_by_text("user: Say something.")).to_be_visible()
        await expect(page.get_by_text("answered", exact=True)).to_be_visible()
        await page.goto(batch)
        await page.get_by_role("link", name="Show all answers").click()
        await expect(page.get_by_role("link", name="line-19")).to_be_visible()
        await page.goto(batch)
        await page.get_by_role("link", name="Counts and checksums").click()
        await page.get_by_role("link", name="Check the files now").click()
        await expect(page.get_by_role("row")).to_have_count(5)
        await page.goto(batch)
        async with page.expect_download() as downloading:
            await page.get_by_role("link", name="Download output").click()
        path = await (await downloading.value).path()
        assert len(path.read_bytes().splitlines()) == 20

        await page.get_by_role("button", name="Retry 1 failed").click()
        await expect(page.get_by_text("A new batch sends the failed lines again.")).to_be_visible()
        await expect(page.locator("#live_status")).to_contain_text("completed")
        await expect(page.locator("#live_facts")).to_contain_text("Retry of")
        await expect(page.locator("#live_stats")).to_contain_text("of 1 requests")
        await page.goto("/ui/batches")
        await expect(page.get_by_role("row")).to_have_count(3)


@pytest.mark.thorough
async def test_a_running_batch_can_be_paused_resumed_changed_and_read_also_without_javascript(
    database_url, tmp_path, monkeypatch
):
    monkeypatch.setattr(store, "SMALL_MAX", 2)
    async with served(database_url, tmp_path, simulator=SLOWLY) as (stage, url), browsing(url) as seen:
        stage.work()
        plain = await seen.page(java_script_enabled=False, viewport={"width": 390, "height": 800})
        await plain.goto("/ui/batches/new")
        file = {"name": "in.jsonl", "mimeType": "application/jsonl"}
        data = jsonl([request(f"r{n}", max_tokens=8) for n in range(400)])
        await plain.get_by_label("Or choose one").set_input_files({**file, "buffer": data})
        await plain.get_by_role("button", name="Check the file").click()
        await plain.get_by_role("button", name="Start 400 requests").click()
        await expect(plain.get_by_text("The batch has started.")).to_be_visible()
        id = plain.url.rpartition("/")[2]

        page = await seen.page()
        await page.goto(f"/ui/batches/{id}")
        await expect(page.locator("#live_status")).to_contain_text("in progress")
        await page.get_by_role("button", name="Pause").click()
        await expect(page.locator("#live_notices")).to_contain_text("Paused")
        await check_access(page)
        await plain.goto(f"/ui/batches/{id}")
        await expect(plain.locator("#live_status")).to_contain_text("paused")
        await plain.get_by_role("button", name="Resume").click()
        await expect(plain.get_by_text("Resumed.")).to_be_visible()
        await expect(page.locator("#live_status")).to_contain_text("in progress")

        await page.get_by_label("Priority, 0 is first").fill("2")
        await page.get_by_role("button", name="Set priority").click()
        await expect(page.get_by_text("The priority is 2 now.")).to_be_visible()
        await page.get_by_label("Requests in flight per process").fill("3")
        await page.get_by_role("button", name="Set limit").click()
        await expect(page.locator("#live_facts")).to_contain_text("at most 3 per process")
        await stage.until(id, lambda batch: batch.completed > 0)
        await page.goto(f"/ui/batches/{id}/lines")
        await expect(page.locator("#live_lines")).to_contain_text("answered")

        await page.goto(f"/ui/batches/{id}")
        await expect(page.locator("#live_charts svg").first).to_be_visible()
        await expect(page.get_by_role("heading", name="Requests in flight and their limit")).to_be_visible()
        await page.get_by_role("button", name="Cancel").click()
        await page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        await expect(page.get_by_text("Cancelling: what is answered is kept.")).to_be_visible()
        await expect(page.locator("#live_status")).to_contain_text("cancelled")
        bad = await stage.upload(b"no json\n")
        for path in ("lines", "lines?q=r1", "lines?of=errors", "line?custom_id=r0", "manifest?check=true"):
            await look(page, f"/ui/batches/{id}/{path}")
        for path in ("/ui", "/ui/batches", "/ui/batches?status=failed", f"/ui/batches/new/{bad}"):
            await look(page, path)
        batch = await stage.get(id)
        assert (batch.priority, batch.limits) == (2, {"max_in_flight": 3})


@asynccontextmanager
async def signed_in(
    stage: Any, url: str, *scopes: Scope | str, tenant: str = "default"
) -> AsyncIterator[httpx.AsyncClient]:
    key = await stage.batchwright.keys.create("test", tenant=tenant, scopes=scopes)
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        token = token_of((await client.get("/ui/sign-in")).text)
        answer = await client.post("/ui/sign-in", data={"csrf": token, "key": key.secret, "next": "/ui"})
        assert answer.status_code == 303, answer.text
        yield client


def token_of(page: str) -> str:
    return page.partition('<meta name="csrf" content="')[2].partition('"')[0]


async def test_scopes_and_tenants_decide_what_is_shown_and_done(database_url, tmp_path):
    async with served(database_url, tmp_path) as (stage, url):
        id = await stage.submit([request("one")])
        async with (
            signed_in(stage, url, Scope.READ) as reader,
            signed_in(stage, url, Scope.READ, Scope.SUBMIT) as submitter,
            signed_in(stage, url, *Scope, tenant="other") as stranger,
        ):
            paths = (f"/ui/batches/{id}", f"/ui/batches/{id}/lines", f"/ui/batches/{id}/line?custom_id=one")
            for path in (*paths, f"/ui/batches/{id}/download/input"):
                assert (await reader.get(path)).status_code == 200, path
                assert (await stranger.get(path)).status_code == 404, path
            shown = (await reader.get(f"/ui/batches/{id}")).text
            assert "Pause" not in shown
            assert "Pause" in (await submitter.get(f"/ui/batches/{id}")).text
            assert (await reader.get("/ui/batches/new")).status_code == 403
            file_id = (await stage.get(id)).input_file_id
            assert (await stranger.get(f"/ui/batches/new/{file_id}")).status_code == 404
            for client, status in ((reader, 403), (stranger, 404), (submitter, 303)):
                data = {"csrf": token_of((await client.get("/ui")).text)}
                for verb in ("pause", "resume"):
                    answer = await client.post(f"/ui/batches/{id}/{verb}", data=data)
                    assert answer.status_code == status, verb
            assert (await submitter.post(f"/ui/batches/{id}/pause", data={})).status_code == 403, (
                "a form without a token is refused"
            )
            assert (await stage.get(id)).paused_at is None
            assert id in (await submitter.get("/ui/batches")).text
            assert id not in (await stranger.get("/ui/batches")).text
            assert id in (await stranger.get("/ui/batches?tenant=*")).text, "an administrator may see all tenants"


async def test_the_same_form_sent_twice_makes_one_batch_and_a_bad_form_says_why(database_url, tmp_path):
    async with served(database_url, tmp_path) as (stage, url), httpx.AsyncClient(base_url=url, timeout=30) as http:
        token = token_of((await http.get("/ui/batches/new")).text)
        assert (await http.post("/ui/batches/new", data={"csrf": token})).status_code == 400
        uploaded = await http.post(
            "/ui/batches/new", data={"csrf": token}, files={"file": ("in.jsonl", jsonl([request("one")]))}
        )
        place = uploaded.headers["location"]
        made = [one.headers["location"] for one in await send_twice(http, place, place)]
        assert made[0] == made[1]
        form = form_in((await http.get(place)).text, place)
        assert (await http.post(place, data={**form, "priority": "12"})).status_code == 400
        for data, path in (({"priority": "x"}, "priority"), ({"max_in_flight": "0"}, "limits"), ({}, "retry")):
            answer = await http.post(f"{made[0]}/{path}", data={"csrf": token, **data})
            assert answer.status_code in (400, 409), path
        for path in (
            "?status=odd",
            f"/{'batch_' + '0' * 32}",
            "/new/file-1",
            f"/{made[0].rpartition('/')[2]}/manifest",
        ):
            assert (await http.get(f"/ui/batches{path}")).status_code in (400, 404), path
        assert len(await stage.batchwright.part(BatchesPart).batches.list(None)) == 1


async def send_twice(http: httpx.AsyncClient, page: str, action: str) -> list[httpx.Response]:
    """What a double click sends where no script prevents it."""
    form = form_in((await http.get(page)).text, action)
    answers = await asyncio.gather(*(http.post(action, data=form) for _ in range(2)))
    assert [answer.status_code for answer in answers] == [303, 303], answers[0].text[:500]
    return list(answers)


async def test_a_double_click_on_retry_makes_one_batch(database_url, tmp_path):
    lines = [request("fine"), request("doomed", max_tokens=-1)]
    async with served(database_url, tmp_path) as (stage, url), httpx.AsyncClient(base_url=url, timeout=30) as http:
        stage.work()
        batch = await stage.ended(await stage.submit(lines))
        page, batches = f"/ui/batches/{batch.id}", stage.batchwright.part(BatchesPart).batches
        first, second = await send_twice(http, page, f"{page}/retry")
        assert first.headers["location"] == second.headers["location"]
        assert len(await batches.list(None)) == 2
        await send_twice(http, page, f"{page}/retry")  # the page was loaded anew: whoever wants another one gets it
        form = form_in((await http.get(page)).text, f"{page}/retry")
        for code in ({}, {"code": "invalid_request_error"}):
            assert (await http.post(f"{page}/retry", data={**form, **code})).status_code == 303
        assert len(await batches.list(None)) == 5


async def test_a_file_dropped_twice_is_one_file(database_url, tmp_path):
    async with served(database_url, tmp_path) as (stage, url), httpx.AsyncClient(base_url=url, timeout=30) as http:
        form = form_in((await http.get("/ui/batches/new")).text, "/ui/batches/new")
        posts = [
            await http.post("/ui/batches/new", data=form, files={"file": ("in.jsonl", jsonl([request(id)]))})
            for id in ("one", "one", "two")
        ]
        places = [answer.headers["location"] for answer in posts]
        assert places[0] == places[1] != places[2]
        assert len(await stage.batchwright.part(BatchesPart).files.list("default")) == 2


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"status_code": 200, "body": {"choices": [{"message": {"content": "Hi"}}]}}, (None, "Hi")),
        ({"status_code": 200, "body": {"choices": [{"text": "Ho"}]}}, (None, "Ho")),
        ({"status_code": 200, "body": {"output": [{"content": [{"type": "t", "text": "He"}]}]}}, (None, "He")),
        ({"status_code": 200, "body": {"data": [{}, {}]}}, (None, "2 results")),
        ({"status_code": 400, "body": {"error": {"code": "bad", "message": "No"}}}, ("bad", "No")),
        ({"status_code": 500, "body": "oops"}, ("500", "oops")),
    ],
)
def test_an_answer_is_shortened_to_its_text_or_its_error(response, expected):
    found = gist(orjson.dumps({"custom_id": "a", "response": response, "error": None}))
    assert (found.code, found.text) == expected
    failed = gist(orjson.dumps({"custom_id": "a", "response": None, "error": {"code": "late", "message": "m"}}))
    assert (failed.code, failed.text, failed.is_good) == ("late", "m", False)
    assert prompt_of(orjson.dumps({"body": {"input": ["x", "y"]}})) == "x\ny"
