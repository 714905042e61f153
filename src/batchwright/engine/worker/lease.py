"""The threads that keep a worker's claims alive, whatever the event loop is doing.

The first has its own connection. Every second it reads from the database which claims this worker holds, so that a
cancel needs no doorbell; every third of a lease it renews them. It may hang for as long as the connection does. A
worker that certainly holds nothing sends no query.

The second is the timer. It makes no calls. It stops jobs a little before their lease expires, because another worker
may claim them after that.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from batchwright.db.database import complete
from batchwright.engine.jobs import ClaimKey
from batchwright.engine.queue import Queue
from batchwright.errors import BatchwrightError, DatabaseError, DatabaseUnavailable
from batchwright.states import JobStatus

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_DOUBT_SECONDS = 60.0
"""How long after its answer was lost a claim may still be committed: longer than any statement lasts."""
_MARGIN_SECONDS_MAX = 2.0
_LOST_ANSWER = "the answer to the claim was lost"
_CUT_OFF = "the worker was cut off from the database"


class Leased(Protocol):
    leased_until: float
    """By the monotonic clock: until then no other worker can have the job."""


def margin(lease_seconds: float) -> float:
    """How long before the end of its lease a job is interrupted, so that it has stopped when another may begin."""
    return min(_MARGIN_SECONDS_MAX, lease_seconds / 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The worker, as the threads see it: they call these methods."""

    held: Callable[[], Mapping[ClaimKey, Leased]]
    """The claims that the worker believes it holds."""
    claims_under_way: Callable[[], tuple[int, int]]
    """How many claims have begun but not ended, and how many have ended."""
    claims_in_doubt: Callable[[], int] | None = None
    """How many claims have ended without an answer; without this, the database is queried even if nothing is held."""
    on_news: Callable[[dict[ClaimKey, JobStatus | None]], object]
    """Receives the claims that were cancelled or expired, and (None) those that are lost."""
    beat: Callable[[Queue], None] = lambda queue: None
    """Writes the worker's heartbeat to the database."""


class Lease(threading.Thread):
    """Renews until `close()`; reports lost and interrupted claims to their holder."""

    def __init__(
        self,
        queue: Queue,
        worker: str,
        holder: Holder,
        *,
        close_database: Callable[[], None],
        revive: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(name="batchwright-lease", daemon=True)
        self._queue = queue
        self._worker = worker
        self._holder = holder
        self._close_database = close_database
        self._revive = revive
        self._closing = threading.Event()
        self._timer = threading.Thread(target=self._watch, name="batchwright-lease-timer", daemon=True)
        self._asked: float | None = None
        """When the unanswered call began."""
        self._over: set[ClaimKey] = set()
        """Claims that the timer has reported and that are still held."""
        self._newly_cut_off: deque[ClaimKey] = deque()
        """Claims that were stopped because the database did not answer; from the timer to the other thread."""
        self._cut_off: set[ClaimKey] = set()
        self._doubts = 0
        self._doubted_until = -math.inf
        self._clear_since: tuple[int, int] | None = None
        """The number of claims made when the database said that we hold nothing."""
        self.failures = 0

    def start(self) -> None:
        super().start()
        self._timer.start()

    def close(self) -> None:
        self._closing.set()
        self.join(timeout=15)
        self._timer.join(timeout=15)

    def run(self) -> None:
        lease = self._queue.settings.lease_seconds
        renew_at = beat_at = time.monotonic()
        while not self._closing.wait(min(_LOOK_SECONDS, lease / 6)):
            now = self._asked = time.monotonic()
            try:
                if now >= renew_at:
                    renew_at = now + lease / 3 if self.renew() else now
                self.look()
                if now >= beat_at:
                    self._holder.beat(self._queue)
                    beat_at = now + 10
            except DatabaseUnavailable as error:
                self._note_failure(error)
                renew_at = now
            except DatabaseError:
                log.exception("the lease thread failed and continues")
            finally:
                self._asked = None
        self._close_database()

    def look(self) -> None:
        """Compare the claims that we believe we hold with the database."""
        before, busy_before = list(self._holder.held()), self._holder.claims_under_way()
        may_hold = bool(before or busy_before[0] or self._newly_cut_off or self._cut_off) or self._has_doubts()
        if not may_hold and busy_before == self._clear_since:
            return
        found = complete(self._queue.holdings(self._worker))
        after, busy_after = set(self._holder.held()), self._holder.claims_under_way()
        news: dict[ClaimKey, JobStatus | None] = {
            key: found.get(key) for key in before if key in after and found.get(key) is not JobStatus.RUNNING
        }
        if news:
            self._holder.on_news(news)
        self._forgive(found)
        if busy_before == busy_after and busy_before[0] == 0:
            unknown = [key for key in found if key not in after and key not in set(before)]
            self._release(unknown, found)
            self._clear_since = None if found or may_hold else busy_before

    def _has_doubts(self) -> bool:
        """Whether a claim without an answer may still be committed. True if the holder does not count such claims."""
        if self._holder.claims_in_doubt is None:
            return True
        if (doubts := self._holder.claims_in_doubt()) != self._doubts:
            self._doubts, self._doubted_until = doubts, time.monotonic() + _DOUBT_SECONDS
        return time.monotonic() < self._doubted_until

    def renew(self) -> bool:
        """Renew all leases; returns whether all were renewed, because a row that is being changed is skipped."""
        began = time.monotonic()  # the new lease counts from before the statement, however long that took
        held = self._holder.held()
        renewed = complete(self._queue.renew(list(held)))
        for (id, _), leased in held.items():
            if id in renewed:
                leased.leased_until = began + self._queue.settings.lease_seconds
        self.failures = 0
        return len(renewed) == len(held)

    def judge(self) -> None:
        """Stop jobs whose lease is about to expire; called by the timer, so it must not wait for anything."""
        now, held = time.monotonic(), self._holder.held()
        latest = now + margin(self._queue.settings.lease_seconds)
        over = {key for key, leased in held.items() if leased.leased_until <= latest}
        news = over - self._over
        self._over = over
        if not news:
            return
        if self._is_cut_off(now):
            log.error("the database did not renew %d leases in time: stopping the jobs", len(news))
            self._newly_cut_off.extend(news)
        self._holder.on_news(dict.fromkeys(news))

    def _watch(self) -> None:
        while not self._closing.wait(margin(self._queue.settings.lease_seconds) / 4):
            self.judge()

    def _is_cut_off(self, now: float) -> bool:
        """Whether the database caused a lease not to be renewed, rather than a process that was suspended."""
        asked = self._asked
        return self.failures > 0 or (asked is not None and now - asked > self._queue.settings.lease_seconds / 6)

    def _forgive(self, found: Collection[ClaimKey]) -> None:
        """Undo the deaths that were counted for claims which others rescued while we were cut off.

        Claims that we still hold, according to the database, may yet be rescued: the next check decides.
        """
        while self._newly_cut_off:
            self._cut_off.add(self._newly_cut_off.popleft())
        if taken := [key for key in self._cut_off if key not in found]:
            complete(self._queue.forgive(taken))
            self._cut_off.difference_update(taken)

    def _release(self, unknown: Iterable[ClaimKey], found: Mapping[ClaimKey, JobStatus]) -> None:
        """Release jobs of a claim whose answer never arrived, and jobs that we stopped while we were cut off."""
        orphans = [key for key in unknown if found[key] is JobStatus.RUNNING]
        for reason, keys in (
            (_LOST_ANSWER, [key for key in orphans if key not in self._cut_off]),
            (_CUT_OFF, [key for key in orphans if key in self._cut_off]),
        ):
            if keys:
                log.warning("releasing %d jobs: %s", len(keys), reason)
                complete(self._queue.release(keys, self._worker, reason))
        ended = [key for key in unknown if found[key] is not JobStatus.RUNNING]
        if ended:
            complete(self._queue.let_go(ended))

    def _note_failure(self, error: DatabaseUnavailable) -> None:
        self.failures += 1
        if self.failures == 1:
            log.warning("the leases cannot be renewed for now: %s", error)
        if self._revive is not None:
            self._start_server_again(self._revive)

    @staticmethod
    def _start_server_again(revive: Callable[[], object]) -> None:
        try:
            revive()
        except BatchwrightError as error:
            log.warning("the embedded PostgreSQL has not restarted yet: %s", error)
