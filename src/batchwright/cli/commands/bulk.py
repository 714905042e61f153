"""Change many jobs from the command line: count them, ask for confirmation, and continue until none is left."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import typer

from batchwright.app import AsyncBatchwright
from batchwright.cli.flags import client, run
from batchwright.cli.show import jobs_text, print_json
from batchwright.engine.bulk import COUNT_MAX, Changed, Verb
from batchwright.engine.views import Cursor, JobFilter
from batchwright.errors import InvalidInput

Act = Callable[[AsyncBatchwright, Cursor | None], Awaitable[Changed]]
_DONE = {"cancel": "cancelled", "rerun": "rerun", "dismiss": "dismissed"}
_NONE = {
    "cancel": "nothing to cancel: no open job matches",
    "rerun": "nothing to rerun: no FAILED or CANCELLED job matches",
    "dismiss": "nothing to dismiss: no FAILED job in the inbox matches",
}


def act_on_many(
    verb: Verb,
    wanted: JobFilter,
    *,
    dry_run: bool,
    yes: bool,
    json: bool,
    database_url: str | None,
    config: Path | None,
    reason: str = "cancelled by request",
) -> None:
    """Apply the verb to every matching job, after the user has confirmed their number."""
    if not (dry_run or yes or sys.stdin.isatty()):
        raise InvalidInput(f"there is no terminal to confirm on; add --yes to {verb} them, or --dry-run to count them")

    async def act(batchwright: AsyncBatchwright, after: Cursor | None) -> Changed:
        match verb:
            case "cancel":
                return await batchwright.bulk.cancel(wanted, after=after, reason=reason)
            case "rerun":
                return await batchwright.bulk.rerun(wanted, after=after)
            case "dismiss":
                return await batchwright.bulk.dismiss(wanted, after=after)

    async def go() -> None:
        async with client(database_url, config) as batchwright:
            n = await batchwright.bulk.count(verb, wanted)
            if dry_run:
                _print_count(verb, n, json)
                return
            if n and not yes:
                typer.confirm(f"{verb} {_count_text(n)}?", abort=True, err=True)
            _print_done(verb, await _repeat_until_done(batchwright, verb, act, n) if n else Changed(0, 0, None), json)

    run(go())


async def _repeat_until_done(batchwright: AsyncBatchwright, verb: Verb, act: Act, n: int) -> Changed:
    matched = changed = 0
    after = None
    while True:
        found, moved, after = await act(batchwright, after)
        matched, changed = matched + found, changed + moved
        if after is None:
            _clear_line()
            if verb == "rerun" and changed:
                batchwright.doorbell.ring(await batchwright.named_queues.all())
            return Changed(matched, changed, None)
        _print_progress(f"{_DONE[verb]} {changed} of {_count_text(n)}")


def _count_text(n: int) -> str:
    return f"{COUNT_MAX} jobs or more" if n >= COUNT_MAX else jobs_text(n)


def _print_progress(text: str) -> None:
    """One line that is updated on a terminal; many lines anywhere else."""
    typer.echo(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, err=True, nl=not sys.stderr.isatty())


def _clear_line() -> None:
    if sys.stderr.isatty():
        typer.echo("\r\x1b[K", err=True, nl=False)


def _print_count(verb: Verb, n: int, json: bool) -> None:
    if json:
        print_json({"dry_run": True, "matched": n, "changed": 0})
    else:
        typer.echo(f"would {verb} {_count_text(n)}" if n else _NONE[verb])


def _print_done(verb: Verb, done: Changed, json: bool) -> None:
    if json:
        print_json({"dry_run": False, "matched": done.matched, "changed": done.changed})
    elif not done.matched:
        typer.echo(_NONE[verb])
    else:
        left = done.matched - done.changed
        typer.echo(f"{_DONE[verb]} {jobs_text(done.changed)}{_explain_left(verb, left) if left > 0 else ''}")


def _explain_left(verb: Verb, n: int) -> str:
    if verb == "rerun":
        return f"; {n} left unchanged: children are rerun with their parents, and some jobs are still being interrupted"
    return f"; {n} had ended or changed meanwhile"
