"""`batchwright batch run`: a whole batch in one command, which resumes if it is started again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from batchwright.app import VERSION, AsyncBatchwright
from batchwright.batches.commands.advice import advise
from batchwright.batches.commands.check import Endpoint
from batchwright.batches.commands.report import Effort, Report, Targets, mention_unfinished
from batchwright.batches.commands.show import Seen, exit_code, group_errors, print_missing_models, progress
from batchwright.batches.commands.watch import Lines, OnLook, View, begin_view, follow, show_live
from batchwright.batches.local import (
    LocalRun,
    Lock,
    SendingState,
    add_headers,
    begin_batch,
    find_abandoned,
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
from batchwright.batches.output.words import read_words
from batchwright.batches.part import BatchesPart
from batchwright.batches.plan.inspect import find_endpoint
from batchwright.batches.store import Batch, window_seconds
from batchwright.cli.flags import (
    Config,
    DatabaseUrl,
    Force,
    Json,
    open_part,
    parse_headers,
    parse_time_span,
    run,
    settings_from,
)
from batchwright.cli.loop import loop_factory, spare_the_collector
from batchwright.cli.show import console, show_meanwhile
from batchwright.cli.stop import Stop, end, end_if_nobody_reads, mute_if_nobody_reads
from batchwright.cli.targets import open_target, refuse_same
from batchwright.engine.worker.worker import Worker
from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.files.local import copy_file, hash_file, require_readable
from batchwright.settings import Settings
from batchwright.telemetry import tracing
from batchwright.telemetry.logs import configure_logs

if TYPE_CHECKING:
    from batchwright.batches.runtime import Runtime

_WINDOW = "24h"
_WORDS_MAX = 3
"""Kinds of errors of which the server's own words are shown."""


def run_batch(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Requests, one JSON object per line.", show_default=False)
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Model server, such as http://127.0.0.1:8000; by default that of the settings."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File for answers; - is standard output; by default beside FILE, .out.jsonl.",
        ),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for lines that failed; by default beside the output, .errors.jsonl."),
    ] = None,
    endpoint: Endpoint = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the server's key.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME: VALUE",
            help="A header for each request; may be repeated. A secret as NAME: env:VARIABLE or file:PATH.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Maximum time for an answer, such as 90s; by default request_timeout of the settings.",
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Time in which the batch must be done, from 1m to 30d; by default 24h."),
    ] = None,
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, help="Maximum number of requests in flight; by default 100.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Resume the run that created this batch, without naming its FILE and server."),
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

    Started again with the same file, server and output, it resumes where it stopped, whatever happened. Ctrl-C lets
    requests in flight end; press it again to quit now. No answer is lost. Files that another command has written are
    only overwritten with --force. If answers go to standard output, everything else goes to standard error.

    The exit code is 0 if every line was answered, 4 if some were not, 3 if the batch was cancelled, 1 if it failed or
    something is wrong, and 130 after Ctrl-C.
    """
    window_seconds(window or _WINDOW)
    if again and retry_failed:
        raise InvalidInput("--again sends every line again, --retry-failed only those that failed; give one of them")
    given = _Given(
        url, api_key_env, parse_headers(header or ()), parse_time_span("--timeout", timeout, least="0.001s", most="30d")
    )
    if resume is None:
        settings = _load_settings(database_url, config, given)
        local, targets = _prepare(file, output, errors, endpoint, window or _WINDOW, given, settings)
        local = replace(local, again=again, retry_failed=retry_failed)
    else:
        own = {"FILE": file, "--output": output, "--errors": errors, "--endpoint": endpoint, "--window": window}
        _refuse_with_resume({**own, "--again": again or None})
        batch = run(_fetch(resume, database_url, config))
        local, given = _recall(batch, given, retry_failed=retry_failed)
        settings = _load_settings(database_url, config, given)
        _refuse_other_server(local, settings, batch.id)
        targets = Targets(open_target("--output", Path(local.output)), open_target("--errors", Path(local.errors)))
    _start(local, targets, private_settings(settings, local.queue, max_in_flight), force=force, json=json)


def _start(local: LocalRun, targets: Targets, settings: Settings, *, force: bool, json: bool) -> None:
    configure_logs("ERROR", settings.log.form)
    tracing.start(version=VERSION)
    beside = contextlib.redirect_stdout(sys.stderr) if targets.has_stream else contextlib.nullcontext()
    try:
        with end_if_nobody_reads(), beside, asyncio.Runner(loop_factory=loop_factory()) as runner:
            code = runner.run(_run(local, targets, settings, force=force, json=json))
    finally:
        tracing.stop()
    end(code, settings)


# What to run ------------------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """What the command line says about the server."""

    url: str | None
    api_key_env: str | None
    headers: dict[str, str]
    timeout_seconds: float | None


def _load_settings(database_url: str | None, config: Path | None, given: _Given) -> Settings:
    """With the server of the command line. Settings of a gateway without a url are meant for it."""
    try:
        settings = settings_from(database_url, config)
    except ConfigurationError:
        if given.url is None:
            raise
        gateway = {"global_inference_gateway": {"url": given.url}}
        settings = settings_from(database_url, config, defaults=gateway)
    return add_headers(use_server(settings, given.url, given.api_key_env, given.timeout_seconds), given.headers)


def _prepare(
    file: Path | None,
    output: Path | None,
    errors: Path | None,
    endpoint: str | None,
    window: str,
    given: _Given,
    settings: Settings,
) -> tuple[LocalRun, Targets]:
    if file is None:
        raise InvalidInput(
            "name a FILE of requests, or a batch to --resume; for a first file: batchwright batch example"
        )
    where = find_endpoint(require_readable(file), endpoint)
    refuse_too_large(file, settings)
    targets = _open_targets(file, output, errors)
    local = LocalRun(
        file=file,
        sha256=hash_file(file),
        endpoint=where,
        server=name_server(settings),
        output=targets.output.name,
        window=window,
        errors=targets.errors.name,
        url=given.url,
        api_key_env=given.api_key_env,
        headers=tuple(sorted(given.headers)),
    )
    return local, targets


def _refuse_with_resume(given: Mapping[str, object]) -> None:
    if names := [name for name, value in given.items() if value is not None]:
        raise InvalidInput(f"--resume takes {', '.join(names)} from the batch; leave {' and '.join(names)} out")


async def _fetch(id: str, database_url: str | None, config: Path | None) -> Batch:
    async with open_part(BatchesPart, database_url, config) as part:
        return await part.batches.get(id, tenant=None)


def _recall(batch: Batch, given: _Given, *, retry_failed: bool) -> tuple[LocalRun, _Given]:
    """The run that created the batch, with its command line; the values of headers must be given again."""
    local = LocalRun.of(batch, retry_failed=retry_failed)
    if missing := [name for name in local.headers if name not in given.headers]:
        wanted = " ".join(f"--header '{name}: …'" for name in missing)
        raise InvalidInput(f"the values of headers are not stored; give them again: {wanted}")
    url, key = given.url or local.url, given.api_key_env or local.api_key_env
    return local, given._replace(url=url, api_key_env=key)


def _refuse_other_server(local: LocalRun, settings: Settings, id: str) -> None:
    if (now := name_server(settings)) != local.server:
        raise InvalidInput(
            f"{id} is a batch for {local.server}, and this command is for {now}; correct --url, or the settings"
        )


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


class _Sending(SendingState):
    """What this process sends, with advice about its server."""

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        super().__init__(runtime)
        self._server = settings.global_inference_gateway

    def advice(self) -> str | None:
        return advise(self.refusals(), self._server) if self._server.is_set else None


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
        self._report = Report(targets, self._part.settings.prices, json=json)
        self._effort: Effort | None = None
        self._signal: int = signal.SIGINT

    async def run(self, lock: Lock, *, force: bool) -> int:
        batch = await find_batch(self._part, self._local)
        if not force:
            await self._refuse_to_overwrite()
        if batch is None:
            await self._mention_unfinished()
        was_done = batch is not None and self._local.is_done(batch)
        if batch is None or not was_done:
            batch = await self._work(batch)
            if batch is None or not batch.has_ended:
                return await self._conclude_stopped(batch)
            await self._part.batches.forget_queue(batch)
        lock.remove()
        return await self._conclude(await follow_retries(self._part.batches, batch), was_done=was_done)

    async def _refuse_to_overwrite(self) -> None:
        """Only what this very command has written before may be replaced."""
        for flag, one in (("--output", self._targets.output), ("--errors", self._targets.errors)):
            if not await has_written(self._part, self._local, one.head()):
                one.refuse_to_overwrite(flag)

    async def _mention_unfinished(self) -> None:
        """The file may have been edited, or the command changed, since a run of it was stopped."""
        others = await self._part.batches.find_unfinished(self._local.path)
        abandoned = await find_abandoned(self._part, others)
        mention_unfinished(self._local, others, {one.id for one in others} - abandoned)

    # The work ---------------------------------------------------------------------------------------------------

    async def _work(self, known: Batch | None) -> Batch | None:
        """The batch when it has ended, or when the user stopped us; None if it did not exist by then."""
        worker = self._batchwright.worker()  # before anything is stored: it fails if the server's key is missing
        try:
            batch = await self._await_unless_stopped(begin_batch(self._part, self._local, known))
            if batch is None:
                await worker.close()
                return None
            runtime = self._part.runtime
            sender = _Sending(runtime, self._batchwright.settings) if runtime is not None else None
            view = await begin_view(self._part, batch.id, title=self._local.file.name, sending=sender)
        except BaseException:
            await worker.close()
            raise
        before = batch.completed
        with self._show(view) as on_look:
            batch = await self._work_until_ended(worker, view, on_look)
        self._effort = Effort(view.elapsed_seconds(), batch.completed - before, before)
        self._report.advice = sender.advice() if sender is not None else None
        return batch

    async def _work_until_ended(self, worker: Worker, view: View, on_look: OnLook) -> Batch:
        def stop() -> None:
            view.notice = "stopping: requests in flight may end; press Ctrl-C again to quit now"
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
        what = f"resuming {batch.id} at {progress(batch)}" if batch.done else batch.id
        with mute_if_nobody_reads():
            typer.echo(f"{what}\non {self._local.server}; Ctrl-C stops it, the same command resumes it")
        if sys.stdout.isatty():
            with show_live(view, console()) as draw:
                yield draw
        else:
            yield self._draw_until_closed(Lines(), batch.id)

    def _draw_until_closed(self, lines: Lines, id: str) -> OnLook:
        """The reader of our output may stop early, as `head` does: that ends the display, and not the run."""

        def draw(view: View) -> None:
            with mute_if_nobody_reads(
                f"nobody reads the output any more; the run continues: batchwright batch watch {id}"
            ):
                lines(view)

        return draw

    def _when_asked(self, stop: Callable[[], object]) -> None:
        """Call this when the user stops us; at once, if that has happened already."""

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

    async def _conclude_stopped(self, batch: Batch | None) -> int:
        code = 128 + self._signal
        family = [] if batch is None else await follow_retries(self._part.batches, batch)
        with mute_if_nobody_reads():
            self._report.stopped(family, code)
        return code

    async def _conclude(self, family: list[Batch], *, was_done: bool) -> int:
        """Write the files of an ended batch, and say how it went. The family is the batch and those it retries."""
        batch = family[0]
        if batch.manifest is not None:
            await self._write(family)
        codes = [one["code"] for one in group_errors(batch)[:_WORDS_MAX]]
        words = await read_words(self._part.files, batch.error_file_id, codes)
        with mute_if_nobody_reads():
            self._report.ended(family, words, self._effort, was_done=was_done)
            if not self._json:
                await print_missing_models(self._part, batch)
        return exit_code(batch)

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
            raise InvalidInput(
                f"{error}; every answer is kept: correct that, and start the same command again"
            ) from error
