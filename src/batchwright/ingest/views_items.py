"""Documents of runs and the inbox, as the API shows them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import ConfigDict, Field

from batchwright.api.schemas import Answer
from batchwright.ingest.explain import Waits
from batchwright.ingest.items import Cause, Item, StepState
from batchwright.ingest.views import WaitView
from batchwright.states import ItemStatus


class ItemError(Answer):
    """Why a document has failed, or why it is retried."""

    model_config = ConfigDict(extra="allow")

    step: str | None = None
    kind: str | None = None
    code: str | None = None
    message: str | None = None


class ItemStepView(Answer):
    """A step of a document."""

    step: str
    state: Literal["open", "done"]
    is_reused: bool = Field(description="Reused from an earlier run, because nothing that it depends on has changed.")
    starts: int
    retry_count: int
    error_kind: str | None
    not_before: datetime | None
    started_at: datetime | None
    ended_at: datetime | None


class ItemView(Answer):
    """A document of a run."""

    object: Literal["ingest.item"] = "ingest.item"
    id: str
    run_id: str
    document_id: int
    source: str
    name: str
    size: int | None
    status: ItemStatus
    step: str = Field(description="The last step that it has reached.")
    retry_count: int
    error: ItemError | None
    cause: str | None = Field(description="Groups failures by step, kind and code.")
    metadata: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    cost: float
    job_ids: list[str] = Field(description="The jobs that worked on it, the newest last.")
    created_at: datetime
    ended_at: datetime | None
    dismissed_at: datetime | None
    steps: list[ItemStepView] | None = Field(None, description="Only if one document is shown.")
    waiting_on: list[WaitView] | None = Field(None, description="Why it is not done; only if one document is shown.")

    @classmethod
    def of(
        cls, item: Item, *, steps: Sequence[StepState] | None = None, waits: Sequence[Waits] | None = None
    ) -> ItemView:
        same = set(cls.model_fields) - {"object", "error", "cost", "job_ids", "steps", "waiting_on"}
        return cls(
            **{name: getattr(item, name) for name in same},
            error=None if item.last_error is None else ItemError.model_validate(item.last_error),
            cost=float(item.cost),
            job_ids=[str(job) for job in item.job_ids],
            steps=None if steps is None else [ItemStepView.model_validate(step) for step in steps],
            waiting_on=None if waits is None else [WaitView.model_validate(one) for one in waits],
        )


# The inbox --------------------------------------------------------------------------------------------------------


class CauseView(Answer):
    """Failed documents of one cause."""

    cause: str
    step: str | None
    kind: str
    code: str | None
    count: int = Field(description="Number of documents; counting stops at about 10,000 over all causes.")
    has_more: bool = Field(description="Whether there are more that were not counted.")
    first_at: datetime
    last_at: datetime
    item_ids: list[str] = Field(description="The latest documents.")
    names: list[str]
    message: str | None = Field(description="The message of the latest failure.")

    @classmethod
    def of(cls, cause: Cause) -> CauseView:
        return cls.model_validate(cause)


class ParkedRun(Answer):
    """A run that waits for a user."""

    run_id: str
    collection: str
    reason: Literal["budget", "credential", "user"]
    message: str | None
    open: int = Field(description="Number of its open documents.")
    remedy: str


class InboxPage(Answer):
    """What needs attention: failed documents by cause, the largest group first, and parked runs."""

    object: Literal["list"] = "list"
    data: list[CauseView]
    parked: list[ParkedRun]
