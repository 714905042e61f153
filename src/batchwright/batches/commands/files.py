"""`batchwright batch results`, `manifest`, `repair` and `gc`: what batches leave in the store.

What only one of them needs is loaded when it runs, because every command of batches loads this module.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import orjson
import typer
from rich.text import Text

from batchwright.batches.commands.show import count_failed
from batchwright.batches.journal.envelopes import is_success
from batchwright.batches.output.results import Cursor, Lines, Results
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batch
from batchwright.cli.flags import BatchId, Config, DatabaseUrl, DryRun, Force, Json, OutputFile, on_part
from batchwright.cli.show import number, print_findings, print_json, print_table, size
from batchwright.cli.stop import end_if_nobody_reads
from batchwright.cli.targets import STANDARD_OUTPUT, Target, open_target, refuse_same
from batchwright.db.check import Finding, Level
from batchwright.errors import Conflict
from batchwright.files.local import copy_file

if TYPE_CHECKING:
    from batchwright.batches.upkeep.collector import Collected

T = TypeVar("T")
_PAUSE_SECONDS_MIN = 0.25
_PAUSE_SECONDS_MAX = 2.0

ErrorFile = Annotated[
    Path | None, typer.Option("--errors", metavar="FILE", help="Write lines that failed to this file.")
]


class Copied(NamedTuple):
    """What was written."""

    lines: int = 0
    errors: int = 0


def results(
    id: BatchId,
    output: OutputFile = STANDARD_OUTPUT,
    errors: ErrorFile = None,
    force: Force = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the batch has ended.")] = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Write the answers of a batch: its files once it has ended; before that, the lines finished so far.

    While it runs, lines come in the order in which they were finished, and those that failed are among them unless
    --errors names a file. With --json what was written is counted, on standard error unless --output names a file.
    Files that exist already are only overwritten with --force.
    """
    answers, others = _open_targets(output, errors, force=force)

    async def go(part: BatchesPart) -> Copied:
        batch = await part.batches.get(id, tenant=None)
        if batch.has_ended:
            return await copy_files(part, batch, answers, others)
        return await _copy_lines(part, batch, answers, others, follow=follow)

    def tell(copied: Copied) -> int:
        if json:
            _print_counts(copied, answers)
        elif answers.stream is None or copied.errors:
            typer.echo(_describe_copy(copied, answers, others), err=True)
        return 0

    with end_if_nobody_reads():
        on_part(BatchesPart, go, tell, database_url, config)


def manifest(
    id: BatchId,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the files again, and compare checksums and counts.")
    ] = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Print the manifest of an ended batch: its counts, and the SHA-256 of its input and of its files.

    With --verify the exit code is 1 if anything does not agree.
    """

    async def go(part: BatchesPart) -> tuple[Batch, list[Finding]]:
        batch = await part.batches.get(id, tenant=None)
        if batch.manifest is None:
            raise Conflict(f"the batch {id} has no manifest: it is {batch.status.value}")
        from batchwright.batches.output import verify as verifying

        return batch, await verifying.verify(part.files, batch) if verify else []

    def tell(found: tuple[Batch, list[Finding]]) -> int:
        batch, findings = found
        if verify and not json:
            print_findings(findings)
        else:
            print_json({**(batch.manifest or {}), **({"verified": findings} if verify else {})})
        return 1 if any(finding.level is Level.ERROR for finding in findings) else 0

    on_part(BatchesPart, go, tell, database_url, config)


def repair(id: BatchId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Write the files of a failed batch that ended without them, from what was answered until then.

    Lines without an answer get the code batch_failed. The batch stays failed.
    """

    async def go(part: BatchesPart) -> Batch:
        from batchwright.batches.output.repair import repair

        return await repair(
            part.batches,
            part.files,
            part.workspace,
            id,
        )

    def tell(batch: Batch) -> int:
        if json:
            print_json(batch.manifest)
        else:
            lines = f"{number(batch.completed)} answers, {number(count_failed(batch))} lines that failed"
            typer.echo(f"batch {batch.id} has its files now: {lines}; see: batchwright batch results {batch.id}")
        return 0

    on_part(BatchesPart, go, tell, database_url, config)


def gc(dry_run: DryRun = False, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Remove what is no longer needed: expired files, leftovers of ended batches, stale work folders.

    Workers do this continuously, a little at a time; this command does all of it at once.
    """

    async def go(part: BatchesPart) -> Collected:
        from batchwright.batches.upkeep.collector import Collector

        core = part.core
        collector = Collector(core.queue, core.store, part.workspace, part.settings, core.settings.retention)
        return await collector.collect(dry_run)

    def tell(collected: Collected) -> int:
        if json:
            heaps = {name.replace(" ", "_"): heap for name, heap in collected.by_kind().items()}
            print_json({"dry_run": dry_run, "bytes": collected.bytes, **heaps})
        else:
            _print_collected(collected, dry_run)
        return 0

    on_part(BatchesPart, go, tell, database_url, config)


# Files of an ended batch ------------------------------------------------------------------------------------------


async def copy_files(part: BatchesPart, batch: Batch, output: Target, errors: Target | None) -> Copied:
    """The two files; one that the batch does not have is an empty one."""
    if batch.manifest is None and not batch.output_file_id:
        hint = f"; try batchwright batch repair {batch.id}" if batch.done and batch.segments_gone_at is None else ""
        raise Conflict(f"the batch {batch.id} has no files: it is {batch.status.value}{hint}")
    with output.replace() as target:
        await copy_file(part.files, batch.output_file_id, target)
    if errors is not None:
        with errors.replace() as target:
            await copy_file(part.files, batch.error_file_id, target)
    return Copied(batch.completed, count_failed(batch))


# Lines of one that runs -------------------------------------------------------------------------------------------


async def _copy_lines(
    part: BatchesPart, batch: Batch, output: Target, errors: Target | None, *, follow: bool
) -> Copied:
    copied = Copied()
    with contextlib.ExitStack() as stack:
        answers = stack.enter_context(output.grow())
        others = answers if errors is None else stack.enter_context(errors.grow())
        async for lines in _read_finished(part, batch, follow=follow):
            for line in lines:
                (answers if is_success(line) else others).write(line)
            answers.flush()
            others.flush()
            good = sum(map(is_success, lines))
            copied = Copied(copied.lines + good, copied.errors + len(lines) - good)
    return copied


async def _read_finished(part: BatchesPart, batch: Batch, *, follow: bool) -> AsyncIterator[list[bytes]]:
    """Registered lines, page by page; with --follow, wait for more until the batch has ended."""
    found = Results(part.batches, part.workspace, part.core.store)
    cursor, pause = Cursor(), _PAUSE_SECONDS_MIN
    while True:
        page: Lines = await found.page(batch.id, cursor)
        cursor = page.next
        if page.data:
            yield [line + b"\n" for line in page.data.split(b"\n")[:-1]]
            pause = _PAUSE_SECONDS_MIN
        if page.has_more:
            continue
        if not follow or batch.has_ended:
            return
        await asyncio.sleep(pause)
        pause = min(_PAUSE_SECONDS_MAX, pause * 2)
        # First the batch: of one that has ended every line is there to be read.
        batch = await part.batches.get(batch.id, tenant=None)


# ------------------------------------------------------------------------------------------------------------------


def _print_counts(copied: Copied, output: Target) -> None:
    counts = copied._asdict()
    if output.stream is None:
        print_json(counts)
    else:
        typer.echo(orjson.dumps(counts).decode(), err=True)


def _open_targets(output: Path, errors: Path | None, *, force: bool) -> tuple[Target, Target | None]:
    answers = open_target("--output", output)
    others = None if errors is None else open_target("--errors", errors)
    if others is not None:
        refuse_same(answers, others)
    if not force:
        answers.refuse_to_overwrite("--output")
        if others is not None:
            others.refuse_to_overwrite("--errors")
    return answers, others


def _describe_copy(copied: Copied, output: Target, errors: Target | None) -> str:
    where = f" to {output}" if output.stream is None else ""
    text = f"wrote {number(copied.lines)} answers{where}"
    if not copied.errors:
        return text
    if errors is None:
        return f"{text}; {number(copied.errors)} lines failed: --errors FILE writes them to a file of their own"
    return f"{text}, and {number(copied.errors)} lines that failed to {errors}"


def _print_collected(collected: Collected, dry_run: bool) -> None:
    found = [(kind, heap) for kind, heap in collected.by_kind().items() if heap.count]
    if not found:
        typer.echo("nothing to remove", err=True)
        return
    print_table(
        {
            "would remove" if dry_run else "removed": [Text(kind) for kind, _ in found],
            "count": [Text(number(heap.count)) for _, heap in found],
            "size": [Text(size(heap.bytes) if heap.bytes else "") for _, heap in found],
        }
    )
