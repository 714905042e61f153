"""Every lifecycle as data: which verb moves an object from which state to which.

                      ┌────────────── retry · snooze · release · rescue · recover · join
                      ▼                                                        │
    enqueue ──▶ QUEUED ── claim ──▶ RUNNING ── succeed · join ──▶ SUCCEEDED    │
                  │  │                │ │ └──────────────────────────────────▶─┘
                  │  └─ expire ─┐     │ └─ fail · expire · rescue · join ──▶ FAILED ──┐
                  └─ cancel ─┐  └─────┼────────────────────────────────────▶─┘        │ rerun
                             └────────┴─ cancel ──▶ CANCELLED ────────────────────────┴──▶ QUEUED | RUNNING

The database refuses every move that is not listed here, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BatchStatus(StrEnum):
    """The status of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class UploadStatus(StrEnum):
    """The status of an upload, in OpenAI's words."""

    PENDING = "pending"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class JobStatus(StrEnum):
    """The status of a job."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class TaskStatus(StrEnum):
    """The status of a task for a provider."""

    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    PARTIAL_COMPLETE = "PARTIAL_COMPLETE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class RunStatus(StrEnum):
    """The status of a run over documents."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    PARKED = "PARKED"
    COMPLETED = "COMPLETED"
    COMPLETED_WITH_ERRORS = "COMPLETED_WITH_ERRORS"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class ItemStatus(StrEnum):
    """The status of a document of a run; while it is OPEN, `step` shows its progress."""

    OPEN = "OPEN"
    DONE = "DONE"
    UNCHANGED = "UNCHANGED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Move:
    """One arrow of a lifecycle."""

    verb: str
    source: StrEnum
    target: StrEnum
    why: str


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The states of one kind of object, what each means, and every legal move."""

    name: str
    initial: StrEnum
    meanings: dict[StrEnum, str]
    terminal: frozenset[StrEnum]
    moves: tuple[Move, ...]


_Q, _R, _S, _F, _C = JobStatus

JOB = Lifecycle(
    name="job",
    initial=_Q,
    meanings={
        _Q: "Waits for `run_after`, for its key, or for a free worker. Enqueue puts it here, and so does every "
        "verb that returns a job to the queue. Claim takes it out; upkeep expires it at its deadline.",
        _R: "With a lease: a worker holds it and renews the lease. Without one: it waits for its children, and "
        "neither rescue nor recover may touch it. A settle takes it out; rescue does when the worker has died.",
        _S: "Ended successfully; `result` holds what the operation returned. Final. Retention removes it.",
        _F: "Ended with an error; `error` says why. Stays until a person reruns it or retention removes it.",
        _C: "Ended by a person or by a cancelled parent. Keeps its lease until the worker has released it.",
    },
    terminal=frozenset({_S, _F, _C}),
    moves=(
        Move("claim", _Q, _R, "a worker claims a due job"),
        Move("cancel", _Q, _C, "a person, a parent or a superseding job ends it"),
        Move("expire", _Q, _F, "its deadline passed before it could run"),
        Move("succeed", _R, _S, "the operation returned"),
        Move("join", _R, _S, "the last child ended and the parent had nothing left to do"),
        Move("fail", _R, _F, "the operation failed permanently, or its attempts are used up"),
        Move("expire", _R, _F, "its deadline passed while it ran"),
        Move("rescue", _R, _F, "its worker died and it may not start again: `abandoned` or `poison`"),
        Move("join", _R, _F, "too many children failed"),
        Move("cancel", _R, _C, "a person, a parent or a superseding job ends it; the operation is interrupted"),
        Move("wait", _R, _R, "the operation waits for children; the lease is released"),
        Move("retry", _R, _Q, "a transient error, with attempts left; due again after a backoff"),
        Move("snooze", _R, _Q, "the operation asked to run again later; no attempt used"),
        Move("release", _R, _Q, "the worker stops before the operation ended; no attempt used"),
        Move("rescue", _R, _Q, "its worker died; the attempt does not count"),
        Move("recover", _R, _Q, "a person releases a job whose lock is stale; attempts start again at 0"),
        Move("join", _R, _Q, "the last child ended and the parent asked to be resumed"),
        Move("rerun", _F, _Q, "a person reruns it"),
        Move("rerun", _C, _Q, "a person reruns it"),
        Move("rerun", _F, _R, "a parent waits again for its unsuccessful children"),
        Move("rerun", _C, _R, "a parent waits again for its unsuccessful children"),
    ),
)

_VALIDATING, _IN_PROGRESS, _FINALIZING, _COMPLETED, _FAILED, _EXPIRED, _CANCELLING, _CANCELLED = BatchStatus

BATCH = Lifecycle(
    name="batch",
    initial=_VALIDATING,
    meanings={
        _VALIDATING: "Waits for a worker that checks its input and plans it. Creating it puts it here.",
        _IN_PROGRESS: "Its requests are sent, on any number of workers; or it is paused, while its window still runs.",
        _FINALIZING: "Every request has its answer; the files are being written. The deadline no longer applies.",
        _COMPLETED: "Every line is in the output or the error file, even if all of them failed.",
        _FAILED: "The input was refused and nothing was sent; or a permanent error ended it, and the answers are kept.",
        _EXPIRED: "Its window ended; the answers are in the output file, the other lines in the error file.",
        _CANCELLING: "A user cancelled it; requests in flight have a grace period, then the files are written.",
        _CANCELLED: "Ended by a user; the answers are in the output file, the other lines in the error file.",
    },
    terminal=frozenset({_COMPLETED, _FAILED, _EXPIRED, _CANCELLED}),
    moves=(
        Move("begin", _VALIDATING, _IN_PROGRESS, "every line is valid and planned"),
        Move("fail", _VALIDATING, _FAILED, "the input is gone, or a line is invalid: `errors` says which"),
        Move("expire", _VALIDATING, _EXPIRED, "its window ended before a worker picked it up"),
        Move("cancel", _VALIDATING, _CANCELLING, "a user cancels it before anything was sent"),
        Move("finalize", _IN_PROGRESS, _FINALIZING, "every request has its answer"),
        Move("expire", _IN_PROGRESS, _EXPIRED, "its window ended; the files hold the answers"),
        Move("fail", _IN_PROGRESS, _FAILED, "a permanent error; the files hold the answers"),
        Move("cancel", _IN_PROGRESS, _CANCELLING, "a user cancels it"),
        Move("resend", _FINALIZING, _IN_PROGRESS, "some lines have no answer after all; they are sent again"),
        Move("complete", _FINALIZING, _COMPLETED, "the files are in the store and every line is accounted for"),
        Move("fail", _FINALIZING, _FAILED, "the files could not be written; only the counts are known"),
        Move("cancel", _FINALIZING, _CANCELLING, "a user cancels it; the files are written anyway"),
        Move("end_cancelled", _CANCELLING, _CANCELLED, "the requests in flight have ended and the files are written"),
        Move("fail", _CANCELLING, _FAILED, "its job could not be run; only the counts are known"),
    ),
)

_PENDING, _FINISHED, _ABANDONED, _LATE = UploadStatus

UPLOAD = Lifecycle(
    name="upload",
    initial=_PENDING,
    meanings={
        _PENDING: "Accepts parts. Creating it puts it here.",
        _FINISHED: "Its parts were joined, and its file exists. The collector removes the parts.",
        _ABANDONED: "Ended by a user; there is no file. The collector removes the parts.",
        _LATE: "It was not completed within an hour; there is no file. The collector removes the parts.",
    },
    terminal=frozenset({_FINISHED, _ABANDONED, _LATE}),
    moves=(
        Move("complete", _PENDING, _FINISHED, "a user names its parts in order; the same commit adds the file"),
        Move("cancel", _PENDING, _ABANDONED, "a user cancels it"),
        Move("expire", _PENDING, _LATE, "its hour is over; it counts as expired even before upkeep records it"),
    ),
)

_TASK_PENDING, _TASK_RUNS, _TASK_DONE, _TASK_PARTIAL, _TASK_FAILED, _TASK_CANCELLED = TaskStatus

TASK = Lifecycle(
    name="task",
    initial=_TASK_PENDING,
    meanings={
        _TASK_PENDING: "Waits until a worker has checked its inputs, copied them to the provider and submitted a job. "
        "Creating it puts it here; at the latest, its timeout takes it out.",
        _TASK_RUNS: "One of its jobs is at a provider, and is polled until it ends: see `provider_state`.",
        _TASK_DONE: "Every job succeeded; the merged result file holds a result for every input.",
        _TASK_PARTIAL: "Some results are missing; the result file also lists these inputs, with the reasons.",
        _TASK_FAILED: "Nothing succeeded: all jobs failed, none could be submitted, or the task timed out.",
        _TASK_CANCELLED: "Ended by a user. Results that were finished by then are in the result file.",
    },
    terminal=frozenset({_TASK_DONE, _TASK_PARTIAL, _TASK_FAILED, _TASK_CANCELLED}),
    moves=(
        Move("begin", _TASK_PENDING, _TASK_RUNS, "the first job was submitted; `provider_state` is written with it"),
        Move("fail", _TASK_PENDING, _TASK_FAILED, "nothing could be submitted: `error` says why"),
        Move("end_cancelled", _TASK_PENDING, _TASK_CANCELLED, "a user cancelled it before anything was submitted"),
        Move("complete", _TASK_RUNS, _TASK_DONE, "all jobs ended, and all of them succeeded"),
        Move("complete_in_part", _TASK_RUNS, _TASK_PARTIAL, "all jobs ended, and something is missing"),
        Move("fail", _TASK_RUNS, _TASK_FAILED, "all jobs ended, and none succeeded; or the task timed out"),
        Move("end_cancelled", _TASK_RUNS, _TASK_CANCELLED, "a user cancelled it; finished results were downloaded"),
    ),
)

_RUN_PENDING, _RUN_RUNS, _RUN_PARKED, _RUN_DONE, _RUN_ERRORS, _RUN_FAILED, _RUN_CANCELLED = RunStatus

RUN = Lifecycle(
    name="run",
    initial=_RUN_PENDING,
    meanings={
        _RUN_PENDING: "Waits for a worker that lists its sources. Creating it puts it here.",
        _RUN_RUNS: "Its sources are listed, and its documents go through their steps.",
        _RUN_PARKED: "Waits for a person: `parked_reason` says why. Steps in progress end; no new ones start.",
        _RUN_DONE: "Every document is done or unchanged.",
        _RUN_ERRORS: "Every document has ended, and some have failed: they are in the inbox, and can be retried.",
        _RUN_FAILED: "Its sources could not be listed, or there was a permanent error: `error` says why.",
        _RUN_CANCELLED: "Ended by a user. Documents that were done stay; the others can be retried.",
    },
    terminal=frozenset({_RUN_DONE, _RUN_ERRORS, _RUN_FAILED, _RUN_CANCELLED}),
    moves=(
        Move("begin", _RUN_PENDING, _RUN_RUNS, "a worker begins to list its sources"),
        Move("park", _RUN_PENDING, _RUN_PARKED, "a user parks it before it begins"),
        Move("fail", _RUN_PENDING, _RUN_FAILED, "its job ended before it could begin"),
        Move("cancel", _RUN_PENDING, _RUN_CANCELLED, "a user cancels it before it begins"),
        Move("park", _RUN_RUNS, _RUN_PARKED, "its budget is used up, a credential is refused, or a user parks it"),
        Move("complete", _RUN_RUNS, _RUN_DONE, "every document is done or unchanged"),
        Move("complete_with_errors", _RUN_RUNS, _RUN_ERRORS, "every document has ended, and some have failed"),
        Move("fail", _RUN_RUNS, _RUN_FAILED, "its sources could not be listed, or its job failed"),
        Move("cancel", _RUN_RUNS, _RUN_CANCELLED, "a user cancels it, with its open documents"),
        Move("resume", _RUN_PARKED, _RUN_RUNS, "a person resumes it"),
        Move("fail", _RUN_PARKED, _RUN_FAILED, "its job failed while it was parked"),
        Move("cancel", _RUN_PARKED, _RUN_CANCELLED, "a user cancels it, with its open documents"),
        Move("reopen", _RUN_ERRORS, _RUN_RUNS, "failed documents are retried"),
        Move("reopen", _RUN_FAILED, _RUN_RUNS, "the run or its failed documents are retried"),
        Move("reopen", _RUN_CANCELLED, _RUN_RUNS, "cancelled documents are retried"),
    ),
)

_ITEM_OPEN, _ITEM_DONE, _ITEM_UNCHANGED, _ITEM_FAILED, _ITEM_CANCELLED = ItemStatus

ITEM = Lifecycle(
    name="item",
    initial=_ITEM_OPEN,
    meanings={
        _ITEM_OPEN: "Goes through its steps, from ENQUEUED on; `step` is the last one that it has reached.",
        _ITEM_DONE: "Every step is done, and search finds this version of the document.",
        _ITEM_UNCHANGED: "Nothing had to be done: neither the document nor the settings have changed.",
        _ITEM_FAILED: "A step failed permanently: `last_error` says which and why. Stays in the inbox until it is "
        "retried or dismissed; the previous version stays searchable.",
        _ITEM_CANCELLED: "Its run was cancelled before it was done.",
    },
    terminal=frozenset({_ITEM_DONE, _ITEM_UNCHANGED, _ITEM_FAILED, _ITEM_CANCELLED}),
    moves=(
        Move("complete", _ITEM_OPEN, _ITEM_DONE, "its last step is done"),
        Move(
            "skip",
            _ITEM_OPEN,
            _ITEM_UNCHANGED,
            "neither its content nor the settings have changed since its live version",
        ),
        Move("fail", _ITEM_OPEN, _ITEM_FAILED, "a step failed permanently, or its retries are used up"),
        Move("cancel", _ITEM_OPEN, _ITEM_CANCELLED, "its run was cancelled"),
        Move("retry", _ITEM_FAILED, _ITEM_OPEN, "a person retries it, from the step that failed"),
        Move("retry", _ITEM_CANCELLED, _ITEM_OPEN, "a person retries it, from the step that it had reached"),
    ),
)

LIFECYCLES: tuple[Lifecycle, ...] = (JOB, BATCH, UPLOAD, TASK, RUN, ITEM)
