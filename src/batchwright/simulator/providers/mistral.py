"""Mistral's batch jobs: files and lines in OpenAI's format, jobs in its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from batchwright.simulator.providers.completions import openai_item, openai_line
from batchwright.simulator.providers.jobs import Item, Job, Stage, stamp
from batchwright.simulator.providers.openai import OpenAI
from batchwright.simulator.providers.wire import Answer, Call, Refused, answer, dump
from batchwright.simulator.providers.world import File

_FILTERS = ("page", "page_size", "model", "agent_id", "created_after", "created_by_me", "status", "order_by")
_JOBS = "/v1/batch/jobs"
_WORDS = {
    Stage.QUEUED: "QUEUED",
    Stage.RUNNING: "RUNNING",
    Stage.CANCELLING: "CANCELLATION_REQUESTED",
    Stage.SUCCEEDED: "SUCCESS",
    Stage.FAILED: "FAILED",
    Stage.CANCELLED: "CANCELLED",
    Stage.EXPIRED: "TIMEOUT_EXCEEDED",
}


class Mistral(OpenAI):
    """Mistral."""

    name = "mistral"
    base = ""
    routes = (
        *(route for route in OpenAI.routes if "batches" not in route[1]),
        ("POST", _JOBS, "create"),
        ("GET", _JOBS, "list"),
        ("GET", f"{_JOBS}/{{id}}", "get"),
        ("POST", f"{_JOBS}/{{id}}/cancel", "cancel"),
        ("DELETE", f"{_JOBS}/{{id}}", "delete"),
    )
    auth = (401, "Unauthorized", "1101")
    quota = (402, "You have reached your spending limit.", "1300")

    def error(self, refused: Refused) -> Answer:
        said = {"object": "error", "message": refused.message, "type": "invalid_request_error", "code": refused.code}
        body = {"detail": refused.message} if refused.status in (401, 404) else said
        return Answer(refused.status, dump(body), headers=refused.headers)

    def do_list_files(self, call: Call) -> Answer:
        mine = [self._file(one) for one in reversed(self.world.files.values()) if one.provider == self.name]
        return answer(self._numbered(call, mine))

    def do_create(self, call: Call) -> Answer:
        body = call.json()
        if not isinstance(body.get("endpoint"), str):
            raise Refused(422, "endpoint: Field required")
        files = [self.world.file(self.name, str(id)) for id in body.get("input_files") or ()]
        lines = [line for file in files for line in file.data.splitlines() if line.strip()]
        lines += [dump(one) for one in body.get("requests") or ()]
        if not lines:
            raise Refused(422, "send input_files or requests")
        names = " ".join(file.filename for file in files)
        items, problems = _read(lines, body)
        job = self.world.make_job(
            self.name,
            "",
            f"{call.text} {names}",
            items,
            body=body,
            problems=problems,
            window_seconds=3600.0 * float(body.get("timeout_hours") or 24),
        )
        return answer(self._job(job))

    def do_list(self, call: Call) -> Answer:
        wanted = {name: value for name, value in call.query.items() if name not in _FILTERS}
        after, status = call.query.get("created_after", ""), call.query.get("status")
        found = [
            self._job(one)
            for one in self.world.listed(self.name)
            if wanted.items() <= dict(one.body.get("metadata") or {}).items() and stamp(one.created_at) >= _utc(after)
        ]
        if call.query.get("order_by") == "created":
            found.reverse()
        return answer(self._numbered(call, [one for one in found if status in (None, one["status"])]))

    def do_get(self, call: Call, id: str) -> Answer:
        job = self.world.job(self.name, id)
        shown = self._job(job)
        if call.query.get("inline") == "true" and job.stage(self.world.now()).is_end:
            good, _ = self._results(job)
            shown["outputs"] = [orjson.loads(openai_line(self.world, one, job)) for one in good]
        return answer(shown)

    def do_cancel(self, call: Call, id: str) -> Answer:
        job = self.world.job(self.name, id)
        if job.stage(self.world.now()).is_end:
            raise Refused(409, f"job {id} has already ended")
        job.cancel(self.world.now())
        return answer(self._job(job))

    def do_delete(self, call: Call, id: str) -> Answer:
        del self.world.jobs[self.world.job(self.name, id).id]
        return answer({"id": id, "object": "batch", "deleted": True})

    def _numbered(self, call: Call, found: list[dict[str, Any]]) -> dict[str, Any]:
        size = min(call.number("page_size", 100, 1000), self.world.settings.page_max)
        start = size * call.number("page", 0, 1 << 31)
        return {"object": "list", "data": found[start : start + size], "total": len(found)}

    def _file(self, file: File) -> dict[str, Any]:
        kind = "batch_request" if file.purpose == "batch" else "batch_result"
        source = "upload" if file.purpose == "batch" else "mistral"
        shown = {**super()._file(file), "purpose": "batch", "sample_type": kind, "source": source}
        return {**shown, "num_lines": file.data.count(b"\n"), "mimetype": "application/jsonl"}

    def _job(self, job: Job) -> dict[str, Any]:
        now, counts = self.world.now(), job.counts(self.world.now())
        stage = job.stage(now)
        outputs = self._outputs(job, stage)
        return {
            "id": job.id,
            "object": "batch",
            "input_files": job.body.get("input_files") or [],
            "metadata": job.body.get("metadata"),
            "endpoint": job.body["endpoint"],
            "model": job.body.get("model"),
            "agent_id": None,
            "output_file": outputs["output_file_id"],
            "error_file": outputs["error_file_id"],
            "errors": self._errors(job, stage),
            "status": job.word(now, _WORDS),
            "created_at": int(job.created_at),
            "started_at": int(job.runs_at) if now >= job.runs_at else None,
            "completed_at": int(job.ends_at) if stage.is_end else None,
            "total_requests": counts.total,
            "completed_requests": counts.succeeded + counts.failed,
            "succeeded_requests": counts.succeeded,
            "failed_requests": counts.failed,
        }

    def _errors(self, job: Job, stage: Stage) -> list[dict[str, Any]]:
        found = [one["message"] for one in job.problems] or [job.why()[1]]
        return [{"message": one, "count": 1} for one in found] if stage is Stage.FAILED else []


def _read(lines: list[bytes], body: Mapping[str, Any]) -> tuple[list[Item], list[Mapping[str, Any]]]:
    """The requests, each with the job's model, and the problems of lines."""
    items: list[Item] = []
    problems: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        item, code = openai_item(line, body["endpoint"], body.get("model"))
        if item is None:
            problems.append({"message": f"line {number}: {code}"})
        else:
            items.append(item)
    return items, problems


def _utc(moment: str) -> str:
    return moment.replace("+00:00", "Z")
