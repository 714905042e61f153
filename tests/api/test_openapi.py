"""The OpenAPI document: what it must say about every route, and whether the server conforms to it under fuzzing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from batchwright import AsyncBatchwright, NewJob
from batchwright.api.application import application
from batchwright.batches.operations import process_job
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import NewBatch
from batchwright.files.uploads import NewUpload, Uploads, new_upload_id
from batchwright.ingest.part import IngestPart
from batchwright.ingest.submission import WantedRun
from batchwright.testing import drain
from tests.api.conftest import GATEWAY, OPERATIONS, Api, configured, routes, stored_file

EXAMPLES = int(os.environ.get("BATCHWRIGHT_TEST_FUZZ_EXAMPLES", "3"))
"""Cases per route in the fuzzing phase; more of them take long."""
PHASES = ("examples", "coverage", "fuzzing")

CONFIG = """\
seed = {seed}
request-timeout = 5.0
max-stream-events = 1
workers = 1
headers = {{ Authorization = "Bearer {secret}" }}

[generation]
max-examples = {examples}
database = "none"
no-shrink = true

[phases]
stateful.enabled = false
coverage.unexpected-methods = ["PATCH"]
coverage.generate-duplicate-query-parameters = false

[checks]
# Half of what is right by its shape is wrong by its sense: an operation that nobody knows, a cursor from nowhere.
positive_data_acceptance.enabled = false
# Keys may carry several scopes and no key is needed for health: tests/api/test_access.py walks the routes instead.
ignored_auth.enabled = false
# Too many items can also be too many bytes: 413 refuses them as well, and is not among the usual answers of this check.
negative_data_rejection.expected-statuses = [
    "400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx",
]

[parameters]
"path.id" = {{ dictionary = "ids", probability = 0.7 }}
"path.name" = {{ dictionary = "names", probability = 0.7 }}

[dictionaries]
ids.values = {ids}
names.values = ["nightly", "default", "papers"]

# Who follows the results of an open batch waits for its end.
[[operations]]
include-path = "/v1/batches/{{id}}/results"
parameters = {{ "query.follow" = false }}

# Nobody answers at the gateway, so that its models are not known.
[[operations]]
include-path = ["/v1/models", "/v1/models/{{id}}"]
checks.not_a_server_error.enabled = false

# GET /v1/jobs/cancel is GET /v1/jobs/{{id}} with an id that is none, and is told so.
[[operations]]
include-path = ["/v1/jobs/cancel", "/v1/jobs/rerun"]
checks.unsupported_method.enabled = false
checks.allow_header_conformance.enabled = false
"""


@pytest.mark.timeout(120 + 60 * EXAMPLES)
@pytest.mark.parametrize(
    ("phases", "examples"), [(("fuzzing",), 1), pytest.param(PHASES, EXAMPLES, marks=pytest.mark.thorough)]
)
async def test_the_server_conforms_to_its_document_for_any_request(
    database_url: str, tmp_path: Path, phases: Sequence[str], examples: int
) -> None:
    settings = configured(database_url, tmp_path)
    offers_batches = dataclasses.replace(settings, global_inference_gateway=GATEWAY)
    async with (
        AsyncBatchwright(settings=settings, operations=OPERATIONS) as batchwright,
        AsyncBatchwright(settings=offers_batches) as front,
    ):
        jobs = [await batchwright.enqueue(name) for name in ("echo", "broken", "family")]
        await batchwright.schedules.create("nightly", "0 3 * * *", NewJob("echo"))
        await drain(batchwright)
        key = await batchwright.keys.create("fuzzer", scopes=["read", "submit", "operate", "admin"])
        config = tmp_path / "schemathesis.toml"
        ids = json.dumps([*map(str, jobs), *await files_and_batches(front), *await runs_and_documents(front)])
        config.write_text(CONFIG.format(seed=1, secret=key.secret, examples=examples, ids=ids))
        server, worker = await front.server(), batchwright.worker()
        running = [server.start(), asyncio.create_task(worker.run())]
        try:
            # The document is made at the first request for it, and the fuzzer would wait only ten seconds.
            async with httpx.AsyncClient(timeout=60) as http:
                assert (await http.get(f"{server.url}/openapi.json")).status_code == 200
            code, said = await fuzz(f"{server.url}/openapi.json", config, phases)
        finally:
            worker.stop()
            await server.close()
            await asyncio.gather(*running)
    assert code == 0, said
    assert f"Tested: {len(routes(application(server._services)))}" in said
    for phase in phases:
        assert f"✅ {phase.title()}" in said


async def files_and_batches(batchwright: AsyncBatchwright) -> list[str]:
    """The ids of objects that requests can read and change."""
    ids = []
    for n in range(3):
        file = await stored_file(batchwright, b"{}\n" * n)
        new = NewBatch(tenant="default", endpoint="/v1/embeddings", input_file_id=file.id, completion_window="24h")
        (job,) = await batchwright.catalog.prepare([process_job(new)])
        await batchwright.part(BatchesPart).batches.create(new, job)
        wanted = NewUpload(
            id=new_upload_id(), tenant="default", purpose="batch", filename="f", mime_type="text/plain", bytes=n
        )
        await Uploads(batchwright.queue.database, batchwright.part(BatchesPart).files).create(wanted)
        ids += [file.id, new.id, wanted.id]
    return ids


async def runs_and_documents(batchwright: AsyncBatchwright) -> list[str]:
    """A run with waiting documents and an empty collection; its sources do not exist."""
    part = batchwright.part(IngestPart)
    ids = []
    for n in range(3):
        wanted = WantedRun(tenant="default", collection="papers", sources=[f"http://127.0.0.1:9/{n}"])
        run, _ = await part.submission.create(wanted)
        ids.append(run.id)
    async with batchwright.queue.database.transaction() as session:
        listed = [{"source": "http://127.0.0.1:9/a", "name": "a"}]
        await part.runs.add_items(run, listed, force=False, session=session)
    return [*ids, *(item.id for item in await part.items.list(run.id)), "1"]


async def fuzz(url: str, config: Path, phases: Sequence[str]) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "--config-file", str(config)]
    command += ["run", "--phases", ",".join(phases), url]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=config.parent, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, said.decode()


# What the document says -------------------------------------------------------------------------------------------


def operations(api: Api) -> list[tuple[str, dict[str, Any]]]:
    document = api.app.openapi()
    return [
        (f"{method.upper()} {path}", one) for path, found in document["paths"].items() for method, one in found.items()
    ]


async def test_every_route_has_a_summary_and_lists_its_errors(api: Api) -> None:
    assert len(operations(api)) == len(routes(api.app)) > 25
    for name, one in operations(api):
        assert one["summary"], name
        assert len(one["tags"]) == 1, name
        answers = one["responses"]
        if name not in ("GET /healthz", "GET /readyz"):
            assert {"400", "401", "403", "413", "421", "503"} <= set(answers), name
        assert "422" not in answers, name
        assert ("415" in answers) == ("requestBody" in one), name
        if "{" in name:
            assert "404" in answers, name
        for status, answer in answers.items():
            if status >= "400" and not (name == "GET /readyz" and status == "503"):
                schema = answer["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (name, status)


async def test_every_parameter_and_every_field_of_a_body_has_a_limit(api: Api) -> None:
    document = api.app.openapi()
    for name, one in operations(api):
        for parameter in one.get("parameters", ()):
            if parameter["name"] == "traceparent":
                continue  # an invalid one is ignored, however long it is
            unlimited = list(unbounded(document, parameter["schema"], f"{name} {parameter['name']}"))
            assert not unlimited
        for content in one.get("requestBody", {}).get("content", {}).values():
            unlimited = list(unbounded(document, content["schema"], name))
            counted = (".payload", ".file", ".data", ".options.*")  # these are limited in bytes and in depth
            assert [where for where in unlimited if not where.endswith(counted)] == []


def unbounded(document: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    """The places below a schema that have no limit."""
    if reference := schema.get("$ref"):
        schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    choices = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    if choices:
        return [found for choice in choices for found in unbounded(document, choice, where)]
    if "enum" in schema or "const" in schema or schema.get("type") in ("null", "boolean"):
        return []
    match schema.get("type"):
        case "object" if "patternProperties" in schema:
            own = [] if schema["propertyNames"]["maxLength"] and schema["maxProperties"] else [where]
            (part,) = schema["patternProperties"].values()
            return own + unbounded(document, part, f"{where}.*")
        case "object":
            assert schema["additionalProperties"] is False, where
            found = [unbounded(document, part, f"{where}.{name}") for name, part in schema["properties"].items()]
            return [place for places in found for place in places]
        case "array":
            own = [] if "maxItems" in schema else [where]
            return own + unbounded(document, schema["items"], f"{where}[]")
        case "string":
            return [] if "maxLength" in schema or schema.get("format") in ("uuid", "date-time") else [where]
        case "integer" | "number":
            has_least = "minimum" in schema or "exclusiveMinimum" in schema
            return [] if has_least and "maximum" in schema else [where]
    return [where]


async def test_the_document_needs_no_key_and_its_examples_are_valid(api: Api) -> None:
    await api.holder()
    http = await api.client()
    answer = await http.get("/openapi.json")
    assert answer.status_code == 200
    assert answer.json()["info"]["title"] == "Batchwright"
    holder = await api.holder("submit")
    (example,) = answer.json()["components"]["schemas"]["JobToBe"]["examples"]
    assert (await holder.post("/v1/jobs", json=example)).status_code == 201
