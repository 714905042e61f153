"""Azure AI Speech: batch transcription, with results behind signed URLs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from batchwright.simulator.providers.jobs import ItemResult, Job, Stage, stamp
from batchwright.simulator.providers.speech import audio_item, audio_of
from batchwright.simulator.providers.wire import JSON, Answer, Call, Refused, answer, dump
from batchwright.simulator.providers.world import Protocol

_CLAUSE = re.compile(r"(displayName|status|createdDateTime|kind) (eq|gt|ge|lt|le) '?([^' ]*)'?")
_KINDS = {
    400: "InvalidRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    422: "UnprocessableEntity",
    429: "TooManyRequests",
    503: "ServiceUnavailable",
}
_READ_ONLY = ("createdDateTime", "lastActionDateTime", "links", "self", "status")
_RETRY_AFTER_MAX = 60.0
_T = r"(?:/v3\.\d)?/transcriptions"
_TICKS = 10_000_000
_URLS_MAX = 1000
_WORDS = {
    Stage.QUEUED: "NotStarted",
    Stage.RUNNING: "Running",
    Stage.SUCCEEDED: "Succeeded",
    Stage.FAILED: "Failed",
    Stage.EXPIRED: "Failed",
}


class AzureSpeech(Protocol):
    """Azure AI Speech."""

    name = "azure"
    base = "/speechtotext"
    routes = (
        ("POST", "/speechtotext/transcriptions:submit", "create"),
        ("POST", r"/speechtotext/v3\.\d/transcriptions", "create"),
        ("GET", f"/speechtotext{_T}", "list"),
        ("GET", f"/speechtotext{_T}/{{id}}", "get"),
        ("GET", f"/speechtotext{_T}/{{id}}/files", "files"),
        ("DELETE", f"/speechtotext{_T}/{{id}}", "delete"),
    )
    auth = (401, "Access denied due to invalid subscription key or wrong API endpoint.", "401")
    quota = (403, "The quota of this resource is exceeded.", "QuotaViolation")

    def key_of(self, call: Call) -> str | None:
        return call.header("ocp-apim-subscription-key") or call.bearer()

    def error(self, refused: Refused) -> Answer:
        """The gateway refuses keys and rates before the service does, in its own format."""
        status, message = refused.status, refused.message
        if status in (401, 429):
            return Answer(status, dump({"error": {"code": str(status), "message": message}}), headers=refused.headers)
        said: dict[str, Any] = {"code": _KINDS.get(status, "InternalServerError"), "message": message}
        if refused.code is not None:
            said["innerError"] = {"code": refused.code, "message": message}
        return Answer(status, dump(said), headers=refused.headers)

    def do_create(self, call: Call) -> Answer:
        self._check_version(call)
        body = call.json()
        _check(body)
        items = [audio_item(self.world, n, str(uri)) for n, uri in enumerate(body["contentUrls"])]
        kept = {name: value for name, value in body.items() if name != "contentUrls"}
        job = self.world.make_job(self.name, "", call.text, items, body=kept, publish=self._publish)
        return answer(self._shown(job), 201, location=self._url(job))

    def do_list(self, call: Call) -> Answer:
        self._check_version(call)
        found = [self._shown(one) for one in self.world.listed(self.name)]
        return answer(self._page(call, _filtered(call, found)))

    def do_get(self, call: Call, id: str) -> Answer:
        self._check_version(call)
        job = self.world.job(self.name, id)
        if job.stage(self.world.now()).is_end:
            return answer(self._shown(job))
        settings = self.world.settings
        wait = min(_RETRY_AFTER_MAX, settings.run_seconds / (settings.speed or 1.0))
        return answer(self._shown(job), retry_after=str(max(1, int(wait))))

    def do_files(self, call: Call, id: str) -> Answer:
        self._check_version(call)
        job = self.world.job(self.name, id)
        if job.stage(self.world.now()) is not Stage.SUCCEEDED:
            return answer({"values": []})
        minutes = call.number("sasLifetimeMinutes", int(self.world.settings.signed_seconds / 60), 1 << 20)
        names = [f"contenturl_{audio_of(one).index}.json" for one in job.delivered(self.world.now()) if one.is_ok]
        found = [self._file(job, name, "Transcription", 60.0 * minutes) for name in names]
        found.append(self._file(job, "report.json", "TranscriptionReport", 60.0 * minutes))
        return answer(self._page(call, _filtered(call, found)))

    def do_delete(self, call: Call, id: str) -> Answer:
        self._check_version(call)
        job = self.world.jobs.get(id)
        if job is not None and not job.stage(self.world.now()).is_end:
            raise Refused(409, "Only transcriptions that have ended can be deleted.", "DeleteNotAllowed")
        self.world.jobs.pop(id, None)
        return Answer(204)

    def _check_version(self, call: Call) -> None:
        if "/v3." not in call.path and "api-version" not in call.query:
            raise Refused(400, "The api-version query parameter is required.", "InvalidArgument")

    def _page(self, call: Call, found: list[dict[str, Any]]) -> dict[str, Any]:
        size = min(call.number("top", 100, 100), self.world.settings.page_max)
        start = call.number("skip", 0, 1 << 31)
        page: dict[str, Any] = {"values": found[start : start + size]}
        if start + size < len(found):
            query = "&".join(f"{name}={value}" for name, value in {**call.query, "skip": start + size}.items())
            page["@nextLink"] = f"{self.world.url}{call.path}?{query.replace(' ', '%20')}"
        return page

    def _url(self, job: Job) -> str:
        return f"{self.world.url}/azure/speechtotext/transcriptions/{job.id}?api-version=2024-11-15"

    def _shown(self, job: Job) -> dict[str, Any]:
        now, stage = self.world.now(), job.stage(self.world.now())
        properties = dict(job.body["properties"])
        if stage is Stage.SUCCEEDED:
            done = [audio_of(one) for one in job.outcomes(now) if one.is_ok]
            properties["durationMilliseconds"] = round(1000 * sum(one.seconds for one in done))
        elif stage.is_end:
            code, message = job.why()
            properties["error"] = {"code": code or "InternalServerError", "message": message}
        kept = ("customProperties", "displayName", "locale", "model")
        return {
            "self": self._url(job),
            **{name: job.body[name] for name in kept if name in job.body},
            "links": {"files": self._url(job).replace("?", "/files?")},
            "properties": properties,
            "status": job.word(now, _WORDS),
            "createdDateTime": stamp(job.created_at),
            "lastActionDateTime": stamp(min(now, job.ends_at)),
        }

    def _file(self, job: Job, name: str, kind: str, seconds: float) -> dict[str, Any]:
        blob = self.world.blobs[f"azure-{job.id}", name]
        return {
            "self": self._url(job).replace("?", f"/files/{name}?"),
            "name": name,
            "kind": kind,
            "links": {"contentUrl": self.world.sign(f"azure-{job.id}", name, seconds)},
            "properties": {"size": len(blob.data)},
            "createdDateTime": stamp(job.ends_at),
        }

    def _publish(self, job: Job) -> None:
        now = self.world.now()
        if job.stage(now) is not Stage.SUCCEEDED:
            return
        good = [one for one in job.delivered(now) if one.is_ok]
        texts = job.spoil([dump(_transcript(one, job)) for one in good])
        for one, text in zip(good, texts, strict=True):
            self.world.put_blob(f"azure-{job.id}", f"contenturl_{audio_of(one).index}.json", text, JSON)
        self.world.put_blob(f"azure-{job.id}", "report.json", dump(_report(job.outcomes(now))), JSON)


def _check(body: Mapping[str, Any]) -> None:
    if (bad := next((name for name in _READ_ONLY if name in body), None)) is not None:
        raise Refused(400, f"{bad} is read-only.", "InvalidPayload")
    for name in ("displayName", "locale"):
        if not isinstance(body.get(name), str):
            raise Refused(400, f"{name} is required.", "InvalidPayload")
    urls = body.get("contentUrls")
    if not isinstance(urls, list) or not 1 <= len(urls) <= _URLS_MAX:
        raise Refused(400, f"Send 1 to {_URLS_MAX} contentUrls.", "InvalidArgument")
    properties = body.get("properties")
    hours = properties.get("timeToLiveHours") if isinstance(properties, dict) else None
    if not isinstance(hours, int) or not 6 <= hours <= 31 * 24:
        raise Refused(400, "properties.timeToLiveHours must be from 6 to 744.", "InvalidTimeToLive")
    custom = body.get("customProperties") or {}
    if len(custom) > 10 or any(len(name) > 64 or len(str(value)) > 256 for name, value in custom.items()):
        raise Refused(400, "customProperties takes 10 entries of 64 and 256 characters.", "InvalidPayload")


def _filtered(call: Call, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    compare = {"eq": "__eq__", "gt": "__gt__", "ge": "__ge__", "lt": "__lt__", "le": "__le__"}
    for name, how, value in _CLAUSE.findall(call.query.get("filter", "")):
        found = [one for one in found if getattr(str(one.get(name, "")), compare[how])(value)]
    return found


def _report(outcomes: list[ItemResult]) -> dict[str, Any]:
    good = sum(one.is_ok for one in outcomes)
    details: list[dict[str, Any]] = []
    for one in outcomes:
        detail: dict[str, Any] = {"source": audio_of(one).uri, "status": "Succeeded" if one.is_ok else "Failed"}
        if not one.is_ok:
            detail |= {"errorKind": "DownloadFailed" if one.status == 404 else "InvalidAudioFormat"}
            detail |= {"errorMessage": one.message}
        details.append(detail)
    return {
        "successfulTranscriptionsCount": good,
        "failedTranscriptionsCount": len(outcomes) - good,
        "details": details,
    }


def _transcript(outcome: ItemResult, job: Job) -> dict[str, Any]:
    audio = audio_of(outcome)
    text, seconds = audio.text, audio.seconds
    said = {"lexical": text, "itn": text, "maskedITN": text, "display": text.capitalize() + "."}
    words = [
        {"word": word, "offset": f"PT{start:g}S", "duration": f"PT{end - start:g}S", "confidence": 0.9}
        for word, start, end in audio.timed()
    ]
    phrase = {
        "recognitionStatus": "Success",
        "channel": 0,
        "speaker": 1,
        "offset": "PT0S",
        "duration": f"PT{seconds:g}S",
        "offsetInTicks": 0.0,
        "durationInTicks": seconds * _TICKS,
        "nBest": [{"confidence": 0.56, **said, "words": words}, {"confidence": 0.9, **said, "display": "worse"}],
    }
    return {
        "source": audio.uri if outcome.item.id == audio.uri else outcome.item.id,
        "timestamp": stamp(job.ends_at),
        "durationInTicks": int(seconds * _TICKS),
        "durationMilliseconds": round(1000 * seconds),
        "duration": f"PT{seconds:g}S",
        "combinedRecognizedPhrases": [{"channel": 0, **said}],
        "recognizedPhrases": [phrase],
    }
