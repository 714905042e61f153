"""One batch on several workers: how much faster it is, and what that costs.

    python -m benchmarks.scale [--quick] [--json] [--only NAME[,NAME]] [--database-url URL]

Real `batchwright worker` processes on one PostgreSQL, and the simulator without a ceiling as the model server: each
answer takes half a second, however many requests there are. So the ideal is known, and Batchwright causes any loss.
"""

from benchmarks.batches.stage import Ground
from benchmarks.fleet import cache, scale
from benchmarks.tools import sections

if __name__ == "__main__":
    sections.main("scale", "One batch on several workers.", (scale, cache), Ground)
