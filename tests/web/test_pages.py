"""Every page of the engine: who may see it, what it shows, and what its forms do, without JavaScript."""

from __future__ import annotations

import asyncio
import re
import tomllib
from datetime import timedelta
from html import unescape
from pathlib import Path
from uuid import UUID, uuid4

from batchwright.access.gate import EVERYBODY
from batchwright.access.keys import Scope
from batchwright.engine.jobs import NewJob
from batchwright.engine.views import JobFilter
from batchwright.plugins import load, part_kinds
from batchwright.states import JobStatus
from batchwright.web.site import Site
from batchwright.web.visit import Enter
from tests.web.conftest import Visitor, form_in, token_in

LISTS = (
    "/ui",
    "/ui?span=day",
    "/ui/jobs",
    "/ui/inbox",
    "/ui/queues",
    "/ui/workers",
    "/ui/operations",
    "/ui/operations/submit?name=greet",
    "/ui/schedules",
    "/ui/schedules/new",
    "/ui/keys",
    "/ui/files",
    "/ui/webhooks",
)
EVIL = "<script>alert('x')</script>"
OPEN = {"show_sign_in", "sign_in"}


async def publish(web) -> None:
    await web.batchwright.catalog.publish("worker-of-the-test")


async def failed_job(web, **payload) -> str:
    id = await web.batchwright.enqueue("broken", payload)
    await web.api.drain()
    return str(id)


def test_every_page_says_who_may_see_it():
    routes = [route for kind in part_kinds() for place in kind.pages for route in load(place).routes]
    assert len(routes) > 30
    for route in routes:
        enters = [one.call for one in route.dependant.dependencies if isinstance(one.call, Enter)]
        assert enters or route.endpoint.__name__ in OPEN, f"{route.path} is open to everybody"
        if "POST" in route.methods and enters:
            is_checked = enters[0].checks_token or route.path == "/ui/files"
            assert is_checked, f"{route.path} does not ask for the token"


async def test_every_page_is_small_safe_and_complete_with_nothing_and_with_something_to_show(web):
    await publish(web)
    visitor = await web.visitor()
    for path in LISTS:
        assert await shown(visitor, path)
    id = await failed_job(web, code=EVIL[:90])
    await web.batchwright.enqueue([NewJob("greet", {"name": EVIL}) for _ in range(60)])
    await web.batchwright.enqueue("family", {"children": 60})
    await web.batchwright.schedules.create("nightly", "0 6 * * *", NewJob("greet", {"name": EVIL}))
    await web.api.drain()
    heavy = await web.batchwright.enqueue("echo", {"value": ["&<'\"" * 20] * 5_000})
    await web.api.drain()
    parent = (await web.batchwright.views.ids(JobFilter(job_type="family"), limit=1))[0][0]
    more = (
        f"/ui/jobs/{heavy}",
        f"/ui/jobs/{id}",
        f"/ui/jobs/{id}/events",
        f"/ui/jobs/{parent}",
        "/ui/schedules/one?name=nightly",
    )
    for path in (*LISTS, *more, "/ui/schedules/edit?name=nightly"):
        assert EVIL not in await shown(visitor, path)


async def shown(visitor, path: str) -> str:
    answer = await visitor.get(path)
    assert answer.status_code == 200, (path, answer.text[:3000])
    assert len(answer.content) <= 100_000, f"{path} has {len(answer.content)} bytes"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    text = answer.text
    assert not re.search(r"<script(?![^>]*\bsrc=\"/ui/assets/)|\son\w+=|\sstyle=|<style|javascript:", text), path
    assert not re.search(r"(?:src|href|action)=\"(?:https?:)?//", text), path
    for form in re.findall(r"<form[^>]*method=\"post\".*?</form>", text, re.DOTALL):
        assert 'name="csrf"' in form, form[:300]
    return text


async def test_long_lists_stay_small_and_say_what_is_left_out(web):
    await publish(web)
    await web.batchwright.enqueue([NewJob("greet", {"name": "x"}, queue=f"queue/{n:03}" * 5) for n in range(120)])
    await web.batchwright.enqueue([NewJob("broken", {"code": f"{n:03}" * 30}) for n in range(40)])
    await web.api.drain()
    await web.batchwright.enqueue([NewJob("greet", {"name": "x"}, queue=f"queue/{n:03}" * 5) for n in range(120)])
    visitor = await web.visitor()
    assert "41 more queues" in await shown(visitor, "/ui/queues")
    assert "15 more groups" in await shown(visitor, "/ui/inbox")
    await shown(visitor, "/ui")
    await shown(visitor, "/ui/jobs")
    for _ in range(90):
        await web.batchwright.keys.create("k" * 100, tenant="t" * 100, scopes=tuple(Scope))
    assert "11 more keys" in await shown(await web.signed_in(), "/ui/keys")


async def test_assets_are_named_by_their_contents_and_kept_for_good(web):
    visitor = await web.visitor()
    page = await visitor.page("/ui")
    for url in re.findall(r'"(/ui/assets/[^"]+)"', page):
        answer = await visitor.get(url)
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert re.search(r"\.[0-9a-f]{16}\.\w+$", url)
    assert (await visitor.get("/ui/assets/app.css")).status_code == 404
    assert (await visitor.get("/ui/assets/..%2f..%2fpart.py")).status_code == 404


# Signing in -------------------------------------------------------------------------------------------------------


async def test_sign_in_is_required_once_a_key_exists(web):
    visitor = await web.visitor()
    await visitor.page("/ui/jobs")
    made = await web.batchwright.keys.create("first")
    sent_on = await visitor.get("/ui/jobs", status="failed")
    assert sent_on.status_code == 303
    assert sent_on.headers["location"] == "/ui/sign-in?next=/ui/jobs%3Fstatus%3Dfailed"
    answer = await visitor.sign_in(made.secret, next="/ui/jobs?status=failed")
    assert answer.headers["location"] == "/ui/jobs?status=failed"
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/ui"} <= {part.strip() for part in cookie.split(";")}
    assert "Secure" not in cookie
    assert made.secret not in cookie
    await visitor.page("/ui/jobs")


async def test_a_session_ends_with_its_key_by_signing_out_or_after_a_time(web):
    for end in ("revoke", "sign out", "expire"):
        visitor = await web.signed_in(lifetime=timedelta(days=1))
        page = await visitor.page("/ui/jobs")
        match end:
            case "revoke":
                await web.batchwright.keys.revoke(visitor.key.key.id)
            case "sign out":
                kept = dict(visitor.http.cookies)
                assert (await visitor.post("/ui/sign-out", token_in(page))).headers["location"] == "/ui/sign-in"
                visitor.http.cookies.update(kept)  # a copy of the cookie no longer works either
            case "expire":
                await web.api.sql("UPDATE batchwright.web_session SET expires_at = now() - interval '1 second'")
        assert (await visitor.get("/ui/jobs")).status_code == 303


async def test_a_wrong_key_is_refused_and_tries_are_limited(web):
    await web.batchwright.keys.create("first")
    lacking = await web.batchwright.keys.create("lacks", scopes=["submit"])
    visitor = await web.visitor()
    for secret in ("bw_wrong", "nonsense", "x" * 5_000, lacking.secret):
        answer = await visitor.sign_in(secret)
        assert answer.status_code == 403
        assert "session" not in answer.headers.get("set-cookie", "")
    assert (await visitor.sign_in("x" * 20_000)).status_code == 400  # refused before it is read, and not counted
    for _ in range(6):
        await visitor.sign_in("bw_wrong")
    answer = await visitor.sign_in("bw_wrong")
    assert answer.status_code == 429
    assert 0 < int(answer.headers["retry-after"]) <= 60
    assert "try again in" in answer.text


async def test_signing_in_redirects_only_to_our_own_pages_and_behind_tls_only_over_tls(web):
    made = await web.batchwright.keys.create("first")
    for next in ("https://evil.example", "//evil.example", "/\\evil.example", "/v1/jobs", "/uix"):
        assert (await (await web.visitor()).sign_in(made.secret, next=next)).headers["location"] == "/ui"
    safe = Visitor(await web.api.client(url="https://localhost:8765"))
    assert "Secure" in (await safe.sign_in(made.secret)).headers["set-cookie"]


async def test_a_form_without_the_token_of_this_browser_is_refused(web):
    await publish(web)
    id = await failed_job(web)
    visitor, other = await web.visitor(), await web.visitor()
    token = await other.token("/ui/inbox")
    for wrong in ("", "0" * 64, token):
        assert (await visitor.post(f"/ui/jobs/{id}/rerun", wrong)).status_code == 403
    fine = await visitor.token("/ui/inbox")
    stranger = await visitor.http.post(
        f"/ui/jobs/{id}/rerun", data={"csrf": fine}, headers={"Origin": "https://evil.example"}
    )
    assert stranger.status_code == 403
    assert (await web.batchwright.get(id)).status is JobStatus.FAILED
    by_script = await visitor.http.post(f"/ui/jobs/{id}/rerun", headers={"X-CSRF-Token": fine})
    assert by_script.status_code == 303
    assert (await web.batchwright.get(id)).status is JobStatus.QUEUED


# Who sees what ----------------------------------------------------------------------------------------------------


async def test_scopes_decide_what_is_shown_and_what_is_allowed(web):
    await publish(web)
    id = await failed_job(web)
    reader = await web.signed_in(Scope.READ)
    page = await reader.page(f"/ui/jobs/{id}")
    for hidden in ("Rerun", "Dismiss", "/ui/keys", "/ui/workers"):
        assert hidden not in page
    assert "/ui/operations/submit" not in await reader.page("/ui/operations")
    for path in ("/ui/workers", "/ui/keys", "/ui/operations/submit?name=greet", "/ui/schedules/new"):
        refused = await reader.get(path)
        assert refused.status_code == 403
        assert "needs the scope" in refused.text
        assert "/ui/jobs" in refused.text  # with the menu, because the visitor is still signed in
    for path in (f"/ui/jobs/{id}/rerun", "/ui/inbox/dismiss", "/ui/queues/pause", "/ui/jobs/apply", "/ui/files"):
        assert (await reader.post(path)).status_code == 403
    operator = await web.signed_in(Scope.READ, Scope.OPERATE)
    assert "Rerun" in await operator.page(f"/ui/jobs/{id}")


async def test_objects_of_other_tenants_are_not_found_and_not_listed(web):
    await publish(web)
    theirs = str(await web.batchwright.enqueue(NewJob("greet", {"name": "a secret"}, tenant="acme")))
    visitor = await web.signed_in(Scope.READ, Scope.OPERATE, tenant="zenith")
    for path in (f"/ui/jobs/{theirs}", f"/ui/jobs/{theirs}/events", f"/ui/jobs/{theirs}/document"):
        answer = await visitor.get(path)
        assert answer.status_code == 404
        assert "a secret" not in answer.text
    assert theirs not in await visitor.page("/ui/jobs")
    assert (await visitor.post(f"/ui/jobs/{theirs}/cancel")).status_code == 404
    assert (await visitor.get("/ui/jobs", tenant="acme")).status_code == 403
    await visitor.post("/ui/jobs/apply", verb="cancel", id=theirs)
    assert (await web.batchwright.get(theirs)).status is JobStatus.QUEUED
    admin = await web.signed_in(tenant="zenith")
    assert theirs not in await admin.page("/ui/jobs")
    for tenant in ("acme", "*"):
        page = await admin.page("/ui/jobs", tenant=tenant)
        assert theirs in page
        assert f"tenant={tenant.replace('*', '%2A')}" in page  # links keep it


async def test_pages_of_two_tenants_at_the_same_time_are_kept_separate(web):
    """Viewers of the same page share it; the tenant is part of what identifies a page."""
    await publish(web)
    ids = {t: str(await web.batchwright.enqueue(NewJob("greet", {"name": t}, tenant=t))) for t in ("acme", "zenith")}
    visitors = {tenant: await web.signed_in(tenant=tenant) for tenant in ids}
    for _ in range(2):
        pages = await asyncio.gather(*(visitors[tenant].page("/ui/jobs") for tenant in ids))
        for tenant, page in zip(ids, pages, strict=True):
            assert [id in page for id in ids.values()] == [tenant == other for other in ids]


# What pages do ----------------------------------------------------------------------------------------------------


async def test_jobs_are_found_by_every_filter_and_page_by_page(web):
    await publish(web)
    await failed_job(web, code="odd")
    jobs = [NewJob("echo", {"value": {"name": f"n{n}", "x": n}}, queue="gpu") for n in range(60)]
    await web.batchwright.enqueue(jobs)
    visitor = await web.visitor()

    async def ids(**params) -> list[str]:
        return re.findall(r'<tr data-key="([0-9a-f-]{36})"', await visitor.page("/ui/jobs", **params))

    first = await visitor.page("/ui/jobs", queue="gpu")
    next = re.search(r'href="([^"]+)"[^>]*rel="next"', first)[1].replace("&amp;", "&")
    both = re.findall(r'<tr data-key="([0-9a-f-]{36})"', first + await visitor.page(next))
    assert len(both) == len(set(both)) == 60
    assert len(await ids(status="failed")) == 1
    assert len(await ids(error="odd")) == 1
    assert len(await ids(type="broken")) == 1
    assert len(await ids(payload="value.name = n7")) == 1
    assert len(await ids(payload='value.x = "7"')) == 1
    assert len(await ids(payload="value.name=nobody")) == 0
    assert len(await ids(begin="1h")) == 50
    assert len(await ids(end="1h")) == 0
    assert len(await ids(pipeline=both[0])) == 1
    for wrong in ({"status": "lost"}, {"begin": "soon"}, {"payload": "name"}, {"pipeline": "7"}, {"cursor": "!"}):
        answer = await visitor.get("/ui/jobs", **wrong)
        assert answer.status_code == 400, wrong
        assert re.search(r"use |write |copy ", answer.text), wrong


async def test_many_jobs_are_changed_after_their_count_was_shown(web):
    await publish(web)
    await web.batchwright.enqueue([NewJob("greet", {"name": "x"}, queue="gpu") for _ in range(3)])
    keep = await web.batchwright.enqueue("greet", {"name": "y"})
    visitor = await web.visitor()
    shown = await visitor.post("/ui/jobs/choose", verb="cancel", scope="all", queue="gpu")
    assert "Cancel 3 jobs?" in re.sub(r"\s+", " ", shown.text)
    for wrong in ({"verb": "cancel", "scope": "all"}, {"verb": "cancel"}, {"verb": "erase", "id": str(keep)}):
        assert (await visitor.post("/ui/jobs/choose", **wrong)).status_code == 400
    assert (await visitor.post("/ui/jobs/apply", verb="cancel")).status_code == 400
    done = await visitor.post("/ui/jobs/apply", verb="cancel", queue="gpu", reason="not needed")
    assert done.headers["location"] == "/ui/jobs?queue=gpu"
    assert "3 jobs cancelled." in await visitor.page("/ui/jobs")
    assert "3 jobs cancelled." not in await visitor.page("/ui/jobs")  # the message is shown once
    assert (await web.batchwright.get(keep)).status is JobStatus.QUEUED
    some = await visitor.post("/ui/jobs/apply", verb="cancel", id=[str(keep), str(uuid4())])
    assert some.status_code == 303
    assert "1 job cancelled. 1 could not be" in await visitor.page("/ui/jobs")


async def test_a_job_shows_its_error_its_family_and_its_pipeline(web):
    await publish(web)
    visitor = await web.visitor()
    page = await visitor.page(f"/ui/jobs/{await failed_job(web, n=7)}")
    assert "it broke" in page
    assert "job.failed" in page
    parent = await web.batchwright.enqueue("family", {"children": 60})
    await web.api.drain()
    page = await visitor.page(f"/ui/jobs/{parent}")
    assert "60 succeeded" in page
    assert 'class="graph"' in page
    child = re.search(r'<li id="at-.*?href="/ui/jobs/([0-9a-f-]{36})"', page, re.DOTALL)[1]
    assert f'href="/ui/jobs/{parent}#tree"' in await visitor.page(f"/ui/jobs/{child}")
    document = await visitor.get(f"/ui/jobs/{parent}/document")
    assert document.json()["job_type"] == "family"
    assert "attachment" in document.headers["content-disposition"]


async def test_children_are_a_tree_whose_levels_open_and_which_copes_with_ten_thousand_at_each(web):
    await publish(web)
    visitor = await web.visitor()
    parent = await web.batchwright.enqueue("family", {"children": 60})
    await web.api.drain()
    page, seen = await visitor.page(f"/ui/jobs/{parent}"), list[str]()
    for n in (25, 25, 10):
        seen += twigs(page)
        assert len(twigs(page)) == n
        later = re.search(r'href="([^"]+children=[^"]+)"[^>]*rel="next"', page)
        page = page if later is None else await visitor.page(unescape(later[1]))
    assert len(set(seen)) == 60
    assert "aria-expanded" not in page  # none of them has children of its own

    branch, other = (await children_of(web, parent))[:2]
    leaf = (await multiply(web, branch, 10_000))[0]
    (deep,) = await multiply(web, leaf, 1)
    await multiply(web, other, 3)
    page = await shown(visitor, f"/ui/jobs/{parent}")
    assert page.count('aria-expanded="false"') == 2
    page = await shown(visitor, toggle(page, branch))
    assert page.count('aria-expanded="true"') == 1
    assert len(twigs(page)) == 25 + 10
    assert f'href="/ui/jobs/{branch}#tree">More of its children' in page
    page = await shown(visitor, toggle(page, leaf))
    assert str(deep)[-12:] in twigs(page)
    page = await shown(visitor, toggle(page, other))
    assert len(twigs(page)) == 25 + 10 + 1 + 3
    page = await shown(visitor, toggle(page, branch))  # closing it closes what was open below it
    assert len(twigs(page)) == 25 + 3
    assert leaf.hex[-12:] not in twigs(page)
    page = await shown(visitor, f"/ui/jobs/{branch}")
    assert "10,000 queued" in page
    assert "more than 10,000" not in page
    await multiply(web, branch, 1)
    assert "more than 10,000" in await visitor.page(f"/ui/jobs/{branch}", open="1" * 12)
    for wrong in ("open=seven", "open=" + ".".join(["0" * 12] * 30), "children=7", "children=1.x", "children=99999.0"):
        assert (await visitor.get(f"/ui/jobs/{parent}?{wrong}")).status_code == 400, wrong
    assert len(twigs(await visitor.page(f"/ui/jobs/{parent}", open="0" * 12))) == 25


async def test_a_tree_with_all_that_may_be_open_stays_small(web):
    await publish(web)
    visitor = await web.visitor()
    parent = await web.batchwright.enqueue("family", {"children": 30})
    await web.api.drain()
    branches = (await children_of(web, parent))[:8]
    for branch in branches:
        await multiply(web, branch, 12)
    words = "the message of a job " * 20
    await web.api.sql("UPDATE batchwright.job SET message = %(words)s WHERE parent_job_id IS NOT NULL", words=words)
    web.api.service(Site).live.forget()
    page = await shown(visitor, f"/ui/jobs/{parent}")
    for branch in branches[:6]:
        page = await shown(visitor, toggle(page, branch))
    assert page.count('aria-expanded="true"') == 6
    assert page.count('aria-expanded="false"') == 0  # that is enough; the others have their own pages
    assert len(twigs(page)) == 25 + 6 * 10
    assert len(page.encode()) < 80_000


def twigs(page: str) -> list[str]:
    return re.findall(r'<li id="at-([0-9a-f]{12})"', page)


def toggle(page: str, id: UUID) -> str:
    """Where the triangle beside this job leads."""
    found = re.search(rf'<li id="at-{id.hex[-12:]}"><div class="twig"><a class="toggle" href="([^"#]+)#at-', page)
    assert found is not None
    return unescape(found[1])


async def children_of(web, id) -> list[UUID]:
    found = await web.api.sql("SELECT id FROM batchwright.job WHERE parent_job_id = %(id)s ORDER BY round, id", id=id)
    return [child for (child,) in found]


async def multiply(web, parent: UUID, n: int) -> list[UUID]:
    """More children of a job: copies of one that waits."""
    like = await web.batchwright.enqueue("greet", {"name": "x"}, delay_seconds=3600)
    await web.api.sql(
        "INSERT INTO batchwright.job SELECT new.* "
        "FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, %(n)s)) AS made, batchwright.job, "
        "jsonb_populate_record(job, jsonb_build_object('id', made.id, 'parent_job_id', %(parent)s::uuid, 'round', 1)) "
        "AS new WHERE job.id = %(like)s",
        parent=parent,
        like=like,
        n=n,
    )
    web.api.service(Site).live.forget()
    return await children_of(web, parent)


async def test_what_needs_attention_stands_first_on_the_overview(web):
    await publish(web)
    visitor = await web.visitor()
    assert 'class="notice ' not in await visitor.page("/ui")
    await web.batchwright.enqueue("greet", {"name": "x"}, queue="gpu")
    await web.batchwright.named_queues.pause("gpu")
    await web.api.sql("UPDATE batchwright.job SET run_after = now() - interval '10 minutes'")
    page = await visitor.page("/ui", span="day")  # another address: what is loaded is kept for a second
    assert "The queue &#39;gpu&#39; is paused, and its oldest job has been due for 10 minutes." in page
    assert "Resume the queue." in page
    assert page.index("is paused") < page.index('class="stats"') < page.index("Failures by cause")


async def test_waiting_jobs_say_why(web):
    await publish(web)
    id = await web.batchwright.enqueue("greet", {"name": "x"}, queue="gpu")
    await web.batchwright.named_queues.pause("gpu")
    page = await (await web.visitor()).page(f"/ui/jobs/{id}")
    assert "the queue &#39;gpu&#39; is paused" in page
    assert "no live worker knows the operation" in page


async def test_the_verbs_of_a_job_do_what_they_say(web):
    await publish(web)
    visitor = await web.visitor()
    id = await failed_job(web)
    assert (await visitor.post(f"/ui/jobs/{id}/dismiss")).status_code == 303
    assert (await web.batchwright.get(id)).dismissed_at is not None
    assert (await visitor.post(f"/ui/jobs/{id}/rerun")).status_code == 303
    assert (await web.batchwright.get(id)).status is JobStatus.QUEUED
    conflict = await visitor.post(f"/ui/jobs/{id}/recover")
    assert conflict.status_code == 409
    assert "QUEUED" in conflict.text
    assert (await visitor.post(f"/ui/jobs/{id}/cancel", reason="enough")).status_code == 303
    assert (await web.batchwright.get(id)).status is JobStatus.CANCELLED
    assert "enough" in await visitor.page(f"/ui/jobs/{id}")
    assert (await visitor.post(f"/ui/pipelines/{id}/cancel")).status_code == 303


async def test_groups_of_the_inbox_are_rerun_and_dismissed(web):
    await publish(web)
    for n in range(3):
        await failed_job(web, code="odd", n=n)
    await failed_job(web, code="other")
    visitor = await web.visitor()
    page = await visitor.page("/ui/inbox")
    assert "Rerun 3" in page
    assert (await visitor.post("/ui/inbox/rerun", job_type="broken", code="odd")).status_code == 303
    page = await visitor.page("/ui/inbox")
    assert "3 jobs queued again." in page
    assert "Rerun 3" not in page
    await visitor.post("/ui/inbox/dismiss", job_type="broken", code="other")
    assert "The inbox is empty" in await visitor.page("/ui/inbox")
    assert (await visitor.post("/ui/inbox/rerun", job_type="")).status_code == 400


async def test_a_job_is_submitted_by_hand(web):
    await publish(web)
    visitor = await web.visitor()
    path = "/ui/operations/submit?name=greet"
    assert "required" in await visitor.page(path)
    done = await visitor.post(path, **{"p.name": "Ada", "priority": "2", "queue": "gpu"})
    assert done.status_code == 303, done.text[:2000]
    job = await web.batchwright.get(done.headers["location"].rpartition("/")[2])
    assert (job.payload, job.priority, job.queue) == ({"name": "Ada"}, 2, "gpu")
    wrong = await visitor.post(path, **{"p.name": "Ada", "priority": "77"})
    assert wrong.status_code == 400
    assert "less than or equal to 9" in wrong.text
    assert 'value="Ada"' in wrong.text  # the typed text is kept
    assert (await visitor.get("/ui/operations/submit", name="nothing")).status_code == 404
    assert (await visitor.post("/ui/operations/submit?name=greet&tenant=*", **{"p.name": "x"})).status_code == 400


async def test_queues_are_paused_and_resumed(web):
    await publish(web)
    await web.batchwright.enqueue("greet", {"name": "x"}, queue="gpu/a b")
    visitor = await web.visitor()
    assert (await visitor.post("/ui/queues/pause", name="gpu/a b")).status_code == 303
    assert "Resume" in await visitor.page("/ui/queues")
    assert (await visitor.post("/ui/queues/resume", name="gpu/a b")).status_code == 303
    assert "Resume" not in await visitor.page("/ui/queues")
    missing = await visitor.post("/ui/queues/pause", name="gpu/a")
    assert missing.status_code == 404
    assert "did you mean" in missing.text


async def test_schedules_are_made_changed_run_and_deleted(web):
    await publish(web)
    visitor = await web.visitor()
    plan = {"name": "nightly", "cron": "0 6 * * *", "timezone": "Europe/Berlin", "job_type": "greet"}
    for field, value in (
        ("cron", "never"),
        ("payload", "{"),
        ("timezone", "Mars"),
        ("job_type", "nothing"),
        ("priority", "x"),
    ):
        wrong = await visitor.post("/ui/schedules/new", **{**plan, "payload": '{"name": "x"}', field: value})
        assert wrong.status_code == 400
        assert 'class="problem"' in wrong.text, field
    made = await visitor.post("/ui/schedules/new", **plan, payload='{"name": "x"}')
    assert made.status_code == 303, made.text[:3000]
    assert (await visitor.post("/ui/schedules/new", **plan, payload='{"name": "x"}')).status_code == 400
    page = await visitor.page("/ui/schedules/one", name="nightly")
    assert page.count("<li><time") == 10
    changed = await visitor.post("/ui/schedules/edit", **{**plan, "cron": "0 7 * * *"}, payload='{"name": "y"}')
    assert changed.status_code == 303
    assert "0 7 * * *" in await visitor.page("/ui/schedules/edit", name="nightly")
    for verb, seen in (("pause", "The schedule is paused"), ("resume", "Next ticks")):
        await visitor.post(f"/ui/schedules/{verb}", name="nightly")
        assert seen in await visitor.page("/ui/schedules/one", name="nightly")
    fired = await visitor.post("/ui/schedules/run", name="nightly")
    assert re.fullmatch(r"/ui/jobs/[0-9a-f-]{36}", fired.headers["location"])
    await visitor.post("/ui/schedules/delete", name="nightly")
    assert (await visitor.get("/ui/schedules/one", name="nightly")).status_code == 404


async def test_a_key_is_shown_once_and_revoked(web):
    visitor = await web.signed_in()
    made = await visitor.post("/ui/keys", name="ci", for_tenant="acme", scope=["read", "submit"], lifetime="90d")
    secret = re.search(r"bw_[\w-]{20,}", made.text)[0]
    holder = await web.batchwright.keys.find(secret)
    assert (holder.tenant, holder.scopes) == ("acme", {Scope.READ, Scope.SUBMIT})
    page = await visitor.page("/ui/keys")
    assert secret not in page
    assert "acme" in page
    assert (await visitor.post(f"/ui/keys/{holder.id}/revoke")).status_code == 303
    assert await web.batchwright.keys.find(secret) is None
    for wrong in (
        {"name": ""},
        {"name": "x", "scope": []},
        {"name": "x", "scope": ["all"]},
        {"name": "x", "scope": ["read"], "lifetime": "soon"},
    ):
        assert (await visitor.post("/ui/keys", **wrong)).status_code == 400


async def test_files_are_uploaded_read_and_deleted(web):
    visitor = await web.visitor()
    token = await visitor.token("/ui/files")
    files = {"csrf": (None, token), "purpose": (None, "batch"), "file": ("a b.jsonl", b'{"x": 1}\n')}
    made = await visitor.http.post("/ui/files", files=files)
    assert made.status_code == 303, made.text[:2000]
    place = made.headers["location"]
    assert "a b.jsonl" in await visitor.page(place)
    assert (await visitor.get(f"{place}/content")).content == b'{"x": 1}\n'
    unsigned = {"purpose": (None, "batch"), "file": ("x", b"y"), "csrf": (None, token)}
    assert (
        await visitor.http.post("/ui/files", files=unsigned)
    ).status_code == 403  # the token came after the file, which is too late
    ((n,),) = await web.api.sql("SELECT count(*) FROM batchwright.file")
    assert n == 1
    assert (await visitor.post(f"{place}/delete")).status_code == 303
    assert (await visitor.get(place)).status_code == 404


async def test_the_search_field_leads_to_the_object_with_the_id(web):
    visitor = await web.visitor()
    id = uuid4()
    assert (await visitor.get("/ui/search", q=f" {id} ")).headers["location"] == f"/ui/jobs/{id}"
    assert (await visitor.get("/ui/search", q="file-" + "0" * 32)).headers["location"] == "/ui/files/file-" + "0" * 32
    assert (await visitor.get("/ui/search", q="greet", tenant="*")).headers[
        "location"
    ] == "/ui/jobs?type=greet&tenant=%2A"
    assert (await visitor.get("/ui/search", q=" ")).status_code == 400


async def test_an_error_is_a_page_with_its_remedy(web):
    visitor = await web.visitor()
    for path, status in (
        ("/ui/nothing", 404),
        (f"/ui/jobs/{uuid4()}", 404),
        ("/ui/jobs/seven", 404),
        ("/ui?span=year", 400),
    ):
        answer = await visitor.get(path)
        assert answer.status_code == status
        assert answer.headers["content-type"].startswith("text/html")
        assert 'class="remedy"' in answer.text
    await web.batchwright.keys.create("first")
    assert (await visitor.get("/ui/nothing")).status_code == 404
    assert "/ui/jobs" not in (await visitor.get("/ui/nothing")).text


# Twice ------------------------------------------------------------------------------------------------------------


async def test_a_form_that_is_sent_twice_creates_one_job(web):
    await publish(web)
    visitor = await web.visitor()
    path = "/ui/operations/submit?name=greet"
    first, second = await visitor.post_twice(path, path, **{"p.name": "Ada"})
    assert first.status_code == second.status_code == 303
    assert first.headers["location"] == second.headers["location"]
    assert await web.api.jobs() == 1
    form = form_in(await visitor.page(path), path)
    for name in ("Ada", "Bob"):  # another text in the same form is another job
        assert (await visitor.http.post(path, data={**form, "p.name": name})).status_code == 303
    assert await web.api.jobs() == 3


async def test_a_schedule_that_is_run_by_a_double_click_creates_one_job(web):
    await publish(web)
    plan = NewJob("echo", {"value": None})
    await web.batchwright.schedules.create("nightly", "0 6 * * *", plan, tick_field="value")
    visitor = await web.visitor()
    path = "/ui/schedules/one?name=nightly"
    answers = await visitor.post_twice(path, "/ui/schedules/run")
    assert len({answer.headers["location"] for answer in answers}) == 1
    assert await web.api.jobs() == 1
    assert (await web.batchwright.schedules.get("nightly")).fires == 1
    await visitor.post_twice(path, "/ui/schedules/run")
    assert await web.api.jobs() == 2


async def test_a_key_that_is_created_by_a_double_click_is_one_key_with_one_secret(web):
    visitor = await web.signed_in()
    before = len(await web.batchwright.keys.list())
    answers = await visitor.post_twice("/ui/keys", "/ui/keys", name="ci", scope="read")
    secrets = [re.search(r"bw_[\w-]{20,}", answer.text)[0] for answer in answers]
    assert len(await web.batchwright.keys.list()) == before + 1
    assert len([one for one in secrets if await web.batchwright.keys.find(one)]) == 1
    form = form_in(await visitor.page("/ui/keys"), "/ui/keys")
    data = {**form, "name": "cd", "scope": "read"}
    made = await visitor.http.post("/ui/keys", data=data)
    assert await web.batchwright.keys.find(re.search(r"bw_[\w-]{20,}", made.text)[0])
    assert (await visitor.http.post("/ui/keys", data=data)).status_code == 409  # in use: it keeps its secret


async def test_a_file_that_is_uploaded_by_a_double_click_is_one_file(web):
    visitor = await web.visitor()
    form = form_in(await visitor.page("/ui/files"), "/ui/files")
    fields = {name: (None, value) for name, value in form.items()} | {"purpose": (None, "batch")}
    places = [
        (await visitor.http.post("/ui/files", files={**fields, "file": (name, b"{}\n")})).headers["location"]
        for name in ("a.jsonl", "a.jsonl", "b.jsonl")
    ]
    assert places[0] == places[1] != places[2]
    assert await web.api.sql("SELECT count(*) FROM batchwright.file") == [(2,)]


async def test_verbs_that_are_sent_twice_change_a_job_once(web):
    await publish(web)
    visitor = await web.visitor()
    id = await failed_job(web)
    page, inbox = f"/ui/jobs/{id}", {"job_type": "broken", "code": "broken"}
    for path, action, fields, statuses in (
        (page, f"{page}/rerun", {}, {303, 409}),
        (page, f"{page}/cancel", {}, {303}),
        ("/ui/jobs", "/ui/jobs/choose", {"verb": "rerun", "id": id}, {200}),
        (page, f"{page}/rerun", {}, {303, 409}),
        ("/ui/inbox", "/ui/inbox/rerun", inbox, {303}),
        ("/ui/inbox", "/ui/inbox/dismiss", inbox, {303}),
    ):
        if path == "/ui/inbox":
            await web.api.drain()
        answers = await visitor.post_twice(path, action, **fields)
        assert {answer.status_code for answer in answers} <= statuses, action
    history = [event.event for event in await web.batchwright.queue.events(id, limit=100)]
    assert [history.count(f"job.{verb}") for verb in ("rerun", "cancelled", "failed")] == [3, 1, 3]
    assert await web.api.jobs() == 1


# Streams ----------------------------------------------------------------------------------------------------------


async def test_an_open_page_counts_as_a_stream_and_each_key_has_its_limit(web):
    places, settings = web.api.services.stream_places, web.api.services.settings
    visitor = await web.visitor(Accept="text/event-stream")
    taken = [places.take(EVERYBODY) for _ in range(settings.streams_per_key_max)]
    refused = await visitor.http.get("/ui/jobs", headers={"Accept": "text/event-stream"})
    assert refused.status_code == 429
    assert "limit for one key" in refused.text
    for place in taken:
        place.give_back()
    places._all = settings.streams_max
    refused = await visitor.http.get("/ui/jobs", headers={"Accept": "text/event-stream"})
    assert refused.status_code == 503
    assert "limit of this server" in refused.text
    places._all = 0
    await web.batchwright.keys.create("first")
    assert (await visitor.http.get("/ui/jobs", headers={"Accept": "text/event-stream"})).status_code == 401


async def test_a_stream_ends_after_a_while_so_that_its_session_is_checked_again(web, monkeypatch):
    monkeypatch.setattr("batchwright.web.visit.STREAM_SECONDS_MAX", 0.0)
    visitor = await web.signed_in()
    stream = await visitor.http.get("/ui/inbox", headers={"Accept": "text/event-stream"})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert "event: patch" in stream.text
    assert "The inbox is empty" in stream.text
    assert visitor.http.cookies["batchwright_session"] not in stream.text


def test_the_wheel_holds_templates_and_assets():
    """hatch adds all files under the package to the wheel, except those that git ignores."""
    root = Path(__file__).parents[2]
    target = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert target == {"packages": ["src/batchwright"]}
    ignored = (root / ".gitignore").read_text().split()
    assert not {"static", "templates", "*.html", "*.css", "*.js", "*.svg"} & {line.strip("/") for line in ignored}
    for folder in ("web/templates", "web/static", "files/templates", "webhooks/templates"):
        assert list((root / "src/batchwright" / folder).iterdir())
