"""`batchwright batch run`: a whole batch in one command, which goes on where it stood if it is started again.

    key = hash of file, server, endpoint and output ─▶ the batch of this key, or a new one in a queue of its own
    a worker in this process, for this queue only ─▶ the end ─▶ output and error file

The batch is in the database like any other, so that nothing is lost however this process ends; but no other worker
takes it. A lock in the work folder tells whether the process that ran it before is really gone: then what that one held
is free at once, instead of after its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.text import Text

from batchwright.app import VERSION, AsyncBatchwright
from batchwright.batches.envelopes import batch_id_of
from batchwright.batches.family import answers, lineage
from batchwright.batches.outlook import cost
from batchwright.batches.store import Batch, NewBatch, window_seconds
from batchwright.batches.submission import check_retry, create, retry_of, store_input
from batchwright.cli.batch_check import Endpoint, InputFile, endpoint_of, readable
from batchwright.cli.batch_files import Force, copy_file, unless_nobody_reads
from batchwright.cli.batch_show import (
    COLOURS,
    error_groups,
    exit_code,
    failed,
    money,
    number,
    print_errors,
    print_problems,
    problems,
    progress,
    tokens_text,
)
from batchwright.cli.batch_watch import Lines, OnLook, View, begin_view, live
from batchwright.cli.batch_work import Here, Lock, free_the_dead, only_one, private_settings, work
from batchwright.cli.flags import Config, DatabaseUrl, Json, parse_headers, settings_from
from batchwright.cli.loop import loop_factory
from batchwright.cli.show import console, print_facts, print_json, seconds, time_text
from batchwright.cli.stop import Stop, end
from batchwright.cli.targets import Target, refuse_same, target
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.engine.lanes import PRIVATE
from batchwright.errors import ConfigurationError, InvalidInput, NotFound
from batchwright.inference.headers import header_pairs
from batchwright.inference.settings import NO_GATEWAY, GatewaySettings
from batchwright.settings import Settings
from batchwright.telemetry import tracing
from batchwright.telemetry.logs import configure_logs

_QUEUE = f"{PRIVATE}run-"
_KEY_DIGITS = 12
_TO_ANY_SERVER = ("request_timeout", "max_retries", "initial_backoff", "max_backoff")
"""What may be kept of a gateway's settings for another server: no key, and nothing about trust."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run, and what is to come of it."""

    file: Path
    sha256: str
    endpoint: str
    server: str
    output: Target
    errors: Target
    window: str
    again: bool
    force: bool
    retry_failed: bool

    @property
    def key(self) -> str:
        """The same for the same file, server, endpoint and output; then it is the same batch."""
        parts = [self.sha256, self.server, self.endpoint, self.output.name]
        return hashlib.sha256(orjson.dumps(parts)).hexdigest()

    @property
    def queue(self) -> str:
        return f"{_QUEUE}{self.key[:_KEY_DIGITS]}"

    def batch(self, input_file_id: str) -> NewBatch:
        return NewBatch(
            tenant=DEFAULT_TENANT,
            endpoint=self.endpoint,
            input_file_id=input_file_id,
            completion_window=self.window,
            **self.own(),
        )

    def own(self) -> dict[str, Any]:
        """What makes a batch this command's own."""
        return {
            "queue": self.queue,
            "idempotency_key": f"run:{self.key}",
            "idempotency_digest": bytes.fromhex(self.key),
        }


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
            help="A header for each request; repeat it. A secret as NAME: env:VARIABLE or file:PATH.",
            show_default=False,
        ),
    ] = None,
    window: Annotated[str, typer.Option(metavar="24h", help="When it must be done: any time from 1m to 30d.")] = "24h",
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, help="Requests in flight at the same time; by default 100.", show_default=False
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="If it is done, ask every line again.")] = False,
    force: Force = False,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="If it is done, ask the lines that failed again, and keep the others."),
    ] = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Run a file of requests on a model server, and write the answers to a file; needs no other process.

    Started again with the same file, server and output it goes on where it stood, whatever had happened. Ctrl-C lets
    requests in flight end, a second one leaves at once; nothing that was answered is lost. Files that another command
    has written are only overwritten with --force. Where answers go to standard output, all else goes to standard error.

    The exit code is 0 if every line was answered, 4 if some were not, 3 if the batch was cancelled, 1 if it failed or
    something is wrong, and 130 after Ctrl-C.
    """
    window_seconds(window)
    if again and retry_failed:
        raise InvalidInput("--again asks every line again, --retry-failed only those that failed; give one of them")
    base = _gateway_set(settings_from(database_url, config), url, api_key_env)
    base = _headers_set(base, header or ())
    plan = _plan(base, file, output, errors, endpoint, window, again=again, force=force, retry_failed=retry_failed)
    settings = private_settings(base, plan.queue, max_in_flight)
    configure_logs("ERROR", settings.log.form)
    tracing.start(version=VERSION)
    try:
        with unless_nobody_reads(), _said_beside(plan), asyncio.Runner(loop_factory=loop_factory()) as runner:
            code = runner.run(_run(plan, settings, json))
    finally:
        tracing.stop()
    end(code, settings)


# What to run ------------------------------------------------------------------------------------------------------


def _plan(
    settings: Settings,
    file: Path,
    output: Path | None,
    errors: Path | None,
    endpoint: str | None,
    window: str,
    *,
    again: bool,
    force: bool,
    retry_failed: bool,
) -> Plan:
    where = endpoint_of(readable(file), endpoint)
    if (size := file.stat().st_size) > (most := settings.batches.file_bytes_max):
        raise InvalidInput(f"{file} has {size} bytes, and batches.file_bytes_max is {most}; split it, or raise that")
    answers = target("--output", output or _beside(file, ".out.jsonl"))
    others = target("--errors", errors or _beside(answers.path or file, ".errors.jsonl"))
    refuse_same(answers, others)
    if file.resolve() in (answers.path, others.path):
        raise InvalidInput(f"input, output and errors must be three files, not {file}, {answers} and {others}")
    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    return Plan(
        file=file,
        sha256=sha256,
        endpoint=where,
        server=_server(settings),
        output=answers,
        errors=others,
        window=window,
        again=again,
        force=force,
        retry_failed=retry_failed,
    )


def _beside(file: Path, ending: str) -> Path:
    """requests.jsonl → requests.out.jsonl → requests.errors.jsonl"""
    return file.with_name(file.name.removesuffix(".jsonl").removesuffix(".out") + ending)


def _gateway_set(settings: Settings, url: str | None, api_key_env: str | None) -> Settings:
    """The server of the command line instead of those of the settings; a key goes to no server but its own."""
    before = settings.global_inference_gateway
    if url is None and not settings.has_gateways:
        raise ConfigurationError(
            f"there is no model server to send to; write --url http://127.0.0.1:8000, or configure one: {NO_GATEWAY}"
        )
    if url is None and (api_key_env is None or not before.is_set):
        if api_key_env is not None:
            raise ConfigurationError("--api-key-env is for one server; write its --url, too")
        return settings
    gateway = GatewaySettings(url=url) if url is not None else before
    if before.is_set and gateway.endpoint == before.endpoint:
        gateway = replace(before, url=gateway.url)
    elif before.is_set:
        gateway = replace(gateway, **{name: getattr(before, name) for name in _TO_ANY_SERVER})
    if api_key_env is not None:
        gateway = replace(gateway, api_key_env=api_key_env, api_key_file=None, api_key_name=None)
    return replace(settings, global_inference_gateway=gateway, model_gateways={})


def _headers_set(settings: Settings, given: Sequence[str]) -> Settings:
    """These headers for all gateways, before those of the configuration. Nobody else runs the batch, so they are not
    stored: who continues it gives them again."""
    headers = parse_headers(given)

    def with_headers(gateway: GatewaySettings) -> GatewaySettings:
        pairs = header_pairs({**dict(gateway.headers), **headers})
        return replace(gateway, headers=pairs, passthrough_headers=()) if gateway.is_set else gateway

    return replace(
        settings,
        global_inference_gateway=with_headers(settings.global_inference_gateway),
        model_gateways={model: with_headers(one) for model, one in settings.model_gateways.items()},
    )


def _server(settings: Settings) -> str:
    if settings.global_inference_gateway.is_set:
        return settings.global_inference_gateway.endpoint
    return " ".join(f"{model}={one.endpoint}" for model, one in sorted(settings.model_gateways.items()))


# The run ----------------------------------------------------------------------------------------------------------


async def _run(plan: Plan, settings: Settings, json: bool) -> int:
    stop = Stop()
    stop.listen()
    batchwright = AsyncBatchwright(settings=settings)
    with _saying("starting the database …"):
        await batchwright.open()
    try:
        with only_one(batchwright.workspace.root, plan.queue) as lock:
            return await _run_alone(batchwright, plan, stop, lock, json)
    finally:
        await batchwright.close()


async def _run_alone(batchwright: AsyncBatchwright, plan: Plan, stop: Stop, lock: Lock, json: bool) -> int:
    batch = await batchwright.batches.repeated(plan.batch(""))
    if not plan.force:
        await _refuse_to_overwrite(batchwright, plan)
    was_done = batch is not None and _is_done(plan, batch)
    if batch is None or not was_done:
        runner = _Runner(batchwright, plan, stop, json)
        batch = await runner.run(batch)
        if batch is None or not batch.has_ended:
            return runner.interrupted(await lineage(batchwright.batches, batch) if batch else [])
        await batchwright.batches.forget_queue(batch)
    lock.remove()
    return await _conclude(batchwright, plan, batch, json, was_done=was_done)


async def _refuse_to_overwrite(batchwright: AsyncBatchwright, plan: Plan) -> None:
    """Only what this very command has written before may be replaced: its batches have one queue."""
    for flag, one in (("--output", plan.output), ("--errors", plan.errors)):
        id = batch_id_of(one.head())
        try:
            is_own = id is not None and (await batchwright.batches.get(id, tenant=None)).queue == plan.queue
        except NotFound:
            is_own = False
        if not is_own:
            one.refuse_to_overwrite(flag)


def _said_beside(plan: Plan) -> contextlib.AbstractContextManager[object]:
    """Nothing but lines may come out where lines are read."""
    is_taken = any(one.stream is not None for one in (plan.output, plan.errors))
    return contextlib.redirect_stdout(sys.stderr) if is_taken else contextlib.nullcontext()


@contextlib.contextmanager
def _saying(text: str) -> Iterator[None]:
    """On a terminal, for as long as it takes: the first start of the embedded database takes a few seconds."""
    if not sys.stderr.isatty():
        yield
        return
    typer.echo(text, err=True, nl=False)
    try:
        yield
    finally:
        typer.echo("\r\x1b[K", err=True, nl=False)


def _is_done(plan: Plan, batch: Batch) -> bool:
    """Whether only the files are to be written; a batch that never began has cost nothing, and is begun anew."""
    if not batch.has_ended or batch.in_progress_at is None or plan.again:
        return False
    return not plan.retry_failed or failed(batch) == 0


class _Runner:
    """Runs one batch in this process."""

    def __init__(self, batchwright: AsyncBatchwright, plan: Plan, stop: Stop, json: bool) -> None:
        self._batchwright = batchwright
        self._plan = plan
        self._stop = stop
        self._json = json
        self._signal: int = signal.SIGINT
        self._worker = batchwright.worker()  # before anything is stored: it tells if the server's key is not there

    async def run(self, known: Batch | None) -> Batch | None:
        """How the batch stands when it has ended or when we were asked to stop; None if it was not made by then."""
        try:
            batch = await self._unless_stopped(self._begun(known))
            if batch is None:
                await self._worker.close()
                return None
            here = Here(self._batchwright.runtime) if self._batchwright.runtime is not None else None
            view = await begin_view(self._batchwright, batch.id, title=self._plan.file.name, sending=here)
        except BaseException:
            await self._worker.close()
            raise
        with self._shown(view) as on_look:
            return await work(self._batchwright, self._worker, view, on_look, self._when_asked)

    def interrupted(self, family: list[Batch]) -> int:
        code = 128 + self._signal
        if self._json:
            print_json(_summary(self._batchwright, self._plan, family, code))
        elif not family:
            typer.echo("stopped before anything was sent", err=True)
        else:
            batch = family[0]
            typer.echo(f"stopped at {progress(batch) or 'the beginning'}; what is answered is kept", err=True)
            typer.echo(f"  go on:    the same command again\n  give up:  batchwright batch cancel {batch.id}", err=True)
        return code

    async def _begun(self, known: Batch | None) -> Batch:
        """The batch of before if it is open, else a new one."""
        if known is not None and not known.has_ended:
            await free_the_dead(self._batchwright, self._plan.queue)
            return known
        is_retry = known is not None and known.in_progress_at is not None and self._plan.retry_failed
        with tracing.span("create-batch") as creating:
            new = await self._retry(known) if known is not None and is_retry else await self._new()
            batch, _ = await create(
                self._batchwright.batches,
                self._batchwright.catalog,
                replace(new, traceparent=creating.traceparent),
                must_be_served=False,
                instead_of=known.id if known is not None else None,
            )
        return batch

    async def _new(self) -> NewBatch:
        batchwright, plan = self._batchwright, self._plan
        limit = batchwright.settings.batches.file_bytes_max
        file = await store_input(
            batchwright.files, plan.file, tenant=DEFAULT_TENANT, bytes_max=limit, sha256=plan.sha256
        )
        return plan.batch(file.id)

    async def _retry(self, known: Batch) -> NewBatch:
        await check_retry(self._batchwright.files, known, None)
        return replace(retry_of(known, None, **self._plan.own()), completion_window=self._plan.window)

    @contextlib.contextmanager
    def _shown(self, view: View) -> Iterator[OnLook]:
        if self._json:
            yield lambda _: None
            return
        batch = view.batch
        what = f"going on with {batch.id} at {progress(batch)}" if batch.done else batch.id
        typer.echo(f"{what} on {self._plan.server}; Ctrl-C stops, the same command goes on")
        if sys.stdout.isatty():
            with live(view, console()) as draw:
                yield draw
        else:
            yield Lines()

    def _when_asked(self, stop: Callable[[], object]) -> None:
        def asked(number: int) -> None:
            self._signal = number
            stop()

        self._stop.on_ask = asked
        if self._stop.asked.is_set():
            stop()

    async def _unless_stopped(self, beginning: Coroutine[Any, Any, Batch]) -> Batch | None:
        task = asyncio.create_task(beginning)
        self._when_asked(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            if not self._stop.asked.is_set():
                raise
            return None


# The end ----------------------------------------------------------------------------------------------------------


async def _conclude(batchwright: AsyncBatchwright, plan: Plan, batch: Batch, json: bool, *, was_done: bool) -> int:
    """Write the files of an ended batch, and say how it went."""
    family = await lineage(batchwright.batches, batch)
    code = exit_code(batch)
    if batch.manifest is not None:
        await _write(batchwright, plan, family)
    if json:
        print_json(_summary(batchwright, plan, family, code))
    else:
        _print_end(batchwright, plan, family, was_done=was_done)
    return code


async def _write(batchwright: AsyncBatchwright, plan: Plan, family: list[Batch]) -> None:
    """The answers of all that was asked for this file; an error file that is there from before must not lie."""
    try:
        with plan.output.writing() as stream:
            async for chunk in answers(batchwright.files, family):
                await asyncio.to_thread(stream.write, chunk)
        if family[0].error_file_id is not None or plan.errors.is_there:
            with plan.errors.writing() as stream:
                await copy_file(batchwright.files, family[0].error_file_id, stream)
    except InvalidInput as error:
        raise InvalidInput(f"{error}; every answer is kept: mend that, and start the same command again") from error


def _summary(batchwright: AsyncBatchwright, plan: Plan, family: list[Batch], code: int) -> dict[str, Any]:
    batch = family[0] if family else None
    has_files = batch is not None and batch.manifest is not None
    return {
        "id": batch.id if batch else None,
        "status": batch.status if batch else None,
        "exit_code": code,
        "total": family[-1].total if family else 0,
        "completed": sum(one.completed for one in family),
        "failed": failed(batch) if batch else 0,
        "error_summary": error_groups(batch) if batch else [],
        "problems": problems(batch) if batch else [],
        "input_tokens": sum(one.input_tokens for one in family),
        "cached_tokens": sum(one.cached_tokens for one in family),
        "output_tokens": sum(one.output_tokens for one in family),
        "cost": _cost(batchwright, family),
        "output": plan.output.name if has_files else None,
        "errors": plan.errors.name if has_files and batch is not None and batch.error_file_id else None,
    }


def _cost(batchwright: AsyncBatchwright, family: list[Batch]) -> float | None:
    found = [cost(one.usage_by_model, batchwright.settings.batches.prices) for one in family]
    return None if None in found else sum(one or 0.0 for one in found)


def _print_end(batchwright: AsyncBatchwright, plan: Plan, family: list[Batch], *, was_done: bool) -> None:
    batch = family[0]
    if was_done:
        again = "--again asks all of it again" + (", --retry-failed what failed" if failed(batch) else "")
        typer.echo(f"{batch.id} was done already, on {time_text(batch.ended_at)}; {again}")
    _print_verdict(family)
    has_files = batch.manifest is not None
    began, ended = batch.in_progress_at, batch.ended_at
    took = (ended - began).total_seconds() if began and ended else 0.0
    spent = _cost(batchwright, family)
    print_facts(
        [
            ("  output", plan.output if has_files else None),
            ("  errors", plan.errors if has_files and batch.error_file_id else None),
            ("  tokens", tokens_text(*family)),
            ("  cost", money(spent) if spent and has_files else None),
            ("  took", f"{seconds(took)}, {batch.completed / took:,.1f} answers/s" if took else None),
            ("  look", f"batchwright batch show {batch.id}"),
        ]
    )
    print_errors(batch)
    print_problems(problems(batch), (batch.errors or {}).get("total", 0))


def _print_verdict(family: list[Batch]) -> None:
    batch = family[0]
    completed, total = sum(one.completed for one in family), family[-1].total
    sign = "✓" if exit_code(batch) == 0 else "✗"
    words = f"{number(completed)} of {number(total)} lines were answered" if total else "nothing was sent"
    if failed(batch):
        words += f", {number(failed(batch))} failed"
    console().print(Text(f"{sign} {batch.status.value}: {words}", f"bold {COLOURS[batch.status]}"), soft_wrap=True)
