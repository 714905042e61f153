"""Every lifecycle as data: which verb moves what from where to where.

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


class JobStatus(StrEnum):
    """Where a job stands."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
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

    def allows(self, source: StrEnum, target: StrEnum) -> bool:
        return any(move.source == source and move.target == target for move in self.moves)

    def verbs(self) -> list[str]:
        return list(dict.fromkeys(move.verb for move in self.moves))


_Q, _R, _S, _F, _C = JobStatus

JOB = Lifecycle(
    name="job",
    initial=_Q,
    meanings={
        _Q: "Waits for `run_after`, for its key, or for a free worker. Enqueue puts it here, and so does every "
        "verb that gives a job back. Claim takes it out; upkeep expires it at its deadline.",
        _R: "With a lease: a worker holds it and renews the lease. Without one: it waits for its children, and "
        "neither rescue nor recover may touch it. A settle takes it out; rescue does when the worker has died.",
        _S: "Ended well; `result` holds what the operation returned. Final. Retention removes it.",
        _F: "Ended badly; `error` says why. Stays until a human reruns it or retention removes it.",
        _C: "Ended by a human or by a cancelled parent. Keeps its lease until the worker has let go of it.",
    },
    terminal=frozenset({_S, _F, _C}),
    moves=(
        Move("claim", _Q, _R, "a worker takes a due job"),
        Move("cancel", _Q, _C, "a human, a parent or a superseding job ends it"),
        Move("expire", _Q, _F, "its deadline passed before it could run"),
        Move("succeed", _R, _S, "the operation returned"),
        Move("join", _R, _S, "the last child ended and the parent had nothing left to do"),
        Move("fail", _R, _F, "the operation failed for good, or its attempts are used up"),
        Move("expire", _R, _F, "its deadline passed while it ran"),
        Move("rescue", _R, _F, "its worker died and it may not start again: `abandoned` or `poison`"),
        Move("join", _R, _F, "too many children failed"),
        Move("cancel", _R, _C, "a human, a parent or a superseding job ends it; the operation is interrupted"),
        Move("wait", _R, _R, "the operation handed over to children; the lease is given up"),
        Move("retry", _R, _Q, "a transient error, with attempts left; comes back after a backoff"),
        Move("snooze", _R, _Q, "the operation asked to be called again later; no attempt used"),
        Move("release", _R, _Q, "the worker stops before the operation ended; no attempt used"),
        Move("rescue", _R, _Q, "its worker died; the attempt is given back"),
        Move("recover", _R, _Q, "a human frees a job whose lock is stale; attempts start again at 0"),
        Move("join", _R, _Q, "the last child ended and the parent asked to be resumed"),
        Move("rerun", _F, _Q, "a human gives it another life"),
        Move("rerun", _C, _Q, "a human gives it another life"),
        Move("rerun", _F, _R, "a parent waits again for its unsuccessful children"),
        Move("rerun", _C, _R, "a parent waits again for its unsuccessful children"),
    ),
)

LIFECYCLES: tuple[Lifecycle, ...] = (JOB,)
