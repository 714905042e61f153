"""`batchwright batch run`: a whole batch in one command, which resumes if it is started again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text

from batchwright.app import VERSION, AsyncBatchwright
from batchwright.batches.commands.check import Endpoint, InputFile, find_endpoint
from batchwright.batches.commands.show import (
    COLOURS,
    Seen,
    count_failed,
    exit_code,
    group_errors,
    list_problems,
    print_errors,
    print_problems,
    progress,
    tokens_text,
)
from batchwright.batches.commands.watch import Lines, OnLook, View, begin_view, follow, show_live
from batchwright.batches.local import (
    LocalRun,
    Lock,
    SendingState,
    add_headers,
    begin_batch,
    find_batch,
    has_written,
    lock_queue,
    name_server,
    private_settings,
    refuse_too_large,
    use_server,
    work_until_ended,
)
from batchwright.batches.output.retries import follow_retries, merge_outputs
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batch, window_seconds
from batchwright.cli.flags import Config, DatabaseUrl, Force, Json, parse_headers, settings_from
from batchwright.cli.loop import loop_factory, spare_the_collector
from batchwright.cli.show import console, money, number, print_facts, print_json, seconds, show_meanwhile, time_text
from batchwright.cli.stop import Stop, end, end_if_nobody_reads
from batchwright.cli.targets import Target, open_target, refuse_same
from batchwright.engine.worker.worker import Worker
from batchwright.errors import InvalidInput
from batchwright.files.local import copy_file, hash_file, require_readable
from batchwright.inference.prices import cost
from batchwright.settings import Settings
from batchwright.telemetry import tracing
from batchwright.telemetry.logs import configure_logs


class Targets(NamedTuple):
    """Where the answers and the lines that failed go."""

    output: Target
    errors: Target

    @property
    def has_stream(self) -> bool:
        """Whether one of them is standard output."""
        return any(one.stream is not None for one in self)


def run_batch(
    file: InputFile,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The model server, such as http://127.0.0.1:8000; by default the settings'."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where answers go; - is standard output; by default beside FILE, .out.jsonl.",
        ),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where lines that failed go; by default beside the output, .errors.jsonl."),
    ] = None,
    endpoint: Endpoint = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable that holds the server's key.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME: VALUE",
            help="A header for each request; may be repeated. A secret as NAME: env:VARIABLE or file:PATH.",
            show_default=False,
        ),
    ] = None,
    window: Annotated[
        str, typer.Option(metavar="24h", help="Time in which the batch must be done, from 1m to 30d.")
    ] = "24h",
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, help="Maximum number of requests in flight; by default 100.", show_default=False
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="If it is done, send every line again.")] = False,
    force: Force = False,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="If it is done, send the lines that failed again, and keep the others."),
    ] = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Run a file of requests on a model server, and write the answers to a file; needs no other process.

    Started again with the same file, server and output, it resumes where it stopped, whatever had happened. Ctrl-C lets
    requests in flight end; press it again to quit now. Nothing that was answered is lost. Files that another command
    has written are only overwritten with --force. Where answers go to standard output, all else goes to standard error.

    The exit code is 0 if every line was answered, 4 if some were not, 3 if the batch was cancelled, 1 if it failed or
    something is wrong, and 130 after Ctrl-C.
    """
    window_seconds(window)
    if again and retry_failed:
        raise InvalidInput("--again asks every line again, --retry-failed only those that failed; give one of them")
    base = use_server(settings_from(database_url, config), url, api_key_env)
    base = add_headers(base, parse_headers(header or ()))
    where = find_endpoint(require_readable(file), endpoint)
    refuse_too_large(file, base)
    targets = _open_targets(file, output, errors)
    local = LocalRun(
        file=file,
        sha256=hash_file(file),
        endpoint=where,
        server=name_server(base),
        output=targets.output.name,
        window=window,
        again=again,
        retry_failed=retry_failed,
    )
    settings = private_settings(base, local.queue, max_in_flight)
    configure_logs("ERROR", settings.log.form)
    tracing.start(version=VERSION)
    beside = contextlib.redirect_stdout(sys.stderr) if targets.has_stream else contextlib.nullcontext()
    try:
        with end_if_nobody_reads(), beside, asyncio.Runner(loop_factory=loop_factory()) as runner:
            code = runner.run(_run(local, targets, settings, force=force, json=json))
    finally:
        tracing.stop()
    end(code, settings)


def _open_targets(file: Path, output: Path | None, errors: Path | None) -> Targets:
    answers = open_target("--output", output or _beside(file, ".out.jsonl"))
    others = open_target("--errors", errors or _beside(answers.path or file, ".errors.jsonl"))
    refuse_same(answers, others)
    if file.resolve() in (answers.path, others.path):
        raise InvalidInput(f"input, output and errors must be three files, not {file}, {answers} and {others}")
    return Targets(answers, others)


def _beside(file: Path, ending: str) -> Path:
    """requests.jsonl → requests.out.jsonl → requests.errors.jsonl"""
    return file.with_name(file.name.removesuffix(".jsonl").removesuffix(".out") + ending)


async def _run(local: LocalRun, targets: Targets, settings: Settings, *, force: bool, json: bool) -> int:
    stop = Stop()
    stop.listen()
    batchwright = AsyncBatchwright(settings=settings)
    with show_meanwhile("starting the database …"):
        await batchwright.open()
    try:
        with lock_queue(batchwright.part(BatchesPart).workspace.root, local.queue) as lock:
            return await _Command(batchwright, local, targets, stop, json=json).run(lock, force=force)
    finally:
        await batchwright.close()


class _Command:
    """One start of the command: runs the batch if that is needed, writes its files, and says how it went."""

    def __init__(
        self, batchwright: AsyncBatchwright, local: LocalRun, targets: Targets, stop: Stop, *, json: bool
    ) -> None:
        self._batchwright = batchwright
        self._part = batchwright.part(BatchesPart)
        self._local = local
        self._targets = targets
        self._stop = stop
        self._json = json
        self._signal: int = signal.SIGINT

    async def run(self, lock: Lock, *, force: bool) -> int:
        batch = await find_batch(self._part, self._local)
        if not force:
            await self._refuse_to_overwrite()
        was_done = batch is not None and self._local.is_done(batch)
        if batch is None or not was_done:
            batch = await self._work(batch)
            if batch is None or not batch.has_ended:
                return self._report_interrupted(await follow_retries(self._part.batches, batch) if batch else [])
            await self._part.batches.forget_queue(batch)
        lock.remove()
        return await self._conclude(await follow_retries(self._part.batches, batch), was_done=was_done)

    async def _refuse_to_overwrite(self) -> None:
        """Only what this very command has written before may be replaced."""
        for flag, one in (("--output", self._targets.output), ("--errors", self._targets.errors)):
            if not await has_written(self._part, self._local, one.head()):
                one.refuse_to_overwrite(flag)

    # The work ---------------------------------------------------------------------------------------------------

    async def _work(self, known: Batch | None) -> Batch | None:
        """How the batch stands when it has ended or when we were asked to stop; None if it was not made by then."""
        worker = self._batchwright.worker()  # before anything is stored: it tells if the server's key is not there
        try:
            batch = await self._await_unless_stopped(begin_batch(self._part, self._local, known))
            if batch is None:
                await worker.close()
                return None
            runtime = self._part.runtime
            sender = SendingState(runtime) if runtime is not None else None
            view = await begin_view(self._part, batch.id, title=self._local.file.name, sending=sender)
        except BaseException:
            await worker.close()
            raise
        with self._show(view) as on_look:
            return await self._work_until_ended(worker, view, on_look)

    async def _work_until_ended(self, worker: Worker, view: View, on_look: OnLook) -> Batch:
        def stop() -> None:
            view.notice = "stopping: requests in flight may end; once more leaves at once"
            worker.stop()

        self._when_asked(stop)
        ended = await work_until_ended(worker, follow(self._part, view, on_look), on_start=spare_the_collector)
        if ended is not None:
            return ended
        view.seen = Seen(batch=await self._part.batches.get(view.batch.id, tenant=None))
        view.notice = None
        on_look(view)
        return view.batch

    @contextlib.contextmanager
    def _show(self, view: View) -> Iterator[OnLook]:
        if self._json:
            yield lambda _: None
            return
        batch = view.batch
        what = f"going on with {batch.id} at {progress(batch)}" if batch.done else batch.id
        typer.echo(f"{what} on {self._local.server}; Ctrl-C stops, the same command goes on")
        if sys.stdout.isatty():
            with show_live(view, console()) as draw:
                yield draw
        else:
            yield Lines()

    def _when_asked(self, stop: Callable[[], object]) -> None:
        """Call this when we are asked to stop; at once, if that has happened already."""

        def asked(number: int) -> None:
            self._signal = number
            stop()

        self._stop.on_ask = asked
        if self._stop.asked.is_set():
            stop()

    async def _await_unless_stopped(self, beginning: Coroutine[Any, Any, Batch]) -> Batch | None:
        task = asyncio.create_task(beginning)
        self._when_asked(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            if not self._stop.asked.is_set():
                raise
            return None

    # The end ----------------------------------------------------------------------------------------------------

    def _report_interrupted(self, family: list[Batch]) -> int:
        code = 128 + self._signal
        if self._json:
            print_json(self._summarize(family, code))
        elif not family:
            typer.echo("stopped before anything was sent", err=True)
        else:
            batch = family[0]
            typer.echo(f"stopped at {progress(batch) or 'the beginning'}; what is answered is kept", err=True)
            typer.echo(f"  go on:    the same command again\n  give up:  batchwright batch cancel {batch.id}", err=True)
        return code

    async def _conclude(self, family: list[Batch], *, was_done: bool) -> int:
        """Write the files of an ended batch, and say how it went. The family is the batch and those it retries."""
        code = exit_code(family[0])
        if family[0].manifest is not None:
            await self._write(family)
        if self._json:
            print_json(self._summarize(family, code))
        else:
            self._print_end(family, was_done=was_done)
        return code

    async def _write(self, family: list[Batch]) -> None:
        """The answers of all that was sent for this file; an error file that is there from before must not lie."""
        error_file_id, errors = family[0].error_file_id, self._targets.errors
        try:
            with self._targets.output.replace() as stream:
                async for chunk in merge_outputs(self._part.files, family):
                    await asyncio.to_thread(stream.write, chunk)
            if error_file_id is not None or errors.is_there:
                with errors.replace() as stream:
                    await copy_file(self._part.files, error_file_id, stream)
        except InvalidInput as error:
            raise InvalidInput(f"{error}; every answer is kept: mend that, and start the same command again") from error

    def _summarize(self, family: list[Batch], code: int) -> dict[str, Any]:
        batch = family[0] if family else None
        has_files = batch is not None and batch.manifest is not None
        return {
            "id": batch.id if batch else None,
            "status": batch.status if batch else None,
            "exit_code": code,
            "total": family[-1].total if family else 0,
            "completed": sum(one.completed for one in family),
            "failed": count_failed(batch) if batch else 0,
            "error_summary": group_errors(batch) if batch else [],
            "problems": list_problems(batch) if batch else [],
            "input_tokens": sum(one.input_tokens for one in family),
            "cached_tokens": sum(one.cached_tokens for one in family),
            "output_tokens": sum(one.output_tokens for one in family),
            "cost": self._cost(family),
            "output": self._targets.output.name if has_files else None,
            "errors": self._targets.errors.name if has_files and batch is not None and batch.error_file_id else None,
        }

    def _cost(self, family: list[Batch]) -> float | None:
        found = [cost(one.usage_by_model, self._part.settings.prices) for one in family]
        return None if None in found else sum(one or 0.0 for one in found)

    def _print_end(self, family: list[Batch], *, was_done: bool) -> None:
        batch = family[0]
        if was_done:
            again = "--again asks all of it again" + (", --retry-failed what failed" if count_failed(batch) else "")
            typer.echo(f"{batch.id} was done already, on {time_text(batch.ended_at)}; {again}")
        _print_verdict(family)
        has_files = batch.manifest is not None
        began, ended = batch.in_progress_at, batch.ended_at
        took = (ended - began).total_seconds() if began and ended else 0.0
        spent = self._cost(family)
        print_facts(
            [
                ("  output", self._targets.output if has_files else None),
                ("  errors", self._targets.errors if has_files and batch.error_file_id else None),
                ("  tokens", tokens_text(*family)),
                ("  cost", money(spent) if spent and has_files else None),
                ("  took", f"{seconds(took)}, {batch.completed / took:,.1f} answers/s" if took else None),
                ("  look", f"batchwright batch show {batch.id}"),
            ]
        )
        print_errors(batch)
        print_problems(list_problems(batch), (batch.errors or {}).get("total", 0))


def _print_verdict(family: list[Batch]) -> None:
    batch = family[0]
    completed, total = sum(one.completed for one in family), family[-1].total
    sign = "✓" if exit_code(batch) == 0 else "✗"
    words = f"{number(completed)} of {number(total)} lines were answered" if total else "nothing was sent"
    if count_failed(batch):
        words += f", {number(count_failed(batch))} failed"
    console().print(Text(f"{sign} {batch.status.value}: {words}", f"bold {COLOURS[batch.status]}"), soft_wrap=True)
