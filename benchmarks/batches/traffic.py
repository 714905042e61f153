"""Data that a batch writes: log, rows and disk of PostgreSQL, and the work folder and the store of a worker."""

import psutil

from benchmarks.batches.stage import Ground, Stage

NAMES = ("database_bytes", "rows", "wal_bytes", "written_bytes")
ROWS = """
    SELECT tup_inserted + tup_updated + tup_deleted FROM pg_stat_database WHERE datname = current_database()
"""


def read(ground: Ground, stage: Stage, worker: psutil.Process) -> dict[str, float]:
    """Counters that only grow; the store is a folder here, so its files are in `written_bytes`."""
    url = stage.environment["BATCHWRIGHT_DATABASE_URL"]
    return {
        "database_bytes": ground.server.disk_bytes(url),
        "rows": float(ground.server.scalar(ROWS, url)),
        "wal_bytes": ground.server.wal_bytes(),
        "written_bytes": worker.io_counters().write_bytes,
    }


def since(before: dict[str, float], after: dict[str, float], requests: int) -> dict[str, float]:
    """For each request."""
    return {name: (after[name] - before[name]) / requests for name in NAMES}
