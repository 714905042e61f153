"""OpenAI's Files and Batches, also in the variants of Groq, Together and Azure OpenAI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson

from batchwright.simulator.providers.completions import openai_item, openai_line
from batchwright.simulator.providers.jobs import Item, ItemResult, Job, Stage, stamp
from batchwright.simulator.providers.wire import OCTETS, Answer, Call, Refused, answer, dump
from batchwright.simulator.providers.world import File, Protocol, World

_V = "(?:/openai)?(?:/v1)?"
_WORDS = {
    Stage.QUEUED: "validating",
    Stage.RUNNING: "in_progress",
    Stage.CANCELLING: "cancelling",
    Stage.SUCCEEDED: "completed",
    Stage.FAILED: "failed",
    Stage.CANCELLED: "cancelled",
    Stage.EXPIRED: "expired",
}
_DAY = 86_400.0
_FINALIZING = 0.9
"""The share of the run after which a batch is finalizing."""


class OpenAI(Protocol):
    """One of the services that speak OpenAI's protocol."""

    name = "openai"
    base = "/v1"
    routes: ClassVar[Sequence[tuple[str, str, str]]] = (
        ("GET", f"{_V}/models", "models"),
        ("POST", f"{_V}/files", "upload"),
        ("GET", f"{_V}/files", "list_files"),
        ("GET", f"{_V}/files/{{id}}", "get_file"),
        ("GET", f"{_V}/files/{{id}}/content", "download"),
        ("DELETE", f"{_V}/files/{{id}}", "delete_file"),
        ("POST", f"{_V}/batches", "create"),
        ("GET", f"{_V}/batches", "list"),
        ("GET", f"{_V}/batches/{{id}}", "get"),
        ("POST", f"{_V}/batches/{{id}}/cancel", "cancel"),
    )
    window_seconds = _DAY

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._pending: dict[str, tuple[str, str]] = {}

    def error(self, refused: Refused) -> Answer:
        kind = "server_error" if refused.status >= 500 else "invalid_request_error"
        code = refused.code or ("rate_limit_exceeded" if refused.status == 429 else None)
        if refused.status == 429:
            kind = "requests" if refused.code is None else refused.code
        said = {"message": refused.message, "type": kind, "param": None, "code": code}
        return Answer(refused.status, dump({"error": said}), headers=refused.headers)

    def do_models(self, call: Call) -> Answer:
        one = {"id": "simulated", "object": "model", "created": int(self.world.now()), "owned_by": "batchwright"}
        return answer({"object": "list", "data": [one]})

    def do_upload(self, call: Call) -> Answer:
        form = call.form()
        if "file" not in form or "purpose" not in form:
            raise Refused(400, "send a file and its purpose")
        name, data = form["file"].filename or "upload.jsonl", form["file"].data
        made = self.world.add_file(self.name, self.world.next_id("file-"), name, form["purpose"].text, data)
        return answer(self._file(made))

    def do_list_files(self, call: Call) -> Answer:
        mine = [one for one in reversed(self.world.files.values()) if one.provider == self.name]
        return answer(self._page(call, [self._file(one) for one in mine]))

    def do_get_file(self, call: Call, id: str) -> Answer:
        return answer(self._file(self._written(id)))

    def do_download(self, call: Call, id: str) -> Answer:
        return Answer(200, self._written(id).data, OCTETS)

    def do_delete_file(self, call: Call, id: str) -> Answer:
        self.world.files.pop(self.world.file(self.name, id).id)
        return answer({"id": id, "object": "file", "deleted": True})

    def do_create(self, call: Call) -> Answer:
        body = call.json()
        for name in ("input_file_id", "endpoint"):
            if not isinstance(body.get(name), str):
                raise Refused(400, f"Missing required parameter: '{name}'.", "missing_required_parameter")
        file = self.world.file(self.name, body["input_file_id"])
        items, problems = _read(file.data, body["endpoint"])
        job = self.world.make_job(
            self.name,
            "batch_",
            f"{call.text} {file.filename}",
            items,
            problems=problems,
            window_seconds=self.window_seconds,
            body=body,
        )
        return answer(self._batch(job))

    def do_list(self, call: Call) -> Answer:
        return answer(self._page(call, [self._batch(one) for one in self.world.listed(self.name)]))

    def do_get(self, call: Call, id: str) -> Answer:
        return answer(self._batch(self.world.job(self.name, id)))

    def do_cancel(self, call: Call, id: str) -> Answer:
        job = self.world.job(self.name, id)
        if job.stage(self.world.now()).is_end:
            raise Refused(409, f"Cannot cancel a batch with status '{self._batch(job)['status']}'.")
        job.cancel(self.world.now())
        return answer(self._batch(job))

    def _page(self, call: Call, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
        size = min(call.number("limit", 20, 100), self.world.settings.page_max)
        ids = [one["id"] for one in found]
        after = call.query.get("after")
        start = ids.index(after) + 1 if after in ids else 0
        data = found[start : start + size]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return {"object": "list", "data": data, **ends, "has_more": start + size < len(found)}

    def _file(self, file: File) -> dict[str, Any]:
        return {
            "id": file.id,
            "object": "file",
            "bytes": len(file.data),
            "created_at": int(file.created_at),
            "filename": file.filename,
            "purpose": file.purpose,
            "status": "processed",
            "expires_at": None,
        }

    def _batch(self, job: Job) -> dict[str, Any]:
        now, counts = self.world.now(), job.counts(self.world.now())
        stage, status = job.stage(now), job.word(now, _WORDS)
        if status == "in_progress" and job.share(now) >= _FINALIZING:
            status = "finalizing"
        ended = int(job.ends_at) if stage.is_end else None
        names = {Stage.SUCCEEDED: "completed_at", Stage.FAILED: "failed_at", Stage.EXPIRED: "expired_at"}
        batch = {
            "id": job.id,
            "object": "batch",
            "endpoint": job.body["endpoint"],
            "errors": _errors(job, stage),
            "input_file_id": job.body["input_file_id"],
            "completion_window": job.body.get("completion_window", "24h"),
            "status": status,
            **self._outputs(job, stage),
            "created_at": int(job.created_at),
            "in_progress_at": int(job.runs_at) if now >= job.runs_at else None,
            "expires_at": int(job.created_at + self.window_seconds),
            "finalizing_at": ended,
            "cancelling_at": None if job.cancelled_at is None else int(job.cancelled_at),
            "cancelled_at": ended if stage is Stage.CANCELLED else None,
            **{name: ended if stage is which else None for which, name in names.items()},
            "request_counts": {"total": counts.total, "completed": counts.succeeded, "failed": counts.failed},
            "metadata": job.body.get("metadata"),
        }
        return self._in_dialect(batch, job)

    def _in_dialect(self, batch: dict[str, Any], job: Job) -> dict[str, Any]:
        """The batch as this service shows it."""
        return batch

    def _outputs(self, job: Job, stage: Stage) -> dict[str, str | None]:
        if not stage.is_end or stage is Stage.FAILED:
            return {"output_file_id": None, "error_file_id": None}
        output, errors = self._results(job)
        return {
            "output_file_id": f"file-out-{job.id}" if output else None,
            "error_file_id": f"file-err-{job.id}" if errors else None,
        }

    def _results(self, job: Job) -> tuple[list[ItemResult], list[ItemResult]]:
        is_expired = job.stage(self.world.now()) is Stage.EXPIRED
        found = job.delivered(self.world.now(), with_unfinished=is_expired)
        return [one for one in found if one.is_ok], [one for one in found if not one.is_ok]

    def _written(self, id: str) -> File:
        """An uploaded file, or the results of a batch that has ended."""
        job = self.world.jobs.get(id[9:]) if id.startswith(("file-out-", "file-err-")) else None
        if job is None or id in self.world.files:
            return self.world.file(self.name, id)
        if id not in self._outputs(job, job.stage(self.world.now())).values():
            raise Refused(404, f"No such File object: {id}", "not_found")
        output, errors = self._results(job)
        chosen = output if id.startswith("file-out-") else errors
        lines = job.lines([openai_line(self.world, one, job) for one in chosen])
        return self.world.add_file(self.name, id, f"{job.id}.jsonl", "batch_output", lines)


class Groq(OpenAI):
    """Groq: the same objects under another path."""

    name = "groq"
    base = "/openai/v1"


class Together(OpenAI):
    """Together: statuses in capitals, no metadata, lists without pages, and uploads to a signed URL."""

    name = "together"
    routes = (
        *OpenAI.routes,
        ("POST", f"{_V}/files/upload", "upload_whole"),
        ("POST", f"{_V}/files/{{id}}/preprocess", "preprocess"),
    )

    def do_upload(self, call: Call) -> Answer:
        """Together's own client asks for an upload URL; a form with the file is accepted as well."""
        form = call.form()
        if "file" in form:
            return self.do_upload_whole(call)
        id = self.world.next_id("file-")
        self._pending[id] = form["file_name"].text, form["purpose"].text
        headers = {"location": self.world.sign("together", id), "x-together-file-id": id}
        return Answer(302, b"", headers=headers)

    def do_upload_whole(self, call: Call) -> Answer:
        return super().do_upload(call)

    def do_preprocess(self, call: Call, id: str) -> Answer:
        blob = self.world.blobs.pop(("together", id), None)
        if blob is None or id not in self._pending:
            raise Refused(404, f"nothing was put at the URL of file {id!r}", "not_found")
        filename, purpose = self._pending.pop(id)
        return answer(self._file(self.world.add_file(self.name, id, filename, purpose, blob.data)))

    def do_list(self, call: Call) -> Answer:
        return answer([self._batch(one) for one in self.world.listed(self.name)])

    def do_create(self, call: Call) -> Answer:
        made = orjson.loads(super().do_create(call).body)
        return answer({"job": made, "warning": None}, 201)

    def _file(self, file: File) -> dict[str, Any]:
        return {**super()._file(file), "FileType": "jsonl", "Processed": True}

    def _in_dialect(self, batch: dict[str, Any], job: Job) -> dict[str, Any]:
        kept = ("id", "endpoint", "input_file_id", "output_file_id", "error_file_id")
        status = {"finalizing": "in_progress", "cancelling": "in_progress"}.get(batch["status"], batch["status"])
        return {
            **{name: batch[name] for name in kept},
            "user_id": "user",
            "file_size_bytes": len(self.world.files[job.body["input_file_id"]].data)
            if job.body["input_file_id"] in self.world.files
            else 0,
            "status": status.upper(),
            "progress": round(100 * job.share(self.world.now())),
            "model_id": job.body.get("model_id"),
            "error": job.why()[1] if status == "failed" else None,
            "job_deadline": _when(batch["expires_at"]),
            "created_at": _when(batch["created_at"]),
            "completed_at": _when(batch["completed_at"]),
        }


class AzureOpenAI(OpenAI):
    """Azure OpenAI: another header, two paths, and jobs that never expire."""

    name = "azure_openai"
    base = "/openai/v1"
    auth = (401, "Access denied due to invalid subscription key or wrong API endpoint.", "401")
    window_seconds = 365 * _DAY

    def key_of(self, call: Call) -> str | None:
        return call.header("api-key") or call.bearer()


def _errors(job: Job, stage: Stage) -> dict[str, Any] | None:
    if stage is not Stage.FAILED:
        return None
    code, message = job.why()
    error = {"code": code or "server_error", "message": message, "line": None, "param": None}
    return {"object": "list", "data": list(job.problems) or [error]}


def _read(data: bytes, endpoint: str) -> tuple[list[Item], list[Mapping[str, Any]]]:
    """The requests of a file, and its validation errors."""
    ids: set[str] = set()
    items: list[Item] = []
    problems: list[Mapping[str, Any]] = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        item, code = openai_item(line, endpoint)
        if item is None or item.id in ids:
            why = code or "duplicate_custom_id"
            problems.append({"code": why, "message": f"line {number}: {why}", "line": number, "param": None})
        else:
            ids.add(item.id)
            items.append(item)
    if not items and not problems:
        problems.append({"code": "empty_file", "message": "The file is empty.", "line": None, "param": None})
    return items, problems


def _when(moment: int | None) -> str | None:
    return None if moment is None else stamp(moment)
