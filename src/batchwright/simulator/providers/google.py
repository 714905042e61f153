"""What Google's APIs share: the format of errors, the codes of gRPC, pages, and the answers of Gemini."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchwright.simulator.providers.completions import echo, flat, usage, wants_tool
from batchwright.simulator.providers.jobs import ItemResult, Job
from batchwright.simulator.providers.wire import Answer, Call, Refused, dump
from batchwright.simulator.providers.world import Protocol

_BILLING = "BILLING_DISABLED"
_RPC = {
    400: (3, "INVALID_ARGUMENT"),
    401: (16, "UNAUTHENTICATED"),
    403: (7, "PERMISSION_DENIED"),
    404: (5, "NOT_FOUND"),
    409: (10, "ABORTED"),
    412: (9, "FAILED_PRECONDITION"),
    429: (8, "RESOURCE_EXHAUSTED"),
    500: (13, "INTERNAL"),
    501: (12, "UNIMPLEMENTED"),
    503: (14, "UNAVAILABLE"),
    504: (4, "DEADLINE_EXCEEDED"),
}


def rpc(status: int, message: str) -> dict[str, Any]:
    """An error of an item or a job: `google.rpc.Status`."""
    return {"code": _RPC.get(status, (2, ""))[0], "message": message}


class Google(Protocol):
    """One of Google's APIs."""

    auth = (401, "Request had invalid authentication credentials.", "ACCESS_TOKEN_TYPE_UNSUPPORTED")
    quota = (403, "This API method requires billing to be enabled. Please enable billing on the project.", _BILLING)

    def error(self, refused: Refused) -> Answer:
        status = _RPC.get(refused.status, (2, "UNKNOWN"))[1]
        said: dict[str, Any] = {"code": refused.status, "message": refused.message, "status": status}
        if refused.code is not None:
            info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": refused.code}
            said["details"] = [{**info, "domain": "googleapis.com", "metadata": {}}]
        return Answer(refused.status, dump({"error": said}), headers=refused.headers)

    def page(self, call: Call, found: Sequence[Any], name: str) -> dict[str, Any]:
        """A page in Google's format, with a token for the next."""
        size = min(call.number("pageSize", 100, 1000) or 100, self.world.settings.page_max)
        start = call.number("pageToken", 0, 1 << 31)
        more = {"nextPageToken": str(start + size)} if start + size < len(found) else {}
        return {name: list(found[start : start + size]), **more}


def rpc_error_of_job(job: Job) -> dict[str, Any]:
    """Why a job failed."""
    code, message = job.why()
    if job.problems:
        return {"code": int(code or 3), "message": message}
    return rpc(job.faults["failed"].status or 500, message)


def generated(outcome: ItemResult, job: Job) -> dict[str, Any]:
    """Gemini's answer to one request."""
    ask, item = outcome.item.ask, outcome.item
    said = echo(flat(ask["contents"][-1].get("parts")))
    asked, answered = usage(ask["contents"], said)
    part: dict[str, Any] = {"text": said}
    tools = [one for tool in ask.get("tools") or () for one in tool.get("functionDeclarations") or ()]
    if tools and wants_tool(said):
        part = {"functionCall": {"name": tools[0]["name"], "args": {"said": said}}}
    return {
        "candidates": [{"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}],
        "usageMetadata": {
            "promptTokenCount": asked,
            "candidatesTokenCount": answered,
            "totalTokenCount": asked + answered,
        },
        "modelVersion": job.body["model"].rpartition("/")[2],
        "responseId": f"resp-{job.number:x}-{item.id}",
    }


def request_problem(request: Any) -> str | None:
    """Why Gemini refuses a request."""
    contents = request.get("contents") if isinstance(request, dict) else None
    is_good = isinstance(contents, list) and contents and all(isinstance(one, dict) for one in contents)
    return None if is_good else "contents is not specified"
