"""What every route has in common: errors, metrics and health; and the lists of queues, operations and workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import uuid4

import httpx
import pytest

from batchwright.errors import Deadlock
from tests.api.conftest import Api, fails, routes, serving


@pytest.fixture
async def away(database_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A server whose database has gone away."""
    async with serving(database_url) as api:
        http = await api.client()
        assert (await http.get("/readyz")).json()["status"] == "ok"
        await api.batchwright.pool.close()
        yield http


async def test_without_its_database_the_server_asks_for_patience(away: httpx.AsyncClient) -> None:
    for method, path in (
        ("GET", "/v1/jobs"),
        ("POST", "/v1/jobs"),
        ("GET", f"/v1/jobs/{uuid4()}"),
        ("GET", "/metrics"),
    ):
        body = {"job_type": "echo"} if method == "POST" else None
        answer = await away.request(method, path, json=body)
        message = fails(answer, 503, "unavailable")
        assert message == "the database is unavailable; try again soon"
        assert answer.headers["Retry-After"] == "1"
    ready = await away.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (503, "unavailable")
    assert (await away.get("/healthz")).json()["status"] == "ok"


async def test_a_deadlock_that_would_not_end_asks_for_patience(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def entangled(*_: object, **__: object) -> None:
        raise Deadlock("process 7 waits for process 8")

    monkeypatch.setattr(type(api.batchwright.views), "ids", entangled)
    answer = await (await api.client()).get("/v1/jobs")
    assert "process" not in fails(answer, 503, "unavailable")
    assert answer.headers["Retry-After"] == "1"


async def test_an_unknown_path_and_a_wrong_method_have_the_one_shape(api: Api) -> None:
    http = await api.client()
    for path in ("/", "/v1", "/v1/nothing", "/v1/jobs/", "//v1/jobs", "/v1/jobs/%2e%2e/x", "/docs", "/redoc"):
        assert "/openapi.json" in fails(await http.get(path), 404, "not_found")
    allowed = {
        "/v1/jobs": "GET, POST",
        "/v1/schedules/x": "DELETE, GET, PUT",
        "/v1/schedules": "GET, POST",
        "/healthz": "GET",
        "/v1/queues/a/b/pause": "POST",
    }
    for path, methods in allowed.items():
        answer = await http.patch(path)
        fails(answer, 405, "method_not_allowed")
        assert answer.headers["Allow"] == methods


async def test_an_unexpected_error_tells_the_log_and_nobody_else(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def burst(*_: object, **__: object) -> None:
        raise RuntimeError("the secret is 42")

    monkeypatch.setattr(type(api.batchwright.views), "ids", burst)
    http = await api.client()
    answer = await http.get("/v1/jobs")
    fails(answer, 500, "internal_error")
    assert "42" not in answer.text
    assert "RuntimeError" not in answer.text
    assert "the secret is 42" in caplog.text


async def test_requests_are_counted_by_route_and_status(api: Api) -> None:
    http = await api.client()
    id = uuid4()
    await http.get(f"/v1/jobs/{id}")
    await http.get(f"/nowhere/{id}")
    text = (await http.get("/metrics")).text
    assert str(id) not in text
    counted = [line for line in text.splitlines() if "http_requests_total{" in line]
    assert any('route="/v1/jobs/{id}"' in line and 'status="404"' in line for line in counted), counted
    assert any('route="other"' in line and 'status="404"' in line for line in counted), counted
    streams = {path for served in api.services.served for path in served.streams}
    of_pages = {path for path in streams if path.startswith("/ui")}
    assert {route.path for route in routes(api.app)} > streams - of_pages > set()


async def test_queues_are_paused_and_resumed_by_admins(api: Api) -> None:
    http = await api.client()
    await http.post("/v1/jobs", json={"job_type": "echo", "queue": "slow/eu"})
    paused = await http.post("/v1/queues/slow/eu/pause")
    assert (paused.status_code, paused.json()["name"], paused.json()["due"]) == (200, "slow/eu", 1)
    assert paused.json()["paused_at"] is not None
    (job,) = (await http.get("/v1/jobs")).json()["data"]
    assert "paused_queue" in [one["reason"] for one in job["waiting_on"]]
    assert await api.drain() == 0
    (listed,) = (await http.get("/v1/queues")).json()["data"]
    assert listed["paused_at"] == paused.json()["paused_at"]
    assert (await http.post("/v1/queues/slow%2Feu/resume")).json()["paused_at"] is None
    assert await api.drain() == 1
    assert "did you mean 'slow/eu'" in fails(await http.post("/v1/queues/slow/e/pause"), 404, "not_found")
    fails(await http.post("/v1/queues/nobody/resume"), 404, "not_found")


async def test_operations_and_workers_are_listed(api: Api) -> None:
    http = await api.client()
    assert (await http.get("/v1/workers")).json()["data"] == []
    worker = api.batchwright.worker()
    await worker.register()
    try:
        (shown,) = (await http.get("/v1/workers")).json()["data"]
        assert (shown["id"], shown["is_alive"]) == (worker.id, True)
        found = {one["name"]: one for one in (await http.get("/v1/operations")).json()["data"]}
        of_documents = {"ingest.run", "ingest.item", "ingest.gather", "compute_embeddings", "compute_embeddings.batch"}
        ours = {"greet", "echo", "broken", "flaky", "family", "chain", "odd", "provider.task"}
        assert set(found) == ours | of_documents
        assert found["greet"]["workers"] == 1
        assert "name" in found["greet"]["payload_schema"]["properties"]
        assert len((await http.get("/v1/operations", params={"limit": 2})).json()["data"]) == 2
    finally:
        await worker.close()
    for path in ("workers", "operations", "queues", "schedules", "jobs", "jobs/failed"):
        for limit in (0, 1001, "x"):
            fails(await http.get(f"/v1/{path}", params={"limit": limit}), 400, param="limit")
