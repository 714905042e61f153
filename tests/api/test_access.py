"""Access control: keys and scopes for every route, objects of other tenants, hosts and origins."""

from __future__ import annotations

import dataclasses
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fastapi.routing import APIRoute

from batchwright import NewJob
from batchwright.access.keys import Scope
from batchwright.batches.operations import process_job
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import NewBatch
from batchwright.testing import drain
from tests.api.conftest import HOST, Api, fails, needed_scope, routes, stored_file

OPEN_ROUTES = {"/healthz", "/readyz"}


# Scopes -----------------------------------------------------------------------------------------------------------


async def called(http: httpx.AsyncClient, route: APIRoute, **options: Any) -> httpx.Response:
    """Call the route with unknown ids and an empty body: a client that is let in gets another error than 401 or 403."""
    path = route.path_format.format(id=uuid4(), name="nobody")
    (method,) = route.methods
    return await http.request(method, path, **options)


async def test_every_route_but_health_needs_a_scope(api: Api) -> None:
    without = {route.path for route in routes(api.app) if needed_scope(route) is None}
    assert without == OPEN_ROUTES
    await api.holder()
    http = await api.client()
    for route in routes(api.app):
        answer = await called(http, route)
        if route.path in OPEN_ROUTES:
            assert answer.status_code == 200
        else:
            fails(answer, 401, "unauthorized")
            assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_a_key_with_only_the_needed_scope_is_accepted_and_one_with_all_other_scopes_is_refused(api: Api) -> None:
    only = {scope: await api.holder(scope) for scope in Scope}
    others = {scope: await api.holder(*(other for other in Scope if other is not scope)) for scope in Scope}
    tried = 0
    for route in routes(api.app):
        scope = needed_scope(route)
        if scope is None:
            continue
        refused = fails(await called(others[scope], route), 403, "forbidden")
        assert scope.value in refused, route.path
        entered = await called(only[scope], route)
        assert entered.status_code in (200, 400, 404), (route.path, entered.text)
        tried += 1
    assert tried == len(routes(api.app)) - len(OPEN_ROUTES) > 25


async def test_which_scope_a_route_needs(api: Api) -> None:
    """A change of this table changes who may do what."""
    found: dict[Scope, set[str]] = {scope: set() for scope in Scope}
    for route in routes(api.app):
        if scope := needed_scope(route):
            found[scope].add(f"{next(iter(route.methods))} {route.path_format}")
    verbs = ("cancel", "limits", "pause", "priority", "resume", "retry")
    assert found[Scope.SUBMIT] == {
        "DELETE /v1/files/{id}",
        "DELETE /v1/collections/{name}",
        "DELETE /v1/collections/{name}/documents/{id}",
        "POST /v1/batches",
        "POST /v1/files",
        "POST /v1/ingest/estimates",
        "POST /v1/ingest/runs",
        *(f"POST /v1/ingest/runs/{{id}}/{verb}" for verb in ("cancel", "park", "resume", "retry")),
        *(f"POST /v1/ingest/items/{{id}}/{verb}" for verb in ("dismiss", "retry")),
        "POST /v1/jobs",
        "POST /v1/tasks",
        "POST /v1/tasks/{id}/cancel",
        "POST /v1/uploads",
        *(f"POST /v1/uploads/{{id}}/{verb}" for verb in ("cancel", "complete", "parts")),
        *(f"POST /v1/batches/{{id}}/{verb}" for verb in verbs),
    }
    assert found[Scope.ADMIN] == {
        "GET /metrics",
        "GET /v1/workers",
        "POST /v1/queues/{name}/pause",
        "POST /v1/queues/{name}/resume",
    }
    assert all(name.startswith("GET ") for name in found[Scope.READ])
    assert not any(name.startswith("GET ") for name in found[Scope.OPERATE])


# Tenants ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Theirs:
    """What tenant b owns."""

    waiting: str
    failed: str
    pipeline: str
    parent: str
    file: str
    batch: str
    upload: str
    key: str = "theirs"
    schedule: str = "nightly"


@pytest.fixture
async def theirs(api: Api) -> Theirs:
    batchwright = api.batchwright
    failed = await batchwright.enqueue("broken", tenant="b")
    pipeline = await batchwright.enqueue("chain", tenant="b")
    parent = await batchwright.enqueue("family", tenant="b")
    await drain(batchwright)
    waiting = await batchwright.enqueue("echo", tenant="b", idempotency_key="theirs", exclusive_key=["k"])
    await batchwright.schedules.create("nightly", "0 3 * * *", NewJob("echo"), tenant="b")
    theirs = await api.holder("submit", tenant="b")
    body = {"job_type": "echo", "queue": "theirs"}
    assert (await theirs.post("/v1/jobs", json=body, headers={"Idempotency-Key": "theirs"})).status_code == 201
    file = await stored_file(batchwright, tenant="b")
    new = NewBatch(tenant="b", endpoint="/v1/embeddings", input_file_id=file.id, completion_window="1h")
    (job,) = await batchwright.catalog.prepare([process_job(new)])
    await batchwright.part(BatchesPart).batches.create(new, job)
    wanted = {"filename": "f", "purpose": "batch", "bytes": 0, "mime_type": "text/plain"}
    upload = (await theirs.post("/v1/uploads", json=wanted)).json()["id"]
    return Theirs(str(waiting), str(failed), str(pipeline), str(parent), file.id, new.id, upload)


async def everything_of(api: Api, tenant: str) -> list[Any]:
    """All current rows of the tenant."""
    rows = [
        await api.sql(f"SELECT to_jsonb(one) FROM batchwright.{table} AS one WHERE tenant = %(t)s ORDER BY 1", t=tenant)
        for table in ("api_request", "batch", "file", "job", "schedule", "upload")
    ]
    events = "SELECT event.id FROM batchwright.job_event AS event JOIN batchwright.job ON job.id = job_id"
    return [*rows, await api.sql(f"{events} WHERE tenant = %(t)s ORDER BY 1", t=tenant)]


async def test_every_route_with_another_tenants_object_finds_nothing_and_changes_nothing(
    api: Api, theirs: Theirs
) -> None:
    before = await everything_of(api, "b")
    mine = await api.holder("read", "submit", "operate", tenant="a")
    schedule_id = str((await api.batchwright.schedules.get("nightly", tenant="b")).id)
    plan = {"cron": "0 4 * * *", "job": {"job_type": "echo"}}
    tried = 0
    for route in routes(api.app):
        if "{" not in route.path or needed_scope(route) is Scope.ADMIN:
            continue
        ids = [theirs.waiting, theirs.failed, theirs.pipeline, theirs.parent, theirs.file, theirs.batch]
        ids = ids[4:] if route.path.startswith(("/v1/files", "/v1/batches")) else ids[:4]
        if route.path.startswith("/v1/models"):
            continue  # models are the same for all tenants
        if route.path.startswith(("/v1/collections", "/v1/ingest")):
            continue  # see tests/ingest/test_http.py
        ids = [theirs.upload] if route.path.startswith("/v1/uploads") else ids
        names = ids if "{id}" in route.path else [theirs.schedule, schedule_id]
        (method,) = route.methods
        if method == "PUT":
            continue  # it creates a schedule of our own tenant; see below
        for name in names:
            path = route.path_format.format(id=name, name=name)
            bodies = {"priority": {"priority": 1}, "limits": {}, "complete": {"part_ids": []}}
            body = bodies.get(path.rpartition("/")[2])
            fails(await mine.request(method, path, json=body), 404)
            tried += 1
    assert tried >= 4 * 8 + 2 * 5 + 2 * 12
    assert await everything_of(api, "b") == before
    own = await mine.put("/v1/schedules/nightly", json=plan)
    assert (own.status_code, own.json()["tenant"]) == (200, "a")
    fails(await mine.put(f"/v1/schedules/{schedule_id}", json=plan), 400, param="name")
    assert await everything_of(api, "b") == before


async def test_queues_are_shared_by_all_tenants_so_operators_may_not_pause_them(api: Api, theirs: Theirs) -> None:
    mine = await api.holder("read", "submit", "operate", tenant="a")
    for verb in ("pause", "resume"):
        fails(await mine.post(f"/v1/queues/theirs/{verb}"), 403, "forbidden")
    assert (await mine.get("/v1/queues")).json()["data"] == []


async def test_filters_bodies_and_keys_do_not_reach_into_another_tenant(api: Api, theirs: Theirs) -> None:
    before = await everything_of(api, "b")
    mine = await api.holder("read", "submit", "operate", tenant="a")
    lists: list[dict[str, Any]] = [
        {},
        {"pipeline_id": theirs.pipeline},
        {"parent_job_id": theirs.parent},
        {"pipeline_id": theirs.parent, "parent_job_id": theirs.parent},
        {"queue": "theirs"},
        {"error_code": "broken"},
    ]
    for params in lists:
        assert (await mine.get("/v1/jobs", params=params)).json()["data"] == [], params
    for path in ("/v1/jobs/failed", "/v1/queues", "/v1/schedules"):
        assert (await mine.get(path)).json()["data"] == []
    bodies: list[dict[str, Any]] = [
        {"pipeline_id": theirs.pipeline},
        {"parent_job_id": theirs.parent},
        {"queue": "theirs"},
        {"status": ["QUEUED", "RUNNING", "FAILED"]},
        {"job_type": "broken"},
    ]
    for verb in ("cancel", "rerun"):
        for body in bodies:
            for dry_run in (True, False):
                done = (await mine.post(f"/v1/jobs/{verb}", json={**body, "dry_run": dry_run})).json()
                assert (done["matched"], done["changed"]) == (0, 0), body
    for verb in ("rerun", "dismiss"):
        assert (await mine.post(f"/v1/jobs/failed/{verb}", json={"job_type": "broken"})).json()["matched"] == 0
    job = {"job_type": "greet", "payload": {"name": "a"}, "idempotency_key": theirs.key, "pipeline_id": theirs.pipeline}
    sent = await mine.post(
        "/v1/jobs",
        json={**job, "exclusive_key": ["k"], "on_held": "supersede"},
        headers={"Idempotency-Key": theirs.key},
    )
    assert (sent.status_code, sent.json()["tenant"]) == (201, "a")
    assert sent.json()["id"] not in (theirs.waiting, theirs.pipeline)
    shown = (await mine.get(f"/v1/pipelines/{theirs.pipeline}")).json()
    assert shown["counts"] == {"QUEUED": 1}  # it shows our own job with their pipeline id, and nothing of theirs
    assert (await mine.post(f"/v1/pipelines/{theirs.pipeline}/cancel")).json()["counts"] == {"CANCELLED": 1}
    assert await everything_of(api, "b") == before


async def test_only_an_admin_acts_in_another_tenant(api: Api, theirs: Theirs) -> None:
    mine = await api.holder("read", "submit", "operate", tenant="a")
    for tenant in ("b", "*", "nobody"):
        fails(await mine.get("/v1/jobs", params={"tenant": tenant}), 403, "forbidden")
        fails(await mine.post(f"/v1/jobs/{theirs.waiting}/cancel", params={"tenant": tenant}), 403, "forbidden")
    assert (await mine.get("/v1/jobs", params={"tenant": "a"})).status_code == 200
    admin = await api.holder(tenant="a")
    fails(await admin.get(f"/v1/jobs/{theirs.waiting}"), 404, "not_found")
    for tenant in ("b", "*"):
        assert (await admin.get(f"/v1/jobs/{theirs.waiting}", params={"tenant": tenant})).status_code == 200
        assert len((await admin.get("/v1/jobs", params={"tenant": tenant})).json()["data"]) == 9
        assert (await admin.get("/v1/jobs/failed", params={"tenant": tenant})).json()["data"][0]["count"] == 1
    assert (await admin.get("/v1/schedules", params={"tenant": "b"})).json()["data"][0]["name"] == "nightly"
    made = await admin.post("/v1/jobs", params={"tenant": "b"}, json={"job_type": "echo"})
    assert (made.status_code, made.json()["tenant"]) == (201, "b")
    cancelled = await admin.post(f"/v1/jobs/{theirs.waiting}/cancel", params={"tenant": "*"})
    assert cancelled.json()["status"] == "CANCELLED"


async def test_nothing_can_be_created_in_all_tenants_at_once(api: Api) -> None:
    admin = await api.holder()
    plan = {"cron": "0 4 * * *", "job": {"job_type": "echo"}}
    everywhere = {"tenant": "*"}
    for answer in (
        await admin.post("/v1/jobs", params=everywhere, json={"job_type": "echo"}),
        await admin.post("/v1/schedules", params=everywhere, json={"name": "n", **plan}),
        await admin.put("/v1/schedules/n", params=everywhere, json=plan),
        await admin.get("/v1/schedules", params=everywhere),
    ):
        assert "name one tenant" in fails(answer, 400, "invalid_request")
    assert await api.jobs() == 0


# Hosts and origins ------------------------------------------------------------------------------------------------


async def asked(api: Api, host: str, settings: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
    http = await api.client(api.with_settings(**(settings or {})))
    return await http.get("/healthz", headers={"Host": host, **headers})


async def test_on_loopback_only_the_machines_own_names_are_accepted(api: Api) -> None:
    for host in ("localhost", "LOCALHOST:1", "localhost:8765", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8765"):
        assert (await asked(api, host)).status_code == 200, host
    for host in (
        "evil.example",
        "evil.example:8765",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "192.0.2.7",
        "[fe80::1]",
        "",
        "evil@localhost",
        "[::1]evil.com",
        "[::1]:80evil.com",
        "[::1",
        "localhost:80:80",
        "localhost:evil.com",
        "127.0.0.1 evil.com",
        "localhost/evil.com",
        "a" * 10_000,
    ):
        assert "api.allowed_hosts" in fails(await asked(api, host), 421, "wrong_host", "host"), host
    assert (await asked(api, "127.0.0.2", {"host": "127.0.0.2"})).status_code == 200
    assert (await asked(api, "[::1]:9", {"host": "::1"})).status_code == 200


async def test_several_host_headers_are_refused(api: Api) -> None:
    http = await api.client()
    for hosts in (("localhost", "evil.example"), ("evil.example", "localhost"), ("localhost", "localhost")):
        answer = await http.get("/healthz", headers=[("Host", host) for host in hosts])
        assert "several Host headers" in fails(answer, 400, "invalid_request", "host")


async def test_other_host_names_are_accepted_by_patterns(api: Api) -> None:
    settings = {"allowed_hosts": ("Desk.example.com", "*.inner.example.com", "[2001:db8::7]", "192.0.2.7")}
    for host in (
        "desk.example.com",
        "DESK.example.com:443",
        "a.inner.example.com",
        "a.b.inner.example.com",
        "[2001:db8::7]:80",
        "192.0.2.7",
        "localhost",
    ):
        assert (await asked(api, host, settings)).status_code == 200, host
    for host in (
        "example.com",
        "inner.example.com",
        "xdesk.example.com",
        "desk.example.com.evil",
        "[2001:db8::8]",
        "2",
    ):
        fails(await asked(api, host, settings), 421, "wrong_host")
    assert (await asked(api, "anything", {"allowed_hosts": ("*",)})).status_code == 200


async def test_a_server_on_all_addresses_accepts_each_of_them_as_host(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchwright.api.access.socket.gethostname", lambda: "Pod-7")
    for bound in ("0.0.0.0", "::"):
        for host in ("192.0.2.7", "192.0.2.7:8765", "[2001:db8::8]:1", "localhost", "pod-7", "POD-7:8765"):
            assert (await asked(api, host, {"host": bound})).status_code == 200, host
        for host in ("evil.example", "pod-8", ""):
            fails(await asked(api, host, {"host": bound}), 421, "wrong_host")
    fails(await asked(api, "192.0.2.8", {"host": "192.0.2.7"}), 421, "wrong_host")
    assert (await asked(api, "192.0.2.7", {"host": "192.0.2.7"})).status_code == 200


async def test_pages_of_other_origins_are_refused(api: Api) -> None:
    http = await api.client()
    for origin in (None, HOST):
        answer = await http.post("/v1/jobs", json={"job_type": "echo"}, headers={"Origin": origin} if origin else {})
        assert answer.status_code == 201
        assert not [name for name in answer.headers if name.startswith("access-control")]
    for origin in (
        "http://evil.example",
        "null",
        "https://localhost:8765",
        "http://localhost",
        "http://localhost:1",
        "",
    ):
        answer = await http.post("/v1/jobs", json={"job_type": "echo"}, headers={"Origin": origin})
        assert "api.allowed_origins" in fails(answer, 403, "wrong_origin", "origin")
        assert not [name for name in answer.headers if name.startswith("access-control")]
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    fails(await http.options("/v1/jobs", headers=preflight), 403, "wrong_origin")
    assert await api.jobs() == 2


async def test_an_allowed_origin_may_call_from_its_pages(api: Api) -> None:
    http = await api.client(api.with_settings(allowed_origins=("https://desk.example.com",)))
    origin = {"Origin": "https://desk.example.com"}
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "idempotency-key"}
    preflight = await http.options("/v1/jobs", headers={**origin, **wanted})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://desk.example.com"
    assert "idempotency-key" in preflight.headers["access-control-allow-headers"].lower()
    sent = await http.post("/v1/jobs", json={"job_type": "echo"}, headers=origin)
    assert (sent.status_code, sent.headers["access-control-allow-origin"]) == (201, "https://desk.example.com")
    assert "access-control-allow-credentials" not in sent.headers
    refused = await http.post("/v1/jobs", json={}, headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, "https://desk.example.com")
    fails(await http.get("/v1/jobs", headers={"Origin": "https://evil.example"}), 403, "wrong_origin")
    assert (await http.get("/v1/jobs", headers={"Origin": HOST})).status_code == 200


async def test_every_answer_forbids_guessing_its_type(api: Api) -> None:
    http = await api.client()
    for path, headers in (("/healthz", {}), ("/v1/nothing", {}), ("/healthz", {"Host": "evil.example"})):
        assert (await http.get(path, headers=headers)).headers["x-content-type-options"] == "nosniff"
