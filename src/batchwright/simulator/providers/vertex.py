"""Vertex AI's batch prediction: requests and results are objects in buckets, and have no ids."""

from __future__ import annotations

import re
from typing import Any

import orjson

from batchwright.simulator.providers.google import Google, generated, request_problem, rpc_error_of_job
from batchwright.simulator.providers.jobs import Item, ItemResult, Job, Stage, stamp
from batchwright.simulator.providers.wire import LINES, Answer, Call, Refused, answer, dump

_CLAUSE = re.compile(r'(display_?[nN]ame|state|labels\.[\w-]+) *[:=] *"?([^" ]*)"?')
_JOBS = "/v1(?:beta1)?/projects/{project}/locations/{location}/batchPredictionJobs"
_WINDOW = 4 * 86_400.0
_WORDS = {
    stage: f"JOB_STATE_{word}"
    for stage, word in {
        Stage.QUEUED: "PENDING",
        Stage.RUNNING: "RUNNING",
        Stage.CANCELLING: "CANCELLING",
        Stage.SUCCEEDED: "SUCCEEDED",
        Stage.FAILED: "FAILED",
        Stage.CANCELLED: "CANCELLED",
        Stage.EXPIRED: "EXPIRED",
    }.items()
}


class Vertex(Google):
    """Vertex AI."""

    name = "vertex"
    routes = (
        ("POST", _JOBS, "create"),
        ("GET", _JOBS, "list"),
        ("GET", f"{_JOBS}/{{id}}", "get"),
        ("POST", f"{_JOBS}/{{id}}:cancel", "cancel"),
        ("DELETE", f"{_JOBS}/{{id}}", "delete"),
    )

    def do_create(self, call: Call, project: str, location: str) -> Answer:
        body = call.json()
        try:
            uris = [str(one) for one in body["inputConfig"]["gcsSource"]["uris"]]
            prefix = str(body["outputConfig"]["gcsDestination"]["outputUriPrefix"])
            body["displayName"], body["model"] = str(body["displayName"]), str(body["model"])
        except (KeyError, TypeError) as error:
            raise Refused(400, f"displayName, model, inputConfig and outputConfig are required: {error}") from error
        problems: list[dict[str, Any]] = []
        job = self.world.make_job(
            self.name,
            "",
            call.text,
            self._items(uris, problems),
            body={**body, "parent": f"projects/{project}/locations/{location}", "prefix": prefix.rstrip("/")},
            problems=problems,
            window_seconds=_WINDOW,
            publish=self._publish,
        )
        return answer(self._job(job))

    def do_list(self, call: Call, project: str, location: str) -> Answer:
        parent = f"projects/{project}/locations/{location}"
        mine = [self._job(one) for one in self.world.listed(self.name) if one.body["parent"] == parent]
        clauses = _CLAUSE.findall(call.query.get("filter", ""))
        found = [one for one in mine if all(_value(one, name) == value for name, value in clauses)]
        return answer(self.page(call, found, "batchPredictionJobs"))

    def do_get(self, call: Call, project: str, location: str, id: str) -> Answer:
        return answer(self._job(self.world.job(self.name, id)))

    def do_cancel(self, call: Call, project: str, location: str, id: str) -> Answer:
        self.world.job(self.name, id).cancel(self.world.now())
        return answer({})

    def do_delete(self, call: Call, project: str, location: str, id: str) -> Answer:
        job = self.world.job(self.name, id)
        if not job.stage(self.world.now()).is_end:
            raise Refused(412, f"job {id} has not ended")
        del self.world.jobs[id]
        return answer({"name": f"{job.body['parent']}/operations/{id}", "done": True, "response": {}})

    def _items(self, uris: list[str], problems: list[dict[str, Any]]) -> list[Item]:
        items: list[Item] = []
        for uri in uris:
            bucket, _, name = uri.removeprefix("gs://").partition("/")
            blob = self.world.blobs.get((bucket, name))
            if blob is None:
                problems.append({"code": "5", "message": f"{uri} is not found"})
                continue
            try:
                lines = [orjson.loads(one) for one in blob.data.splitlines() if one.strip()]
            except orjson.JSONDecodeError as error:
                problems.append({"code": "3", "message": f"{uri} is not JSONL: {error}"})
                continue
            items += [_item(len(items) + n, one) for n, one in enumerate(lines)]
        return items

    def _job(self, job: Job) -> dict[str, Any]:
        now, counts = self.world.now(), job.counts(self.world.now())
        stage, state = job.stage(now), job.word(now, _WORDS)
        if stage is Stage.SUCCEEDED and counts.succeeded and counts.failed:
            state = "JOB_STATE_PARTIALLY_SUCCEEDED"
        kept = ("displayName", "model", "inputConfig", "outputConfig", "labels")
        shown = {
            "name": f"{job.body['parent']}/batchPredictionJobs/{job.id}",
            **{name: job.body[name] for name in kept if name in job.body},
            "state": state,
            "createTime": stamp(job.created_at),
            "updateTime": stamp(min(now, job.ends_at)),
        }
        if now >= job.runs_at:
            shown["startTime"] = stamp(job.runs_at)
        if not stage.is_end:
            return shown
        shown["endTime"] = stamp(job.ends_at)
        if stage is Stage.FAILED:
            return {**shown, "error": rpc_error_of_job(job)}
        stats = {"successfulCount": counts.succeeded, "failedCount": counts.failed, "incompleteCount": counts.pending}
        shown["completionStats"] = {name: str(count) for name, count in stats.items() if count}
        return {**shown, "outputInfo": {"gcsOutputDirectory": _folder(job)}}

    def _publish(self, job: Job) -> None:
        if job.stage(self.world.now()) is Stage.FAILED:
            return
        bucket, _, name = _folder(job).removeprefix("gs://").partition("/")
        found = job.delivered(self.world.now())
        lines = job.lines([dump(_line(one, job)) for one in found])
        self.world.put_blob(bucket, f"{name}/predictions.jsonl", lines, LINES)


def _item(number: int, line: Any) -> Item:
    request = line.get("request") if isinstance(line, dict) else None
    return Item(str(number), request, dump(line).decode(), request_problem(request))


def _folder(job: Job) -> str:
    return f"{job.body['prefix']}/prediction-model-{stamp(job.runs_at)}"


def _line(outcome: ItemResult, job: Job) -> dict[str, Any]:
    status = "" if outcome.is_ok else f"Bad Request: {outcome.status} {outcome.message}"
    response = generated(outcome, job) if outcome.is_ok else {}
    at = stamp(job.ends_at)
    return {"status": status, "processed_time": at, "request": outcome.item.ask, "response": response}


def _value(job: dict[str, Any], name: str) -> object:
    if name.startswith("labels."):
        return job.get("labels", {}).get(name.removeprefix("labels."))
    return job["state"] if name == "state" else job["displayName"]
