"""What a pooler in transaction mode costs: PostgreSQL's processor time per job, directly and through PgBouncer.

    python -m benchmarks.pooler [--quick] [--json] [--database-url URL]

It needs `pgbouncer`; BENCH_PGBOUNCER names another one, such as one that keeps statements prepared.
"""

from benchmarks.fleet import pooler
from benchmarks.tools import sections

if __name__ == "__main__":
    sections.main("pooler", "What a pooler in transaction mode costs.", (pooler,))
