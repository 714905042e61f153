"""How long every page of the dashboard takes over a full database, and what 200 open dashboards cost.

    python -m benchmarks.web [--quick] [--json] [--only pages,viewers] [--database-url URL]

The database holds a million jobs, ten million events and 10,000 batches.
"""

from benchmarks.fleet import dashboard
from benchmarks.tools import sections

if __name__ == "__main__":
    sections.main("web", "Pages of the dashboard over a full database.", (dashboard,))
