"""Jobs over HTTP: each route with valid, refused and malformed requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pytest

from batchwright.api import jobs, submit
from batchwright.api.schemas import JobsToBe, JobToBe
from batchwright.db.retry import retry_deadlocks
from batchwright.errors import DatabaseUnavailable, Deadlock
from tests.api.conftest import Api, fails, gathered
from tests.support import take_one

JSON = {"Content-Type": "application/json"}
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ADA = {"job_type": "greet", "payload": {"name": "Ada"}}


async def post(http: httpx.AsyncClient, body: Any, key: str | None = None, **options: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return await http.post("/v1/jobs", json=body, headers=headers, **options)


async def made(http: httpx.AsyncClient, job_type: str = "echo", payload: Any = None, **options: Any) -> str:
    answer = await post(http, {"job_type": job_type, "payload": payload, **options})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def many(http: httpx.AsyncClient, n: int, job_type: str = "echo", **options: Any) -> list[str]:
    answer = await post(http, {"jobs": [{"job_type": job_type, **options} for _ in range(n)]})
    assert answer.status_code == 201, answer.text
    return [job["id"] for job in answer.json()["data"]]


async def status(http: httpx.AsyncClient, id: str) -> str:
    return str((await http.get(f"/v1/jobs/{id}")).json()["status"])


# Submit -----------------------------------------------------------------------------------------------------------


async def test_a_job_is_submitted_run_and_shown(api: Api, http: httpx.AsyncClient) -> None:
    sent = {**ADA, "priority": 2, "queue": "slow/eu", "exclusive_key": ["ada", 7, True, None], "max_attempts": 5}
    answer = await http.post("/v1/jobs", json=sent, headers={"traceparent": TRACE})
    assert answer.status_code == 201
    job = answer.json()
    assert {name: job[name] for name in sent} == sent
    assert (job["object"], job["status"], job["tenant"]) == ("job", "QUEUED", "default")
    assert (job["pipeline_id"], job["traceparent"]) == (job["id"], TRACE)
    assert "Idempotent-Replayed" not in answer.headers
    await api.drain()
    shown = (await http.get(f"/v1/jobs/{job['id']}")).json()
    assert (shown["status"], shown["result"], shown["waiting_on"]) == ("SUCCEEDED", "Hello, Ada!", [])


async def test_a_waiting_job_says_why(api: Api, http: httpx.AsyncClient) -> None:
    first = await made(http, exclusive_key=["k"])
    later = (await post(http, {"job_type": "echo", "delay_seconds": 60, "exclusive_key": ["k"]})).json()
    reasons = {one["reason"]: one for one in later["waiting_on"]}
    assert set(reasons) == {"run_after", "no_worker", "exclusive_key"}
    assert reasons["run_after"]["until"] == later["run_after"]
    assert reasons["exclusive_key"]["job_id"] == first
    (listed, _) = (await http.get("/v1/jobs")).json()["data"]
    assert listed["waiting_on"] == later["waiting_on"]


async def test_an_unknown_operation_and_a_wrong_payload_are_named(api: Api, http: httpx.AsyncClient) -> None:
    message = fails(await post(http, {"job_type": "gret"}), 400, "unknown_operation", "job_type")
    assert "did you mean 'greet'" in message
    fails(await post(http, {"job_type": "greet", "payload": {"name": 7}}), 400, "payload_invalid", "payload")
    assert await api.jobs() == 0


async def test_operations_of_batches_cannot_be_enqueued_by_hand(api: Api, http: httpx.AsyncClient) -> None:
    message = fails(await post(http, {"job_type": "batch.webhook"}), 400, "invalid_request", "job_type")
    assert "POST /v1/batches" in message
    plan = {"name": "n", "cron": "0 6 * * *", "job": {"job_type": "batch.process"}}
    fails(await http.post("/v1/schedules", json=plan), 400, "invalid_request", "job.job_type")
    assert await api.jobs() == 0


async def test_many_jobs_are_created_together_or_not_at_all(api: Api, http: httpx.AsyncClient) -> None:
    answer = await post(http, {"jobs": [{**ADA, "priority": n} for n in range(5)]})
    assert answer.status_code == 201
    assert [job["priority"] for job in answer.json()["data"]] == [0, 1, 2, 3, 4]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"job_type": "greet", "payload": {"name": 7}}, "jobs.1.payload"),
        ({"job_type": "gret"}, "jobs.1.job_type"),
        ({**ADA, "priority": 10}, "jobs.1.priority"),
        ({**ADA, "exclusive_key": ["x" * 500] * 3}, "jobs.1.exclusive_key"),
        ({**ADA, "exclusive_key": [{}]}, "jobs.1.exclusive_key.0"),
        ({**ADA, "surprise": 1}, "jobs.1.surprise"),
    ]
    for job, param in bad:
        fails(await post(http, {"jobs": [ADA, job, ADA]}), 400, param=param)
    held = {"job_type": "echo", "exclusive_key": ["k"], "on_held": "reject"}
    fails(await post(http, {"jobs": [held, ADA, held]}), 409, "conflict")
    assert await api.jobs() == 5


async def test_an_error_in_a_list_of_one_job_names_its_position(api: Api, http: httpx.AsyncClient) -> None:
    fails(await post(http, {"jobs": [{"job_type": "gret"}]}), 400, param="jobs.0.job_type")


async def test_a_thousand_jobs_fit_in_one_request_and_one_more_does_not(api: Api, http: httpx.AsyncClient) -> None:
    answer = await post(http, {"jobs": [{"job_type": "echo", "payload": {"value": n}} for n in range(1000)]})
    assert answer.status_code == 201
    assert [job["payload"]["value"] for job in answer.json()["data"]] == list(range(1000))
    fails(await post(http, {"jobs": [{"job_type": "echo"}] * 1001}), 400, "invalid_request", "jobs")
    fails(await post(http, {"jobs": []}), 400, "invalid_request", "jobs")
    assert await api.jobs() == 1000


# Idempotency-Key --------------------------------------------------------------------------------------------------


SORTED = orjson.OPT_SORT_KEYS


def test_the_body_that_is_meant_is_as_pydantic_would_write_it_and_takes_no_time() -> None:
    """Digests of keys outlive an upgrade, and this runs on the event loop."""
    one = {"job_type": "echo", "payload": {"a": [1.5, None, "é", 2**60]}, "run_after": "2030-01-01T00:00:00Z"}
    for body in (one, {"jobs": [one, {"job_type": "x"}, {"job_type": "x", "payload": None, "delay_seconds": 2}]}):
        read = (JobsToBe if "jobs" in body else JobToBe).model_validate(body)
        written = read.model_dump(mode="json", exclude_unset=True)
        assert orjson.dumps(jobs._meant(read), option=SORTED) == orjson.dumps(written, option=SORTED)
    large = JobsToBe.model_validate({"jobs": [{"job_type": "x", "payload": {"a": [[]] * 20_000}}] * 500})
    began = time.process_time()
    jobs._meant(large)
    assert time.process_time() - began < 1


async def test_a_repeated_request_gives_the_same_job(api: Api, http: httpx.AsyncClient) -> None:
    first, again = await post(http, ADA, "k"), await post(http, ADA, "k")
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "Idempotent-Replayed" not in first.headers
    assert first.json()["id"] == again.json()["id"]
    reordered = b'{ "payload": {"name": "Ada"}, "job_type":"greet" }'
    same = await http.post("/v1/jobs", content=reordered, headers={**JSON, "Idempotency-Key": "k"})
    assert same.json()["id"] == first.json()["id"]
    assert await api.jobs() == 1


async def test_a_repeated_request_for_many_gives_the_same_jobs(api: Api, http: httpx.AsyncClient) -> None:
    body = {"jobs": [ADA, ADA, ADA]}
    first, again = await post(http, body, "k"), await post(http, body, "k")
    assert (first.status_code, again.status_code) == (201, 200)
    assert [job["id"] for job in first.json()["data"]] == [job["id"] for job in again.json()["data"]]
    assert await api.jobs() == 3


async def test_a_key_with_another_body_is_a_conflict(api: Api, http: httpx.AsyncClient) -> None:
    await post(http, ADA, "k")
    assert "another body" in fails(await post(http, {"job_type": "echo"}, "k"), 409, "conflict")
    fails(await post(http, {"jobs": [ADA]}, "k"), 409, "conflict")
    assert await api.jobs() == 1


async def test_the_same_key_of_another_tenant_is_another_key(api: Api) -> None:
    ours, theirs = await api.holder(tenant="ours"), await api.holder(tenant="theirs")
    one, two = await post(ours, ADA, "k"), await post(theirs, {"job_type": "echo"}, "k")
    assert (one.status_code, two.status_code) == (201, 201)
    assert one.json()["id"] != two.json()["id"]


async def test_twenty_requests_with_one_key_at_once_make_one_job(api: Api, http: httpx.AsyncClient) -> None:
    answers = await gathered(*(post(http, {"jobs": [ADA, ADA]}, "k") for _ in range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    assert len({tuple(job["id"] for job in answer.json()["data"]) for answer in answers}) == 1
    assert await api.jobs() == 2


async def test_a_crash_before_the_commit_leaves_neither_key_nor_job(
    api: Api, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {**submit.SQL, "answer": "SELECT 1 / 0"}
    with monkeypatch.context() as patch:
        patch.setattr(submit, "SQL", broken)
        assert (await post(http, ADA, "k")).status_code >= 400
    assert await api.sql("SELECT FROM batchwright.api_request") == []
    assert await api.jobs() == 0
    assert (await post(http, ADA, "k")).status_code == 201


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_commit_whose_answer_was_lost_is_recognized_as_this_requests(
    api: Api, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    once, losses = submit._once, [DatabaseUnavailable("the answer was lost"), Deadlock("chosen as a victim")]

    @retry_deadlocks
    async def lossy(*args: Any) -> Any:
        answer = await once(*args)
        if losses:
            raise losses.pop()
        return answer

    monkeypatch.setattr(submit, "_once", lossy)
    answer = await post(http, ADA, key)
    assert answer.status_code == 201
    assert "Idempotent-Replayed" not in answer.headers
    assert not losses
    assert await api.jobs() == 1


async def test_a_key_that_retention_removes_meanwhile_can_be_used_again(
    api: Api, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await post(http, ADA, "k")
    gone = "WITH gone AS (DELETE FROM batchwright.api_request RETURNING digest, answer) SELECT * FROM gone WHERE false"
    monkeypatch.setattr(submit, "SQL", {**submit.SQL, "known": gone})
    assert (await post(http, ADA, "k")).status_code == 201
    assert await api.jobs() == 2


async def test_a_key_whose_job_was_removed_says_so(api: Api, http: httpx.AsyncClient) -> None:
    await post(http, ADA, "k")
    await post(http, {"jobs": [ADA]}, "m")
    await api.sql("DELETE FROM batchwright.job_event")
    await api.sql("DELETE FROM batchwright.job")
    assert "removed" in fails(await post(http, ADA, "k"), 409, "conflict")
    assert (await post(http, {"jobs": [ADA]}, "m")).json()["data"] == []
    await api.sql("DELETE FROM batchwright.api_request")
    assert (await post(http, ADA, "k")).status_code == 201


async def test_a_jobs_own_idempotency_key_gives_the_same_job(api: Api, http: httpx.AsyncClient) -> None:
    body = {**ADA, "idempotency_key": "mine"}
    first, again = await post(http, body), await post(http, body)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    fails(await post(http, {"job_type": "echo", "idempotency_key": "mine"}), 409, "conflict")


# Get and list -----------------------------------------------------------------------------------------------------


async def test_the_list_is_filtered_by_every_field(api: Api, http: httpx.AsyncClient) -> None:
    family = await made(http, "family", {"children": 1})
    failed = await made(http, "broken", {"code": "quota"})
    await api.drain()
    pipeline = str(uuid4())
    waiting = await made(http, "echo", delay_seconds=60, queue="slow", pipeline_id=pipeline)
    (child,) = (await http.get("/v1/jobs", params={"parent_job_id": family})).json()["data"]
    moment = (await http.get(f"/v1/jobs/{waiting}")).json()["created_at"]
    wanted: list[tuple[dict[str, Any], set[str]]] = [
        ({}, {family, failed, waiting, child["id"]}),
        ({"status": "FAILED"}, {failed}),
        ({"status": ["FAILED", "QUEUED"]}, {failed, waiting}),
        ({"job_type": "family"}, {family}),
        ({"queue": "slow"}, {waiting}),
        ({"pipeline_id": pipeline}, {waiting}),
        ({"pipeline_id": family}, {family, child["id"]}),
        ({"parent_job_id": family, "status": "FAILED"}, set()),
        ({"error_code": "quota"}, {failed}),
        ({"created_from": moment}, {waiting}),
        ({"created_to": moment}, {family, failed, child["id"]}),
        ({"job_type": "nobody"}, set()),
        ({"pipeline_id": str(uuid4())}, set()),
    ]
    for params, ids in wanted:
        page = (await http.get("/v1/jobs", params=params)).json()
        assert {job["id"] for job in page["data"]} == ids, params
        assert (page["object"], page["has_more"], page["next_cursor"]) == ("list", False, None)


async def test_pages_are_stable_while_jobs_are_added(api: Api, http: httpx.AsyncClient) -> None:
    ids = await many(http, 7)  # they have the same creation time, so only their ids differ
    seen, cursor = [], None
    for _ in range(4):
        page = (await http.get("/v1/jobs", params={"limit": 2, **({"cursor": cursor} if cursor else {})})).json()
        seen += [job["id"] for job in page["data"]]
        cursor = page["next_cursor"]
        await many(http, 1)
    assert seen == sorted(ids, reverse=True)
    assert (page["has_more"], cursor) == (False, None)


async def test_a_page_of_large_jobs_is_cut_short(
    api: Api, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_JOBS_PER_STEP", 2)
    monkeypatch.setattr(jobs, "_PAGE_BYTES_MAX", 3000)
    ids = await many(http, 7, payload={"value": "x" * 1000})
    pages, cursor = [], None
    for _ in range(2):
        page = (await http.get("/v1/jobs", params={"cursor": cursor} if cursor else {})).json()
        pages.append([job["id"] for job in page["data"]])
        assert page["has_more"] == (page["next_cursor"] is not None)
        cursor = page["next_cursor"]
    assert [len(page) for page in pages] == [4, 3]
    assert [id for page in pages for id in page] == sorted(ids, reverse=True)
    assert cursor is None


async def test_a_job_that_is_not_there_is_not_found(http: httpx.AsyncClient) -> None:
    id = uuid4()
    for method, path in (
        ("GET", ""),
        ("GET", "/events"),
        ("GET", "/events/stream"),
        ("POST", "/cancel"),
        ("POST", "/recover"),
        ("POST", "/rerun"),
    ):
        assert str(id) in fails(await http.request(method, f"/v1/jobs/{id}{path}"), 404, "not_found")
        fails(await http.request(method, f"/v1/jobs/nonsense{path}"), 400, "invalid_request", "id")
    fails(await http.get(f"/v1/pipelines/{id}"), 404, "not_found")
    fails(await http.post(f"/v1/pipelines/{id}/cancel"), 404, "not_found")


async def test_events_are_read_page_by_page(api: Api, http: httpx.AsyncClient) -> None:
    id = await made(http)
    await api.drain()
    whole = (await http.get(f"/v1/jobs/{id}/events")).json()
    names = ["job.enqueued", "job.started", "job.succeeded"]
    assert [event["event"] for event in whole["data"]] == names
    assert whole["has_more"] is False
    seen, after = [], "0"
    for _ in range(3):
        page = (await http.get(f"/v1/jobs/{id}/events", params={"limit": 1, "after": after})).json()
        seen += [event["event"] for event in page["data"]]
        after = page["next_cursor"]
    assert seen == names
    assert after is None
    for value in ("-1", "x", str(2**53), "1.5"):
        fails(await http.get(f"/v1/jobs/{id}/events", params={"after": value}), 400, param="after")


async def test_a_job_with_odd_values_can_still_be_shown(api: Api, http: httpx.AsyncClient) -> None:
    id = await made(http, "odd")
    await api.drain()
    (job,) = (await http.get("/v1/jobs")).json()["data"]
    assert (job["id"], job["error"]["code"], job["error"]["scope"]) == (id, "404", "job")
    events = {event["event"]: event for event in (await http.get(f"/v1/jobs/{id}/events")).json()["data"]}
    assert events["odd.cost"]["cost"] == "NaN"


# Verbs on one job -------------------------------------------------------------------------------------------------


async def test_cancel_is_a_no_op_on_a_job_that_has_ended(api: Api, http: httpx.AsyncClient) -> None:
    done = await made(http)
    await api.drain()
    assert (await http.post(f"/v1/jobs/{done}/cancel")).json()["status"] == "SUCCEEDED"
    open_ = await made(http)
    answer = await http.post(f"/v1/jobs/{open_}/cancel", json={"reason": "a change of mind"})
    assert answer.json()["status"] == "CANCELLED"
    again = await http.post(f"/v1/jobs/{open_}/cancel", json={"reason": "twice"})
    assert again.json() == answer.json()
    events = (await http.get(f"/v1/jobs/{open_}/events")).json()["data"]
    assert [event["message"] for event in events if event["event"] == "job.cancelled"] == ["a change of mind"]
    fails(await http.post(f"/v1/jobs/{open_}/cancel", json={"reason": ""}), 400, param="reason")


async def test_verbs_on_a_job_with_an_owner_are_refused(api: Api, http: httpx.AsyncClient) -> None:
    id = await made(http)
    await api.sql("UPDATE batchwright.job SET owner = 'batch b1'")
    for verb in ("cancel", "recover", "rerun"):
        assert "batch b1" in fails(await http.post(f"/v1/jobs/{id}/{verb}"), 409, "conflict")


async def test_recover_is_only_for_jobs_whose_lease_has_expired(api: Api, http: httpx.AsyncClient) -> None:
    id = await made(http)
    assert "QUEUED" in fails(await http.post(f"/v1/jobs/{id}/recover"), 409, "conflict")
    await take_one(api.queue, types=["echo"])
    assert "its lease is alive" in fails(await http.post(f"/v1/jobs/{id}/recover"), 409, "conflict")
    await api.sql("UPDATE batchwright.job SET lease_until = now() - interval '1 second'")
    answer = await http.post(f"/v1/jobs/{id}/recover")
    assert (answer.status_code, answer.json()["status"], answer.json()["attempts"]) == (200, "QUEUED", 0)


async def test_rerun_is_only_for_failed_and_cancelled_jobs(api: Api, http: httpx.AsyncClient) -> None:
    bad, good = await made(http, "broken"), await made(http)
    await api.drain()
    answer = await http.post(f"/v1/jobs/{bad}/rerun")
    assert (answer.status_code, answer.json()["status"]) == (200, "QUEUED")
    assert "SUCCEEDED" in fails(await http.post(f"/v1/jobs/{good}/rerun"), 409, "conflict")
    fails(await http.post(f"/v1/jobs/{bad}/rerun"), 409, "conflict")


# The inbox --------------------------------------------------------------------------------------------------------


async def test_the_inbox_groups_failures_by_type_and_code(api: Api, http: httpx.AsyncClient) -> None:
    for code in ("quota", "quota", "syntax"):
        await made(http, "broken", {"code": code})
    await made(http, "flaky")
    await api.drain()
    groups = (await http.get("/v1/jobs/failed")).json()["data"]
    found = {(group["job_type"], group["code"]): (group["count"], group["retryable"]) for group in groups}
    assert found == {
        ("broken", "quota"): (2, False),
        ("broken", "syntax"): (1, False),
        ("flaky", "busy"): (1, True),
    }
    assert (groups[0]["message"], len(groups[0]["samples"])) == ("it broke", 2)
    only = (await http.get("/v1/jobs/failed", params={"job_type": "flaky"})).json()["data"]
    assert [group["job_type"] for group in only] == ["flaky"]
    assert len((await http.get("/v1/jobs/failed", params={"limit": 1})).json()["data"]) == 1


@pytest.mark.parametrize("verb", ["rerun", "dismiss"])
async def test_a_group_of_the_inbox_is_emptied(api: Api, http: httpx.AsyncClient, verb: str) -> None:
    ids = {code: await made(http, "broken", {"code": code}) for code in ("quota", "syntax")}
    await api.drain()
    group = {"job_type": "broken", "code": "quota"}
    dry = (await http.post(f"/v1/jobs/failed/{verb}", json={**group, "dry_run": True})).json()
    assert (dry["dry_run"], dry["matched"], dry["changed"]) == (True, 1, 0)
    assert len((await http.get("/v1/jobs/failed")).json()["data"]) == 2
    done = (await http.post(f"/v1/jobs/failed/{verb}", json=group)).json()
    assert done == {
        "object": "changed", "dry_run": False, "matched": 1, "changed": 1, "has_more": False, "next_cursor": None,
    }  # fmt: skip
    assert [one["code"] for one in (await http.get("/v1/jobs/failed")).json()["data"]] == ["syntax"]
    assert await status(http, ids["quota"]) == ("QUEUED" if verb == "rerun" else "FAILED")
    assert await status(http, ids["syntax"]) == "FAILED"
    fails(await http.post(f"/v1/jobs/failed/{verb}", json={"code": "quota"}), 400, param="job_type")
    fails(await http.post(f"/v1/jobs/failed/{verb}", json={**group, "cursor": "?"}), 400, param="cursor")


async def test_a_dismissed_job_comes_back_when_it_fails_again(api: Api, http: httpx.AsyncClient) -> None:
    id = await made(http, "broken")
    await api.drain()
    await http.post("/v1/jobs/failed/dismiss", json={"job_type": "broken"})
    assert (await http.get("/v1/jobs/failed")).json()["data"] == []
    await http.post(f"/v1/jobs/{id}/rerun")
    await api.drain()
    assert (await http.get("/v1/jobs/failed")).json()["data"][0]["samples"] == [id]


# Many at once -----------------------------------------------------------------------------------------------------


async def test_jobs_are_cancelled_by_filter(api: Api, http: httpx.AsyncClient) -> None:
    fast, slow = await many(http, 3), await many(http, 2, queue="slow")
    dry = (await http.post("/v1/jobs/cancel", json={"queue": "slow", "dry_run": True})).json()
    assert (dry["dry_run"], dry["matched"], dry["changed"]) == (True, 2, 0)
    assert await status(http, slow[0]) == "QUEUED"
    done = (await http.post("/v1/jobs/cancel", json={"queue": "slow", "reason": "too slow"})).json()
    assert (done["matched"], done["changed"], done["has_more"]) == (2, 2, False)
    assert {await status(http, id) for id in slow} == {"CANCELLED"}
    assert {await status(http, id) for id in fast} == {"QUEUED"}
    nothing = (await http.post("/v1/jobs/cancel", json={"status": ["SUCCEEDED"]})).json()
    assert (nothing["matched"], nothing["changed"]) == (0, 0)


async def test_more_than_a_thousand_jobs_are_cancelled_call_by_call(api: Api, http: httpx.AsyncClient) -> None:
    await many(http, 1000)
    await many(http, 1)
    first = (await http.post("/v1/jobs/cancel", json={"job_type": "echo"})).json()
    assert (first["changed"], first["has_more"]) == (1000, True)
    rest = (await http.post("/v1/jobs/cancel", json={"job_type": "echo", "cursor": first["next_cursor"]})).json()
    assert (rest["changed"], rest["has_more"], rest["next_cursor"]) == (1, False, None)


async def test_jobs_are_rerun_by_filter(api: Api, http: httpx.AsyncClient) -> None:
    bad = await many(http, 3, "broken")
    good = await made(http)
    await api.drain()
    dry = (await http.post("/v1/jobs/rerun", json={"error_code": "broken", "dry_run": True})).json()
    assert (dry["matched"], dry["changed"]) == (3, 0)
    done = (await http.post("/v1/jobs/rerun", json={"error_code": "broken"})).json()
    assert (done["matched"], done["changed"]) == (3, 3)
    assert {await status(http, id) for id in bad} == {"QUEUED"}
    assert await status(http, good) == "SUCCEEDED"


@pytest.mark.parametrize("verb", ["cancel", "rerun"])
async def test_a_filter_without_a_condition_is_refused(api: Api, http: httpx.AsyncClient, verb: str) -> None:
    id = await made(http)
    empty: list[dict[str, Any]] = [{}, {"dry_run": True}, {"status": []}, {"queue": None}, {"cursor": "x"}]
    for body in empty:
        assert "there is no filter" in fails(await http.post(f"/v1/jobs/{verb}", json=body), 400, "invalid_request")
    for odd in ({"quue": "slow"}, {"queue": "q", "dry_run": "no"}, {"queue": "q", "dry_run": 0}):
        fails(await http.post(f"/v1/jobs/{verb}", json=odd), 400, "invalid_request")
    assert await status(http, id) == "QUEUED"


# Pipelines --------------------------------------------------------------------------------------------------------


async def test_a_pipeline_is_shown_and_cancelled(api: Api, http: httpx.AsyncClient) -> None:
    id = await made(http, "chain")
    await api.drain()
    shown = (await http.get(f"/v1/pipelines/{id}")).json()
    assert (shown["id"], shown["status"]) == (id, "RUNNING")
    assert shown["counts"] == {"SUCCEEDED": 1, "QUEUED": 1}
    assert [step["job_type"] for step in shown["steps"]] == ["chain", "echo"]
    answer = await http.post(f"/v1/pipelines/{id}/cancel", json={"reason": "enough"})
    assert answer.json()["status"] == "CANCELLED"
    assert answer.json()["counts"] == {"SUCCEEDED": 1, "CANCELLED": 1}
    assert (await http.post(f"/v1/pipelines/{id}/cancel")).json() == answer.json()


# Malformed requests -----------------------------------------------------------------------------------------------

NO_JSON = [
    b"{",
    b'{"job_type": "greet"} trailing',
    b'{"job_type": NaN}',
    b'{"job_type": "echo", "payload": {"value": Infinity}}',
    b'{"job_type": "echo", "payload": {"value": 1e400}}',
    b'{"job_type": "echo", "payload": {"value": "\\ud800"}}',
    b'{"job_type": "\xff\xfe"}',
    b"\xef\xbb\xbf{}",
    b"'greet'",
    b'{"job_type": "echo", "payload": ' + b"[" * 5000 + b"]" * 5000 + b"}",
]
NO_REQUEST = [
    b"[]",
    b"null",
    b"3",
    b'"greet"',
    b"{}",
    b'{"job_type": ""}',
    b'{"job_type": null}',
    b'{"job_type": 7}',
    b'{"job_type": "' + b"x" * 101 + b'"}',
    b'{"jobs": null}',
    b'{"jobs": [3]}',
    b'{"jobs": [[]]}',
    b'{"jobs": [{"job_type": "echo"}], "queue": "slow"}',
]


async def test_a_body_that_is_not_json_is_refused(http: httpx.AsyncClient) -> None:
    for body in NO_JSON:
        answer = await http.post("/v1/jobs", content=body, headers={**JSON, "Idempotency-Key": "k"})
        assert "not JSON" in fails(answer, 400, "invalid_request", "body")


async def test_json_that_is_not_a_request_is_refused(api: Api, http: httpx.AsyncClient) -> None:
    for body in NO_REQUEST:
        fails(await http.post("/v1/jobs", content=body, headers=JSON), 400, "invalid_request")
    assert "body: Field required" in fails(await http.post("/v1/jobs"), 400, param="body")
    assert "body: Field required" in fails(await http.post("/v1/jobs", headers=JSON), 400, param="body")
    assert await api.jobs() == 0


async def test_fields_out_of_range_are_refused_by_name(api: Api, http: httpx.AsyncClient) -> None:
    wrong: list[tuple[str, Any]] = [
        ("priority", -1), ("priority", 10), ("priority", 1.5), ("priority", "5"), ("priority", True),
        ("priority", 10**15), ("max_attempts", 0), ("max_attempts", 1001), ("delay_seconds", -1),
        ("delay_seconds", 1e9), ("delay_seconds", "soon"), ("queue", ""), ("queue", "q" * 201),
        ("exclusive_key", []), ("exclusive_key", [1] * 21), ("exclusive_key", "k"), ("exclusive_key", ["x" * 400] * 3),
        ("on_held", "wait"), ("idempotency_key", ""), ("idempotency_key", "k" * 256), ("pipeline_id", "p"),
        ("traceparent", "t" * 201),
        ("run_after", "tomorrow"), ("run_after", "2026-12-24T18:00:00"), ("run_after", 5), ("run_after", "5"),
        ("run_after", "9999-12-31T23:59:59-01:00"), ("run_after", "10000-01-01T00:00:00Z"),
        ("deadline", "9999-12-31T23:59:59-01:00"), ("deadline", "0001-01-01T00:00:00+01:00"),
        ("deadline", "0000-01-01T00:00:00Z"), ("deadline", -1), ("deadline", 1e18),
    ]  # fmt: skip
    for field, value in wrong:
        fails(await post(http, {"job_type": "echo", field: value}), 400, "invalid_request", field)
        fails(await post(http, {"jobs": [{"job_type": "echo", field: value}]}), 400, param=f"jobs.0.{field}")
    assert await api.jobs() == 0


async def test_the_first_and_the_last_year_can_be_stored_and_read(api: Api, http: httpx.AsyncClient) -> None:
    for moment in ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"):
        job = (await post(http, {"job_type": "echo", "deadline": moment, "run_after": moment})).json()
        assert job["deadline"] == moment
    assert len((await http.get("/v1/jobs")).json()["data"]) == 2


async def test_a_nul_character_is_refused_wherever_text_is_taken(api: Api, http: httpx.AsyncClient) -> None:
    for field in ("job_type", "queue", "idempotency_key", "traceparent"):
        answer = await post(http, {"job_type": "echo", field: "a\0b"})
        assert "NUL" in fails(answer, 400, "invalid_request", field)
    assert "NUL" in fails(await post(http, {"job_type": "echo", "exclusive_key": ["\0"]}), 400, param="exclusive_key.0")
    payloads: list[Any] = [{"value": "\0"}, {"value": {"\0": 1}}, {"value": ["\0"]}, {"\0": 1}]
    for payload in payloads:
        fails(await post(http, {"job_type": "echo", "payload": payload}), 400, "payload_invalid", "payload")
    for name in (
        "job_type",
        "queue",
        "error_code",
        "cursor",
        "tenant",
        "pipeline_id",
        "created_from",
        "status",
        "limit",
    ):
        fails(await http.get("/v1/jobs", params={name: "\0"}), 400, "invalid_request")
    id = await made(http)
    fails(await http.post(f"/v1/jobs/{id}/cancel", json={"reason": "\0"}), 400, param="reason")
    for body in ({"job_type": "\0"}, {"job_type": "a", "code": "\0"}, {"job_type": "a", "cursor": "\0"}):
        fails(await http.post("/v1/jobs/failed/rerun", json=body), 400, "invalid_request")
    for field in ("job_type", "queue", "error_code", "reason"):
        fails(await http.post("/v1/jobs/cancel", json={"status": ["QUEUED"], field: "\0"}), 400, param=field)
    for path in ("schedules/%00", "jobs/%00", "pipelines/%00", "%00"):
        assert (await http.get(f"/v1/{path}")).status_code in (400, 404)
    fails(await http.post("/v1/queues/%00/pause"), 400, param="name")
    fails(await http.get("/v1/schedules", params={"cursor": "\0"}), 400, param="cursor")
    assert await status(http, id) == "QUEUED"


async def test_headers_have_limits(http: httpx.AsyncClient) -> None:
    fails(await post(http, ADA, ""), 400, param="idempotency-key")
    fails(await post(http, ADA, "k" * 256), 400, param="idempotency-key")
    long = await http.post("/v1/jobs", json=ADA, headers={"traceparent": "t" * 201})
    assert (long.status_code, long.json()["traceparent"]) == (201, None), "an invalid traceparent is ignored"
    odd = {"Idempotency-Key": b"\xff\xe9"}
    assert (await http.post("/v1/jobs", json=ADA, headers=odd)).status_code == 201


async def test_query_parameters_out_of_range_are_refused_by_name(http: httpx.AsyncClient) -> None:
    wrong = [
        ("limit", "0"), ("limit", "1001"), ("limit", "x"), ("limit", "1e2"), ("limit", str(10**30)),
        ("status", "DONE"), ("job_type", ""), ("job_type", "x" * 101), ("queue", "x" * 201), ("error_code", ""),
        ("pipeline_id", "x"), ("parent_job_id", "x"), ("created_from", "yesterday"), ("created_from", "12"),
        ("created_to", "9999-12-31T23:59:59-01:00"), ("created_to", "0001-01-01T00:00:00+01:00"),
        ("created_from", "2026-13-01T00:00:00Z"), ("created_to", "2026-01-01"), ("tenant", "x" * 101),
        ("cursor", ""), ("cursor", "x"), ("cursor", "=" * 200), ("cursor", "x" * 201), ("cursor", "\u00e4"),
        ("cursor", "MC4w"), ("cursor", "Ny4wMDAw"), ("cursor", "LWZmZmZmZmZmZmZmZmZmZmZmZi4w"),
    ]  # fmt: skip
    for name, value in wrong:
        answer = await http.get("/v1/jobs", params={name: value})
        fails(answer, 400, "invalid_request", "status.0" if name == "status" else name)
    six = [("status", "QUEUED")] * 6
    fails(await http.get("/v1/jobs", params=six), 400, param="status")


async def test_payloads_have_a_size(api: Api, http: httpx.AsyncClient) -> None:
    big = {"value": "x" * (1024 * 1024)}
    fails(await post(http, {"job_type": "echo", "payload": big}), 413, "too_large", "payload")
    answer = await post(http, {"jobs": [ADA, {"job_type": "echo", "payload": big}]})
    fails(answer, 413, "too_large", "jobs.1.payload")
    assert await api.jobs() == 0
    fits = {"value": "x" * (1024 * 1024 - 100)}
    assert (await post(http, {"job_type": "echo", "payload": fits})).status_code == 201


async def test_payloads_have_a_depth(api: Api, http: httpx.AsyncClient) -> None:
    for depth, expected in ((199, 201), (200, 400), (251, 400), (252, 400), (254, 400), (300, 400), (1000, 400)):
        deep = b'{"value":' + b"[" * depth + b"]" * depth + b"}"
        body = b'{"job_type":"echo","payload":' + deep + b"}"
        headers = {**JSON, "Idempotency-Key": str(depth)}
        one = await http.post("/v1/jobs", content=body, headers=headers)
        listed = await http.post("/v1/jobs", content=b'{"jobs":[' + body + b"]}", headers=JSON)
        plan = await http.put("/v1/schedules/deep", content=b'{"cron":"0 0 * * *","job":' + body + b"}", headers=JSON)
        assert (one.status_code, listed.status_code) == (expected, expected)
        assert plan.status_code == (200 if expected == 201 else 400)
        if expected == 400:
            assert "deeper than 200 levels" in fails(one, 400, param="payload")
            fails(listed, 400, param="jobs.0.payload")
            fails(plan, 400, param="job.payload")
    await api.drain()
    assert {job["status"] for job in (await http.get("/v1/jobs")).json()["data"]} == {"SUCCEEDED"}


async def test_numbers_and_names_that_json_does_not_define_do_no_harm(http: httpx.AsyncClient) -> None:
    huge = b'{"job_type": "echo", "payload": {"value": ' + b"9" * 400 + b"}}"
    fails(await http.post("/v1/jobs", content=huge, headers=JSON), 400, "invalid_request")
    twice = b'{"job_type": "echo", "job_type": "greet", "payload": {"name": "x", "name": "y"}}'
    job = (await http.post("/v1/jobs", content=twice, headers=JSON)).json()
    assert (job["job_type"], job["payload"]) == ("greet", {"name": "y"})
    exact: list[Any] = [2**63 - 1, -(2**63), 0.1, 1e308, "\u2028", "\U0001f6df"]
    job = (await post(http, {"job_type": "echo", "payload": {"value": exact}})).json()
    assert job["payload"]["value"] == exact


async def test_bodies_have_a_size_however_they_are_sent(api: Api) -> None:
    http = await api.client(api.with_settings(body_bytes_max=500, jobs_bytes_max=1000))
    whole = orjson.dumps({"job_type": "echo", "payload": {"value": "x" * 2000}})
    assert "1000 bytes" in fails(await http.post("/v1/jobs", content=whole, headers=JSON), 413, "too_large", "body")

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(whole), 100):
            yield whole[start : start + 100]

    assert "1000 bytes" in fails(await http.post("/v1/jobs", content=pieces(), headers=JSON), 413, "too_large", "body")
    assert "500 bytes" in fails(await http.post("/v1/jobs/cancel", content=whole, headers=JSON), 413, "too_large")
    assert await api.jobs() == 0
    assert (await post(http, ADA)).status_code == 201


async def test_only_the_content_type_of_json_is_accepted(api: Api, http: httpx.AsyncClient) -> None:
    body = orjson.dumps(ADA)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "nonsense", ""):
        answer = await http.post("/v1/jobs", content=body, headers={"Content-Type": kind})
        assert "application/json" in fails(answer, 415, "wrong_content_type")
    fails(await http.post("/v1/jobs", content=body), 415, "wrong_content_type")
    assert await api.jobs() == 0
    for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.x+json"):
        assert (await http.post("/v1/jobs", content=body, headers={"Content-Type": kind})).status_code == 201


async def test_a_long_value_is_shortened_in_the_error(http: httpx.AsyncClient) -> None:
    answer = await post(http, {**ADA, "x" * 100_000: 1})
    fails(answer, 400)
    assert len(answer.content) < 5_000
    answer = await http.get("/v1/" + "x" * 10_000)
    fails(answer, 404)
    assert len(answer.content) < 2_000


async def test_an_unknown_parameter_is_refused_and_not_ignored(
    http: httpx.AsyncClient,
) -> None:
    message = fails(await http.get("/v1/jobs?statuss=FAILED"), 400, "unknown_parameter", "statuss")
    assert "did you mean 'status'?" in message
    fails(await http.get("/v1/operations?tenant=default&x=1"), 400)
