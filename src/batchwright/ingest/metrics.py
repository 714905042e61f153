"""Metrics of documents in workers."""

from __future__ import annotations

from decimal import Decimal

from batchwright.telemetry.metrics import Counts, Metric, Sampled

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)

INGEST_METRICS = (
    Metric("ingest_items_total", "Documents that ended, by status.", ("status",)),
    Metric(
        "ingest_steps_total",
        "Attempts at steps, by result; `reused` means that the output of an earlier run was used.",
        ("step", "result"),
    ),
    Metric("ingest_step_seconds", "Duration of a completed step.", ("step",), "histogram", _SECONDS),
    Metric(
        "ingest_prompt_tokens_total",
        "Tokens that documents have sent to models.",
        ("model", "lane"),
        sampled=Sampled("tokens", "model"),
    ),
    Metric(
        "ingest_completion_tokens_total",
        "Tokens of the models' answers to documents.",
        ("model", "lane"),
        sampled=Sampled("tokens", "model"),
    ),
    Metric("ingest_cost_total", "Cost of these tokens in dollars, if the price is known.", ("model", "lane")),
    Metric("ingest_calls_in_doubt_total", "Requests whose answers were lost, so that they may have been paid for."),
)


class IngestCounts:
    """The metrics of documents in one process."""

    def __init__(self, counts: Counts | None = None) -> None:
        self._counts = counts or Counts(INGEST_METRICS)

    def step_completed(self, step: str, seconds: float, *, is_reused: bool) -> None:
        self._counts.add("ingest_steps_total", 1, (step, "reused" if is_reused else "completed"))
        if not is_reused:
            self._counts.observe("ingest_step_seconds", seconds, (step,))

    def step_failed(self, step: str, category: str) -> None:
        """`category` is that of the result, or `deferred` for a step that waits although nothing is wrong."""
        self._counts.add("ingest_steps_total", 1, (step, category or "deferred"))

    def item_ended(self, status: str) -> None:
        self._counts.add("ingest_items_total", 1, (status,))

    def paid(self, model: str, lane: str, prompt: int, completion: int, cost: Decimal | None) -> None:
        self._counts.add("ingest_prompt_tokens_total", prompt, (model, lane))
        self._counts.add("ingest_completion_tokens_total", completion, (model, lane))
        if cost is not None:
            self._counts.add("ingest_cost_total", float(cost), (model, lane))

    def doubted(self, calls: int = 1) -> None:
        self._counts.add("ingest_calls_in_doubt_total", calls)
