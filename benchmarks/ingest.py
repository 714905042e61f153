"""Documents: what a step costs, what is done again and what is not, and how fast and how well search answers.

    python -m benchmarks.ingest [--quick] [--json] [--only NAME[,NAME]] [--database-url URL]

Every section has a database and a folder of its own on one PostgreSQL, and real `batchwright worker` processes. The
documents are made by the benchmark; nothing is downloaded. Where calls of a model are counted, a provider in a process
of its own keeps a bill of every text that it has embedded. What each section measures, and with which settings, is
shown below its table. Clocks of a shared machine cannot be trusted: CPU time is preferred where it can be measured.
"""

from types import ModuleType

from benchmarks.documents import again, extraction, items, quality, resume, searching, steps
from benchmarks.tools import sections

SECTIONS: tuple[ModuleType, ...] = (extraction, steps, items, again, resume, searching, quality)


if __name__ == "__main__":
    sections.main("ingest", "Documents: their cost, what is done twice, and search.", SECTIONS)
