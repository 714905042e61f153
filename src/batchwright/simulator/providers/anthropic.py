"""Anthropic's message batches: requests in the body, no names, one file of results in any order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.simulator.providers.completions import echo, flat, usage, wants_tool
from batchwright.simulator.providers.jobs import Item, ItemResult, Job, Stage, stamp
from batchwright.simulator.providers.wire import LINES, Answer, Call, Refused, answer, dump
from batchwright.simulator.providers.world import Protocol

_DAY = 86_400.0
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_WORDS = {
    **dict.fromkeys((Stage.SUCCEEDED, Stage.FAILED, Stage.CANCELLED, Stage.EXPIRED), "ended"),
    **dict.fromkeys((Stage.QUEUED, Stage.RUNNING), "in_progress"),
    Stage.CANCELLING: "canceling",
}
_UNFINISHED = {Stage.CANCELLED: "canceled", Stage.EXPIRED: "expired"}
"""The outcome of unfinished requests; in a failed batch they are errored."""


class Anthropic(Protocol):
    """Anthropic."""

    name = "anthropic"
    routes = (
        ("GET", "/v1/models", "models"),
        ("POST", "/v1/messages/batches", "create"),
        ("GET", "/v1/messages/batches", "list"),
        ("GET", "/v1/messages/batches/{id}", "get"),
        ("POST", "/v1/messages/batches/{id}/cancel", "cancel"),
        ("GET", "/v1/messages/batches/{id}/results", "results"),
        ("DELETE", "/v1/messages/batches/{id}", "delete"),
    )
    auth = (401, "invalid x-api-key", "authentication_error")
    quota = (
        400,
        "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade.",
        "invalid_request_error",
    )

    def key_of(self, call: Call) -> str | None:
        return call.header("x-api-key") or call.bearer()

    def error(self, refused: Refused) -> Answer:
        said = {"type": "error", "error": _error(refused.status, refused.message), "request_id": "req_simulated"}
        return Answer(refused.status, dump(said), headers=refused.headers)

    def do_models(self, call: Call) -> Answer:
        one = {"type": "model", "id": "claude-simulated", "display_name": "Simulated", "created_at": stamp(0)}
        return answer({"data": [one], "has_more": False, "first_id": one["id"], "last_id": one["id"]})

    def do_create(self, call: Call) -> Answer:
        if call.header("anthropic-version") is None:
            raise Refused(400, "anthropic-version: header is required")
        requests = call.json().get("requests")
        if not isinstance(requests, list) or not requests:
            raise Refused(400, "requests: Field required")
        items = [_item(n, one) for n, one in enumerate(requests)]
        if len({one.id for one in items}) < len(items):
            raise Refused(400, "requests: custom_id must be unique")
        return answer(self._batch(self.world.make_job(self.name, "msgbatch_", call.text, items, window_seconds=_DAY)))

    def do_list(self, call: Call) -> Answer:
        size = min(call.number("limit", 20, 1000), self.world.settings.page_max)
        found = [self._batch(one) for one in self.world.listed(self.name)]
        ids = [one["id"] for one in found]
        after, before = call.query.get("after_id"), call.query.get("before_id")
        start = ids.index(after) + 1 if after in ids else 0
        if before in ids:
            start = max(0, ids.index(before) - size)
        data = found[start : start + size]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return answer({"data": data, **ends, "has_more": start > 0 if before in ids else start + size < len(found)})

    def do_get(self, call: Call, id: str) -> Answer:
        return answer(self._batch(self.world.job(self.name, id)))

    def do_cancel(self, call: Call, id: str) -> Answer:
        job = self.world.job(self.name, id)
        if job.stage(self.world.now()).is_end:
            raise Refused(400, f"batch {id} has already ended")
        job.cancel(self.world.now())
        return answer(self._batch(job))

    def do_results(self, call: Call, id: str) -> Answer:
        job, now = self.world.job(self.name, id), self.world.now()
        if not job.stage(now).is_end:
            raise Refused(404, f"batch {id} has not ended")
        found = job.delivered(now, with_unfinished=True)
        return Answer(200, job.lines([dump(self._line(one, job)) for one in found]), LINES)

    def do_delete(self, call: Call, id: str) -> Answer:
        job = self.world.job(self.name, id)
        if not job.stage(self.world.now()).is_end:
            raise Refused(400, f"batch {id} cannot be deleted while it is processed")
        del self.world.jobs[id]
        return answer({"id": id, "type": "message_batch_deleted"})

    def _batch(self, job: Job) -> dict[str, Any]:
        now = self.world.now()
        is_ended = job.stage(now).is_end
        return {
            "id": job.id,
            "type": "message_batch",
            "processing_status": job.word(now, _WORDS),
            "request_counts": self._counts(job),
            "created_at": stamp(job.created_at),
            "expires_at": stamp(job.created_at + _DAY),
            "ended_at": stamp(job.ends_at) if is_ended else None,
            "cancel_initiated_at": None if job.cancelled_at is None else stamp(job.cancelled_at),
            "archived_at": None,
            "results_url": f"{self.world.url}/anthropic/v1/messages/batches/{job.id}/results" if is_ended else None,
        }

    def _counts(self, job: Job) -> dict[str, int]:
        """All requests count as processing until the whole batch has ended."""
        counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
        stage = job.stage(self.world.now())
        for one in job.outcomes(self.world.now()):
            counts[_fate(one, stage) if stage.is_end else "processing"] += 1
        return counts

    def _line(self, outcome: ItemResult, job: Job) -> dict[str, Any]:
        fate = _fate(outcome, job.stage(self.world.now()))
        result: dict[str, Any] = {"type": fate}
        if fate == "succeeded":
            result["message"] = _message(outcome.item, job)
        elif fate == "errored":
            error = _error(outcome.status or 500, outcome.message)
            result["error"] = {"type": "error", "error": error, "request_id": None}
        return {"custom_id": outcome.item.id, "result": result}


def _item(number: int, request: Any) -> Item:
    if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
        raise Refused(400, f"requests.{number}.custom_id: Field required")
    params = request.get("params")
    if not isinstance(params, dict):
        raise Refused(400, f"requests.{number}.params: Field required")
    missing = next((name for name in ("model", "max_tokens", "messages") if not params.get(name)), None)
    problem = None if missing is None else f"{missing}: Field required"
    return Item(request["custom_id"], params, dump(params).decode(), problem)


def _fate(outcome: ItemResult, stage: Stage) -> str:
    if outcome.is_ok:
        return "succeeded"
    return "errored" if outcome.status else _UNFINISHED.get(stage, "errored")


def _error(status: int, message: str) -> Mapping[str, str]:
    usual = "api_error" if status >= 500 else "invalid_request_error"
    return {"type": _KINDS.get(status, usual), "message": message}


def _message(item: Item, job: Job) -> dict[str, Any]:
    params = item.ask
    said = echo(flat(params["messages"][-1].get("content")))
    asked, answered = usage(params["messages"], said)
    content: dict[str, Any] = {"type": "text", "text": said, "citations": None}
    has_call = bool(params.get("tools")) and wants_tool(said)
    if has_call:
        content = {"type": "tool_use", "id": "toolu_0", "name": params["tools"][0]["name"], "input": {"said": said}}
    return {
        "id": f"msg_{job.number:x}_{item.id}",
        "type": "message",
        "role": "assistant",
        "model": params["model"],
        "content": [content],
        "stop_reason": "tool_use" if has_call else "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": asked,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": answered,
            "service_tier": "batch",
        },
    }
