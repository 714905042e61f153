"""A thousand idle workers on one PostgreSQL: whether they cost what the figures of `make bench-idle` predict.

    python -m benchmarks.thousand [--quick] [--json] [--save] [--database-url URL]

A thousand processes do not fit on one machine, so a few processes send what idle workers send: the real statements at
the real pace, each worker with a row and connections of its own.
"""

from benchmarks.fleet import behind, thousand
from benchmarks.tools import sections

if __name__ == "__main__":
    sections.main(
        "thousand", "A thousand idle workers.", (thousand, behind), server_settings={"max_connections": "3500"}
    )
