"""The counts of real worker processes are summed, even if one of them is killed."""

import signal

import pytest

from batchwright import NewJob
from batchwright.db.database import Blocking, Database, complete
from batchwright.engine.metrics import fold, read_counts
from batchwright.engine.queue import Queue
from batchwright.operations.registry import Registry
from batchwright.telemetry.metrics import series
from tests.cli import sample
from tests.cli.conftest import SAMPLE
from tests.support import DATABASE, Clock, put

SETTLED = """
    SELECT FROM batchwright.worker_counts, jsonb_each_text(counts)
    WHERE key LIKE '["jobs_settled_total"%%' GROUP BY () HAVING sum(value::numeric) >= %s
"""


@pytest.mark.thorough
def test_a_killed_worker_process_keeps_what_it_had_written(cli, database_url):
    database, clock = Blocking(DATABASE, database_url), Clock()
    queue = Queue(Database(database, clock=clock))
    with cli.start("worker", SAMPLE) as one, cli.start("worker", SAMPLE) as other:
        one.until("runs .*sample")
        other.until("runs .*sample")
        complete(put(queue, *(NewJob(sample.greet) for _ in range(6)), operations=Registry([sample.greet])))
        cli.until(SETTLED, 6)
        one.signal(signal.SIGKILL)
        one.ended()
        other.signal(signal.SIGTERM)
        other.ended()
    before = complete(read_counts(queue.database))
    complete(clock.advance(queue, 601))
    assert complete(fold(queue.database)) >= 1
    assert complete(read_counts(queue.database)) == before
    assert sum(series(before)["jobs_settled_total"].values()) == 6
    database.close()
