"""A job table in the state that a test of the command line needs, without a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batchwright import NewJob, Wait
from batchwright.db.database import Blocking, Database, complete
from batchwright.engine.catalog import Catalog
from batchwright.engine.jobs import Claim, JobId
from batchwright.engine.outcomes import Settle
from batchwright.engine.queue import Queue
from batchwright.engine.workers import Workers
from batchwright.operations.registry import Registry
from tests.cli import sample
from tests.support import DATABASE, fail, succeed

SAMPLES = Registry([sample.greet, sample.linger, sample.block, sample.sulk, sample.fail, sample.family])


class Stage:
    """The queue's verbs for blocking code."""

    def __init__(self, database: Blocking) -> None:
        self.queue = Queue(Database(database))
        self._catalog = Catalog(self.queue.database, SAMPLES)

    def put(self, *jobs: NewJob) -> list[JobId]:
        new = jobs or (NewJob(sample.greet),)
        rows = complete(self._catalog.prepare(new))
        return [one.id for one in complete(self.queue.enqueue(rows))]

    def claim(self, id: JobId) -> Claim:
        claim = complete(self.queue.claim_job("w1", id, SAMPLES.names()))
        assert claim is not None
        return claim

    def succeed(self, id: JobId) -> None:
        assert complete(succeed(self.queue, self.claim(id)))

    def fail(self, *ids: JobId, code: str = "no_paper") -> None:
        for id in ids:
            assert complete(fail(self.queue, self.claim(id), code=code))

    def failed(self, n: int, **options: Any) -> list[JobId]:
        ids = self.put(*(NewJob(sample.fail, **options) for _ in range(n)))
        self.fail(*ids)
        return ids

    def hand_over(self, id: JobId, children: int) -> list[JobId]:
        claim = self.claim(id)
        new = [NewJob(sample.greet) for _ in range(children)]
        complete(self.queue.wait(claim, "w1", Wait(new), complete(self._catalog.prepare(new, parent=claim))))
        return [job.id for job in new]

    def chain(self, id: JobId, job: NewJob) -> JobId:
        """End a job that chains another one."""
        claim = self.claim(id)
        rows = complete(self._catalog.prepare([job], before=claim))
        values = {"result": None, "progress_current": None, "progress_total": None}
        complete(self.queue.succeed_with(Settle("succeed", claim, values), "w1", write=None, then=rows))
        return job.id

    def worker(self, name: str = "w1", *, stopping: bool = False, **columns: Any) -> None:
        """Register a worker with a fresh heartbeat."""
        known = {"host": "here", "pid": 7, "version": "1.2", "queues": None, "concurrency": 2}
        row = {**known, "operations": SAMPLES.names(), **columns}
        complete(Workers(self.queue.database).register(id=name, **row))
        complete(Workers(self.queue.database).heartbeat(name, running=1, stopping=stopping))

    def status(self, id: JobId) -> str:
        return complete(self.queue.get(id)).status.value


@contextmanager
def staged(url: str) -> Iterator[Stage]:
    database = Blocking(DATABASE, url)
    try:
        yield Stage(database)
    finally:
        database.close()
