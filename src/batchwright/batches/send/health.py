"""How the model servers of one process answer: the time since the last answer, and failures since then.

For people who watch a run: the view must show that a server is slow or failing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batchwright.batches.journal.envelopes import words_in
from batchwright.inference.answers import Answer, Failure, Verdict

_KINDS_MAX = 20
_ATTEMPTS = {
    Failure.CONNECT.value: "could not connect",
    Failure.LOST.value: "lost their connection",
    Failure.TIMEOUT.value: "timed out",
}


class Complaint(NamedTuple):
    """Attempts that failed in the same way."""

    code: str | None
    """Our own code, such as request_timeout; None if the server's answer is used as it is."""
    status: int | None
    attempts: int
    words: str
    """The server's message, or what happened, at the first of them."""

    @property
    def short(self) -> str:
        """`3 timed out`, `12 answered 503`."""
        if self.status is not None:
            return f"{self.attempts} answered {self.status}"
        return f"{self.attempts} {_ATTEMPTS.get(self.code or '', f'failed with {self.code}')}"


class Health:
    """What the senders of a process observe; times are those of their clock."""

    def __init__(self, now: float) -> None:
        self._began_at: float | None = None
        self._answered_at = now
        self.has_answers = False
        """Whether a request has succeeded."""
        self._failed: dict[tuple[str | None, int | None], int] = {}
        self._words: dict[tuple[str | None, int | None], str] = {}

    def sent(self, now: float) -> None:
        """A request is sent. Before the first one, no answer is expected."""
        if self._began_at is None:
            self._began_at = self._answered_at = now

    def succeeded(self, now: float) -> None:
        """A request has its result."""
        self.has_answers = True
        self._hear(now)

    def failed(self, answer: Answer, now: float) -> None:
        """A request got no result. A permanent refusal counts as an answer; after other failures it may be resent."""
        kind = answer.code, answer.status
        if answer.verdict is Verdict.ANSWER:
            self._hear(now)
        else:
            self._failed[kind] = self._failed.get(kind, 0) + 1
        if kind not in self._words and len(self._words) < _KINDS_MAX:
            self._words[kind] = answer.message or words_in(answer.body)

    def _hear(self, now: float) -> None:
        self._answered_at = now
        if self._failed:
            self._failed.clear()

    def silent_seconds(self, now: float) -> float:
        """Since the last answer, or since the first request if there was none."""
        return 0.0 if self._began_at is None else now - self._answered_at

    def complaints(self) -> Sequence[Complaint]:
        """What failed since the last answer, the most frequent first."""
        found = [Complaint(*kind, count, self._words.get(kind, "")) for kind, count in self._failed.items()]
        return sorted(found, key=lambda one: -one.attempts)

    def refusals(self) -> Sequence[Complaint]:
        """Every way in which a request failed, as long as none has succeeded."""
        if self.has_answers:
            return ()
        return [Complaint(*kind, self._failed.get(kind, 0), words) for kind, words in self._words.items()]
