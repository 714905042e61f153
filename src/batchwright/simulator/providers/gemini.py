"""Batches and files of the Gemini developer API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from batchwright.simulator.providers.google import Google, generated, request_problem, rpc, rpc_error_of_job
from batchwright.simulator.providers.jobs import Item, ItemResult, Job, Stage, stamp
from batchwright.simulator.providers.wire import OCTETS, Answer, Call, Refused, answer, dump
from batchwright.simulator.providers.world import File, World

_TWO_DAYS = 2 * 86_400.0
_TYPES = "type.googleapis.com/google.ai.generativelanguage.v1main."
_V = "/v1(?:beta)?"
_WORDS = {
    stage: f"BATCH_STATE_{word}"
    for stage, word in {
        Stage.QUEUED: "PENDING",
        Stage.RUNNING: "RUNNING",
        Stage.CANCELLING: "RUNNING",
        Stage.SUCCEEDED: "SUCCEEDED",
        Stage.FAILED: "FAILED",
        Stage.CANCELLED: "CANCELLED",
        Stage.EXPIRED: "EXPIRED",
    }.items()
}


class Gemini(Google):
    """The Gemini developer API."""

    name = "gemini"
    routes = (
        ("GET", f"{_V}/models", "models"),
        ("POST", f"/upload{_V}/files", "upload"),
        ("GET", f"{_V}/files", "list_files"),
        ("GET", f"{_V}/files/{{id}}", "get_file"),
        ("GET", f"(?:/download)?{_V}/files/{{id}}:download", "download"),
        ("DELETE", f"{_V}/files/{{id}}", "delete_file"),
        ("POST", f"{_V}/models/{{model}}:batchGenerateContent", "create"),
        ("GET", f"{_V}/batches", "list"),
        ("GET", f"{_V}/batches/{{id}}", "get"),
        ("POST", f"{_V}/batches/{{id}}:cancel", "cancel"),
        ("DELETE", f"{_V}/batches/{{id}}", "delete"),
    )
    auth = (400, "API key not valid. Please pass a valid API key.", "API_KEY_INVALID")

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._uploads: dict[str, tuple[dict[str, Any], str, bytes]] = {}

    def key_of(self, call: Call) -> str | None:
        """An upload URL is its own credential."""
        upload = call.query.get("upload_id")
        return upload if upload in self._uploads else call.header("x-goog-api-key") or call.query.get("key")

    def do_models(self, call: Call) -> Answer:
        return answer({"models": [{"name": "models/gemini-simulated", "displayName": "Simulated"}]})

    def do_upload(self, call: Call) -> Answer:
        """Resumable as in Google's clients, or in one request as `raw` or `multipart`."""
        how = call.header("x-goog-upload-protocol") or call.query.get("uploadType")
        if (upload := call.query.get("upload_id")) is not None:
            return self._upload_more(call, upload)
        if how == "resumable":
            said, kind = call.json().get("file", {}), call.header("x-goog-upload-header-content-type") or OCTETS
            upload = self.world.next_id("upload-")
            self._uploads[upload] = said, kind, b""
            url = f"{self.world.url}{call.path}?upload_id={upload}&upload_protocol=resumable"
            return Answer(200, b"", headers={"x-goog-upload-url": url, "x-goog-upload-status": "active"})
        if how == "multipart":
            head, data = call.parts()
            return self._uploaded(orjson.loads(head.data).get("file", {}), data.type, data.data)
        return self._uploaded({}, call.header("content-type") or OCTETS, call.body)

    def _upload_more(self, call: Call, upload: str) -> Answer:
        if upload not in self._uploads:
            raise Refused(404, f"there is no upload {upload!r}")
        said, kind, data = self._uploads[upload]
        if call.number("offset", int(call.header("x-goog-upload-offset") or 0), 1 << 62) != len(data):
            raise Refused(400, f"the upload is at {len(data)}")
        self._uploads[upload] = said, kind, data + call.body
        if "finalize" not in (call.header("x-goog-upload-command") or ""):
            return Answer(200, b"", headers={"x-goog-upload-status": "active"})
        del self._uploads[upload]
        return self._uploaded(said, kind, data + call.body)

    def _uploaded(self, said: dict[str, Any], kind: str, data: bytes) -> Answer:
        id = str(said.get("name") or self.world.next_id("")).removeprefix("files/")
        shown = str(said.get("displayName") or said.get("display_name") or "")
        file = self.world.add_file(self.name, f"files/{id}", shown, "upload", data, str(said.get("mimeType") or kind))
        return answer({"file": _file(file, self.world)}, x_goog_upload_status="final")

    def do_list_files(self, call: Call) -> Answer:
        mine = [_file(one, self.world) for one in reversed(self.world.files.values()) if one.provider == self.name]
        return answer(self.page(call, mine, "files"))

    def do_get_file(self, call: Call, id: str) -> Answer:
        return answer(_file(self._found(id), self.world))

    def do_download(self, call: Call, id: str) -> Answer:
        file = self._found(id)
        if file.purpose == "upload":
            raise Refused(400, "Only generated files can be downloaded.")
        return Answer(200, file.data, OCTETS)

    def do_delete_file(self, call: Call, id: str) -> Answer:
        del self.world.files[self._found(id).id]
        return answer({})

    def do_create(self, call: Call, model: str) -> Answer:
        batch = call.json().get("batch")
        if not isinstance(batch, dict) or not (batch.get("displayName") or batch.get("display_name")):
            raise Refused(400, "batch.display_name is required")
        config = batch.get("inputConfig") or batch.get("input_config") or {}
        body = {"model": f"models/{model}", "name": batch.get("displayName") or batch.get("display_name")}
        name = config.get("fileName") or config.get("file_name")
        items = _of_requests(config) if name is None else _of_file(self._found(str(name).removeprefix("files/")).data)
        job = self.world.make_job(
            self.name,
            "",
            call.text,
            items,
            body={**body, "is_file": name is not None},
            window_seconds=_TWO_DAYS,
            problems=() if items else ({"message": "the input has no requests"},),
        )
        return answer(self._operation(job))

    def do_list(self, call: Call) -> Answer:
        return answer(self.page(call, [self._operation(one) for one in self.world.listed(self.name)], "operations"))

    def do_get(self, call: Call, id: str) -> Answer:
        return answer(self._operation(self.world.job(self.name, id)))

    def do_cancel(self, call: Call, id: str) -> Answer:
        job = self.world.job(self.name, id)
        if job.stage(self.world.now()).is_end:
            raise Refused(412, f"batch {id} has already ended")
        job.cancel(self.world.now())
        return answer({})

    def do_delete(self, call: Call, id: str) -> Answer:
        del self.world.jobs[self.world.job(self.name, id).id]
        return answer({})

    def _operation(self, job: Job) -> dict[str, Any]:
        now, counts = self.world.now(), job.counts(self.world.now())
        stage = job.stage(now)
        stats = {"requestCount": counts.total, "pendingRequestCount": counts.pending}
        if stage.is_end:
            stats |= {"successfulRequestCount": counts.succeeded, "failedRequestCount": counts.failed}
        metadata = {
            "@type": f"{_TYPES}GenerateContentBatch",
            "name": f"batches/{job.id}",
            "model": job.body["model"],
            "displayName": job.body["name"],
            "state": job.word(now, _WORDS),
            "createTime": stamp(job.created_at),
            "updateTime": stamp(min(now, job.ends_at)),
            "batchStats": {name: str(count) for name, count in stats.items() if count},
        }
        done: dict[str, Any] = {"done": True} if stage.is_end else {}
        if stage is Stage.SUCCEEDED and "empty" not in job.faults:
            metadata["output"] = output = self._output(job)
            done["response"] = {"@type": f"{_TYPES}GenerateContentBatchOutput", **output}
        elif stage is Stage.FAILED:
            done["error"] = rpc_error_of_job(job)
        elif stage.is_end and stage is not Stage.SUCCEEDED:
            done["error"] = {"code": 1 if stage is Stage.CANCELLED else 4, "message": f"The batch was {stage}."}
        ended = {"endTime": stamp(job.ends_at)} if stage.is_end else {}
        return {"name": f"batches/{job.id}", "metadata": {**metadata, **ended}, **done}

    def _output(self, job: Job) -> dict[str, Any]:
        if job.body["is_file"]:
            return {"responsesFile": f"files/batch-{job.id}"}
        found = [_response(one, job) for one in job.delivered(self.world.now())]
        return {"inlinedResponses": {"inlinedResponses": found}}

    def _found(self, id: str) -> File:
        """An uploaded file, or the results of a batch that has succeeded."""
        job = self.world.jobs.get(id.removeprefix("batch-"))
        now = self.world.now()
        if f"files/{id}" not in self.world.files and job is not None and job.stage(now) is Stage.SUCCEEDED:
            lines = [dump({"key": one.item.id, **_response(one, job)}) for one in job.delivered(now)]
            self.world.add_file(self.name, f"files/{id}", "", "output", job.lines(lines), "application/jsonl")
        return self.world.file(self.name, f"files/{id}")


def _file(file: File, world: World) -> dict[str, Any]:
    uri = f"{world.url}/gemini/v1beta/{file.id}"
    shown = {
        "name": file.id,
        "displayName": file.filename,
        "mimeType": file.type,
        "sizeBytes": str(len(file.data)),
        "createTime": stamp(file.created_at),
        "updateTime": stamp(file.created_at),
        "expirationTime": stamp(file.created_at + _TWO_DAYS),
        "uri": uri,
        "state": "ACTIVE",
        "source": "UPLOADED" if file.purpose == "upload" else "GENERATED",
    }
    return shown if file.purpose == "upload" else {**shown, "downloadUri": f"{uri}:download?alt=media"}


def _of_requests(config: dict[str, Any]) -> list[Item]:
    requests = config.get("requests") or {}
    found: Sequence[Any] = requests.get("requests") or [] if isinstance(requests, dict) else []
    return [_item(n, one, (one.get("metadata") or {}).get("key")) for n, one in enumerate(found)]


def _of_file(data: bytes) -> list[Item]:
    try:
        lines = [orjson.loads(line) for line in data.splitlines() if line.strip()]
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the input file is not JSONL: {error}") from error
    return [_item(n, one, one.get("key")) for n, one in enumerate(lines)]


def _item(number: int, line: dict[str, Any], key: object) -> Item:
    request = line.get("request")
    id = str(number) if key is None else str(key)
    return Item(id, {**(request or {}), "_line": line}, dump(line).decode(), request_problem(request))


def _response(outcome: ItemResult, job: Job) -> dict[str, Any]:
    metadata = outcome.item.ask["_line"].get("metadata")
    said: dict[str, Any] = {"metadata": metadata} if metadata is not None else {}
    if outcome.is_ok:
        return {**said, "response": generated(outcome, job)}
    return {**said, "error": rpc(outcome.status, outcome.message)}
