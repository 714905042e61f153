"""How long every list, count and metric takes with a million jobs and ten million events in the database.

    python -m benchmarks.lists [--quick] [--json] [--database-url URL]

First with a million jobs that have ended, then with a million more that wait.
"""

from benchmarks.fleet import lists
from benchmarks.tools import sections

if __name__ == "__main__":
    sections.main("lists", "Lists, counts and metrics of a full database.", (lists,))
