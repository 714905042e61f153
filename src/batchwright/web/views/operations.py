"""Operations that workers have published, and a form to submit a job by hand."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from pydantic import ValidationError
from starlette.datastructures import FormData
from starlette.responses import Response

from batchwright.api.schemas import JobToBe
from batchwright.api.submit import submit
from batchwright.engine.views import OperationView
from batchwright.errors import Conflict, InvalidInput, NotFound
from batchwright.web.pages import Link, Pages
from batchwright.web.schema_form import Field, fields_of, fill
from batchwright.web.visit import Reader, Submitter, Visit

pages = Pages(
    "operations", package="batchwright.web", links=[Link("Operations", "/ui/operations", group="Engine", order=30)]
)
_OWNED = ("batch.", "ingest.run", "ingest.item", "ingest.gather", "provider.task")
"""Operations that belong to other objects, such as batches; they cannot be submitted by hand."""
_SHOWN = 120
_OPTIONS = ("queue", "priority", "max_attempts", "delay_seconds", "idempotency_key")
_NUMBERS = {"priority": int, "max_attempts": int, "delay_seconds": float}


@pages.get("/ui/operations")
async def list_operations(visit: Reader) -> Response:
    views = visit.services.core.views

    async def load() -> dict[str, Any]:
        operations = await views.operations()
        return {"operations": operations[:_SHOWN], "more": max(0, len(operations) - _SHOWN)}

    return await visit.show("operations.html", load, title="Operations", owned=_OWNED)


@pages.get("/ui/operations/submit")
async def show_form(visit: Submitter, name: Annotated[str, Query(max_length=100)]) -> Response:
    operation = await _operation(visit, name)
    fields = fields_of(operation.payload_schema)
    given = {field.name: field.default for field in fields}
    return _draw(visit, operation, fields, given, {})


@pages.post("/ui/operations/submit")
async def submit_job(visit: Submitter, name: Annotated[str, Query(max_length=100)]) -> Response:
    """Like `POST /v1/jobs`; problems are shown beside their fields. The same form sent twice submits one job."""
    operation, form = await _operation(visit, name), await visit.form()
    fields = fields_of(operation.payload_schema)
    given = {key: str(form.get(key, "")).strip() for key in (*(field.name for field in fields), *_OPTIONS)}
    filled = fill(fields, lambda key: given[key])
    problems = dict(filled.problems)
    options = _options(form, problems)
    if not problems:
        try:
            job = JobToBe.model_validate({"job_type": name, "payload": filled.payload, **options})
            tenant = visit.caller.own_tenant
            key = await visit.once()
            made = await submit(visit.services.core, [job.new_job(tenant, None)], tenant=tenant, key=key, body={})
            return visit.go(f"/ui/jobs/{made.ids[0]}", done="The job is queued.")
        except ValidationError as error:
            problem = error.errors()[0]
            problems[str(problem["loc"][0] if problem["loc"] else "")] = str(problem["msg"])
        except (InvalidInput, Conflict) as error:
            param = getattr(error, "param", None)
            problems[param if param in given else ""] = str(error)
    return _draw(visit, operation, fields, given, problems, status=400)


def _options(form: FormData, problems: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key in _OPTIONS:
        text = str(form.get(key, "")).strip()
        if not text:
            continue
        try:
            options[key] = _NUMBERS[key](text) if key in _NUMBERS else text
        except ValueError:
            problems[key] = f"{text!r} is not a number."
    return options


async def _operation(visit: Visit, name: str) -> OperationView:
    for one in await visit.services.core.views.operations():
        if one.name == name:
            return one
    raise NotFound(f"no worker has published an operation {name!r}; start one that has it")


def _draw(
    visit: Visit,
    operation: OperationView,
    fields: list[Field],
    given: dict[str, str],
    problems: dict[str, str],
    *,
    status: int = 200,
) -> Response:
    return visit.draw(
        "operation_submit.html",
        status=status,
        title=f"Submit {operation.name}",
        operation=operation,
        fields=fields,
        given={**dict.fromkeys(_OPTIONS, ""), **given},
        problems=problems,
    )
