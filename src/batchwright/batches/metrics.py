"""Metrics of batches, with the names, labels and values of llm-d's batch gateway.

Counters and histograms go into the worker's row of counts, and are summed over all workers that ever ran. Gauges show
the load of this process now, and are summed over live processes. What happens to each request is only noted at first,
and counted later, many requests at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchwright.inference.answers import Answer
from batchwright.states import BatchStatus
from batchwright.telemetry.metrics import Counts, LabelLimit, LabelLimits, Metric, Sampled

if TYPE_CHECKING:
    from batchwright.batches.send.dispatch import Dispatcher

MODELS_MAX = 100
"""Maximum number of models that have their own series without being named in the configuration; others are `other`."""
_NOTED_MAX = 1_000

_HOUR, _DAY = 3600.0, 86_400.0
_REQUESTS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_PLANS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_WAITS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, _HOUR, 4 * _HOUR, 12 * _HOUR, _DAY)
_LIVES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, _HOUR, 2 * _HOUR, 4 * _HOUR, 8 * _HOUR, 16 * _HOUR, _DAY)
_LONG_LIVES = (*_LIVES, 2 * _DAY, 7 * _DAY, 30 * _DAY)

_SIZES = (100, 1_000, 10_000, 30_000)
_RESULTS = {
    BatchStatus.COMPLETED: "success",
    BatchStatus.CANCELLED: "success",
    BatchStatus.FAILED: "failed",
    BatchStatus.EXPIRED: "expired",
}

BATCH_GATEWAY_METRICS = (
    Metric(
        "jobs_processed_total",
        "Batches that ended (success, failed, expired) or had ended before (skipped), and shards that a worker gave "
        "back (re_enqueued).",
        ("result", "reason"),
        prefix="",
        expected=(
            ("success", "none"),
            ("failed", "none"),
            ("failed", "system_error"),
            ("expired", "expired_dequeue"),
            ("expired", "expired_execution"),
            ("re_enqueued", "none"),
            ("re_enqueued", "guard_shutdown"),
            ("re_enqueued", "db_transient"),
            ("re_enqueued", "system_error"),
            ("skipped", "not_runnable_state"),
            ("skipped", "db_inconsistency"),
        ),
    ),
    Metric(
        "job_processing_duration_seconds",
        "Time from when a worker picked up a batch until its end, by the number of its requests.",
        ("size_bucket",),
        "histogram",
        _LIVES,
        prefix="",
    ),
    Metric(
        "job_queue_wait_duration_seconds",
        "Time that a batch waited until a worker picked it up.",
        (),
        "histogram",
        _WAITS,
        prefix="",
    ),
    Metric("total_workers", "Maximum number of shards that live worker processes can hold.", (), "gauge", prefix=""),
    Metric("active_workers", "Shards that live worker processes hold.", (), "gauge", prefix=""),
    Metric("processor_inflight_requests", "Requests in flight to model servers.", (), "gauge", prefix=""),
    Metric(
        "processor_max_inflight_concurrency",
        "Maximum number of requests in flight: inference.concurrency, summed over processes.",
        (),
        "gauge",
        prefix="",
    ),
    Metric(
        "model_inflight_requests",
        "Requests in flight to each model.",
        ("model",),
        "gauge",
        prefix="",
        sampled=Sampled("in_flight", "model"),
    ),
    Metric(
        "plan_build_duration_seconds",
        "Time to check and plan an input file, by the number of its requests.",
        ("size_bucket",),
        "histogram",
        _PLANS,
        prefix="",
    ),
    Metric(
        "model_request_execution_duration_seconds",
        "Time of the attempt that gave a request its final answer.",
        ("model",),
        "histogram",
        _REQUESTS,
        prefix="",
        sampled=Sampled("requests", "model"),
    ),
    Metric(
        "request_errors_by_model_total",
        "Requests whose final answer is an error; attempts that were retried do not count.",
        ("model",),
        prefix="",
        sampled=Sampled("errors", "model"),
    ),
    Metric(
        "batch_request_prompt_tokens_total",
        "Prompt tokens that model servers reported.",
        ("model",),
        prefix="",
        sampled=Sampled("tokens", "model"),
    ),
    Metric(
        "batch_request_generation_tokens_total",
        "Answer tokens that model servers reported.",
        ("model",),
        prefix="",
        sampled=Sampled("tokens", "model"),
    ),
    Metric(
        "batch_job_e2e_latency_seconds",
        "Time from the creation of a batch to its end, by how it ended.",
        ("status",),
        "histogram",
        _LONG_LIVES,
        prefix="",
    ),
    Metric(
        "batch_cancellation_total",
        "Batches that were cancelled, by their phase: queued, in_progress or finalizing.",
        ("phase",),
        prefix="",
        expected=(("queued",), ("in_progress",), ("finalizing",)),
    ),
    Metric(
        "batch_startup_recovery_total",
        "Batches that were recovered after a worker died, by their status and by what was done.",
        ("status", "action"),
        prefix="",
    ),
)
OWN_METRICS = (
    Metric(
        "model_limit",
        "Requests in flight that each model can take, as tuned automatically.",
        ("model",),
        "gauge",
        sampled=Sampled("limit", "model"),
    ),
    Metric(
        "model_breaker_open",
        "Processes that send nothing to the model now, because its server cannot be reached.",
        ("model",),
        "gauge",
    ),
    Metric(
        "work_disk_full",
        "Processes that send nothing now, because the disk of their work folder is nearly full.",
        (),
        "gauge",
    ),
    Metric(
        "batch_retries_total",
        "Attempts after which a request is resent, by the server's status or the failure.",
        ("model", "reason"),
    ),
    Metric(
        "batch_answers_registered_total",
        "Answers registered in the database; no crash can lose them.",
    ),
    Metric(
        "batch_lines_resent_total",
        "Lines without an answer at the end, which were resent.",
        expected=((),),
    ),
)
BATCH_METRICS = (*BATCH_GATEWAY_METRICS, *OWN_METRICS)


def label_limits(models: Iterable[str]) -> LabelLimits:
    """Every model that the configuration names has its own series, and so have the first MODELS_MAX others."""
    return {"model": LabelLimit(frozenset(models), MODELS_MAX)}


def size_bucket(requests: int) -> str:
    """The first of 100, 1000, 10000 and 30000 that is above the number of requests; or `large`."""
    place = bisect_right(_SIZES, requests)
    return str(_SIZES[place]) if place < len(_SIZES) else "large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of a worker process at one moment."""

    shards: int
    shards_max: int
    requests: int
    requests_max: int
    in_flight: Mapping[str, int]
    """Requests in flight, by model."""
    limits: Mapping[str, int]
    """Requests that may be in flight, by model."""
    unreachable: Collection[str] = frozenset()
    """Models whose server cannot be reached."""
    has_room: bool = True
    """Whether the disk of the work folder has room for more answers."""


def load_of(dispatcher: Dispatcher, *, shards: int, shards_max: int) -> Load:
    """The load now. A process whose slots do not add up claims no more shards, so its maximum is 0."""
    total = dispatcher.limits.total
    return Load(
        shards=shards,
        shards_max=0 if dispatcher.broken else shards_max,
        requests=total.in_use,
        requests_max=total.capacity,
        in_flight=dispatcher.in_flight(),
        limits={model: sender.limit.adaptive.limit for model, sender in dispatcher.senders.items()},
        unreachable=frozenset(model for model, one in dispatcher.senders.items() if one.limit.breaker.is_open),
        has_room=dispatcher.disk.trouble is None,
    )


@dataclass(slots=True)
class _Tally:
    """What was recorded about one model's answers."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0
    input: int = 0
    output: int = 0


class BatchCounts:
    """The batch numbers of one worker process."""

    def __init__(self, counts: Counts | None = None) -> None:
        self._counts = counts or Counts(BATCH_METRICS)
        self._counts.on_read(self._count)
        self._tallies: dict[str, _Tally] = {}
        self._retries: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._load: Callable[[], Load] | None = None

    # Requests ---------------------------------------------------------------------------------------------------

    def answered(self, model: str, *answers: Answer) -> None:
        """Requests have their final answers, good or bad."""
        tally = self._tallies.get(model)
        if tally is None:
            tally = self._tallies[model] = _Tally()
        for answer in answers:
            tally.seconds.append(answer.seconds)
            usage = answer.usage
            if usage.input:
                tally.input += usage.input
            if usage.output:
                tally.output += usage.output
            if not answer.succeeded:
                tally.errors += 1
        if len(tally.seconds) >= _NOTED_MAX:
            self._count_answers()

    def retried(self, model: str, answer: Answer) -> None:
        """A request will be resent."""
        status = answer.status
        reason = str(status) if status is not None and status >= 300 else answer.code or "unknown"
        self._retries[model, reason] += 1

    def registered(self, lines: int) -> None:
        """Answers were registered: from now on other workers can use them."""
        self._counts.add("batch_answers_registered_total", lines)

    # Batches ----------------------------------------------------------------------------------------------------

    def waited(self, seconds: float) -> None:
        """A batch waited this long until a worker picked it up."""
        self._counts.observe("job_queue_wait_duration_seconds", seconds)

    def planned(self, total: int, seconds: float) -> None:
        """A plan was written."""
        self._counts.observe("plan_build_duration_seconds", seconds, (size_bucket(total),))

    def recovered(self, status: str, action: str) -> None:
        """A batch was recovered after its worker died."""
        self._counts.add("batch_startup_recovery_total", 1, (status, action))

    def given_back(self, reason: str) -> None:
        """A shard was given back before its end: guard_shutdown, db_transient, system_error, or none of these."""
        self._counts.add("jobs_processed_total", 1, ("re_enqueued", reason))

    def skipped(self, reason: str) -> None:
        """There was nothing to do for a batch: not_runnable_state if it had ended, db_inconsistency if it is gone."""
        self._counts.add("jobs_processed_total", 1, ("skipped", reason))

    def resent(self, lines: int) -> None:
        """This number of lines had no answer at the end, and is resent."""
        self._counts.add("batch_lines_resent_total", lines)

    def cancelled(self, phase: str) -> None:
        """A batch was cancelled: queued, in_progress or finalizing."""
        self._counts.add("batch_cancellation_total", 1, (phase,))

    def ended(self, status: str, reason: str, *, total: int, seconds: float, since_created: float) -> None:
        """A batch ended, `seconds` after a worker picked it up; 0 if none did."""
        self._counts.add("jobs_processed_total", 1, (_RESULTS[BatchStatus(status)], reason))
        self._counts.observe("batch_job_e2e_latency_seconds", since_created, (status,))
        if seconds > 0:
            self._counts.observe("job_processing_duration_seconds", seconds, (size_bucket(total),))

    # Gauges -----------------------------------------------------------------------------------------------------

    def watch(self, load: Callable[[], Load]) -> None:
        """Call `load` for the gauges whenever they are written."""
        self._load = load

    def _count(self) -> None:
        self._count_answers()
        for labels, n in self._retries.items():
            self._counts.add("batch_retries_total", n, labels)
        self._retries.clear()
        if self._load is not None:
            self._set_gauges(self._load())

    def _count_answers(self) -> None:
        for model, tally in self._tallies.items():
            labels = (model,)
            self._counts.observe_all("model_request_execution_duration_seconds", tally.seconds, labels)
            self._counts.add("request_errors_by_model_total", tally.errors, labels)
            self._counts.add("batch_request_prompt_tokens_total", tally.input, labels)
            self._counts.add("batch_request_generation_tokens_total", tally.output, labels)
        self._tallies.clear()

    def _set_gauges(self, load: Load) -> None:
        for name, n in (
            ("total_workers", load.shards_max),
            ("active_workers", load.shards),
            ("processor_inflight_requests", load.requests),
            ("processor_max_inflight_concurrency", load.requests_max),
        ):
            self._counts.set_all(name, {(): n})
        for name, by_model in (("model_inflight_requests", load.in_flight), ("model_limit", load.limits)):
            self._counts.set_all(name, {(model,): n for model, n in by_model.items()})
        self._counts.set_all("model_breaker_open", {(model,): 1 for model in load.unreachable})
        self._counts.set_all("work_disk_full", {} if load.has_room else {(): 1})
