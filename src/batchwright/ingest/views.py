"""Runs as the API shows them, and the request bodies for runs, their documents and the inbox."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

from fastapi import Header, Query
from pydantic import Field

from batchwright.api.schemas import LIMIT_MAX, Answer, Body, Cursor, Flag, Name, Priority, Text
from batchwright.engine.metadata import METADATA_KEY_CHARACTERS_MAX, METADATA_PAIRS_MAX, METADATA_VALUE_CHARACTERS_MAX
from batchwright.errors import InvalidInput
from batchwright.ingest.config import Overrides
from batchwright.ingest.explain import Waits, remedy_of_parked
from batchwright.ingest.runs import Doubt, Run
from batchwright.ingest.submission import WantedRun
from batchwright.states import RunStatus

SOURCES_MAX = 10_000
SOURCES_SHOWN = 20
IDS_MAX = 1_000
_SECONDS_MAX = 366 * 86_400.0
_MONEY_MAX = 1_000_000_000.0

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Maximum number to return.")]
From = Annotated[Cursor | None, Query(description="The `next_cursor` of the previous page.")]
Source = Annotated[Text, Field(min_length=1, max_length=4_000)]
Pattern = Annotated[Text, Field(min_length=1, max_length=500)]
ModelName = Annotated[Text, Field(min_length=1, max_length=200)]
CauseName = Annotated[Text, Field(min_length=1, max_length=300)]
Money = Annotated[float, Field(strict=True, ge=0.000001, le=_MONEY_MAX, allow_inf_nan=False)]
Reason = Annotated[Text, Field(min_length=1, max_length=500)]
IdempotencyKey = Annotated[
    Text | None,
    Header(
        min_length=1,
        max_length=255,
        description="A repeated request with the same key and body returns the same run, for as long as it is kept; "
        "with another body it is a conflict.",
    ),
]


def read_cursor(cursor: str | None, pattern: str) -> str | None:
    """Refuse a malformed cursor, because it would start the page at a random place."""
    if cursor is not None and not re.fullmatch(pattern, cursor):
        raise InvalidInput("the cursor is invalid: send the next_cursor of the previous page", param="cursor")
    return cursor


# Bodies -----------------------------------------------------------------------------------------------------------


class RunToBe(Body):
    """A run over documents. Unset fields have the values of the table `[ingest]` of the server's settings."""

    collection: Name = Field(description="Where the documents go; created if it does not exist.")
    sources: Annotated[list[Source], Field(min_length=1, max_length=SOURCES_MAX)] = Field(
        description="URLs; also folders, files and buckets below `ingest.roots`, which an operator sets."
    )
    lane: Literal["realtime", "batch", "auto"] | None = Field(
        None, description="How models are called: `batch` is cheaper and takes hours; `auto` chooses by size."
    )
    embedding_model: ModelName | None = Field(None, description="`local`, `hash`, or a model that a gateway serves.")
    embedding_dimensions: Annotated[int, Field(strict=True, ge=1, le=16_000)] | None = Field(
        None, description="Length of a vector, if the model lets you choose."
    )
    entities: ModelName | None = Field(None, description="`patterns`, `none`, or a chat model that a gateway serves.")
    chunk_characters: Annotated[int, Field(strict=True, ge=16, le=20_000)] | None = Field(
        None, description="Maximum number of characters of a chunk, including its overlap."
    )
    chunk_overlap: Annotated[int, Field(strict=True, ge=0, le=10_000)] | None = Field(
        None, description="Maximum number of characters that a chunk repeats from the one before."
    )
    language: Annotated[Text, Field(min_length=1, max_length=63)] | None = Field(
        None, description="Text search configuration of PostgreSQL; only used if the run creates the collection."
    )
    include: Annotated[list[Pattern], Field(max_length=100)] | None = Field(
        None, description="Patterns of names to read from folders and buckets."
    )
    exclude: Annotated[list[Pattern], Field(max_length=100)] | None = Field(
        None, description="Patterns of names to leave out; they override `include`."
    )
    force: Flag = Field(False, description="Process every document again, changed or not.")
    budget: Money | None = Field(None, description="Maximum cost in dollars; then the run is parked.")
    deadline_seconds: Annotated[float, Field(strict=True, ge=1, le=_SECONDS_MAX, allow_inf_nan=False)] | None = Field(
        None, description="The run fails if it has not ended by then."
    )
    priority: Priority = Field(5, description="From 0 (first) to 9 (last).")
    metadata: (
        Annotated[
            dict[
                Annotated[Text, Field(min_length=1, max_length=METADATA_KEY_CHARACTERS_MAX)],
                Annotated[Text, Field(max_length=METADATA_VALUE_CHARACTERS_MAX)],
            ],
            Field(max_length=METADATA_PAIRS_MAX),
        ]
        | None
    ) = Field(None, description="Your own metadata, shown with the run.")

    def wanted(self, tenant: str, *, idempotency_key: str | None = None, traceparent: str | None = None) -> WantedRun:
        """The run for a tenant. It sets no roots, so those of the settings apply."""
        chosen = {name: getattr(self, name) for name in Overrides.__dataclass_fields__ if name != "roots"}
        return WantedRun(
            tenant=tenant,
            collection=self.collection,
            sources=self.sources,
            overrides=Overrides(**chosen),
            lane=self.lane,
            budget=as_decimal(self.budget),
            metadata=self.metadata,
            priority=self.priority,
            deadline_seconds=self.deadline_seconds,
            idempotency_key=idempotency_key,
            traceparent=traceparent,
        )


class RunToPark(Body):
    """A reason, shown with the run."""

    reason: Reason = "parked by a user"


class RunToCancel(Body):
    """A reason, for the history of the run's job."""

    reason: Reason = "the run was cancelled"


class RunToResume(Body):
    """How to resume a parked run."""

    budget: Money | None = Field(None, description="Replaces the run's budget.")


class DocumentsToRetry(Body):
    """Which failed and cancelled documents of a run to retry; by default all of them."""

    cause: CauseName | None = Field(None, description="Only documents that failed for this cause; see the inbox.")
    ids: Annotated[list[Name], Field(min_length=1, max_length=IDS_MAX)] | None = None
    anew: Flag = Field(False, description="Also repeat their completed steps.")


class ItemToRetry(Body):
    """How to retry a document."""

    anew: Flag = Field(False, description="Also repeat its completed steps.")


class DocumentsOfInbox(Body):
    """Documents of the inbox to select: at least one condition, or `all`."""

    cause: CauseName | None = None
    run: Name | None = Field(None, description="Only documents of this run.")
    ids: Annotated[list[Name], Field(min_length=1, max_length=IDS_MAX)] | None = None
    all: Flag = Field(False, description="All documents of the inbox.")


class InboxToRetry(DocumentsOfInbox):
    """Documents of the inbox to retry."""

    anew: Flag = Field(False, description="Also repeat their completed steps.")


# Runs -------------------------------------------------------------------------------------------------------------


class RunCounts(Answer):
    """Documents of a run."""

    total: int
    open: int
    done: int
    unchanged: int = Field(description="Documents that had not changed, so that nothing was done.")
    failed: int
    cancelled: int
    retired: int = Field(description="Documents that are gone from the sources, and were removed from search.")


class MoneyView(Answer):
    """What a run costs, in dollars."""

    spent: float
    reserved: float = Field(description="What requests in flight may cost.")
    in_doubt: float | None = Field(description="Cost of requests whose answers were lost; only if one run is shown.")
    budget: float | None
    is_exact: bool = Field(description="False if the price of something that was used is unknown.")
    prompt_tokens: int
    completion_tokens: int
    calls: int


class WaitView(Answer):
    """Something that documents wait for."""

    reason: str
    message: str
    count: int | None = Field(description="Number of documents; null if not counted.")
    has_more: bool = Field(description="Whether only the first 5,000 open documents of the run were counted.")
    step: str | None
    until: datetime | None
    remedy: str | None = Field(description="What a user can do; null if no action is needed.")


class ParkedView(Answer):
    """Why a run waits for a user."""

    reason: Literal["budget", "credential", "user"]
    message: str | None
    remedy: str


class RunOptions(Answer):
    """The settings of a run, as they were when it was created."""

    embedding_model: str
    embedding_dimensions: int | None
    entities: str
    chunk_characters: int
    chunk_overlap: int
    language: str
    include: list[str]
    exclude: list[str]
    force: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RunOptions:
        chunk, embedding = config["chunk"], config["embedding"]
        return cls(
            embedding_model=embedding["model"],
            embedding_dimensions=embedding["dimensions"],
            entities=config["entities"]["model"],
            chunk_characters=chunk["characters"],
            chunk_overlap=chunk["overlap"],
            **{name: config[name] for name in ("language", "include", "exclude", "force")},
        )


class FunnelStep(Answer):
    """Number of open documents whose last step is this one."""

    step: str
    count: int


class RunView(Answer):
    """A run over documents."""

    object: Literal["ingest.run"] = "ingest.run"
    id: str
    collection: str
    status: RunStatus
    sources: list[str] = Field(description=f"The first {SOURCES_SHOWN} of them.")
    source_count: int
    lane: str
    options: RunOptions
    priority: int
    counts: RunCounts
    money: MoneyView
    estimate: dict[str, Any] | None = Field(description="The estimate made before the run, if any.")
    skipped: dict[str, Any] | None = Field(
        description="Other files in the sources, which were left out: their number by reason, and the first ones."
    )
    is_listing_complete: bool | None = Field(description="Null while the sources are being listed.")
    parked: ParkedView | None
    funnel: list[FunnelStep] | None = Field(
        None,
        description="Open documents by step; only if one run is shown. Only the first 5,000 are examined; "
        "the others count as not started.",
    )
    waiting_on: list[WaitView] | None = Field(None, description="What documents wait for; only if one run is shown.")
    error: dict[str, Any] | None
    metadata: dict[str, str] | None
    job_id: str
    created_at: datetime
    started_at: datetime | None
    deadline_at: datetime | None
    ended_at: datetime | None

    @classmethod
    def of(
        cls,
        run: Run,
        *,
        doubt: Doubt | None = None,
        funnel: Sequence[FunnelStep] | None = None,
        waits: Sequence[Waits] | None = None,
    ) -> RunView:
        same = ("id", "collection", "status", "lane", "priority", "estimate", "skipped", "error", "metadata")
        moments = ("created_at", "started_at", "deadline_at", "ended_at")
        return cls(
            **{name: getattr(run, name) for name in (*same, *moments)},
            sources=run.sources[:SOURCES_SHOWN],
            source_count=len(run.sources),
            options=RunOptions.of(run.config),
            counts=_counts(run),
            money=_money(run, doubt),
            is_listing_complete=run.is_complete,
            parked=_parked(run),
            funnel=None if funnel is None else list(funnel),
            waiting_on=None if waits is None else [WaitView.model_validate(one) for one in waits],
            job_id=str(run.job_id),
        )


def _counts(run: Run) -> RunCounts:
    names = ("total", "open", "done", "unchanged", "failed", "cancelled")
    return RunCounts(retired=run.retired_count, **{name: getattr(run, f"item_count_{name}") for name in names})


def _money(run: Run, doubt: Doubt | None) -> MoneyView:
    return MoneyView(
        spent=float(run.spent),
        reserved=max(0.0, float(run.reserved) - (0.0 if doubt is None else float(doubt.cost))),
        in_doubt=None if doubt is None else float(doubt.cost),
        budget=None if run.budget is None else float(run.budget),
        is_exact=not run.has_unknown_cost,
        prompt_tokens=run.prompt_tokens,
        completion_tokens=run.completion_tokens,
        calls=run.calls,
    )


def _parked(run: Run) -> ParkedView | None:
    if run.parked_reason is None:
        return None
    remedy = remedy_of_parked(run.id, run.parked_reason)
    return ParkedView.model_validate({"reason": run.parked_reason, "message": run.parked_message, "remedy": remedy})


class FigureView(Answer):
    """An estimate with its bounds. In about 19 of 20 cases the real value lies between them."""

    low: float
    value: float
    high: float


class EstimateView(Answer):
    """What a run would need. Values that could not be estimated are null, and `unknown` says why."""

    object: Literal["ingest.estimate"] = "ingest.estimate"
    lane: str
    models: dict[str, str] = Field(description="Models that cost something, by the kind of their requests.")
    documents: int
    bytes: int
    unchanged: int = Field(description="Documents that need no work; no other figure includes them.")
    skipped: dict[str, int] = Field(description="Other files in the sources, which are left out, by reason.")
    sampled: int = Field(description="Documents that the figures are based on.")
    sample_failures: dict[str, int] = Field(description="Documents of the sample that cannot be read, by code.")
    failing: FigureView | None = Field(description="Documents that cannot be read.")
    pages: FigureView | None
    tokens: FigureView | None
    chunks: FigureView | None
    embedding_tokens: FigureView | None
    embedding_requests: FigureView | None
    entity_windows: FigureView | None
    entity_prompt_tokens: FigureView | None
    entity_answer_tokens: FigureView | None
    cost: dict[str, FigureView | None] = Field(description="In dollars, by lane.")
    seconds: FigureView | None = Field(description="In the realtime lane, at the configured limits.")
    price_sources: list[str]
    unknown: list[str]


class DocumentsChanged(Answer):
    """What was done."""

    object: Literal["changed"] = "changed"
    count: int = Field(description="Documents that were changed.")
    runs: dict[str, int] = Field(
        description="For retries: documents by run; 0 for a run that had failed as a whole and starts again."
    )


def as_decimal(amount: float | None) -> Decimal | None:
    return None if amount is None else Decimal(str(amount))
