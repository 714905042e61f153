"""Sarvam's speech-to-text jobs: create one, upload to signed URLs, start it, download from signed URLs."""

from __future__ import annotations

from typing import Any

from batchwright.simulator.providers.jobs import Item, ItemResult, Job, Stage, stamp
from batchwright.simulator.providers.speech import Audio, audio_of
from batchwright.simulator.providers.wire import JSON, Answer, Call, Refused, answer, dump
from batchwright.simulator.providers.world import Protocol

_FILES_MAX = 20
_J = "/speech-to-text/job/v1"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "invalid_api_key_error",
    404: "not_found_error",
    422: "unprocessable_entity_error",
    429: "rate_limit_exceeded_error",
    503: "billing_service_unavailable_error",
    504: "gateway_timeout_error",
}
_WORDS = {
    Stage.NEW: "Accepted",
    Stage.QUEUED: "Pending",
    Stage.RUNNING: "Running",
    Stage.SUCCEEDED: "Completed",
    Stage.FAILED: "Failed",
    Stage.EXPIRED: "Failed",
}


class Sarvam(Protocol):
    """Sarvam."""

    name = "sarvam"
    routes = (
        ("POST", _J, "create"),
        ("POST", f"{_J}/upload-files", "upload"),
        ("POST", f"{_J}/download-files", "download"),
        ("POST", f"{_J}/{{id}}/start", "start"),
        ("GET", f"{_J}/{{id}}/status", "get"),
    )
    auth = (403, "Invalid API key.", "invalid_api_key_error")
    quota = (429, "No credits available.", "insufficient_quota_error")

    def key_of(self, call: Call) -> str | None:
        return call.header("api-subscription-key")

    def error(self, refused: Refused) -> Answer:
        code = refused.code or _KINDS.get(refused.status, "internal_server_error")
        said = {"message": refused.message, "code": code, "request_id": "simulated"}
        return Answer(refused.status, dump({"error": said}), headers=refused.headers)

    def do_create(self, call: Call) -> Answer:
        parameters = call.json().get("job_parameters")
        if not isinstance(parameters, dict):
            raise Refused(422, "job_parameters is required")
        job = self.world.make_job(
            self.name,
            "",
            call.text,
            (),
            begun_at=None,
            body={"parameters": parameters, "files": []},
            publish=self._publish,
        )
        return answer({**self._head(job), "job_parameters": parameters}, 202)

    def do_upload(self, call: Call) -> Answer:
        job, names = self._named(call)
        if len({*job.body["files"], *names}) > _FILES_MAX:
            raise Refused(400, f"a job has at most {_FILES_MAX} files")
        if job.begun_at is not None:
            raise Refused(400, f"job {job.id} was started already")
        job.body["files"] += [name for name in names if name not in job.body["files"]]
        job.trace += " ".join(["", *names])
        urls = {name: _signed(self.world.sign(f"sarvam-{job.id}", f"inputs/{name}")) for name in names}
        return answer({**self._head(job), "upload_urls": urls})

    def do_start(self, call: Call, id: str) -> Answer:
        job = self.world.job(self.name, id)
        if job.begun_at is not None:
            raise Refused(400, f"job {id} was started already")
        if not job.body["files"]:
            raise Refused(400, f"job {id} has no files")
        job.items = [self._item(job, n, name) for n, name in enumerate(job.body["files"])]
        job.begun_at = self.world.now()
        return answer(self._status(job))

    def do_get(self, call: Call, id: str) -> Answer:
        return answer(self._status(self.world.job(self.name, id)))

    def do_download(self, call: Call) -> Answer:
        job, names = self._named(call)
        bucket = f"sarvam-{job.id}"
        if missing := [name for name in names if (bucket, f"outputs/{name}") not in self.world.blobs]:
            raise Refused(400, f"there is no output {missing[0]!r}")
        urls = {name: _signed(self.world.sign(bucket, f"outputs/{name}")) for name in names}
        return answer({**self._head(job), "download_urls": urls})

    def _named(self, call: Call) -> tuple[Job, list[str]]:
        body = call.json()
        names = body.get("files")
        if not isinstance(names, list) or not names:
            raise Refused(422, "files must be a list of names")
        return self.world.job(self.name, str(body.get("job_id"))), [str(name) for name in names]

    def _item(self, job: Job, index: int, name: str) -> Item:
        blob = self.world.blobs.get((f"sarvam-{job.id}", f"inputs/{name}"))
        problem = f"{name} was not uploaded" if blob is None else None
        return Item(name, Audio(index, name, name, None if blob is None else blob.data), name, problem)

    def _head(self, job: Job) -> dict[str, Any]:
        state = job.word(self.world.now(), _WORDS)
        return {"job_id": job.id, "job_state": state, "storage_container_type": "Azure"}

    def _status(self, job: Job) -> dict[str, Any]:
        now, counts = self.world.now(), job.counts(self.world.now())
        stage = job.stage(now)
        return {
            **self._head(job),
            "created_at": stamp(job.created_at),
            "updated_at": stamp(min(now, job.ends_at)),
            "total_files": counts.total,
            "successful_files_count": counts.succeeded,
            "failed_files_count": counts.failed,
            "error_message": job.why()[1] if stage is Stage.FAILED else "",
            "job_details": [_detail(one, job) for one in job.delivered(now)] if stage.is_end else [],
        }

    def _publish(self, job: Job) -> None:
        good = [one for one in job.delivered(self.world.now()) if one.is_ok]
        texts = job.spoil([dump(_transcript(one, job)) for one in good])
        for one, text in zip(good, texts, strict=True):
            self.world.put_blob(f"sarvam-{job.id}", f"outputs/{audio_of(one).index}.json", text, JSON)


def _signed(url: str) -> dict[str, Any]:
    return {"file_url": url, "file_metadata": None}


def _detail(outcome: ItemResult, job: Job) -> dict[str, Any]:
    index = audio_of(outcome).index
    output = {"file_name": f"{index}.json", "file_id": f"out-{index}"}
    failed = "Internal Server Error" if outcome.status >= 500 else "API Error"
    return {
        "inputs": [{"file_name": outcome.item.id, "file_id": f"in-{index}"}],
        "outputs": [output] if outcome.is_ok else [],
        "state": "Success" if outcome.is_ok else failed,
        "error_message": None if outcome.is_ok else outcome.message,
        "exception_name": None if outcome.is_ok else "SimulatedError",
    }


def _transcript(outcome: ItemResult, job: Job) -> dict[str, Any]:
    audio = audio_of(outcome)
    entry = {"transcript": audio.text, "start_time_seconds": 0.0, "end_time_seconds": audio.seconds, "speaker_id": "0"}
    spoken = job.body["parameters"].get("language_code")
    return {
        "request_id": f"{job.id}-{audio.index}",
        "transcript": audio.text,
        "timestamps": {
            "words": [audio.text],
            "start_time_seconds": [0.0],
            "end_time_seconds": [audio.seconds],
        },
        "diarized_transcript": {"entries": [entry]} if job.body["parameters"].get("with_diarization") else None,
        "language_code": "hi-IN" if spoken in (None, "unknown") else spoken,
        "language_probability": 0.9,
    }
