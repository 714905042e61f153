"""Schedules over HTTP: each route with valid and refused requests."""

from __future__ import annotations

from typing import Any

import httpx

from tests.api.conftest import Api, fails

PLAN: dict[str, Any] = {"cron": "0 6 * * MON-FRI", "job": {"job_type": "greet", "payload": {"name": "Ada"}}}


async def create(http: httpx.AsyncClient, name: str = "report", **changes: Any) -> httpx.Response:
    return await http.post("/v1/schedules", json={"name": name, **PLAN, **changes})


async def test_a_schedule_is_created_changed_paused_run_and_deleted(api: Api, http: httpx.AsyncClient) -> None:
    made = await create(http, timezone="Europe/Berlin", missed="skip", tick_field=None)
    assert made.status_code == 201
    schedule = made.json()
    assert (schedule["object"], schedule["name"], schedule["tenant"]) == ("schedule", "report", "default")
    assert (schedule["timezone"], schedule["missed"], schedule["fires"]) == ("Europe/Berlin", "skip", 0)
    assert schedule["upcoming"][0] == schedule["next_at"]
    assert len(schedule["upcoming"]) == 5
    for which in ("report", schedule["id"]):
        assert (await http.get(f"/v1/schedules/{which}")).json() == schedule
    paused = (await http.post("/v1/schedules/report/pause")).json()
    assert (paused["paused_at"] is not None, paused["upcoming"]) == (True, [])
    assert (await http.post("/v1/schedules/report/resume")).json()["paused_at"] is None
    fired = await http.post("/v1/schedules/report/run")
    assert fired.status_code == 201
    assert (await http.get(f"/v1/jobs/{fired.json()['job_id']}")).json()["job_type"] == "greet"
    gone = await http.delete("/v1/schedules/report")
    assert (gone.status_code, gone.content) == (204, b"")
    fails(await http.get("/v1/schedules/report"), 404, "not_found")
    assert await api.jobs() == 1


async def test_a_name_is_taken_once_and_put_replaces_it(http: httpx.AsyncClient) -> None:
    first = (await create(http)).json()
    fails(await create(http), 409, "conflict")
    new = await http.put("/v1/schedules/report", json={**PLAN, "cron": "0 7 * * *"})
    assert (new.status_code, new.json()["id"], new.json()["cron"]) == (200, first["id"], "0 7 * * *")
    assert (await http.put("/v1/schedules/other", json=PLAN)).json()["name"] == "other"


async def test_a_schedule_that_is_not_there_is_not_found(http: httpx.AsyncClient) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/run")):
        fails(await http.request(method, f"/v1/schedules/nobody{path}"), 404, "not_found")


async def test_schedules_are_listed_page_by_page(http: httpx.AsyncClient) -> None:
    for name in ("c", "a", "b"):
        await create(http, name)
    seen, cursor = [], None
    for _ in range(2):
        page = (await http.get("/v1/schedules", params={"limit": 2, **({"cursor": cursor} if cursor else {})})).json()
        seen.append([one["name"] for one in page["data"]])
        cursor = page["next_cursor"]
    assert seen == [["a", "b"], ["c"]]
    assert (page["has_more"], cursor) == (False, None)
    fails(await http.get("/v1/schedules", params={"cursor": "a b"}), 400, "invalid_request", "cursor")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cron": "every day"}, "cron"),
    ({"cron": "* * * *"}, "cron"),
    ({"cron": "61 * * * *"}, "cron"),
    ({"cron": ""}, "cron"),
    ({"cron": "0 0 30 2 *"}, "cron"),
    ({"cron": "*" * 201}, "cron"),
    ({"timezone": "Mars/Olympus"}, "timezone"),
    ({"timezone": "../../etc/passwd"}, "timezone"),
    ({"timezone": "\0"}, "timezone"),
    ({"missed": "never"}, "missed"),
    ({"tick_field": ""}, "tick_field"),
    ({"tick_field": "nobody"}, "job.payload"),
    ({"job": {"job_type": "gret"}}, "job.job_type"),
    ({"job": {"job_type": "greet"}}, "job.payload"),
    ({"job": {"job_type": "echo", "priority": 10}}, "job.priority"),
    ({"job": {"job_type": "echo", "exclusive_key": ["x" * 400] * 3}}, "job.exclusive_key"),
    ({"job": {"job_type": "echo", "deadline": "2026-12-24T18:00:00Z"}}, "job.deadline"),
    ({"job": {"job_type": "echo", "payload": {"value": "\0"}}}, "job.payload"),
    ({"job": None}, "job"),
    ({"name": ""}, "name"),
    ({"name": "a b"}, "name"),
    ({"name": "a\0b"}, "name"),
    ({"name": "x" * 201}, "name"),
    ({"name": "0192f000-0000-7000-8000-000000000000"}, "name"),
    ({"surprise": 1}, "surprise"),
]


async def test_an_invalid_schedule_is_refused_with_the_name_of_the_field(http: httpx.AsyncClient) -> None:
    for changes, param in WRONG:
        fails(await http.post("/v1/schedules", json={"name": "report", **PLAN, **changes}), 400, param=param)
    assert (await http.get("/v1/schedules")).json()["data"] == []
