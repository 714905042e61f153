"""Documents over HTTP: runs, items, the inbox, collections and search, and what is refused."""

import asyncio
import io
import json
from contextlib import asynccontextmanager

import httpx
import pyarrow.parquet
import pytest

from batchwright.ingest.services import IngestServices
from tests.api.conftest import Api, fails
from tests.inference.server import RawServer, answer
from tests.ingest.documents import make_encrypted_pdf, make_pdf
from tests.ingest.stage import ingest_stage

RUNS = "/v1/ingest/runs"
URL = "http://docs.example.com/a.html"


@asynccontextmanager
async def serving(stage):
    server = await stage.batchwright.server()
    api = Api(stage.batchwright, server._services)
    try:
        yield api
    finally:
        await api.close()
        await server.close()


@pytest.fixture
async def stage(database_url, tmp_path):
    settings = {"private": True, "roots": [str(tmp_path / "papers")], "max_retries": 0}
    async with ingest_stage(database_url, tmp_path, ingest=settings) as stage:
        yield stage


@pytest.fixture
async def api(stage):
    async with serving(stage) as api:
        yield api


@pytest.fixture
async def http(api):
    return await api.client()


@pytest.fixture
async def website():
    async with RawServer() as server:
        for name, text in {
            "/whales.html": "<h1>Whales</h1><p>Whales are mammals of the sea. Write to whale@example.com.</p>",
            "/trees.html": "<h1>Trees</h1><p>Trees grow slowly in the far north.</p>",
        }.items():
            server.replies[name] = answer(text.encode(), "200 OK", "content-type: text/html", 'etag: "1"')
        server.replies["/none.html"] = answer(b"gone", "404 Not Found")
        yield server


async def create(http, stage, sources=None, *, collection="papers", **body):
    sources = [str(stage.folder)] if sources is None else sources
    made = await http.post(RUNS, json={"collection": collection, "sources": sources, **body})
    assert made.status_code == 201, made.text
    return made.json()


async def read(http, stage, *args, **body):
    """A run that has ended."""
    made = await create(http, stage, *args, **body)
    await stage.ended(made["id"])
    return (await http.get(f"{RUNS}/{made['id']}")).json()


async def get(http, path, **params):
    found = await http.get(path, params=params)
    assert found.status_code == 200, found.text
    return found.json()


async def post(http, path, body=None):
    done = await http.post(path, json=body)
    assert done.status_code == 200, done.text
    return done.json()


async def failed_run(http, stage):
    """A run with one good document and two bad ones."""
    stage.write("a.txt", "Whales are mammals.")
    stage.write("b.pdf", make_encrypted_pdf())
    stage.write("c.pdf", make_encrypted_pdf())
    stage.work()
    run = await read(http, stage)
    assert run["status"] == "COMPLETED_WITH_ERRORS"
    return run


# A newcomer -------------------------------------------------------------------------------------------------------


async def test_a_first_run_reads_web_pages_searches_exports_and_deletes_them(stage, website):
    """Over a real connection, as with curl."""
    stage.work()
    server = await stage.batchwright.server()
    running = server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            body = {
                "collection": "animals & more",
                "sources": [f"{website.url}/whales.html", f"{website.url}/trees.html", f"{website.url}/none.html"],
                "metadata": {"for": "me"},
            }
            run = (await http.post(RUNS, json=body)).json()
            assert run["object"] == "ingest.run"
            while run["ended_at"] is None:
                run = (await http.get(f"{RUNS}/{run['id']}")).json()
                assert all(wait["message"] for wait in run["waiting_on"])
            assert (run["status"], run["metadata"]) == ("COMPLETED_WITH_ERRORS", {"for": "me"})
            assert run["counts"] | {"done": 2, "failed": 1, "total": 3, "open": 0} == run["counts"]
            assert run["money"]["spent"] == 0
            (failed,) = (await http.get(f"{RUNS}/{run['id']}/items", params={"status": "FAILED"})).json()["data"]
            assert failed["source"].endswith("/none.html")
            assert "404" in failed["error"]["message"]

            place = "/v1/collections/animals%20%26%20more"
            found = (await http.get(f"{place}/search", params={"q": "which mammals live in the sea?"})).json()
            best = found["data"][0]
            assert best["source"].endswith("/whales.html")
            assert "mammals" in [best["text"][start:end] for start, end in best["marks"]]
            assert [one["text"] for one in best["mentions"]] == ["whale@example.com"]
            assert {one.partition(":")[0] for one in found["used"]} == {"words", "vectors"}
            exported = await http.get(f"{place}/export", params={"vectors": True})
            rows = [json.loads(line) for line in exported.text.splitlines()]
            assert {row["name"].rpartition("/")[2] for row in rows} == {"whales.html", "trees.html"}
            assert all(row["vector"] for row in rows)
            assert (await http.delete(place)).json()["deleted"] is True
            fails(await http.get(f"{place}/search", params={"q": "whales"}), 404, "not_found")
    finally:
        await server.close()
        await running


# Runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"collection": "a/b"}, "collection", "no slash"),
        ({"collection": " a"}, "collection", "no spaces at either end"),
        ({"collection": ""}, "collection", ""),
        ({"collection": "x" * 101}, "collection", ""),
        ({"sources": []}, "sources", ""),
        ({"sources": ["/etc/passwd"]}, "sources", "outside the roots"),
        ({"sources": ["@/etc/hosts"]}, "sources", "outside the roots"),
        ({"sources": ["s3://bucket/prefix"]}, "sources", "outside the roots"),
        ({"sources": ["{papers}/../secret"]}, "sources", "outside the roots"),
        ({"sources": ["ftp://example.com/a"]}, "sources", "the scheme ftp: is not supported"),
        ({"sources": ["http://u:p@example.com/a"]}, "sources", "a user or password"),
        ({"sources": [URL] * 10_001}, "sources", ""),
        ({"sources": ["http://x/" + "y" * 4_000]}, "sources.0", ""),
        ({"embedding_model": "none-such"}, "embedding_model", "there is no model server for 'none-such'"),
        ({"entities": "gpt-5-mini"}, "entities", "there is no model server for 'gpt-5-mini'"),
        ({"chunk_characters": 15}, "chunk_characters", ""),
        ({"chunk_characters": 20_001}, "chunk_characters", ""),
        ({"language": "klingon"}, "language", "the database has no language 'klingon'"),
        ({"lane": "fast"}, "lane", ""),
        ({"budget": 0}, "budget", ""),
        ({"budget": "1"}, "budget", ""),
        ({"deadline_seconds": 0}, "deadline_seconds", ""),
        ({"priority": 10}, "priority", ""),
        ({"metadata": {"k": 1}}, "metadata.k", ""),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", ""),
        ({"include": ["a" * 501]}, "include.0", ""),
        ({"roots": ["/"]}, "roots", "Extra inputs are not permitted"),
    ],
)
async def test_a_source_that_cannot_be_read_is_refused_and_nothing_is_created(stage, http, change, param, words):
    body = {"collection": "papers", "sources": [URL], **change}
    body["sources"] = [source.replace("{papers}", str(stage.folder)) for source in body["sources"]]
    for path in (RUNS, "/v1/ingest/estimates"):
        assert words in fails(await http.post(path, json=body), 400, param=param)
    for table in ("ingest_run", "ingest_collection", "job"):
        assert await stage.rows(f"SELECT count(*) FROM batchwright.{table}") == [(0,)]


async def test_a_budget_is_refused_for_a_model_with_an_unknown_price_also_at_a_resume(database_url, tmp_path):
    gateway = {"own-model": {"url": "http://127.0.0.1:9"}}
    async with (
        ingest_stage(database_url, tmp_path, ingest={"roots": [str(tmp_path)]}, model_gateways=gateway) as stage,
        serving(stage) as api,
    ):
        http = await api.client()
        body = {"collection": "papers", "sources": [str(stage.folder)], "embedding_model": "own-model"}
        assert "price" in fails(await http.post(RUNS, json=body | {"budget": 1.5}), 400, param="budget")
        run = (await http.post(RUNS, json=body)).json()
        await post(http, f"{RUNS}/{run['id']}/park")
        fails(await http.post(f"{RUNS}/{run['id']}/resume", json={"budget": 2}), 400, param="budget")
        assert (await post(http, f"{RUNS}/{run['id']}/resume"))["status"] == "RUNNING"


async def test_a_folder_below_a_root_is_read_with_the_options_of_the_run(stage, http):
    stage.write("a.txt", "Whales are mammals.")
    stage.write("b.md", "# Trees\n\nTrees grow slowly.")
    stage.work()
    options = {"chunk_characters": 400, "chunk_overlap": 30, "include": ["*.md"], "entities": "none", "budget": 0.25}
    run = await read(http, stage, **options)
    assert run["counts"]["done"] == 1
    assert run["options"] == {
        "embedding_model": "hash",
        "embedding_dimensions": None,
        "entities": "none",
        "chunk_characters": 400,
        "chunk_overlap": 30,
        "language": "english",
        "include": ["*.md"],
        "exclude": [],
        "force": False,
    }
    assert run["money"] | {"budget": 0.25, "in_doubt": 0, "reserved": 0, "is_exact": True} == run["money"]
    assert run["skipped"]["total"] == 1
    assert run["is_listing_complete"] is True
    again = await read(http, stage, **options)
    assert (again["counts"]["unchanged"], again["counts"]["done"]) == (1, 0)
    forced = await read(http, stage, **options, force=True)
    assert (forced["counts"]["unchanged"], forced["counts"]["done"]) == (0, 1)


async def test_the_same_key_returns_the_same_run_and_another_body_is_a_conflict(stage, http):
    body = {"collection": "papers", "sources": [URL]}
    first = await http.post(RUNS, json=body, headers={"Idempotency-Key": "k"})
    again = await http.post(RUNS, json=body, headers={"Idempotency-Key": "k"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    assert again.headers["Idempotent-Replayed"] == "true"
    for change in ({"collection": "other"}, {"force": True}, {"budget": 1}, {"chunk_characters": 100}):
        fails(await http.post(RUNS, json=body | change, headers={"Idempotency-Key": "k"}), 409, "conflict")
    assert await stage.rows("SELECT count(*) FROM batchwright.ingest_run") == [(1,)]


async def test_runs_are_listed_page_by_page_the_newest_first(stage, http):
    ids = [(await create(http, stage, [URL], collection=name))["id"] for name in ("a", "b", "a", "b", "a")]
    seen, cursor = [], None
    while True:
        page = await get(http, RUNS, limit=2, **({"cursor": cursor} if cursor else {}))
        seen += [run["id"] for run in page["data"]]
        if not page["has_more"]:
            break
        cursor = page["next_cursor"]
    assert seen == ids[::-1]
    assert [run["id"] for run in (await get(http, RUNS, collection="b"))["data"]] == [ids[3], ids[1]]
    await post(http, f"{RUNS}/{ids[0]}/cancel")
    assert [run["id"] for run in (await get(http, RUNS, status="CANCELLED"))["data"]] == [ids[0]]
    assert (await get(http, RUNS, status=["CANCELLED", "PENDING"], limit=100))["data"][4]["id"] == ids[0]
    fails(await http.get(RUNS, params={"cursor": "zzz"}), 400, param="cursor")
    fails(await http.get(RUNS, params={"limit": 101}), 400, param="limit")
    fails(await http.get(RUNS, params={"colection": "a"}), 400, "unknown_parameter")


async def test_a_page_of_runs_with_very_many_sources_is_short_and_has_a_cursor(stage, http, monkeypatch):
    monkeypatch.setattr("batchwright.ingest.http_runs._PAGE_CHARACTERS_MAX", 100)
    monkeypatch.setattr("batchwright.ingest.http_runs._RUNS_PER_STEP", 2)
    ids = [(await create(http, stage, [f"{URL}?{n}" for n in range(30)]))["id"] for _ in range(3)]
    first = await get(http, RUNS)
    assert ([run["id"] for run in first["data"]], first["has_more"]) == (ids[:0:-1], True)
    assert (len(first["data"][0]["sources"]), first["data"][0]["source_count"]) == (20, 30)
    rest = await get(http, RUNS, cursor=first["next_cursor"])
    assert ([run["id"] for run in rest["data"]], rest["has_more"]) == (ids[:1], False)


async def test_a_run_is_parked_and_resumed_and_says_what_it_waits_for(stage, http):
    stage.write("a.txt", "Whales are mammals.")
    run = await create(http, stage)
    assert [wait["reason"] for wait in run["waiting_on"]] == ["no_worker"]
    assert run["waiting_on"][0]["remedy"]
    parked = await post(http, f"{RUNS}/{run['id']}/park", {"reason": "lunch"})
    assert (parked["status"], parked["parked"]["reason"], parked["parked"]["message"]) == ("PARKED", "user", "lunch")
    assert "lunch" in parked["waiting_on"][0]["message"]
    fails(await http.post(f"{RUNS}/{run['id']}/park"), 409, "conflict")
    inbox = await get(http, "/v1/ingest/inbox")
    assert [(one["run_id"], one["reason"]) for one in inbox["parked"]] == [(run["id"], "user")]
    resumed = await post(http, f"{RUNS}/{run['id']}/resume", {"budget": 3})
    assert (resumed["status"], resumed["parked"], resumed["money"]["budget"]) == ("RUNNING", None, 3)
    fails(await http.post(f"{RUNS}/{run['id']}/resume"), 409, "conflict")
    stage.work()
    assert (await stage.ended(run["id"])).status.value == "COMPLETED"
    assert (await get(http, f"{RUNS}/{run['id']}"))["waiting_on"] == []


async def test_a_cancelled_run_can_be_retried(stage, http):
    stage.write("a.txt", "Whales are mammals.")
    run = await create(http, stage)
    cancelled = await post(http, f"{RUNS}/{run['id']}/cancel", {"reason": "by mistake"})
    assert cancelled["status"] == "CANCELLED"
    for verb in ("cancel", "park", "resume"):
        fails(await http.post(f"{RUNS}/{run['id']}/{verb}"), 409, "conflict")
    assert await post(http, f"{RUNS}/{run['id']}/retry") == {"object": "changed", "count": 0, "runs": {}}


async def test_a_run_that_failed_as_a_whole_can_be_restarted(stage, http, tmp_path):
    missing = stage.folder / "later"
    stage.work()
    run = await read(http, stage, [str(missing)])
    assert (run["status"], bool(run["error"])) == ("FAILED", True)
    stage.write("later/a.txt", "Whales are mammals.")
    assert (await post(http, f"{RUNS}/{run['id']}/retry"))["runs"] == {run["id"]: 0}
    await stage.ended(run["id"])
    shown = await get(http, f"{RUNS}/{run['id']}")
    assert (shown["status"], shown["counts"]["done"]) == ("COMPLETED", 1)


async def test_an_estimate_shows_what_a_run_would_need_and_creates_nothing(stage, http, website):
    stage.write("a.txt", "Whales are mammals. " * 100)
    body = {"collection": "papers", "sources": [str(stage.folder), f"{website.url}/trees.html"]}
    found = await post(http, "/v1/ingest/estimates", body)
    assert (found["object"], found["documents"], found["sampled"]) == ("ingest.estimate", 2, 2)
    assert found["chunks"]["value"] >= 2
    assert found["cost"]["realtime"] == {"low": 0, "value": 0, "high": 0}
    assert await stage.rows("SELECT count(*) FROM batchwright.ingest_run") == [(0,)]


async def test_too_many_estimates_at_once_are_refused_until_later(stage, api, http):
    estimating = api.service(IngestServices).estimating
    await estimating.acquire()
    await estimating.acquire()
    body = {"collection": "papers", "sources": [str(stage.folder)]}
    answer = await http.post("/v1/ingest/estimates", json=body)
    fails(answer, 503, "unavailable")
    assert answer.headers["Retry-After"]
    estimating.release()
    assert (await http.post("/v1/ingest/estimates", json=body)).status_code == 200


async def test_an_estimate_that_takes_too_long_times_out(stage, http, website, monkeypatch):
    monkeypatch.setattr("batchwright.ingest.http_runs._ESTIMATE_SECONDS", 0.2)
    website.replies["/slow.html"] = None
    body = {"collection": "papers", "sources": [f"{website.url}/slow.html"]}
    assert "list fewer" in fails(await http.post("/v1/ingest/estimates", json=body), 503, "unavailable")


# Items and the inbox ----------------------------------------------------------------------------------------------


async def test_documents_of_a_run_are_listed_filtered_and_shown_with_their_steps(stage, http):
    run = await failed_run(http, stage)
    items = f"{RUNS}/{run['id']}/items"
    first = await get(http, items, limit=2)
    rest = await get(http, items, limit=2, cursor=first["next_cursor"])
    assert [one["name"] for one in first["data"] + rest["data"]] == ["a.txt", "b.pdf", "c.pdf"]
    assert (first["has_more"], rest["has_more"], rest["next_cursor"]) == (True, False, None)
    failed = (await get(http, items, status="FAILED"))["data"]
    assert [one["name"] for one in failed] == ["b.pdf", "c.pdf"]
    assert len((await get(http, items, cause=failed[0]["cause"]))["data"]) == 2
    assert [one["name"] for one in (await get(http, items, step="DONE"))["data"]] == ["a.txt"]
    assert (await get(http, items, status="CANCELLED"))["data"] == []
    fails(await http.get(items, params={"cursor": "run_1"}), 400, param="cursor")

    item = await get(http, f"/v1/ingest/items/{failed[0]['id']}")
    assert (item["status"], item["error"]["step"]) == ("FAILED", "CONTENT_EXTRACTED")
    assert {step["step"]: step["state"] for step in item["steps"]} == {"FETCHED": "done", "CONTENT_EXTRACTED": "open"}
    assert item["waiting_on"] == []
    events = await get(http, f"/v1/ingest/items/{item['id']}/events", limit=1000)
    assert {"step_started", "step_completed", "step_failed"} <= {one["event"] for one in events["data"]}


async def test_the_history_of_a_document_covers_all_its_jobs_in_pages(stage, http):
    run = await failed_run(http, stage)
    (item, _) = (await get(http, f"{RUNS}/{run['id']}/items", status="FAILED"))["data"]
    assert (await post(http, f"/v1/ingest/items/{item['id']}/retry", {"anew": True}))["status"] == "OPEN"
    await stage.ended(run["id"])
    shown = await get(http, f"/v1/ingest/items/{item['id']}")
    assert len(shown["job_ids"]) == 2
    events, after = [], 0
    while True:
        page = await get(http, f"/v1/ingest/items/{item['id']}/events", after=after, limit=3)
        events += page["data"]
        if not page["has_more"]:
            break
        after = page["next_cursor"]
    assert len(events) > 6
    assert [one["id"] for one in events] == sorted({one["id"] for one in events})
    assert {one["job_id"] for one in events} == set(shown["job_ids"])
    assert [one["event"] for one in events].count("step_failed") == 2


async def test_the_inbox_groups_by_cause_and_its_verbs_need_a_condition(stage, http):
    run = await failed_run(http, stage)
    inbox = await get(http, "/v1/ingest/inbox", run=run["id"])
    (group,) = inbox["data"]
    assert (group["count"], group["step"], sorted(group["names"])) == (2, "CONTENT_EXTRACTED", ["b.pdf", "c.pdf"])
    assert len(group["item_ids"]) == 2
    for verb in ("retry", "dismiss"):
        path = f"/v1/ingest/inbox/{verb}"
        for body in ({}, {"all": False}, {"all": True, "cause": "x"}):
            fails(await http.post(path, json=body), 400, param="all")
        fails(await http.post(path, json={"run": "run_none"}), 404, "not_found")
        fails(await http.post(path, json={"ids": []}), 400, param="ids")
        fails(await http.post(path, json={"ids": ["x"] * 1_001}), 400, param="ids")
        assert (await post(http, path, {"cause": "none"}))["count"] == 0
    assert (await post(http, "/v1/ingest/inbox/dismiss", {"ids": group["item_ids"][:1]}))["count"] == 1
    assert (await get(http, "/v1/ingest/inbox"))["data"][0]["count"] == 1
    done = await post(http, "/v1/ingest/inbox/retry", {"cause": group["cause"]})
    assert done == {"object": "changed", "count": 1, "runs": {run["id"]: 1}}
    await stage.ended(run["id"])
    assert (await post(http, "/v1/ingest/inbox/dismiss", {"all": True}))["count"] == 1
    assert (await get(http, "/v1/ingest/inbox"))["data"] == []
    assert (await post(http, "/v1/ingest/inbox/retry", {"all": True}))["count"] == 0
    assert (await post(http, f"{RUNS}/{run['id']}/retry", {"cause": group["cause"]}))["count"] == 2
    await stage.ended(run["id"])


async def test_a_document_is_dismissed_once_and_only_if_it_has_failed(stage, http):
    run = await failed_run(http, stage)
    good, bad, _ = (await get(http, f"{RUNS}/{run['id']}/items"))["data"]
    assert (await post(http, f"/v1/ingest/items/{bad['id']}/dismiss"))["dismissed_at"] is not None
    assert "already" in fails(await http.post(f"/v1/ingest/items/{bad['id']}/dismiss"), 409)
    assert "is DONE" in fails(await http.post(f"/v1/ingest/items/{good['id']}/dismiss"), 409)
    assert "is DONE" in fails(await http.post(f"/v1/ingest/items/{good['id']}/retry"), 409)


# Collections ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def papers(stage, http):
    stage.write("a.txt", "Whales are mammals. " + "They sing in the deep sea. " * 200)
    stage.write("sub/b.md", "# Trees\n\nTrees grow slowly in the north. Write to tree@example.com.")
    stage.write("c.pdf", make_pdf(["The first page is about ships.", "The second page is about harbours."]))
    stage.work()
    await read(http, stage)
    return "/v1/collections/papers"


async def test_collections_and_their_documents_are_listed_page_by_page(stage, http, papers):
    for name in ("aa", "zz"):
        await read(http, stage, [str(stage.folder / "sub")], collection=name)
    first = await get(http, "/v1/collections", limit=2)
    rest = await get(http, "/v1/collections", limit=2, cursor=first["next_cursor"])
    assert [one["name"] for one in first["data"] + rest["data"]] == ["aa", "papers", "zz"]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    shown = await get(http, papers)
    assert (shown["documents"], shown["language"], len(shown["spaces"])) == (3, "english", 1)
    assert shown["spaces"][0]["dimensions"] > 0
    page = await get(http, f"{papers}/documents", limit=2)
    more = await get(http, f"{papers}/documents", limit=2, cursor=page["next_cursor"])
    documents = page["data"] + more["data"]
    assert sorted(one["name"] for one in documents) == ["a.txt", "c.pdf", "sub/b.md"]
    assert more["has_more"] is False
    long = next(one for one in documents if one["name"] == "a.txt")
    assert await get(http, f"{papers}/documents/{long['id']}") == long
    chunks = await get(http, f"{papers}/documents/{long['id']}/chunks", limit=1)
    later = await get(http, f"{papers}/documents/{long['id']}/chunks", limit=100, cursor=chunks["next_cursor"])
    assert [one["number"] for one in chunks["data"] + later["data"]] == list(range(long["chunks"]))
    assert long["chunks"] > 2
    for path in ("", "/documents", "/search?q=x", "/export", "/documents/1"):
        fails(await http.get(f"/v1/collections/none{path}"), 404, "not_found")
    fails(await http.get(f"{papers}/documents/999999"), 404, "not_found")
    fails(await http.get(f"{papers}/documents/0"), 400, param="id")
    fails(await http.get(f"{papers}/documents", params={"cursor": "x"}), 400, param="cursor")


async def test_search_by_words_by_vectors_and_with_filters(stage, http, papers):
    async def names(**params):
        return [hit["name"] for hit in (await get(http, f"{papers}/search", **params))["data"]]

    assert (await names(q="harbours"))[0] == "c.pdf"
    assert (await names(q="slowly growing trees", mode="words")) == ["sub/b.md"]
    assert len(await names(q="trees", mode="vectors", limit=2)) == 2
    assert await names(q="page", filter=["page:2"], mode="words") == ["c.pdf"]
    assert await names(q="page", filter=["name:*.pdf", "page:1"], mode="words") == ["c.pdf"]
    assert await names(q="trees", filter=["entity:email"], mode="words") == ["sub/b.md"]
    assert await names(q="whales", filter=["none:such"]) == []
    hit = (await get(http, f"{papers}/search", q="harbours", mode="words"))["data"][0]
    assert (hit["collection"], hit["page_last"], hit["ranks"]) == ("papers", 2, {"words": 1})


@pytest.mark.parametrize(
    ("params", "status", "param"),
    [
        ({}, 400, "q"),
        ({"q": ""}, 400, "q"),
        ({"q": "  "}, 400, "q"),
        ({"q": "x" * 2_001}, 400, "q"),
        ({"q": "x", "limit": 0}, 400, "limit"),
        ({"q": "x", "limit": 101}, 400, "limit"),
        ({"q": "x", "mode": "magic"}, 400, "mode"),
        ({"q": "x", "filter": "page"}, 400, "filter"),
        ({"q": "x", "filter": "page:first"}, 400, "filter"),
        ({"q": "x", "filter": ["a:1", "a:2"]}, 400, "filter"),
        ({"q": "x", "filter": ["a:1"] * 21}, 400, "filter"),
        ({"q": "x", "filters": "a:1"}, 400, "filters"),
    ],
)
async def test_an_invalid_search_is_refused(http, params, status, param):
    fails(await http.get("/v1/collections/papers/search", params=params), status, param=param)


async def test_without_the_model_server_words_are_searched_and_a_search_by_vectors_is_an_error(database_url, tmp_path):
    from tests.ingest.fake_provider import FakeProvider

    async with FakeProvider() as provider:
        tables = {
            "ingest": {"roots": [str(tmp_path / "papers")], "embedding_model": "embedder"},
            "model_gateways": {"embedder": {"url": provider.url}},
        }
        async with ingest_stage(database_url, tmp_path, **tables) as stage, serving(stage) as api:
            http = await api.client()
            stage.write("a.txt", "Whales are mammals.")
            stage.work()
            assert (await read(http, stage))["counts"]["done"] == 1
            path = "/v1/collections/papers/search"
            assert (await get(http, path, q="whales", mode="vectors"))["data"][0]["name"] == "a.txt"
            await provider.stop()
            found = await get(http, path, q="whales")
            assert (found["data"][0]["ranks"], len(found["used"])) == ({"words": 1}, 2)
            assert any(one.startswith("vectors left out") for one in found["used"])
            answer = await http.get(path, params={"q": "whales", "mode": "vectors"})
            fails(answer, 503, "model_unavailable")
            assert answer.headers["Retry-After"]


async def test_an_export_as_lines_or_as_parquet_holds_every_chunk(stage, http, papers):
    lines = await http.get(f"{papers}/export")
    assert lines.headers["content-type"] == "application/x-ndjson"
    rows = [json.loads(line) for line in lines.text.splitlines()]
    total = (await get(http, papers))["chunks"]
    assert len(rows) == total
    assert "vector" not in rows[0]
    parquet = await http.get(f"{papers}/export", params={"format": "parquet", "vectors": True})
    table = pyarrow.parquet.read_table(io.BytesIO(parquet.content))
    assert table.num_rows == total
    assert [row["text"] for row in rows] == table.column("text").to_pylist()
    assert all(table.column("vector").to_pylist())
    last = rows[-1]["document_id"]
    rest = await http.get(f"{papers}/export", params={"after": sorted({row["document_id"] for row in rows})[-2]})
    assert {json.loads(line)["document_id"] for line in rest.text.splitlines()} == {last}
    assert (await http.get(f"{papers}/export", params={"after": last})).content == b""
    fails(await http.get(f"{papers}/export", params={"format": "csv"}), 400, param="format")


async def test_an_export_that_is_cut_short_cannot_be_mistaken_for_a_complete_one(stage, papers, monkeypatch):
    server = await stage.batchwright.server()
    running = server.start()
    monkeypatch.setattr("batchwright.ingest.http_collections._PIECE_BYTES", 1)
    monkeypatch.setattr("batchwright.ingest.export._PAGE", 1)
    try:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=30) as http,
            http.stream("GET", f"{papers}/export", params={"vectors": True}) as answer,
        ):
            assert answer.status_code == 200
            await stage.rows("ALTER TABLE batchwright.ingest_chunk RENAME TO hidden")
            with pytest.raises(httpx.RemoteProtocolError):
                await answer.aread()
    finally:
        await server.close()
        await running


async def test_a_retired_document_is_not_found_and_comes_back_with_the_next_run(stage, http, papers):
    found = await get(http, f"{papers}/documents")
    document = next(one for one in found["data"] if one["name"] == "sub/b.md")
    gone = await http.delete(f"{papers}/documents/{document['id']}")
    assert gone.json() == {
        "object": "collection.document",
        "collection": "papers",
        "id": document["id"],
        "deleted": True,
    }
    assert (await get(http, f"{papers}/search", q="trees", mode="words"))["data"] == []
    fails(await http.get(f"{papers}/documents/{document['id']}"), 404)
    fails(await http.delete(f"{papers}/documents/{document['id']}"), 409)
    again = await read(http, stage)
    assert (again["counts"]["done"], again["counts"]["unchanged"]) == (1, 2)
    assert (await get(http, f"{papers}/search", q="trees", mode="words"))["data"] != []


async def test_a_collection_with_an_open_run_is_not_deleted(stage, http):
    run = await create(http, stage, [URL])
    assert run["id"] in fails(await http.delete("/v1/collections/papers"), 409, "conflict")
    await post(http, f"{RUNS}/{run['id']}/cancel")
    assert (await http.delete("/v1/collections/papers")).json()["deleted"] is True
    fails(await http.delete("/v1/collections/papers"), 404)
    assert (await get(http, "/v1/collections"))["data"] == []


# Tenants and scopes -----------------------------------------------------------------------------------------------


async def test_objects_of_another_tenant_are_not_found(stage, api):
    theirs = await api.holder(tenant="b")
    run = await failed_run(theirs, stage)
    mine = await api.holder("read", "submit", "operate", tenant="a")
    items = (await get(theirs, f"{RUNS}/{run['id']}/items"))["data"]
    (document,) = (await get(theirs, "/v1/collections/papers/documents"))["data"]
    before = await stage.rows("SELECT to_jsonb(one) FROM batchwright.ingest_item AS one ORDER BY id")
    for path in (f"{RUNS}/{run['id']}", f"{RUNS}/{run['id']}/items", f"/v1/ingest/inbox?run={run['id']}"):
        fails(await mine.get(path), 404, "not_found")
    for verb in ("cancel", "park", "resume", "retry"):
        fails(await mine.post(f"{RUNS}/{run['id']}/{verb}"), 404, "not_found")
    for item in items:
        for path in ("", "/events"):
            fails(await mine.get(f"/v1/ingest/items/{item['id']}{path}"), 404, "not_found")
        for verb in ("retry", "dismiss"):
            fails(await mine.post(f"/v1/ingest/items/{item['id']}/{verb}"), 404, "not_found")
    ids = [item["id"] for item in items]
    for verb in ("retry", "dismiss"):
        fails(await mine.post(f"/v1/ingest/inbox/{verb}", json={"run": run["id"]}), 404, "not_found")
        for body in ({"ids": ids}, {"all": True}, {"cause": items[1]["cause"]}):
            assert (await post(mine, f"/v1/ingest/inbox/{verb}", body))["count"] == 0
    for path in ("", "/documents", f"/documents/{document['id']}", "/search?q=whales", "/export"):
        fails(await mine.get(f"/v1/collections/papers{path}"), 404, "not_found")
    for path in ("", f"/documents/{document['id']}"):
        fails(await mine.delete(f"/v1/collections/papers{path}"), 404, "not_found")
    for path in (RUNS, "/v1/collections", "/v1/ingest/inbox"):
        assert (await get(mine, path))["data"] == []
    assert await stage.rows("SELECT to_jsonb(one) FROM batchwright.ingest_item AS one ORDER BY id") == before
    admin = await api.holder(tenant="a")
    assert [one["id"] for one in (await get(admin, RUNS, tenant="*"))["data"]] == [run["id"]]
    assert (await get(admin, "/v1/collections/papers", tenant="b"))["documents"] == 1
    fails(await admin.get("/v1/collections", params={"tenant": "*"}), 400)


async def test_two_tenants_have_collections_of_one_name(stage, api):
    stage.work()
    ours = {"a": "whales", "b": "trees"}
    for tenant, word in ours.items():
        stage.write(f"{tenant}/one.txt", f"All about {word}.")
        await read(await api.holder(tenant=tenant), stage, [str(stage.folder / tenant)])
    for tenant, word in ours.items():
        http = await api.holder("read", tenant=tenant)
        hits = await asyncio.gather(*(get(http, "/v1/collections/papers/search", q=one) for one in ours.values()))
        assert {hit["text"] for found in hits for hit in found["data"]} == {f"All about {word}."}


async def test_runs_need_the_scope_submit_and_the_inbox_needs_operate(stage, api):
    reader, submitter = await api.holder("read"), await api.holder("submit")
    body = {"collection": "papers", "sources": [URL]}
    for path in (RUNS, "/v1/ingest/estimates"):
        assert "'submit'" in fails(await reader.post(path, json=body), 403, "forbidden")
    run = (await submitter.post(RUNS, json=body)).json()
    fails(await submitter.get(f"{RUNS}/{run['id']}"), 403, "forbidden")
    assert (await reader.get(f"{RUNS}/{run['id']}")).status_code == 200
    fails(await reader.post(f"{RUNS}/{run['id']}/cancel"), 403, "forbidden")
    fails(await reader.delete("/v1/collections/papers"), 403, "forbidden")
    for verb in ("retry", "dismiss"):
        assert "'operate'" in fails(await submitter.post(f"/v1/ingest/inbox/{verb}", json={"all": True}), 403)


async def test_costs_are_those_of_the_callers_tenant(stage, api, http):
    await stage.rows(
        "INSERT INTO batchwright.spending (tenant, day, model, lane, calls, prompt_tokens, cost) "
        "SELECT tenant, (now() AT TIME ZONE 'UTC')::date, 'small', 'realtime', 2, 100, cost "
        "FROM (VALUES ('default', 0.5), ('other', 1.5)) AS given (tenant, cost) RETURNING tenant"
    )
    found = (await http.get("/v1/ingest/costs")).json()
    sums = {"calls": 2, "unpriced": 0, "prompt_tokens": 100, "completion_tokens": 0, "cost": 0.5}
    part = {"tenant": "default", "model": "small", "lane": "realtime", "sums": sums}
    assert found == {"object": "ingest.costs", "days": 30, "total": sums, "data": [part], "has_more": False}
    everyone = (await http.get("/v1/ingest/costs", params={"limit": 1, "tenant": "*"})).json()
    assert [part["tenant"] for part in everyone["data"]] == ["other"]
    assert (everyone["total"]["cost"], everyone["has_more"]) == (2.0, True)
    fails(await http.get("/v1/ingest/costs", params={"days": 0}), 400, param="days")
