"""A stub of AWS Transcribe for what moto cannot produce, such as jobs that fail, and S3 for what they write."""

from __future__ import annotations

import functools
import re
from typing import Any
from xml.sax.saxutils import escape, unescape

from batchwright.simulator.providers.gcs import Gcs
from batchwright.simulator.providers.jobs import Item, Job, Stage
from batchwright.simulator.providers.speech import Audio
from batchwright.simulator.providers.wire import JSON, XML, Answer, Call, Refused, answer, dump
from batchwright.simulator.providers.world import Handler, Protocol

_KEY = re.compile("<Key>([^<]*)</Key>")
_CREDENTIAL = re.compile("Credential=([^/]+)/")
_NAME = re.compile("[0-9a-zA-Z._-]{1,200}")
_TARGETS = {
    "Transcribe.StartTranscriptionJob": "create",
    "Transcribe.GetTranscriptionJob": "get",
    "Transcribe.ListTranscriptionJobs": "list",
    "Transcribe.DeleteTranscriptionJob": "delete",
}
_WORDS = {
    Stage.QUEUED: "QUEUED",
    Stage.RUNNING: "IN_PROGRESS",
    Stage.SUCCEEDED: "COMPLETED",
    Stage.FAILED: "FAILED",
    Stage.EXPIRED: "FAILED",
}


def _access_key(call: Call) -> str | None:
    found = _CREDENTIAL.search(call.header("authorization") or "")
    return None if found is None else found[1]


class S3(Gcs):
    """Buckets with S3's API, on which Google's XML API is modelled; signatures are not checked."""

    name = "s3"
    routes = (
        *(route for route in Gcs.routes if "/storage/" not in route[1]),
        ("POST", "/{bucket}/?", "delete_many"),
    )

    def key_of(self, call: Call) -> str | None:
        return _access_key(call) or "anonymous"

    def do_delete_many(self, call: Call, bucket: str) -> Answer:
        """Missing objects count as deleted."""
        names = [unescape(name) for name in _KEY.findall(call.text)]
        for name in names:
            self.world.blobs.pop((bucket, name), None)
        deleted = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        return Answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode(), XML)


class Aws(Protocol):
    """AWS Transcribe; a header names the call."""

    name = "aws"
    routes = ()
    auth = (400, "The security token included in the request is invalid.", "UnrecognizedClientException")
    quota = (400, "You have too many concurrent jobs in the queue.", "LimitExceededException")

    def find(self, call: Call, path: str) -> tuple[str, Handler] | None:
        name = _TARGETS.get(call.header("x-amz-target") or "")
        return None if name is None else (name, functools.partial(getattr(self, f"do_{name}"), call))

    def key_of(self, call: Call) -> str | None:
        return _access_key(call)

    def error(self, refused: Refused) -> Answer:
        """Throttling is a 400 too; only its type distinguishes it."""
        usual = "InternalFailureException" if refused.status >= 500 else "BadRequestException"
        kind = refused.code or ("ThrottlingException" if refused.status == 429 else usual)
        status = 400 if refused.status == 429 else refused.status
        headers = {**refused.headers, "x-amzn-errortype": kind}
        return Answer(status, dump({"__type": kind, "Message": refused.message}), "application/x-amz-json-1.1", headers)

    def do_create(self, call: Call) -> Answer:
        body = call.json()
        name, uri = str(body.get("TranscriptionJobName")), str((body.get("Media") or {}).get("MediaFileUri"))
        if _NAME.fullmatch(name) is None or not uri.startswith("s3://"):
            raise Refused(400, "The name or the media URI of the job is not valid.")
        if not {"LanguageCode", "IdentifyLanguage", "IdentifyMultipleLanguages"} & body.keys():
            raise Refused(400, "Send LanguageCode, IdentifyLanguage or IdentifyMultipleLanguages.")
        if any(one.body["TranscriptionJobName"] == name for one in self.world.jobs.values() if one.provider == "aws"):
            raise Refused(400, "The requested job name already exists. Use a different job name.", "ConflictException")
        items = [self._item(uri)]
        return self._shown(self.world.make_job(self.name, "", call.text, items, body=body, publish=self._publish))

    def do_get(self, call: Call) -> Answer:
        return self._shown(self._job(call))

    def do_list(self, call: Call) -> Answer:
        body = call.json()
        wanted, part = body.get("Status"), str(body.get("JobNameContains", ""))
        found = [self._summary(one) for one in self.world.listed(self.name)]
        found = [one for one in found if part in one["TranscriptionJobName"]]
        found = [one for one in found if wanted in (None, one["TranscriptionJobStatus"])]
        size = min(int(body.get("MaxResults", 5)), self.world.settings.page_max)
        start = int(body.get("NextToken", 0))
        more = {"NextToken": str(start + size)} if start + size < len(found) else {}
        return answer({"TranscriptionJobSummaries": found[start : start + size], **more})

    def do_delete(self, call: Call) -> Answer:
        job = self._job(call)
        if not job.stage(self.world.now()).is_end:
            raise Refused(400, "The job can't be deleted while it is in progress.")
        del self.world.jobs[job.id]
        return Answer(200)

    def _job(self, call: Call) -> Job:
        name = call.json().get("TranscriptionJobName")
        found = [one for one in self.world.jobs.values() if one.provider == "aws"]
        job = next((one for one in found if one.body["TranscriptionJobName"] == name), None)
        if job is None:
            raise Refused(400, "The requested job couldn't be found. Check the job name and try your request again.")
        return job

    def _item(self, uri: str) -> Item:
        """Media that is not here may be in another S3; we know that it is missing only in our own buckets."""
        bucket, _, name = uri.removeprefix("s3://").partition("/")
        blob = self.world.blobs.get((bucket, name))
        is_ours = any(where == bucket for where, _ in self.world.blobs)
        problem = "The S3 object that you specified doesn't exist." if is_ours and blob is None else None
        return Item(uri, Audio(0, uri, name.rpartition("/")[2], None if blob is None else blob.data), name, problem)

    def _summary(self, job: Job) -> dict[str, Any]:
        now, stage = self.world.now(), job.stage(self.world.now())
        (outcome,) = job.outcomes(now)
        is_bad = stage.is_end and not outcome.is_ok
        shown = {
            "TranscriptionJobName": job.body["TranscriptionJobName"],
            "TranscriptionJobStatus": "FAILED" if is_bad else job.word(now, _WORDS),
            "CreationTime": job.created_at,
            **{name: job.body[name] for name in ("LanguageCode",) if name in job.body},
        }
        if is_bad:
            fault = job.faults.get("failed")
            message = None if fault is None else fault.message
            shown["FailureReason"] = message or outcome.item.problem or "Unsupported media format."
        return {**shown, "CompletionTime": job.ends_at} if stage.is_end else shown

    def _shown(self, job: Job) -> Answer:
        shown = {**self._summary(job), "Media": job.body["Media"]}
        if shown["TranscriptionJobStatus"] == "COMPLETED":
            bucket, key = self._output(job)
            is_own = "OutputBucketName" in job.body
            uri = f"{self.world.url}/s3/{bucket}/{key}" if is_own else self.world.sign(bucket, key, 900)
            shown["Transcript"] = {"TranscriptFileUri": uri}
        return answer({"TranscriptionJob": shown})

    def _output(self, job: Job) -> tuple[str, str]:
        name = job.body["TranscriptionJobName"]
        bucket, key = str(job.body.get("OutputBucketName", "aws-transcripts")), str(job.body.get("OutputKey") or "")
        return bucket, f"{key}{name}.json" if not key or key.endswith("/") else key

    def _publish(self, job: Job) -> None:
        (outcome,) = job.outcomes(self.world.now())
        if outcome.is_ok and "missing" not in job.faults:
            (text,) = job.spoil([dump(_transcript(job, outcome.item.ask))])
            self.world.put_blob(*self._output(job), text, JSON)


def _transcript(job: Job, audio: Audio) -> dict[str, Any]:
    """Numbers are strings; the full stop at the end has no times."""
    items: list[dict[str, Any]] = [
        {
            "id": n,
            "type": "pronunciation",
            "start_time": f"{start:g}",
            "end_time": f"{end:g}",
            "alternatives": [{"confidence": "0.9", "content": word}],
            "speaker_label": "spk_0",
        }
        for n, (word, start, end) in enumerate(audio.timed())
    ]
    dot = {"id": len(items), "type": "punctuation", "alternatives": [{"confidence": "0.0", "content": "."}]}
    results = {"transcripts": [{"transcript": f"{audio.text}."}], "items": [*items, dot]}
    name = job.body["TranscriptionJobName"]
    return {"jobName": name, "accountId": "123456789012", "status": "COMPLETED", "results": results}
