"""What workers cost PostgreSQL that have nothing to do.

    python -m benchmarks.idle [--quick] [--json] [--database-url URL]

Real `batchwright worker` processes on one database, which has no jobs. What a worker costs is what each further one
adds; what is done once for all of them, upkeep, is told apart.
"""

from benchmarks.fleet import idle
from benchmarks.tools import sections

if __name__ == "__main__":
    sections.main("idle", "What idle workers cost PostgreSQL.", (idle,))
