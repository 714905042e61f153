"""Google Speech-to-Text v2: batchRecognize, an operation whose results go into a bucket."""

from __future__ import annotations

from typing import Any

from batchwright.simulator.providers.google import Google, rpc, rpc_error_of_job
from batchwright.simulator.providers.jobs import ItemResult, Job, Stage, stamp
from batchwright.simulator.providers.speech import audio_item, audio_of
from batchwright.simulator.providers.wire import JSON, Answer, Call, Refused, answer, dump

_AT = "/v2/projects/{project}/locations/{location}"
_DAY = 86_400.0
_FILES_MAX = 15
_NUMBER = "123456789"
"""Names contain the project's number, even if the request used its id."""
_TYPES = "type.googleapis.com/google.cloud.speech.v2."


class GoogleSpeech(Google):
    """Google Speech-to-Text."""

    name = "google"
    routes = (
        ("POST", f"{_AT}/recognizers/{{recognizer}}:batchRecognize", "create"),
        ("GET", f"{_AT}/operations", "list"),
        ("GET", f"{_AT}/operations/{{id}}", "get"),
        ("POST", f"{_AT}/operations/{{id}}:cancel", "cancel"),
        ("GET", f"{_AT}/recognizers", "recognizers"),
    )

    def do_recognizers(self, call: Call, project: str, location: str) -> Answer:
        return answer({"recognizers": []})

    def do_create(self, call: Call, project: str, location: str, recognizer: str) -> Answer:
        body = call.json()
        uris = [str(one.get("uri", "")) for one in body.get("files") or ()]
        if not 1 <= len(uris) <= _FILES_MAX or not all(one.startswith("gs://") for one in uris):
            raise Refused(400, f"files must have 1 to {_FILES_MAX} URIs that begin with gs://")
        output = body.get("recognitionOutputConfig") or {}
        if "gcsOutputConfig" not in output and ("inlineResponseConfig" not in output or len(uris) > 1):
            raise Refused(400, "recognitionOutputConfig is required; results inline are for one file")
        body["recognizer"] = f"projects/{project}/locations/{location}/recognizers/{recognizer}"
        job = self.world.make_job(
            self.name,
            "",
            call.text,
            [audio_item(self.world, n, uri) for n, uri in enumerate(uris)],
            body={"asked": body, "parent": f"projects/{_NUMBER}/locations/{location}"},
            window_seconds=_DAY,
            publish=self._publish,
        )
        return answer(self._operation(job))

    def do_list(self, call: Call, project: str, location: str) -> Answer:
        parent = f"projects/{_NUMBER}/locations/{location}"
        found = [self._operation(one) for one in self.world.listed(self.name) if one.body["parent"] == parent]
        return answer(self.page(call, found, "operations"))

    def do_get(self, call: Call, project: str, location: str, id: str) -> Answer:
        return answer(self._operation(self.world.job(self.name, id)))

    def do_cancel(self, call: Call, project: str, location: str, id: str) -> Answer:
        job = self.world.job(self.name, id)
        if not self.world.settings.is_google_speech_cancellable:
            raise Refused(501, "Operation is not implemented, or supported, or enabled.")
        job.cancel(self.world.now())
        return answer({})

    def _operation(self, job: Job) -> dict[str, Any]:
        now, stage = self.world.now(), job.stage(self.world.now())
        percent = 100 if stage.is_end else int(100 * job.share(now))
        files = {one.item.id: {"progressPercent": percent} for one in job.outcomes(now)}
        metadata = {
            "@type": f"{_TYPES}OperationMetadata",
            "createTime": stamp(job.created_at),
            "updateTime": stamp(min(now, job.ends_at)),
            "resource": job.body["asked"]["recognizer"],
            "method": "google.cloud.speech.v2.Speech.BatchRecognize",
            "batchRecognizeRequest": job.body["asked"],
            "progressPercent": percent,
            "batchRecognizeMetadata": {"transcriptionMetadata": files},
        }
        shown: dict[str, Any] = {"name": f"{job.body['parent']}/operations/{job.id}", "metadata": metadata}
        if not stage.is_end:
            return {**shown, "done": False}
        if stage is Stage.FAILED:
            return {**shown, "done": True, "error": rpc_error_of_job(job)}
        if stage is not Stage.SUCCEEDED:
            error = {"code": 1 if stage is Stage.CANCELLED else 4, "message": f"The operation was {stage}."}
            return {**shown, "done": True, "error": error}
        return {**shown, "done": True, "response": self._response(job)}

    def _response(self, job: Job) -> dict[str, Any]:
        found = job.delivered(self.world.now())
        seconds = sum(audio_of(one).seconds for one in found if one.is_ok)
        return {
            "@type": f"{_TYPES}BatchRecognizeResponse",
            "results": {one.item.id: self._result(one, job) for one in found},
            "totalBilledDuration": f"{seconds:g}s",
        }

    def _result(self, outcome: ItemResult, job: Job) -> dict[str, Any]:
        if not outcome.is_ok:
            return {"error": rpc(outcome.status, outcome.message)}
        metadata = {"metadata": {"totalBilledDuration": f"{audio_of(outcome).seconds:g}s"}}
        if _prefix(job) is None:
            return {**metadata, "inlineResult": {"transcript": _transcript(outcome)}}
        uri = f"gs://{'/'.join(_place(outcome, job))}"
        return {**metadata, "cloudStorageResult": {"uri": uri}, "uri": uri}

    def _publish(self, job: Job) -> None:
        now = self.world.now()
        if job.stage(now) is not Stage.SUCCEEDED or _prefix(job) is None:
            return
        good = [one for one in job.delivered(now) if one.is_ok]
        for one, text in zip(good, job.spoil([dump(_transcript(one)) for one in good]), strict=True):
            self.world.put_blob(*_place(one, job), text, JSON)


def _prefix(job: Job) -> str | None:
    config = job.body["asked"]["recognitionOutputConfig"].get("gcsOutputConfig")
    return None if config is None else str(config["uri"]).rstrip("/")


def _place(outcome: ItemResult, job: Job) -> tuple[str, str]:
    """Bucket and name of a file's transcript."""
    audio = audio_of(outcome)
    bucket, _, folder = (_prefix(job) or "").removeprefix("gs://").partition("/")
    name = f"{audio.name.rpartition('.')[0] or audio.name}_transcript_{job.id}-{audio.index}.json"
    return bucket, f"{folder}/{name}" if folder else name


def _transcript(outcome: ItemResult) -> dict[str, Any]:
    """`BatchRecognizeResults`; the last result has no alternatives, as also happens at Google."""
    audio = audio_of(outcome)
    words = [
        {"startOffset": f"{start:g}s", "endOffset": f"{end:g}s", "word": word, "speakerLabel": "1"}
        for word, start, end in audio.timed()
    ]
    result = {
        "alternatives": [{"transcript": audio.text, "confidence": 0.9, "words": words}],
        "channelTag": 1,
        "resultEndOffset": f"{audio.seconds:g}s",
        "languageCode": "en-us",
    }
    silent = {"resultEndOffset": f"{audio.seconds:g}s", "languageCode": "en-us"}
    return {"results": [result, silent], "metadata": {"totalBilledDuration": f"{audio.seconds:g}s"}}
