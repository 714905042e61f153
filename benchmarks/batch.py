"""Batches: their cost compared with other ways to send a file, and whether they meet their goals.

    python -m benchmarks.batch [--quick] [--json] [--only NAME[,NAME]] [--database-url URL]

Every section has a database and a folder of its own on one PostgreSQL, real `batchwright worker` processes, and the
simulator as the model server, so that nothing but Batchwright is measured. What each section measures, and with which
settings, is shown below its table. Clocks of a shared machine cannot be trusted: two figures that are compared come
from the same run, interleaved, and CPU time is preferred; the calibration loop shows how busy the machine was.
"""

from types import ModuleType

from benchmarks.batches import beside, cost, crash, endings, limit, memory, planning, prefix
from benchmarks.batches.stage import Ground
from benchmarks.tools import sections

SECTIONS: tuple[ModuleType, ...] = (cost, memory, planning, prefix, limit, beside, endings, crash)


if __name__ == "__main__":
    sections.main("batch", "Batches: their cost and their promises.", SECTIONS, Ground)
