"""Emissions from CSV files: entries, factors and units in, totals out.

    unit_sync ─────┐
    factor_ingest ─┼─▶ emission_recalc   one per module and year, however many files ask for it
    csv_ingest ────┘

Register them with `operations = ["batchwright.operations.builtin.emissions"]`. They create their tables themselves, in
the schema `emissions`.
"""

from batchwright.operations.builtin.emissions.entries import csv_ingest
from batchwright.operations.builtin.emissions.factors import factor_ingest
from batchwright.operations.builtin.emissions.recalc import emission_recalc
from batchwright.operations.builtin.emissions.units import unit_sync

__all__ = ["csv_ingest", "emission_recalc", "factor_ingest", "unit_sync"]
