"""A thousand idle workers on one PostgreSQL: whether they cost what `make bench-idle` lets expect.

    python -m benchmarks.thousand [--quick] [--json] [--save] [--database-url URL]

A thousand processes do not fit on one machine, so some processes hold many workers each. What the workers send is not
imitated: they are the workers of `batchwright worker`, with their own rows, threads and connections.
"""

from benchmarks.fleet import thousand
from benchmarks.tools import sections

if __name__ == "__main__":
    sections.main("thousand", "A thousand idle workers.", (thousand,), server_settings={"max_connections": "5500"})
