"""The thread that keeps a worker's claims alive, whatever the event loop is doing.

It has a connection of its own. Every second it reads what the database says that this worker holds, so that a
cancel needs no doorbell; every third of a lease it renews. When it could not renew for a whole lease, others may
have the jobs by now, and the worker stops them by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from uuid import UUID

from batchwright.db.database import complete
from batchwright.engine.queue import Queue
from batchwright.errors import BatchwrightError, DatabaseError, DatabaseUnavailable
from batchwright.states import JobStatus

log = logging.getLogger(__name__)

Key = tuple[UUID, int]
_LOOK_SECONDS = 1.0


class Lease(threading.Thread):
    """Renews until `close()`; reports lost and interrupted claims through `on_news`."""

    def __init__(
        self,
        queue: Queue,
        worker: str,
        *,
        held: Callable[[], list[Key]],
        claims_under_way: Callable[[], tuple[int, int]],
        on_news: Callable[[dict[Key, JobStatus | None]], object],
        beat: Callable[[Queue], None],
        close_database: Callable[[], None],
        revive: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(name="batchwright-lease", daemon=True)
        self._queue = queue
        self._worker = worker
        self._held = held
        self._claims_under_way = claims_under_way
        self._on_news = on_news
        self._beat = beat
        self._close_database = close_database
        self._revive = revive
        self._closing = threading.Event()
        self._renewed = time.monotonic()
        self.failures = 0

    def close(self) -> None:
        self._closing.set()
        self.join(timeout=15)

    def run(self) -> None:
        lease = self._queue.settings.lease_seconds
        renew_at = beat_at = time.monotonic()
        while not self._closing.wait(min(_LOOK_SECONDS, lease / 6)):
            now = time.monotonic()
            try:
                self.look()
                if now >= renew_at:
                    self.renew()
                    renew_at = now + lease / 3
                if now >= beat_at:
                    self._beat(self._queue)
                    beat_at = now + 10
            except DatabaseUnavailable as error:
                self._failed(error)
                renew_at = now
            except DatabaseError:
                log.exception("the lease thread stumbled")
        self._close_database()

    def look(self) -> None:
        """Compare what we believe to hold with what the database says."""
        before, busy_before = self._held(), self._claims_under_way()
        found = complete(self._queue.holdings(self._worker))
        after, busy_after = set(self._held()), self._claims_under_way()
        news: dict[Key, JobStatus | None] = {
            key: found.get(key) for key in before if key in after and found.get(key) is not JobStatus.RUNNING
        }
        if news:
            self._on_news(news)
        if busy_before == busy_after and busy_before[0] == 0:
            unknown = [key for key in found if key not in after and key not in set(before)]
            self._release(unknown, found)

    def renew(self) -> None:
        began = time.monotonic()  # the new lease counts from before the statement, however long that took
        complete(self._queue.renew(self._held()))
        self._renewed = began
        self.failures = 0

    def _release(self, unknown: Iterable[Key], found: dict[Key, JobStatus]) -> None:
        """Give back what a claim took whose answer never arrived."""
        orphans = [key for key in unknown if found[key] is JobStatus.RUNNING]
        if orphans:
            log.warning("giving back %d jobs whose claim was never answered", len(orphans))
            complete(self._queue.release(orphans, self._worker, "the answer to the claim was lost"))
        ended = [key for key in unknown if found[key] is not JobStatus.RUNNING]
        if ended:
            complete(self._queue.let_go(ended))

    def _failed(self, error: DatabaseUnavailable) -> None:
        self.failures += 1
        if self.failures == 1:
            log.warning("the leases cannot be renewed for now: %s", error)
        if time.monotonic() - self._renewed > self._queue.settings.lease_seconds:
            held = self._held()
            if held:
                log.error("no renewal for a whole lease: stopping %d jobs that others may have by now", len(held))
                self._on_news(dict.fromkeys(held))
        if self._revive is not None:
            self._start_server_again(self._revive)

    @staticmethod
    def _start_server_again(revive: Callable[[], object]) -> None:
        try:
            revive()
        except BatchwrightError as error:
            log.warning("the embedded PostgreSQL did not come back yet: %s", error)
