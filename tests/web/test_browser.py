"""The dashboard in a real browser: with and without JavaScript, on large and small screens, and by keyboard."""

from __future__ import annotations

from pathlib import Path

import axe_playwright_python
import pytest
from playwright.async_api import expect

from batchwright.access.keys import Scope
from batchwright.engine.jobs import NewJob
from tests.web.browser import LOOP, Printer

pytestmark = LOOP
SMALL = {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}}
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
PAGES = (
    "/ui",
    "/ui/jobs",
    "/ui/jobs?status=failed&type=crash",
    "/ui/jobs?type=nothing",
    "/ui/inbox",
    "/ui/queues",
    "/ui/workers",
    "/ui/operations",
    "/ui/operations/submit?name=greet",
    "/ui/schedules",
    "/ui/schedules/new",
    "/ui/schedules/one?name=nightly",
    "/ui/schedules/edit?name=nightly",
    "/ui/keys",
    "/ui/files",
    "/ui/webhooks",
)


async def furnished(stage) -> list[str]:
    """Create data for every page; return the pages of some jobs."""
    Printer.is_broken = True
    ids = [await stage.submit("invoice.send", {"number": n}) for n in range(2)]
    ids += [await stage.submit("crash"), await stage.submit("month.close"), await stage.submit("report.build")]
    year = await stage.submit("year.review")
    await stage.ended(*ids[3:], year)
    first, *_ = await stage.batchwright.queue.database.rows(
        "SELECT id FROM batchwright.job WHERE parent_job_id = %(id)s ORDER BY id", {"id": year}
    )
    await stage.submit("greet", {"name": "later"}, delay_seconds=3600)
    await stage.batchwright.schedules.create("nightly", "0 6 * * *", NewJob("greet", {"name": "x"}), replace=True)
    return [*(f"/ui/jobs/{id}" for id in (ids[2], ids[4])), f"/ui/jobs/{year}?open={first[0].hex[-12:]}"]


async def violations(page) -> list[str]:
    """The problems that axe-core finds."""
    await page.evaluate(AXE)
    found = await page.evaluate(
        "async () => (await axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', "
        "'best-practice']})).violations.map(v => v.id + ': ' + v.nodes.slice(0, 3).map(n => n.html).join(' | '))"
    )
    return list(found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("look", [{}, pytest.param(SMALL, marks=pytest.mark.thorough)])
async def test_axe_finds_nothing_wrong_on_any_page(stage, look):
    more = await furnished(stage)
    wrong = {}
    # The test injects axe, which the page's policy does not allow; one of the pages is an error.
    async with stage.page(bypass_csp=True, errors=1, **look) as page:
        await page.goto("/ui/sign-in")
        wrong["/ui/sign-in"] = await violations(page)
        await stage.sign_in(page, stage.admin.secret)
        for path in (*PAGES, *more, more[1] + "/events", "/ui/nothing"):
            await page.goto(path)
            wrong[path] = await violations(page)
        await page.goto("/ui/jobs?status=failed&type=crash")
        await page.get_by_label("Select job").first.check()
        await page.get_by_role("button", name="Rerun selected").click()
        await expect(page.get_by_role("button", name="Rerun 1 job")).to_be_visible()
        wrong["a question before many jobs change"] = await violations(page)
        await page.goto("/ui/keys")
        await page.get_by_label("Name").fill("ci")
        await page.get_by_role("button", name="Create key").click()
        await expect(page.get_by_role("heading", name="Key created")).to_be_visible()
        wrong["a new key"] = await violations(page)
        await page.goto("/ui/files")
        file = {"name": "a.jsonl", "mimeType": "application/jsonl", "buffer": b"{}"}
        await page.get_by_label("you can drop it here").set_input_files(file)
        await page.get_by_role("button", name="Upload").click()
        await expect(page.get_by_role("heading", name="a.jsonl")).to_be_visible()
        wrong["a file"] = await violations(page)
        await page.keyboard.press("?")
        wrong["the help"] = await violations(page)
    assert not {path: found for path, found in wrong.items() if found}


async def test_no_page_is_too_wide_for_a_phone(stage):
    more = await furnished(stage)
    async with stage.admin_page(**SMALL) as page:
        for path in (*PAGES, *more, more[1] + "/events"):
            await page.goto(path)
            assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, path
        await expect(page.get_by_role("navigation", name="Pages")).to_be_visible()


async def test_signing_in_leads_to_the_requested_page_and_a_revoked_key_ends_the_session(stage):
    key = await stage.key()
    async with stage.page() as page:
        await page.goto("/ui/jobs?status=failed")
        await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        await page.get_by_label("API key").fill(key.secret)
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/ui/jobs?status=failed")
        await expect(page.locator("#live-state")).to_have_text("Live")
        assert await page.evaluate("document.cookie") == ""
        await stage.batchwright.keys.revoke(key.key.id)
        await page.goto("/ui/queues")
        await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


async def test_jobs_appear_and_end_without_a_reload_and_other_rows_stay(stage):
    Printer.is_broken = True
    async with stage.admin_page() as page:
        await page.goto("/ui/jobs?type=invoice.send")
        await page.evaluate("window.isSame = true")
        await page.get_by_label("Error code").fill("half a wo")
        known = await page.locator("tr[data-key]").count()
        id = await stage.submit("invoice.send", {"number": 7})
        row = page.locator(f'tr[data-key="{id}"]')
        await expect(row).to_contain_text("no_paper")
        await row.get_by_role("checkbox").check()
        other = await stage.submit("invoice.send", {"number": 8})
        await expect(page.locator(f'tr[data-key="{other}"]')).to_contain_text("failed")
        assert await page.locator("tr[data-key]").count() == known + 2
        await expect(row.get_by_role("checkbox")).to_be_checked()
        await expect(page.locator("[data-selected]")).to_have_text("1 selected")
        await expect(page.get_by_label("Error code")).to_have_value("half a wo")
        assert await page.evaluate("window.isSame")


async def test_a_job_is_watched_from_its_page(stage):
    id = await stage.submit("greet", {"name": "Ada"}, queue="slow")
    await stage.batchwright.named_queues.pause("slow")
    waiting = await stage.submit("greet", {"name": "Bob"}, queue="slow")
    async with stage.admin_page() as page:
        await page.goto(f"/ui/jobs/{waiting}")
        await expect(page.get_by_text("the queue 'slow' is paused")).to_be_visible()
        await page.evaluate("window.isSame = true")
        await stage.batchwright.named_queues.resume("slow")
        await stage.ended(id, waiting)
        await expect(page.locator("#live_title .status")).to_have_text("succeeded")
        await expect(page.get_by_role("region", name="Result")).to_contain_text("Hello, Bob!")
        await expect(page.locator("#live_events")).to_contain_text("job.succeeded")
        assert await page.evaluate("window.isSame")
        stamp = page.locator("#live_events time").first
        assert " ago" in await stamp.inner_text() or await stamp.inner_text() == "now"
        assert "2026" in (await stamp.get_attribute("title")) or ":" in (await stamp.get_attribute("title"))


async def test_a_tree_of_jobs_opens_in_place_and_without_a_script_by_its_address(stage):
    id = await stage.submit("year.review")
    await stage.ended(id)
    async with stage.admin_page() as page:
        await page.goto(f"/ui/jobs/{id}")
        await page.evaluate("window.isSame = true")
        twigs = page.locator("#tree li[id]")
        await expect(twigs).to_have_count(3)
        await page.get_by_label("Children of report.build").nth(1).click()
        await expect(twigs).to_have_count(5)
        await expect(page.locator("a.toggle[aria-expanded=true]")).to_be_focused()
        assert await page.evaluate("window.isSame"), "without a reload"
        await page.keyboard.press("Enter")
        await expect(twigs).to_have_count(3)
        await page.go_back()
        await expect(twigs).to_have_count(5)
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        await expect(page.locator(".twig.at")).to_contain_text("report.build")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="report.build")).to_be_visible()
        await page.locator("#tree").get_by_role("link", name="year.review").click()
        await page.wait_for_url(f"**/ui/jobs/{id}#tree")
    async with stage.admin_page(java_script_enabled=False) as page:
        await page.goto(f"/ui/jobs/{id}")
        await page.get_by_label("Children of report.build").nth(1).click()
        await expect(page.locator("#tree li[id]")).to_have_count(5)
        assert "#at-" in page.url


async def test_a_group_of_the_inbox_is_rerun(stage):
    Printer.is_broken = True
    id = await stage.submit("invoice.send", {"number": 9})
    async with stage.admin_page() as page:
        await page.goto("/ui/inbox")
        group = page.locator("section", has_text="no_paper")
        await expect(group).to_contain_text("the printer has no paper")
        Printer.is_broken = False
        await group.get_by_role("button", name="Rerun").click()
        await expect(page.get_by_role("dialog")).to_contain_text("of invoice.send?")
        await page.get_by_role("dialog").get_by_role("button", name="Rerun").click()
        await expect(page.locator(".flash")).to_contain_text("queued again")
        await stage.ended(id)
        await expect(page.locator("section", has_text="no_paper")).to_have_count(0)


async def test_everything_works_without_javascript(stage):
    Printer.is_broken = True
    ids = [await stage.submit("crash") for _ in range(2)]
    for id in ids:
        with pytest.raises(Exception, match="surprise"):
            await stage.ended(id)
    await furnished(stage)
    async with stage.admin_page(java_script_enabled=False) as page:
        for path in PAGES:
            assert (await page.goto(path)).status == 200, path
        await page.goto("/ui/jobs?type=crash")
        for id in ids:
            await page.locator(f'tr[data-key="{id}"]').get_by_role("checkbox").check()
        await page.get_by_role("button", name="Rerun selected").click()
        await expect(page.get_by_role("heading", name="Rerun 2 jobs?")).to_be_visible()
        await page.get_by_role("button", name="Rerun 2 jobs").click()
        await expect(page.locator(".flash")).to_have_text("2 jobs rerun.")
        await page.goto("/ui/operations/submit?name=greet")
        await page.get_by_label("name").fill("Ada")
        await page.get_by_role("button", name="Submit the job").click()
        await expect(page.locator(".flash")).to_have_text("The job is queued.")


async def test_keyboard_shortcuts_move_in_lists_and_open_search_and_help(stage):
    ids = [await stage.submit("greet", {"name": f"n{n}"}) for n in range(3)]
    await stage.ended(*ids)
    async with stage.admin_page() as page:
        await page.goto("/ui/jobs?type=greet")
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        await expect(page.locator(f'tr[data-key="{ids[1]}"]')).to_have_class("at")
        await page.keyboard.press("x")
        await expect(page.locator("[data-selected]")).to_have_text("1 selected")
        await page.keyboard.press("k")
        await page.keyboard.press("Enter")
        await page.wait_for_url(f"**/ui/jobs/{ids[2]}")
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog")).to_contain_text("Keyboard shortcuts")
        await page.keyboard.press("Escape")
        await page.keyboard.press("/")
        await page.keyboard.type(ids[0])
        await page.keyboard.press("Enter")
        await page.wait_for_url(f"**/ui/jobs/{ids[0]}")
        await page.keyboard.press("g")
        await page.keyboard.press("i")
        await page.wait_for_url("**/ui/inbox")


async def test_scopes_and_tenants_limit_what_a_browser_sees(stage):
    reader, stranger = await stage.key(Scope.READ), await stage.key(tenant="acme")
    id = await stage.submit("greet", {"name": "secret"})
    async with stage.page(reader.secret) as page:
        await page.goto(f"/ui/jobs/{id}")
        await expect(page.get_by_role("heading", name="greet")).to_be_visible()
        assert await page.get_by_role("button", name="Cancel").count() == 0
        assert await page.get_by_role("link", name="Keys").count() == 0
    async with stage.page(stranger.secret) as page:
        await page.goto("/ui/jobs")
        await expect(page.get_by_text("No jobs yet")).to_be_visible()
        assert (await page.request.get(f"/ui/jobs/{id}")).status == 404


async def test_times_are_shown_in_the_time_zone_of_the_viewer(stage):
    id = await stage.submit("greet", {"name": "x"})
    titles = []
    for zone in ("Pacific/Kiritimati", "America/Los_Angeles"):
        async with stage.admin_page(timezone_id=zone, locale="en-GB") as page:
            await page.goto(f"/ui/jobs/{id}")
            titles.append(await page.locator("#live_state time").first.get_attribute("title"))
    assert titles[0] != titles[1]
