"""Batches over HTTP: valid and refused requests, the fields of a batch, and the additional verbs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import httpx
import orjson
import pytest

from batchwright.batches.journal.envelopes import request_id
from batchwright.batches.journal.journal import Journal, LineStatus
from batchwright.batches.journal.workspace import segment_key
from batchwright.batches.operations import process_job
from batchwright.batches.output.results import Results
from batchwright.batches.part import BatchesPart
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Batches, Ending, NewBatch
from batchwright.engine.catalog import SQL as CATALOG_SQL
from batchwright.errors import BatchwrightError, DatabaseUnavailable, StorageUnavailable
from batchwright.inference.prices import Price
from batchwright.states import BatchStatus
from tests.api.conftest import GATEWAY, Api, fails, serving, stored_file

PRICES = {"small": Price(input=1.0, output=2.0, cached=0.5), "large": Price(input=10.0, output=20.0)}
PARTS = {"global_inference_gateway": GATEWAY, "batches": BatchSettings(prices=PRICES)}
TERMINAL = ("completed", "failed", "expired", "cancelled")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def api(database_url: str) -> AsyncIterator[Api]:
    async with serving(database_url, parts=PARTS) as api:
        yield api


@pytest.fixture
async def http(api: Api) -> httpx.AsyncClient:
    return await api.client()


async def asked(api: Api, **changes: Any) -> dict[str, Any]:
    """The body of a request for a batch of a new file."""
    file = await stored_file(api.batchwright)
    body = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **changes}
    return {name: value for name, value in body.items() if value is not ...}


async def made(api: Api, http: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    answer = await http.post("/v1/batches", json=await asked(api, **changes))
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def begun(api: Api, http: httpx.AsyncClient, models: Sequence[str] = ("small",), total: int = 10) -> str:
    """A batch that a worker has planned."""
    id: str = (await made(api, http))["id"]
    assert await api.batchwright.part(BatchesPart).batches.begin(id, total=total, models=models, input_sha256="0" * 64)
    return id


async def ended(api: Api, http: httpx.AsyncClient, verb: str = "expire", **ending: Any) -> str:
    """A batch that has ended with some lines in its error file."""
    id = await begun(api, http)
    error_file = await stored_file(api.batchwright, purpose="batch_output")
    given: dict[str, Any] = {
        "counts": {"completed": 7, "failed": 2, "expired": 1, "cancelled": 0},
        "error_summary": {"rate_limit": (2, "r1"), "batch_expired": (1, "r9")},
        "error_file_id": error_file.id,
    }
    assert await getattr(api.batchwright.part(BatchesPart).batches, verb)(id, Ending(**{**given, **ending}))
    return id


async def shown(http: httpx.AsyncClient, id: str) -> dict[str, Any]:
    body: dict[str, Any] = (await http.get(f"/v1/batches/{id}")).json()
    return body


async def batches(api: Api) -> int:
    ((n,),) = await api.sql("SELECT count(*) FROM batchwright.batch")
    return int(n)


# Create -----------------------------------------------------------------------------------------------------------


async def test_a_new_batch_is_shown_with_every_field(api: Api, http: httpx.AsyncClient) -> None:
    body = await asked(api, metadata={"team": "a"})
    answer = await http.post("/v1/batches", json=body)
    assert answer.status_code == 200
    batch = answer.json()
    stamps = [f"{name}_at" for name in ("in_progress", "finalizing", "cancelling", "paused", *TERMINAL)]
    others = ["model", "errors", "output_file_id", "error_file_id", "usage", "eta", "deadline_risk", "retry_of"]
    nothing_yet = dict.fromkeys([*stamps, *others])
    assert batch == {
        **body,
        **nothing_yet,
        "id": batch["id"],
        "object": "batch",
        "status": "validating",
        "created_at": batch["created_at"],
        "expires_at": batch["created_at"] + 86_400,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "counts_by_outcome": {"completed": 0, "failed": 0, "expired": 0, "cancelled": 0},
        "error_summary": [],
        "cost": 0.0,
        "prefix_saved_tokens": 0,
        "waiting_on": [],
        "priority": 5,
        "limits": {"max_in_flight": None},
    }
    assert batch["id"].startswith("batch_")
    assert await shown(http, batch["id"]) == batch
    ((job,),) = await api.sql("SELECT to_jsonb(job) FROM batchwright.job")
    assert (job["job_type"], job["owner"], job["payload"]) == ("batch.process", batch["id"], {"batch_id": batch["id"]})


@pytest.mark.parametrize(("window", "seconds"), [("1m", 60), ("90m", 5400), ("24h", 86_400), ("30d", 2_592_000)])
async def test_any_window_from_a_minute_to_thirty_days_is_accepted(
    api: Api, http: httpx.AsyncClient, window: str, seconds: int
) -> None:
    batch = await made(api, http, completion_window=window)
    assert (batch["completion_window"], batch["expires_at"] - batch["created_at"]) == (window, seconds)


@pytest.mark.parametrize(
    ("change", "code", "param", "message"),
    [
        ({"completion_window": "59s"}, "invalid_value", "completion_window", "Supported values are: '24h'"),
        ({"completion_window": "31d"}, "invalid_value", "completion_window", "Supported values are: '24h'"),
        ({"completion_window": "a day"}, "invalid_value", "completion_window", "Invalid value: 'a day'."),
        ({"completion_window": "\u0662\u0664h"}, "invalid_value", "completion_window", "Supported values are: '24h'"),
        ({"completion_window": "h" * 41}, "string_above_max_length", "completion_window", "maximum length 40"),
        ({"completion_window": ...}, "missing_required_parameter", "completion_window", "Missing required parameter"),
        ({"endpoint": "/v1/images/edits"}, "invalid_value", "endpoint", "'/v1/embeddings', '/v1/moderations'"),
        ({"endpoint": "mixed"}, "invalid_value", "endpoint", "Invalid value: 'mixed'."),
        ({"endpoint": "/v1/audio/speech"}, "invalid_value", "endpoint", "it answers with audio"),
        ({"endpoint": "v1/embeddings"}, "invalid_value", "endpoint", "Supported values are: '/v1/chat/completions'"),
        ({"endpoint": ...}, "missing_required_parameter", "endpoint", "Missing required parameter: 'endpoint'."),
        ({"endpoint": 7}, "invalid_type", "endpoint", "expected a string, but got an integer instead."),
        ({"input_file_id": ...}, "missing_required_parameter", "input_file_id", "'input_file_id'"),
        ({"input_file_id": None}, "invalid_type", "input_file_id", "expected a string, but got null instead."),
        (
            {"metadata": {"tags": ["a"]}},
            "invalid_type",
            "metadata.tags",
            "Invalid type for 'metadata.tags': expected a string, but got an array instead.",
        ),
        ({"metadata": {"n": 1}}, "invalid_type", "metadata.n", "but got an integer instead."),
        ({"metadata": {"n": True}}, "invalid_type", "metadata.n", "but got a boolean instead."),
        ({"metadata": "words"}, "invalid_type", "metadata", "expected an object, but got a string instead."),
        ({"metadata": {"v": "x" * 513}}, "string_above_max_length", "metadata.v", "with maximum length 512"),
        ({"metadata": {"": "v"}}, "empty_string", "metadata.", "empty string"),
        ({"metadata": {"k" * 65: "v"}}, "string_above_max_length", None, "with maximum length 64"),
        (
            {"metadata": {str(n): "" for n in range(17)}},
            "object_above_max_properties",
            "metadata",
            "at most 16 properties, but got an object with 17 properties",
        ),
        ({"metadata": {"v": "a\0b"}}, "invalid_value", "metadata.v", "NUL"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "invalid_value", None, "'created_at'"),
        ({"output_expires_after": {"seconds": 3600}}, "missing_required_parameter", "output_expires_after.anchor", ""),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3599}},
            "integer_below_min_value",
            "output_expires_after.seconds",
            ">= 3600, but got 3599",
        ),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 2_592_001}},
            "integer_above_max_value",
            "output_expires_after.seconds",
            "<= 2592000, but got 2592001",
        ),
        ({"priority": 10}, "integer_above_max_value", "priority", "<= 9"),
        ({"priority": "1"}, "invalid_type", "priority", "expected an integer"),
        ({"limits": {"max_in_flight": 0}}, "integer_below_min_value", "limits.max_in_flight", ">= 1"),
        ({"limits": {"max_tokens": 1}}, "unknown_parameter", "limits.max_tokens", "Unknown parameter"),
        ({"colour": "red"}, "unknown_parameter", "colour", "Unknown parameter: 'colour'."),
    ],
)
async def test_an_invalid_body_is_refused_with_openais_messages(
    api: Api, http: httpx.AsyncClient, change: dict[str, Any], code: str, param: str | None, message: str
) -> None:
    said = fails(await http.post("/v1/batches", json=await asked(api, **change)), 400, code, param)
    assert message in said
    assert await batches(api) == 0


async def test_a_body_that_is_not_a_json_object_is_refused(http: httpx.AsyncClient) -> None:
    fails(await http.post("/v1/batches"), 400, "missing_required_parameter", "body")
    fails(await http.post("/v1/batches", json=[]), 400, "invalid_type", "body")
    json = {"Content-Type": "application/json"}
    fails(await http.post("/v1/batches", content=b"{", headers=json), 400, "invalid_request", "body")
    fails(await http.post("/v1/batches", content=b"{}"), 415, "wrong_content_type")


async def test_metadata_up_to_its_limits_is_shown_again(api: Api, http: httpx.AsyncClient) -> None:
    metadata = {f"{n:064}": "\u20ac" * 512 for n in range(16)}
    batch = await made(api, http, metadata=metadata)
    assert batch["metadata"] == metadata
    assert (await made(api, http, metadata=None))["metadata"] is None
    assert (await made(api, http, metadata={}))["metadata"] == {}


async def test_the_input_must_be_a_file_of_this_tenant_with_the_purpose_batch(
    api: Api, http: httpx.AsyncClient
) -> None:
    theirs = await stored_file(api.batchwright, tenant="b")
    gone = await stored_file(api.batchwright)
    await api.batchwright.part(BatchesPart).files.delete(gone.id, tenant="default")
    old = await stored_file(api.batchwright, expires_seconds=0)
    for id in (theirs.id, gone.id, old.id, "file-unknown"):
        answer = await http.post("/v1/batches", json=await asked(api, input_file_id=id))
        said = fails(answer, 400, param="file_id")
        assert said == f"Cannot find file {id}, or project default does not have access to it."
        assert answer.json()["error"]["code"] is None
    for purpose in ("evals", "batch_output"):
        other = await stored_file(api.batchwright, purpose=purpose)
        answer = await http.post("/v1/batches", json=await asked(api, input_file_id=other.id))
        assert f"'{purpose}'" in fails(answer, 400, "invalid_value", "input_file_id")
    assert await batches(api) == 0


async def test_the_limits_of_a_batch_and_the_lifetime_of_its_files_are_stored(
    api: Api, http: httpx.AsyncClient
) -> None:
    batch = await made(
        api,
        http,
        priority=0,
        limits={"max_in_flight": 3},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (batch["priority"], batch["limits"]) == (0, {"max_in_flight": 3})
    ((priority, kept),) = await api.sql(
        "SELECT job.priority, output_expires_seconds FROM batchwright.batch JOIN batchwright.job ON job.id = job_id"
    )
    assert (priority, kept) == (0, 3600)


@pytest.mark.parametrize(("sent", "kept"), [(TRACE, TRACE), ("nonsense" * 100, None), (None, None)])
async def test_the_trace_of_the_call_is_stored_with_the_job(
    api: Api, http: httpx.AsyncClient, sent: str | None, kept: str | None
) -> None:
    headers = {} if sent is None else {"traceparent": sent}
    assert (await http.post("/v1/batches", json=await asked(api), headers=headers)).status_code == 200
    assert await api.sql("SELECT job.traceparent FROM batchwright.job") == [(kept,)]
    assert await api.sql("SELECT traceparent FROM batchwright.batch") == [(kept,)]


async def test_without_a_gateway_a_batch_is_accepted_only_if_some_worker_runs_batches(database_url: str) -> None:
    async with serving(database_url) as api:
        http = await api.client()
        body = await asked(api)
        answer = await http.post("/v1/batches", json=body)
        said = fails(answer, 503, "no_worker")
        assert "[global_inference_gateway]" in said
        assert '[model_gateways."llama-3"]' in said
        assert answer.headers["retry-after"] == "5"
        schema = {"name": "batch.process", "payload_schema": {}, "defaults": {}, "description": ""}
        params = {"operations": orjson.dumps([schema]).decode(), "worker": "elsewhere"}
        await api.queue.database.ask(CATALOG_SQL["publish"], params)
        assert (await http.post("/v1/batches", json=body)).status_code == 200


# Repeating --------------------------------------------------------------------------------------------------------


async def test_the_same_key_gives_the_same_batch_and_another_body_is_a_conflict(
    api: Api, http: httpx.AsyncClient
) -> None:
    key = {"Idempotency-Key": "k" * 255}
    body = await asked(api)
    first = await http.post("/v1/batches", json=body, headers=key)
    again = await http.post("/v1/batches", json=dict(reversed(body.items())), headers=key)
    assert again.json() == first.json()
    assert (again.headers["idempotent-replayed"], first.headers.get("idempotent-replayed")) == ("true", None)
    other = await http.post("/v1/batches", json={**body, "completion_window": "1h"}, headers=key)
    fails(other, 409, "conflict")
    assert other.headers["x-should-retry"] == "false"
    # A repeated request is answered even if its batch could no longer be made.
    await api.batchwright.part(BatchesPart).files.delete(body["input_file_id"], tenant="default")
    late = await http.post("/v1/batches", json=body, headers=key)
    assert (late.status_code, late.json()["id"]) == (200, first.json()["id"])
    fails(await http.post("/v1/batches", json=body, headers={"Idempotency-Key": "other"}), 400, param="file_id")
    assert (await batches(api), await api.jobs()) == (1, 1)


async def test_idempotency_keys_are_separate_for_each_tenant_and_route(api: Api) -> None:
    key = {"Idempotency-Key": "k"}
    mine, theirs = await api.holder(tenant="default"), await api.holder(tenant="b")
    body = await asked(api)
    assert (await mine.post("/v1/batches", json=body, headers=key)).status_code == 200
    their_file = await stored_file(api.batchwright, tenant="b")
    their_body = {**body, "input_file_id": their_file.id}
    assert (await theirs.post("/v1/batches", json=their_body, headers=key)).status_code == 200
    sent = await mine.post("/v1/jobs", json={"job_type": "echo"}, headers=key)
    assert sent.status_code == 201
    id = await ended(api, mine)
    retried = await mine.post(f"/v1/batches/{id}/retry", headers=key)
    assert retried.status_code == 200
    assert "idempotent-replayed" not in retried.headers


async def test_simultaneous_requests_with_one_key_make_one_batch(api: Api, http: httpx.AsyncClient) -> None:
    body = await asked(api)
    answers = await asyncio.gather(
        *(http.post("/v1/batches", json=body, headers={"Idempotency-Key": "k"}) for _ in range(8))
    )
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == 7
    assert (await batches(api), await api.jobs()) == (1, 1)


async def test_a_commit_whose_answer_was_lost_makes_no_second_batch(
    api: Api, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, calls = api.batchwright.part(BatchesPart).batches.create, 0

    async def forgetful(self: Any, *given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        answer = await create(*given, **options)
        if calls <= 2:
            raise DatabaseUnavailable("the answer was lost")
        return answer

    monkeypatch.setattr(Batches, "create", forgetful)
    answer = await http.post("/v1/batches", json=await asked(api))
    assert (answer.status_code, calls) == (200, 3)
    assert "idempotent-replayed" not in answer.headers
    assert (await batches(api), await api.jobs()) == (1, 1)


# Get and list -----------------------------------------------------------------------------------------------------


async def test_batches_are_listed_page_by_page_the_newest_first(api: Api, http: httpx.AsyncClient) -> None:
    ids = [(await made(api, http))["id"] for _ in range(5)][::-1]
    found: list[str] = []
    after: dict[str, str] = {}
    for size in (2, 2, 1):
        page = (await http.get("/v1/batches", params={"limit": 2, **after})).json()
        assert len(page["data"]) == size
        found += [one["id"] for one in page["data"]]
        assert (page["object"], page["first_id"], page["last_id"]) == ("list", found[-size], found[-1])
        assert page["has_more"] == (len(found) < 5)
        after = {"after": page["last_id"]}
    assert found == ids
    end = (await http.get("/v1/batches", params=after)).json()
    assert end == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    for limit, code in ((0, "integer_below_min_value"), (101, "integer_above_max_value"), ("x", "invalid_type")):
        fails(await http.get("/v1/batches", params={"limit": limit}), 400, code, "limit")


async def test_an_unknown_batch_is_404(api: Api, http: httpx.AsyncClient) -> None:
    verbs = ("cancel", "pause", "resume", "retry")
    answers = [await http.post(f"/v1/batches/batch_unknown/{verb}") for verb in verbs]
    answers += [await http.get(f"/v1/batches/batch_unknown{part}") for part in ("", "/results", "/manifest", "/events")]
    answers.append(await http.post("/v1/batches/batch_unknown/priority", json={"priority": 1}))
    for answer in answers:
        fails(answer, 404)
        error = {"message": "No batch found with id 'batch_unknown'.", "type": "invalid_request_error"}
        assert answer.json() == {"error": {**error, "param": None, "code": None}}


async def test_lists_of_batches_refuse_cursors_and_parameters_that_they_do_not_know(api: Api) -> None:
    mine, theirs = await api.holder(tenant="a"), await api.holder("read", tenant="b")
    file = await stored_file(api.batchwright, tenant="a")
    new = NewBatch(tenant="a", endpoint="/v1/embeddings", input_file_id=file.id, completion_window="1h")
    (job,) = await api.batchwright.catalog.prepare([process_job(new)])
    await api.batchwright.part(BatchesPart).batches.create(new, job)
    for tenant in ({}, {"tenant": "*"}):
        assert (await mine.get("/v1/batches", params={"after": new.id, **tenant})).json()["data"] == []
        message = fails(await mine.get("/v1/batches", params={"after": "batch_no", **tenant}), 400, "invalid_value")
        assert message == "No batch found with id 'batch_no'."
    fails(await theirs.get("/v1/batches", params={"after": new.id}), 400, "invalid_value", "after")
    message = fails(await mine.get("/v1/batches?limits=5"), 400, "unknown_parameter", "limits")
    assert message == "Unknown parameter: 'limits'; did you mean 'limit'?"


async def test_tenants_see_only_their_own_batches(api: Api) -> None:
    mine, theirs = await api.holder(tenant="default"), await api.holder("read", "submit", "operate", tenant="b")
    id = (await made(api, mine))["id"]
    assert (await theirs.get("/v1/batches")).json()["data"] == []
    for verb in ("cancel", "pause", "resume", "retry"):
        fails(await theirs.post(f"/v1/batches/{id}/{verb}"), 404)
    fails(await theirs.post(f"/v1/batches/{id}/priority", json={"priority": 1}), 404)
    fails(await theirs.post(f"/v1/batches/{id}/limits", json={}), 404)
    for part in ("", "/results", "/manifest", "/events"):
        fails(await theirs.get(f"/v1/batches/{id}{part}"), 404)
    admin = await api.holder(tenant="b")
    for tenant in ("default", "*"):
        assert len((await admin.get("/v1/batches", params={"tenant": tenant})).json()["data"]) == 1
        assert (await admin.get(f"/v1/batches/{id}", params={"tenant": tenant})).json()["id"] == id
    fails(await admin.post("/v1/batches", params={"tenant": "*"}, json=await asked(api)), 400)


async def test_counts_usage_model_and_times_are_shown_as_in_the_row(api: Api, http: httpx.AsyncClient) -> None:
    id = await begun(api, http)
    await api.sql(
        """UPDATE batchwright.batch SET completed = 4, failed = 2, expired = 1, cancelled = 1, input_tokens = 1000,
        cached_tokens = 400, output_tokens = 50, reasoning_tokens = 20, usage_by_model = %(usage)s,
        error_summary = %(errors)s""",
        usage='{"small": {"input": 1000, "cached": 400, "output": 50, "reasoning": 20}}',
        errors='{"http_500": [1, "b"], "rate_limit": [2, "a"]}',
    )
    batch = await shown(http, id)
    assert batch["request_counts"] == {"total": 10, "completed": 4, "failed": 4}
    assert batch["counts_by_outcome"] == {"completed": 4, "failed": 2, "expired": 1, "cancelled": 1}
    assert batch["usage"] == {
        "input_tokens": 1000,
        "input_tokens_details": {"cached_tokens": 400},
        "output_tokens": 50,
        "output_tokens_details": {"reasoning_tokens": 20},
        "total_tokens": 1050,
    }
    assert batch["error_summary"] == [
        {"code": "rate_limit", "count": 2, "sample_custom_id": "a"},
        {"code": "http_500", "count": 1, "sample_custom_id": "b"},
    ]
    assert batch["cost"] == pytest.approx((600 * 1.0 + 400 * 0.5 + 50 * 2.0) / 1_000_000)
    assert (batch["model"], batch["prefix_saved_tokens"], batch["status"]) == ("small", 400, "in_progress")
    assert batch["in_progress_at"] >= batch["created_at"]
    await api.sql("UPDATE batchwright.batch SET usage_by_model = %(usage)s", usage='{"unknown": {"input": 1}}')
    assert (await shown(http, id))["cost"] is None


async def test_a_waiting_batch_says_what_it_waits_for_while_the_note_is_fresh(
    api: Api, http: httpx.AsyncClient
) -> None:
    id = await begun(api, http)
    assert await api.batchwright.part(BatchesPart).batches.note_wait(id, "store", "503 Slow Down")
    assert (await shown(http, id))["waiting_on"] == [
        {"reason": "store", "message": "the store is unavailable: 503 Slow Down"}
    ]
    await api.sql("UPDATE batchwright.batch SET waiting_at = now() - interval '3 minutes'")
    assert (await shown(http, id))["waiting_on"] == []


async def test_a_batch_of_many_models_names_none(api: Api, http: httpx.AsyncClient) -> None:
    assert (await shown(http, await begun(api, http, ["small", "large"])))["model"] is None
    assert (await shown(http, await begun(api, http, ["large"])))["model"] == "large"


async def test_problems_of_the_input_are_shown(api: Api, http: httpx.AsyncClient) -> None:
    id = (await made(api, http))["id"]
    problem = {"code": "invalid_json_line", "line": 3, "message": "This line is …", "param": None}
    ending = Ending(errors={"data": [problem], "total": 2_000})
    await api.batchwright.part(BatchesPart).batches.fail(id, ending)
    batch = await shown(http, id)
    assert batch["errors"] == {"object": "list", "data": [problem], "total": 2_000}
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert (batch["status"], batch["output_file_id"]) == ("failed", None)
    assert batch["failed_at"] is not None


async def test_the_error_that_failed_a_batch_is_shown_if_its_input_was_good(api: Api, http: httpx.AsyncClient) -> None:
    id = await begun(api, http)
    await api.batchwright.part(BatchesPart).batches.stop(
        id, "error", {"code": "input_gone", "message": "The input is gone."}
    )
    assert (await shown(http, id))["errors"] is None
    await api.batchwright.part(BatchesPart).batches.fail(id, Ending())
    (problem,) = (await shown(http, id))["errors"]["data"]
    assert problem == {"code": "input_gone", "line": None, "message": "The input is gone.", "param": None}


@pytest.mark.parametrize(("done", "seconds", "risk"), [(5, 3600, "none"), (5, 35, "low"), (5, 20, "high")])
async def test_the_end_is_estimated_from_the_pace_of_the_last_minute(
    api: Api, http: httpx.AsyncClient, done: int, seconds: int, risk: str
) -> None:
    """Five of ten lines took thirty seconds, so the rest takes thirty more."""
    id = await begun(api, http)
    await api.sql(
        """UPDATE batchwright.batch SET completed = %(done)s, in_progress_at = now() - interval '30 seconds',
        expires_at = now() + %(window)s""",
        done=done,
        window=timedelta(seconds=seconds),
    )
    batch = await shown(http, id)
    assert (batch["eta"], batch["deadline_risk"]) == (None, None)
    await registered(api, id, lines=done)
    batch = await shown(http, id)
    ((now,),) = await api.sql("SELECT extract(epoch FROM now())::float8")
    assert batch["deadline_risk"] == risk
    assert now + 20 <= batch["eta"] <= now + 40
    assert (await http.get("/v1/batches")).json()["data"][0]["deadline_risk"] == risk
    await http.post(f"/v1/batches/{id}/pause")
    assert ((await shown(http, id))["eta"], (await shown(http, id))["deadline_risk"]) == (None, None)


async def registered(api: Api, id: str, *, lines: int, ago: float = 1.0, seq: int = 0) -> None:
    await api.sql(
        """INSERT INTO batchwright.batch_segment
            (batch_id, shard, claim, seq, host, start_byte, end_byte, lines, tally, registered_at)
        VALUES (%(id)s, 0, 1, %(seq)s, 'h', 0, 1, %(lines)s, '{}', now() - make_interval(secs => %(ago)s))""",
        id=id,
        seq=seq,
        lines=lines,
        ago=ago,
    )


async def test_the_pace_counts_only_recent_lines_and_reads_few_segments(api: Api, http: httpx.AsyncClient) -> None:
    id = await begun(api, http, total=1_000_000)

    async def rate() -> float | None:
        return (await api.batchwright.part(BatchesPart).batches.paces([id]))[id].rate

    await api.sql("UPDATE batchwright.batch SET in_progress_at = now() - interval '1 hour'")
    await registered(api, id, lines=6_000, ago=120.0)
    assert await rate() is None
    await registered(api, id, lines=600, ago=30.0, seq=1)
    assert await rate() == pytest.approx(10, rel=0.05)
    started = """INSERT INTO batchwright.worker (id, host, pid, version, queues, operations, concurrency, started_at,
            heartbeat_at)
        VALUES (%(id)s, 'h', 1, '1', %(queues)s, '{}', 1, now() - make_interval(secs => %(ago)s), now())"""
    await api.sql(started, id="other", queues=["elsewhere"], ago=1.0)
    assert await rate() == pytest.approx(10, rel=0.05)
    await api.sql(started, id="ours", queues=None, ago=40.0)
    assert await rate() == pytest.approx(15, rel=0.05), "time in which no worker ran it does not count"
    assert (await api.batchwright.part(BatchesPart).batches.paces([id]))[id].silent_seconds == pytest.approx(30, abs=2)
    await api.sql("UPDATE batchwright.worker SET started_at = now() - interval '5 s' WHERE id = 'ours'")
    assert (await api.batchwright.part(BatchesPart).batches.paces([id]))[id].silent_seconds == pytest.approx(5, abs=2)
    await api.sql("DELETE FROM batchwright.worker")
    await api.sql(
        """INSERT INTO batchwright.batch_segment
            (batch_id, shard, claim, seq, host, start_byte, end_byte, lines, tally, registered_at)
        SELECT %(id)s, 1, 1, n, 'h', 0, 1, 7, '{}', now() - make_interval(secs => 10 - n / 60.0)
        FROM generate_series(1, 500) AS n""",
        id=id,
    )
    assert await rate() == pytest.approx(499 * 7 / 9.98, rel=0.05)


# Cancel, pause and the rest ---------------------------------------------------------------------------------------


async def test_cancelling_a_batch_again_is_harmless(api: Api, http: httpx.AsyncClient) -> None:
    id = await begun(api, http)
    first = (await http.post(f"/v1/batches/{id}/cancel")).json()
    assert first["status"] == "cancelling"
    assert first["cancelling_at"] is not None
    assert (await http.post(f"/v1/batches/{id}/cancel")).json() == first
    await api.batchwright.part(BatchesPart).batches.end_cancelled(id, Ending())
    assert (await http.post(f"/v1/batches/{id}/cancel")).json()["status"] == "cancelled"


@pytest.mark.parametrize(("verb", "status"), [("expire", BatchStatus.EXPIRED), ("fail", BatchStatus.FAILED)])
async def test_a_batch_that_has_ended_cannot_be_cancelled(
    api: Api, http: httpx.AsyncClient, verb: str, status: BatchStatus
) -> None:
    id = await ended(api, http, verb)
    answer = await http.post(f"/v1/batches/{id}/cancel")
    assert fails(answer, 409) == f"Cannot cancel a batch with status '{status.value}'."
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["type"]) == (None, None, "invalid_request_error")
    assert answer.headers["x-should-retry"] == "false"


async def test_every_conflict_of_the_server_tells_clients_not_to_repeat_it(api: Api, http: httpx.AsyncClient) -> None:
    job = (await http.post("/v1/jobs", json={"job_type": "echo"})).json()
    answer = await http.post(f"/v1/jobs/{job['id']}/recover")
    fails(answer, 409, "conflict")
    assert answer.headers["x-should-retry"] == "false"


async def test_a_batch_is_paused_and_resumed(api: Api, http: httpx.AsyncClient) -> None:
    id = await begun(api, http)
    paused = (await http.post(f"/v1/batches/{id}/pause")).json()
    assert (paused["status"], paused["paused_at"] is None) == ("in_progress", False)
    assert (await http.post(f"/v1/batches/{id}/pause")).json()["paused_at"] == paused["paused_at"]
    assert (await http.post(f"/v1/batches/{id}/resume")).json()["paused_at"] is None
    assert await api.batchwright.part(BatchesPart).batches.finalize(id)
    for verb in ("pause", "resume"):
        assert "'finalizing'" in fails(await http.post(f"/v1/batches/{id}/{verb}"), 409, "conflict")


async def test_priority_and_limits_are_changed_while_it_is_open(api: Api, http: httpx.AsyncClient) -> None:
    id = await begun(api, http)
    assert (await http.post(f"/v1/batches/{id}/priority", json={"priority": 0})).json()["priority"] == 0
    assert await api.sql("SELECT priority FROM batchwright.job") == [(0,)]
    limits = {"max_in_flight": 4}
    assert (await http.post(f"/v1/batches/{id}/limits", json=limits)).json()["limits"] == limits
    assert (await api.batchwright.part(BatchesPart).batches.controls([id]))[id].limits == limits
    lifted = await http.post(f"/v1/batches/{id}/limits", json={"max_in_flight": None})
    assert lifted.json()["limits"] == {"max_in_flight": None}
    fails(await http.post(f"/v1/batches/{id}/priority", json={"priority": 10}), 400, param="priority")
    fails(await http.post(f"/v1/batches/{id}/priority", json={}), 400, "missing_required_parameter", "priority")
    fails(await http.post(f"/v1/batches/{id}/limits", json={"max_in_flight": -1}), 400, param="max_in_flight")
    fails(await http.post(f"/v1/batches/{id}/limits", json={"a": 1}), 400, "unknown_parameter", "a")
    old = await ended(api, http)
    fails(await http.post(f"/v1/batches/{old}/priority", json={"priority": 1}), 409, "conflict")
    fails(await http.post(f"/v1/batches/{old}/limits", json=limits), 409, "conflict")


# Retry ------------------------------------------------------------------------------------------------------------


async def test_failed_lines_are_resent_in_a_new_batch(api: Api, http: httpx.AsyncClient) -> None:
    id = await ended(api, http)
    before = await shown(http, id)
    answer = await http.post(f"/v1/batches/{id}/retry", json={"codes": ["rate_limit"]}, headers={"traceparent": TRACE})
    again = answer.json()
    assert (again["retry_of"], again["status"], again["input_file_id"]) == (id, "validating", before["input_file_id"])
    assert again["id"] != id
    for name in ("endpoint", "completion_window", "metadata", "priority", "limits"):
        assert again[name] == before[name]
    rows = await api.sql(
        "SELECT retry_codes, family, traceparent FROM batchwright.batch WHERE id = %(id)s", id=again["id"]
    )
    assert rows == [(["rate_limit"], id, TRACE)]
    assert await shown(http, id) == before
    everything = (await http.post(f"/v1/batches/{id}/retry")).json()
    assert await api.sql("SELECT retry_codes FROM batchwright.batch WHERE id = %(id)s", id=everything["id"]) == [
        (None,)
    ]


async def test_a_retry_is_repeated_by_its_key(api: Api, http: httpx.AsyncClient) -> None:
    id, key = await ended(api, http), {"Idempotency-Key": "k"}
    first = await http.post(f"/v1/batches/{id}/retry", headers=key)
    again = await http.post(f"/v1/batches/{id}/retry", headers=key, json={})
    assert (again.json()["id"], again.headers["idempotent-replayed"]) == (first.json()["id"], "true")
    fails(await http.post(f"/v1/batches/{id}/retry", json={"codes": ["batch_expired"]}, headers=key), 409)
    other = await ended(api, http)
    fails(await http.post(f"/v1/batches/{other}/retry", headers=key), 409, "conflict")


@pytest.mark.parametrize("which", ["open", "input", "error", "none", "nothing", "codes"])
async def test_a_batch_that_cannot_be_retried_says_why(api: Api, http: httpx.AsyncClient, which: str) -> None:
    counts = {"completed": 10, "failed": 0, "expired": 0, "cancelled": 0}
    endings: Mapping[str, dict[str, Any]] = {"none": {"error_file_id": None}, "nothing": {"counts": counts}}
    id = await begun(api, http) if which == "open" else await ended(api, http, **endings.get(which, {}))
    batch = await shown(http, id)
    if which in ("input", "error"):
        await api.batchwright.part(BatchesPart).files.delete(batch[f"{which}_file_id"], tenant="default")
    body = {"codes": ["unheard_of"]} if which == "codes" else None
    answer = await http.post(f"/v1/batches/{id}/retry", json=body)
    said = fails(answer, 409, "conflict")
    words = {
        "open": "status 'in_progress'",
        "input": batch["input_file_id"],
        "error": f"{batch['error_file_id']} is gone",
        "none": "no error file",
        "nothing": "no error file",
        "codes": "there are: batch_expired, rate_limit",
    }
    assert words[which] in said
    assert answer.headers["x-should-retry"] == "false"
    assert await batches(api) == 1


async def test_the_codes_of_a_retry_are_checked(api: Api, http: httpx.AsyncClient) -> None:
    id = await ended(api, http)
    for body, param in (
        ({"codes": []}, "codes"),
        ({"codes": ["x" * 101]}, "codes.0"),
        ({"codes": ["x"] * 51}, "codes"),
        ({"codes": "rate_limit"}, "codes"),
        ({"code": ["x"]}, "code"),
    ):
        fails(await http.post(f"/v1/batches/{id}/retry", json=body), 400, param=param)
    assert await batches(api) == 1


# Manifest and events ----------------------------------------------------------------------------------------------


async def test_the_manifest_exists_once_the_batch_has_ended(api: Api, http: httpx.AsyncClient) -> None:
    id = await begun(api, http)
    assert "in_progress" in fails(await http.get(f"/v1/batches/{id}/manifest"), 404, "not_found")
    manifest = {"counts": {"total": 10}, "input": {"sha256": "0" * 64}}
    id = await ended(api, http, manifest=manifest)
    assert (await http.get(f"/v1/batches/{id}/manifest")).json() == manifest


async def test_the_events_of_a_batch_are_those_of_its_job(api: Api, http: httpx.AsyncClient) -> None:
    id = (await made(api, http))["id"]
    page = (await http.get(f"/v1/batches/{id}/events")).json()
    assert [event["event"] for event in page["data"]] == ["job.enqueued"]
    last = page["data"][0]["id"]
    assert (await http.get(f"/v1/batches/{id}/events", params={"after": last})).json()["data"] == []
    job = page["data"][0]["job_id"]
    assert id in fails(await http.post(f"/v1/jobs/{job}/cancel"), 409, "conflict")


# Results ----------------------------------------------------------------------------------------------------------


class Shard:
    """A shard of a batch, whose answers are written and registered by hand."""

    def __init__(self, api: Api, id: str, number: int = 0, *, host: str | None = None, stored: bool = False) -> None:
        self.api = api
        self.id = id
        self.number = number
        self.host = host or api.batchwright.part(BatchesPart).workspace.id
        self.stored = stored
        self.path = api.batchwright.part(BatchesPart).workspace.journal(id, number, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._seq = 0
        self._lines = 0
        self._journal = Journal(self.path)

    async def answer(self, n: int, size: int = 10) -> list[str]:
        """Finish this number of requests and register them in one piece; return their custom_ids."""
        names = []
        for _ in range(n):
            offset = self.number * 1_000_000 + self._lines
            names.append(f"s{self.number}-{self._lines}")
            response = {"status_code": 200, "request_id": "r", "body": {"text": "x" * size}}
            line = {"id": request_id(self.id, offset), "custom_id": names[-1], "response": response, "error": None}
            self._journal.append(offset, LineStatus.OK, orjson.dumps(line) + b"\n")
            self._lines += 1
        part = self._journal.take()
        key = None
        if self.stored:
            key = segment_key(self.id, self.number, 1, "h", part.start, part.end)
            await self.api.batchwright.store.put(key, self.path.read_bytes()[part.start : part.end])
        await self.api.sql(
            """INSERT INTO batchwright.batch_segment
                (batch_id, shard, claim, seq, host, key, start_byte, end_byte, lines, tally, registered_at)
            VALUES (%(id)s, %(shard)s, 1, %(seq)s, %(host)s, %(key)s, %(start)s, %(end)s, %(lines)s, '{}', now())""",
            id=self.id,
            shard=self.number,
            seq=self._seq,
            host=self.host,
            key=key,
            start=part.start,
            end=part.end,
            lines=n,
        )
        self._seq += 1
        return names


def custom_ids(data: bytes) -> list[str]:
    assert data == b"" or data.endswith(b"\n")
    lines = [orjson.loads(line) for line in data.splitlines()]
    assert all(line["response"]["status_code"] == 200 for line in lines)
    return [line["custom_id"] for line in lines]


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch, api: Api) -> None:
    """Pages of a few hundred bytes, so that a batch has many."""
    page = Results.page

    async def small(self: Any, id: str, cursor: Any, **options: Any) -> Any:
        return await page(self, id, cursor, 300, **options)

    monkeypatch.setattr(Results, "page", small)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.usefixtures("small_pages")
async def test_finished_lines_are_read_page_by_page_in_the_order_of_their_registration(
    api: Api, http: httpx.AsyncClient, stored: bool
) -> None:
    id = await begun(api, http)
    first, second = (
        Shard(api, id, 0, stored=stored),
        Shard(api, id, 1, host="elsewhere" if stored else None, stored=stored),
    )
    wanted = [*await first.answer(5), *await second.answer(3), *await first.answer(2)]
    if stored:
        first.path.unlink()
    found: list[str] = []
    cursor: dict[str, str] = {}
    for _ in range(len(wanted) + 1):
        answer = await http.get(f"/v1/batches/{id}/results", params=cursor)
        assert answer.headers["content-type"] == "application/x-ndjson"
        new = custom_ids(answer.content)
        assert len(new) <= 3
        found += new
        cursor = {"after": answer.headers["x-next-cursor"]}
        if not new:
            break
    assert found == wanted
    more = await second.answer(1)
    assert custom_ids((await http.get(f"/v1/batches/{id}/results", params=cursor)).content) == more


async def test_the_last_page_of_an_ended_batch_has_no_cursor(api: Api, http: httpx.AsyncClient) -> None:
    id = await begun(api, http)
    names = await Shard(api, id).answer(3)
    running = await http.get(f"/v1/batches/{id}/results")
    assert (custom_ids(running.content), "x-next-cursor" in running.headers) == (names, True)
    ending = Ending(output_file_id="file-out")
    await api.batchwright.part(BatchesPart).batches.expire(id, ending)
    over = await http.get(f"/v1/batches/{id}/results")
    assert (custom_ids(over.content), "x-next-cursor" in over.headers) == (names, False)
    await api.sql("UPDATE batchwright.batch SET segments_gone_at = now()")
    assert "its output file is file-out" in fails(await http.get(f"/v1/batches/{id}/results"), 410, "gone")


async def test_a_batch_without_answers_has_an_empty_page_and_a_cursor(api: Api, http: httpx.AsyncClient) -> None:
    id = (await made(api, http))["id"]
    answer = await http.get(f"/v1/batches/{id}/results")
    assert (answer.content, answer.headers["x-next-cursor"]) == (b"", "0:0")
    again = await http.get(f"/v1/batches/{id}/results", params={"after": "0:0"})
    assert again.headers["x-next-cursor"] == "0:0"


@pytest.mark.parametrize("stored", [False, True])
async def test_an_invented_cursor_is_refused(api: Api, http: httpx.AsyncClient, stored: bool) -> None:
    id = await begun(api, http)
    shard = Shard(api, id, stored=stored)
    await shard.answer(2)
    if stored:
        shard.path.unlink()
    ((segment, end),) = await api.sql("SELECT id, end_byte FROM batchwright.batch_segment")
    for cursor in (
        "x",
        "1",
        ":",
        "-1:0",
        f"{segment}:1",
        f"{segment}:{end - 5}",
        f"{segment}:{end + 1}",
        f"{segment + 5}:0",
        "9" * 30 + ":0",
        "\u0661:0",
    ):
        answer = await http.get(f"/v1/batches/{id}/results", params={"after": cursor})
        assert "not a cursor of this batch" in fails(answer, 400, param="after"), cursor
    assert (await http.get(f"/v1/batches/{id}/results", params={"after": f"{segment}:{end}"})).content == b""


async def test_the_cursor_of_another_batch_is_refused_and_skips_nothing(api: Api, http: httpx.AsyncClient) -> None:
    mine, other = await begun(api, http), await begun(api, http)
    await Shard(api, mine).answer(1)
    await Shard(api, other).answer(1)
    cursor = (await http.get(f"/v1/batches/{other}/results")).headers["x-next-cursor"]
    for params in ({"after": cursor}, {"after": cursor, "follow": "true"}):
        answer = await http.get(f"/v1/batches/{mine}/results", params=params)
        assert "not a cursor of this batch" in fails(answer, 400, param="after")


@pytest.mark.parametrize("stored", [False, True])
async def test_each_line_has_its_cursor_if_the_request_asks_for_it(
    api: Api, http: httpx.AsyncClient, stored: bool
) -> None:
    id = await begun(api, http)
    first, second = (Shard(api, id, number, stored=stored) for number in range(2))
    for shard in (first, second, first):
        await shard.answer(2)
    if stored:
        first.path.unlink()
    plain = (await http.get(f"/v1/batches/{id}/results")).content.splitlines()
    answer = await http.get(f"/v1/batches/{id}/results", params={"cursors": "true"})
    told = [orjson.loads(line) for line in answer.content.splitlines()]
    cursors = [line.pop("cursor") for line in told]
    assert told == [orjson.loads(line) for line in plain]
    assert cursors[-1] == answer.headers["x-next-cursor"]
    for n, cursor in enumerate(cursors, start=1):
        rest = await http.get(f"/v1/batches/{id}/results", params={"after": cursor})
        assert rest.content.splitlines() == plain[n:]


async def test_what_was_never_registered_is_not_shown(api: Api, http: httpx.AsyncClient) -> None:
    id = await begun(api, http)
    shard = Shard(api, id)
    names = await shard.answer(2)
    with shard.path.open("ab") as file:
        file.write(b"what a zombie wrote")
    assert custom_ids((await http.get(f"/v1/batches/{id}/results")).content) == names


async def test_answers_on_another_machine_without_a_shared_store_are_a_conflict(
    api: Api, http: httpx.AsyncClient
) -> None:
    id = await begun(api, http)
    await Shard(api, id, host="elsewhere").answer(1)
    assert "storage.url" in fails(await http.get(f"/v1/batches/{id}/results"), 409, "conflict")


async def test_journals_that_were_removed_meanwhile_are_gone(api: Api, http: httpx.AsyncClient) -> None:
    id = await begun(api, http)
    shard = Shard(api, id)
    await shard.answer(1)
    shard.path.unlink()
    fails(await http.get(f"/v1/batches/{id}/results"), 410, "gone")


@pytest.fixture
async def live(api: Api) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server on a socket."""
    server = await api.batchwright.server()
    server.start()
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        yield client
    await server.close()
    assert server._services.counts.total("event_streams") == 0


async def test_results_are_followed_until_the_batch_has_ended(
    api: Api, http: httpx.AsyncClient, live: httpx.AsyncClient
) -> None:
    id = await begun(api, http)
    shard = Shard(api, id)
    wanted = await shard.answer(2)
    async with live.stream("GET", f"/v1/batches/{id}/results", params={"follow": "true"}) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
        assert "x-next-cursor" not in answer.headers
        lines = answer.aiter_lines()
        found = [await anext(lines) for _ in range(2)]
        wanted += await shard.answer(1)
        found.append(await anext(lines))
        wanted += await shard.answer(2)
        await api.batchwright.part(BatchesPart).batches.expire(id, Ending())
        found += [line async for line in lines]
    assert [orjson.loads(line)["custom_id"] for line in found] == wanted


async def test_a_stream_ends_when_its_key_is_revoked_or_its_client_disconnects(
    api: Api, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = await begun(api, http)
    await Shard(api, id).answer(1)
    key = await api.batchwright.keys.create("follower")
    monkeypatch.setattr("batchwright.access.gate.LIVE_SECONDS", 0.0)
    server = await api.batchwright.server()
    server.start()
    headers = {"Authorization": f"Bearer {key.secret}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=20) as client:
        async with client.stream("GET", f"/v1/batches/{id}/results", params={"follow": "true"}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
        async with client.stream("GET", f"/v1/batches/{id}/results", params={"follow": "true"}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await api.batchwright.keys.revoke(key.key.id)
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                await anext(lines)
    counts = server._services.counts
    for _ in range(1000):
        if counts.total("event_streams") == 0:
            break
        await asyncio.sleep(0.005)
    assert counts.total("event_streams") == 0
    await server.close()


async def test_a_server_that_shuts_down_ends_its_streams(api: Api, http: httpx.AsyncClient) -> None:
    id = await begun(api, http)
    await Shard(api, id).answer(1)
    server = await api.batchwright.server()
    server.start()
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=20) as client,
        client.stream("GET", f"/v1/batches/{id}/results", params={"follow": "true"}) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        began = asyncio.get_running_loop().time()
        await server.close()
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            await anext(lines)
        assert asyncio.get_running_loop().time() - began < 4


async def test_the_number_of_streams_of_results_is_limited_and_bad_requests_get_a_status(api: Api) -> None:
    http = await api.client(api.with_settings(streams_max=0))
    id = await begun(api, http)
    answer = await http.get(f"/v1/batches/{id}/results", params={"follow": "true"})
    fails(answer, 503, "unavailable")
    fails(await http.get(f"/v1/batches/{id}/results", params={"follow": "true", "after": "x"}), 400, param="after")
    fails(await http.get(f"/v1/batches/{id}/results", params={"follow": "perhaps"}), 400, "invalid_type", "follow")


async def test_a_database_that_is_unavailable_for_a_moment_interrupts_no_stream(
    api: Api, http: httpx.AsyncClient, live: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = await begun(api, http)
    shard = Shard(api, id)
    names = await shard.answer(1)
    page, calls = Results.page, 0

    async def faltering(self: Any, *given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            await api.batchwright.part(BatchesPart).batches.expire(id, Ending())
        if calls in (2, 3):
            raise DatabaseUnavailable("away")
        return await page(self, *given, **options)

    monkeypatch.setattr(Results, "page", faltering)
    async with live.stream("GET", f"/v1/batches/{id}/results", params={"follow": "true"}) as answer:
        lines = answer.aiter_lines()
        found = [orjson.loads(await anext(lines))["custom_id"]]
        names += await shard.answer(1)
        found += [orjson.loads(line)["custom_id"] async for line in lines]
    assert (found, calls) == (names, 4)


@pytest.mark.parametrize("error", [DatabaseUnavailable, StorageUnavailable])
@pytest.mark.usefixtures("small_pages")
async def test_a_stream_of_an_ended_batch_has_every_page_although_a_read_fails_once(
    api: Api,
    http: httpx.AsyncClient,
    live: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BatchwrightError],
) -> None:
    id = await begun(api, http)
    names = await Shard(api, id).answer(6)
    await api.batchwright.part(BatchesPart).batches.expire(id, Ending())
    page, calls = Results.page, 0

    async def faltering(self: Any, *given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error("away")
        return await page(self, *given, **options)

    monkeypatch.setattr(Results, "page", faltering)
    answer = await live.get(f"/v1/batches/{id}/results", params={"follow": "true"})
    assert custom_ids(answer.content) == names
    assert calls > 2


async def test_a_stream_that_was_cut_off_resumes_after_the_last_line_received(
    api: Api, http: httpx.AsyncClient
) -> None:
    id = await begun(api, http)
    shard = Shard(api, id)
    names = await shard.answer(3)
    found: list[dict[str, Any]] = []
    for n in range(3):
        server = await api.batchwright.server()
        server.start()
        params = {"follow": "true", "cursors": "true", **({"after": found[-1]["cursor"]} if found else {})}
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=20) as client,
            client.stream("GET", f"/v1/batches/{id}/results", params=params) as answer,
        ):
            lines = answer.aiter_lines()
            found += [orjson.loads(await anext(lines)) for _ in range(2 if n < 2 else 3)]
        await server.close()
        names += await shard.answer(2)
    assert [line["custom_id"] for line in found] == names[:7]


async def test_a_stream_that_cannot_continue_is_cut_off_and_the_next_request_gets_the_reason(
    api: Api, http: httpx.AsyncClient, live: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    id = await begun(api, http)
    await Shard(api, id).answer(1)
    async with live.stream("GET", f"/v1/batches/{id}/results", params={"follow": "true"}) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        await Shard(api, id, 1, host="elsewhere").answer(1)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            await anext(lines)
    assert f"results of {id} can no longer be followed" in caplog.text
    assert "Traceback" not in caplog.text
    answer = await live.get(f"/v1/batches/{id}/results", params={"follow": "true"})
    assert "another machine" in fails(answer, 409, "conflict")
