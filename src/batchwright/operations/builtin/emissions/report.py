"""Reports how a file was read: in events, in the job's result, and in its error."""

from __future__ import annotations

from typing import Any

from batchwright.engine.context import Context
from batchwright.errors import SchemaInvalid
from batchwright.operations.builtin.emissions.files import DataFile
from batchwright.operations.builtin.emissions.table import Problem

ERRORS_SHOWN = 20


def refuse_empty(file: DataFile, rows: int, problems: list[Problem]) -> None:
    if rows == 0:
        why = "; ".join(map(str, problems[:3])) or "there are no rows below the header"
        raise SchemaInvalid(f"{file.name!r} has no usable row: {why}", code="no_usable_row")


def report_bad(ctx: Context, bad: int, problems: list[Problem]) -> None:
    if bad:
        ctx.emit(
            f"{ctx.job_type}.bad_rows",
            f"{bad:,} rows were not kept; {problems[0]}",
            level="warning",
            bad=bad,
            first=[_shown(problem) for problem in problems[:5]],
        )


def counted(rows: int, bad: int, problems: list[Problem]) -> dict[str, Any]:
    """The outcome of a file, for its job's result."""
    return {"rows": rows, "bad": bad, "errors": [_shown(problem) for problem in problems[:ERRORS_SHOWN]]}


def _shown(problem: Problem) -> dict[str, Any]:
    return {"line": problem.line, "column": problem.column, "value": problem.value, "reason": problem.reason}
