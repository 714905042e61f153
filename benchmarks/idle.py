"""What idle workers cost PostgreSQL.

    python -m benchmarks.idle [--quick] [--json] [--database-url URL]

Real `batchwright worker` processes on one database, which has no jobs. The cost of a worker is what each further one
adds; upkeep, which is done once for all of them, is counted separately.
"""

from benchmarks.fleet import idle
from benchmarks.tools import sections

if __name__ == "__main__":
    sections.main("idle", "What idle workers cost PostgreSQL.", (idle,))
