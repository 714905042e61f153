"""Every list of the command line, at five widths, with unusually long values.

`test_every_table_and_every_list_is_drawn_here` finds tables that are missing here.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import types
import typing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from rich.cells import cell_len
from rich.console import Console

import batchwright
from batchwright.access.keys import ApiKey, Scope
from batchwright.batches.commands import check as batch_check
from batchwright.batches.commands import files as batch_files
from batchwright.batches.commands import show as batch_show
from batchwright.batches.commands import watch as batch_watch
from batchwright.batches.plan.estimate import Estimate
from batchwright.batches.store import Batch, Pace
from batchwright.batches.upkeep.collector import Amount, Collected
from batchwright.cli.commands import inbox, keys, pipelines, queues, schedules, simulate, workers
from batchwright.cli.commands import show as job_show
from batchwright.cli.commands import watch as job_watch
from batchwright.engine.jobs import Job, JobEvent
from batchwright.engine.schedules import Schedule
from batchwright.engine.views import InboxGroup, OperationView, Pipeline, QueueView, Step, WaitingOn, WorkerView
from batchwright.inference.spending import Costs, Spent, Sums
from batchwright.ingest.collections import Collection, StoredDocument
from batchwright.ingest.commands import collections, costs
from batchwright.ingest.commands import inbox as ingest_inbox
from batchwright.ingest.commands import items as ingest_items
from batchwright.ingest.commands import show as ingest_show
from batchwright.ingest.commands import watch as ingest_watch
from batchwright.ingest.items import Cause, Item, StepState
from batchwright.ingest.runs import Run
from batchwright.ingest.spaces import Space
from batchwright.providers.commands import providers as provider_list
from batchwright.providers.commands import show as task_show
from batchwright.providers.commands import watch as task_watch
from batchwright.providers.contract import Abilities
from batchwright.providers.jobs import Hold, RemoteJob
from batchwright.providers.tasks import Target, Task
from batchwright.states import BatchStatus, ItemStatus, JobStatus, RunStatus, TaskStatus
from tests.cli.test_commands import TREE

WIDTHS = (60, 80, 100, 120, 200)
THEN = datetime.now(UTC) - timedelta(days=3, minutes=5)
ID = UUID("019a9999-1234-7000-8000-123456789abc")
HEX = "0123456789abcdef0123456789abcdef"
LONG = "shop.orders.reconcile_with_the_payment_provider_of_the_other_continent"
MESSAGE = "handler_error: " + "the payment provider answered with something that nobody understood " * 4
MODEL = "an-organisation-with-a-long-name/a-model-with-a-long-name-2026-11-18-instruct-awq"
MANY = 123_456_789


def filled(kind: Any, **values: Any) -> Any:
    """An object of this class; fields without a given value get one of their type."""
    hints = typing.get_type_hints(kind)
    names = [one.name for one in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(kind._fields)
    return kind(**{name: values[name] if name in values else _value(hints[name]) for name in names})


def _value(hint: Any) -> Any:
    if isinstance(hint, typing.NewType):
        return _value(hint.__supertype__)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return typing.get_args(hint)[0]
    if origin in (typing.Union, types.UnionType):
        return None if type(None) in typing.get_args(hint) else _value(typing.get_args(hint)[0])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint))
    known = {int: MANY, float: 1234.5, str: "text", bool: False, datetime: THEN, UUID: ID, Decimal: Decimal("12.5")}
    if hint in known:
        return known[hint]
    return {} if origin is not None and issubclass(origin, typing.Mapping) else []  # type: ignore[arg-type]


def jobs() -> list[Job]:
    return [
        filled(Job, id=ID, status=JobStatus.CANCELLED, job_type=LONG, tenant=LONG, queue=LONG, created_at=THEN,
               attempts=12, max_attempts=25, progress_current=MANY, progress_total=MANY, message=MESSAGE, error=None),
        filled(Job, id=ID, status=JobStatus.FAILED, job_type="a", tenant="default", queue="default", created_at=THEN,
               attempts=3, max_attempts=3, error={"code": "handler_error", "message": MESSAGE}),
    ]  # fmt: skip


def draw_jobs() -> None:
    waiting = [filled(WaitingOn, reason=reason) for reason in ("exclusive_key", "paused_queue", "no_worker")]
    job_show.print_jobs(jobs(), {ID: waiting})


def draw_events() -> None:
    event = filled(JobEvent, ts=THEN, level="warning", event="job.retry_later", message=MESSAGE, fields={"n": MANY})
    job_show.print_job(jobs()[0], {}, [event], [])


def draw_job_live() -> None:
    event = filled(JobEvent, ts=THEN, level="warning", event="job.retry_later", message=MESSAGE, fields=None)
    job = dataclasses.replace(jobs()[0], status=JobStatus.RUNNING, locked_by="vm:28933:d449f513b397", lease_until=THEN)
    view = job_watch.View(job, children=dict.fromkeys(JobStatus, MANY), events=deque([event]))
    draw_live(lambda _: view)


def draw_batch_live() -> None:
    view = batch_watch.View(batch_show.Seen(batch=a_batch()), {}, title=f"{LONG}.jsonl")
    draw_live(lambda _: view)


def draw_run_live() -> None:
    view = ingest_watch.View(ingest_show.Seen(run=a_run()))
    draw_live(lambda _: view)


def draw_batches() -> None:
    batch = a_batch()
    pace = filled(Pace, rate=1.5, now=datetime.now(UTC))
    batch_show.print_batches([batch_show.Seen(batch=batch, pace=pace)])
    batch_show.print_errors(batch)


def a_batch() -> Batch:
    batch: Batch = filled(
        Batch, id=f"batch_{HEX}", status=BatchStatus.IN_PROGRESS, paused_at=THEN, total=MANY, completed=MANY - 3_000,
        failed=2_345, expired=0, cancelled=0, tenant=LONG, models=[MODEL, MODEL], created_at=THEN, metadata=None,
        in_progress_at=THEN, error_summary={"handler_error": (2_345, LONG)}, usage_by_model={},
    )  # fmt: skip
    return batch


def draw_estimates() -> None:
    batch_check._print_models([filled(Estimate, model=MODEL, cost=123_456.5)])


def draw_collected() -> None:
    heaps = {one.name: Amount(MANY, 10**14) for one in dataclasses.fields(Collected)}
    batch_files._print_collected(Collected(**heaps), dry_run=True)


def draw_inbox() -> None:
    group = filled(InboxGroup, job_type=LONG, code="provider_unavailable_for_too_long", count=MANY, has_more=True)
    inbox._print([dataclasses.replace(group, message=MESSAGE, last_at=THEN)])


def draw_queues() -> None:
    queue = filled(QueueView, name=LONG, due=MANY, scheduled=MANY, has_more=True, oldest_due_seconds=9e6)
    queues._print([dataclasses.replace(queue, paused_at=THEN)])


def draw_workers() -> None:
    host = "batchwright-worker-deployment-7d9f8b6c5d-x2x4q"
    worker = filled(WorkerView, host=host, pid=4_194_304, queues=[LONG, LONG], concurrency=1000, running=1000)
    workers._print_workers([dataclasses.replace(worker, version="1.2.3", heartbeat_at=THEN, started_at=THEN)])


def operation() -> OperationView:
    schema = {"properties": {"order_number": {"type": "string", "description": MESSAGE}}, "required": ["order_number"]}
    found: OperationView = filled(OperationView, name=LONG, description=MESSAGE, payload_schema=schema, defaults={})
    return found


def draw_operations() -> None:
    workers._print_operations([operation()])
    workers._show_operation(operation(), json=False)


def draw_schedules() -> None:
    schedule = filled(
        Schedule, name="nightly-report-of-the-second-warehouse", cron="*/15 2,3,4 1-15 * 1-5", tenant=LONG,
        timezone="America/Argentina/ComodRivadavia", job={"operation": LONG}, next_at=THEN, last_tick_at=THEN,
        paused_at=None, fires=MANY, last_error=MESSAGE,
    )  # fmt: skip
    schedules._print_schedules([schedule])


def draw_keys() -> None:
    key = filled(ApiKey, id=ID, name=LONG, tenant=LONG, scopes=tuple(Scope), hint="bw_abcdef", last_used_at=THEN)
    keys._print([dataclasses.replace(key, expires_at=datetime.now(UTC) + timedelta(days=900), revoked_at=None)])


def draw_pipeline() -> None:
    counts = dict.fromkeys(JobStatus, MANY)
    step = filled(Step, job_type=LONG, counts=counts)
    pipeline = filled(Pipeline, id=ID, status=JobStatus.RUNNING, counts=counts, steps=[step], has_more=False)
    pipelines._print(pipeline, [], {})


def draw_pipeline_live() -> None:
    step = filled(Step, job_type=LONG, counts=(counts := dict.fromkeys(JobStatus, MANY)))
    pipeline = filled(Pipeline, id=ID, status=JobStatus.RUNNING, counts=counts, steps=[step], has_more=False)
    draw_live(lambda width: pipelines._draw(pipeline, width))


def draw_simulated() -> None:
    one = dict.fromkeys(("served", "refused", "prompt_tokens", "completion_tokens", "cached_tokens"), MANY)
    times = {"p95": 1234.5}
    simulate._print_models([(MODEL, {**one, "utilisation": 0.5, "wait_seconds": times, "total_seconds": times})])


def task() -> Task:
    found: Task = filled(
        Task, id=f"task_{HEX}", status=TaskStatus.PARTIAL_COMPLETE, succeeded=MANY, failed=2_345, cost=12_345.678,
        created_at=THEN, ended_at=THEN, tenant=LONG, targets=[Target("azure_openai", MODEL)], provider_state=None,
    )  # fmt: skip
    return found


def remote_jobs() -> list[RemoteJob]:
    job = filled(
        RemoteJob, provider="azure_openai", model=MODEL, phase="submitting", raw_status="VALIDATING_" + LONG,
        total=MANY, succeeded=MANY - 5_000, failed=2_345, cost=12_345.678, external_id=f"batch_{HEX}{HEX}",
        failures=3, due_seconds=119.0, error=None,
    )  # fmt: skip
    return [job]


def draw_tasks() -> None:
    task_show.print_tasks([task()])


def draw_remote_jobs() -> None:
    open_task = dataclasses.replace(task(), status=TaskStatus.IN_PROGRESS, ended_at=None)
    task_show.print_jobs(task_show.Seen(task=open_task, jobs=remote_jobs()))


def draw_task_live() -> None:
    open_task = dataclasses.replace(task(), status=TaskStatus.IN_PROGRESS, ended_at=None)
    view = task_watch.View(task_show.Seen(task=open_task, jobs=remote_jobs()))
    draw_live(lambda _: view)


def draw_providers() -> None:
    can = filled(Abilities, task_types=frozenset({"completion", "transcription"}), can_cancel=True, can_find=True)
    can = dataclasses.replace(can, inputs_max=MANY, requests_max=MANY, request_bytes_max=MANY)
    row = filled(provider_list.Row, name="azure_openai", abilities=can, timeout_hours=72.0, hold=filled(Hold))
    provider_list._print_rows([row])


def draw_runs() -> None:
    ingest_show.print_runs([a_run()])


def a_run() -> Run:
    run: Run = filled(
        Run, id=f"run_{HEX}", status=RunStatus.COMPLETED_WITH_ERRORS, item_count_total=MANY, item_count_done=MANY - 9,
        item_count_unchanged=0, item_count_failed=2_345, spent=Decimal("12345.67"), tenant=LONG, collection=LONG,
    )  # fmt: skip
    return run


def draw_items() -> None:
    item = filled(
        Item, id=f"item_{HEX}", status=ItemStatus.UNCHANGED, retry_count=5, cost=Decimal("12345.67"), name=LONG,
        last_error={"code": "c", "message": MESSAGE},
    )  # fmt: skip
    ingest_items.print_items([item])


def draw_item() -> None:
    step = filled(StepState, step="CONTENT_EXTRACTED", state="done", starts=3, retry_count=2, error_kind="Transient")
    ingest_items._print_steps([step])
    event = filled(JobEvent, ts=THEN, event="retry_scheduled", fields={"step": "CONTENT_EXTRACTED", "seconds": 90.0})
    event = dataclasses.replace(event, model=MODEL, prompt_tokens=MANY, cost=Decimal("12.5"), message=MESSAGE)
    ingest_items._print_events([event])


def draw_causes() -> None:
    cause = Cause(
        "FETCHED/handler_error", "FETCHED", "Transient", "handler_error", MANY, THEN, THEN, [f"item_{HEX}"],
        [LONG, LONG], MESSAGE, [], has_more=True,
    )  # fmt: skip
    ingest_inbox._print([cause], None)


def draw_collections() -> None:
    space = filled(Space, model=MODEL, dimensions=4096)
    collection = filled(Collection, name="papers-of-the-second-institute", tenant=LONG, documents=MANY, chunks=MANY)
    collection = dataclasses.replace(collection, text_bytes=10**14, is_more=True, spaces=[space], updated_at=THEN)
    collections._print_collections([collection])


def draw_documents() -> None:
    document = filled(StoredDocument, id=MANY, chunks=MANY, text_bytes=10**14, name=LONG, source=f"s3://{LONG}")
    collections._print_documents([document])


def draw_costs() -> None:
    sums = filled(Sums, calls=MANY, prompt_tokens=MANY, completion_tokens=MANY, cost=Decimal("12345.67"), unpriced=0)
    spent = filled(Spent, tenant=LONG, model=MODEL, lane="realtime", sums=sums)
    costs._print(filled(Costs, total=sums, parts=[spent, spent], has_more=False))


def draw_live(draw: Callable[[int], Any]) -> None:
    """A live view as a terminal shows it."""
    from batchwright.cli import show

    width = show.terminal_width() or 1000
    Console(width=width, highlight=False).print(draw(width))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A list, the texts that it must show completely at any width, and those that it may cut."""

    draw: Callable[[], None]
    tables: Sequence[str]
    """Functions that lay out a table."""
    whole: Sequence[str]
    commands: Sequence[tuple[str, ...]] = ()
    has_cut: bool = True


UUID_TEXT, NUMBER = str(ID), f"{MANY:,}"
LISTS = {
    "jobs": Drawn(
        draw=draw_jobs, tables=["cli.commands.show:print_jobs"], commands=[("job", "list")],
        whole=[UUID_TEXT, "CANCELLED", "FAILED", "12/25", "3/3", "3 d", f"{MANY}/{MANY}", "handler_error"],
    ),
    "events": Drawn(draw=draw_events, tables=[], whole=["job.retry_later", f"{THEN:%H:%M:%S}"], has_cut=False),
    "job, live": Drawn(
        draw=draw_job_live, tables=["cli.commands.show:event_lines"],
        whole=[UUID_TEXT, "RUNNING", "3 d 0 h", "on vm:28933:d449f513b397", "job.retry_later", f"{MANY} cancelled"],
    ),
    "batch, live": Drawn(
        draw=draw_batch_live, tables=[], has_cut=False,
        whole=["in_progress, paused", "3 d 0 h", f"{MANY - 655:,}/{NUMBER}", "2,345 failed"],
    ),
    "run, live": Drawn(
        draw=draw_run_live, tables=[], has_cut=False,
        whole=[f"run_{HEX}", "COMPLETED_WITH_ERRORS", "3 d 0 h", f"{NUMBER} documents", "2,345 failed"],
    ),
    "batches": Drawn(
        draw=draw_batches, commands=[("batch", "list")],
        tables=["batches.commands.show:print_batches", "batches.commands.show:print_errors"],
        whole=[f"batch_{HEX}", "in_progress, paused", f"{MANY - 655:,}/{NUMBER}", "2,345", "3 d", "handler_error"],
    ),
    "estimates": Drawn(
        draw=draw_estimates, tables=["batches.commands.check:_print_models"], commands=[("batch", "check")],
        whole=[NUMBER, "123.5 MB", "about 120,000,000", "123,456.50"],
    ),
    "collected": Drawn(
        draw=draw_collected, tables=["batches.commands.files:_print_collected"], whole=[NUMBER, "100.0 TB"],
        has_cut=False,
    ),
    "inbox": Drawn(
        draw=draw_inbox, tables=["cli.commands.inbox:_print"], commands=[("inbox",), ("inbox", "list")],
        whole=[f"{MANY}+", LONG, "provider_unavailable_for_too_long", "3 d ago"],
    ),
    "queues": Drawn(
        draw=draw_queues, tables=["cli.commands.queues:_print"], commands=[("queue", "list")], has_cut=False,
        whole=[LONG, f"{MANY}+", "104 d", f"{THEN:%Y-%m-%d %H:%M:%S} UTC"],
    ),
    "workers": Drawn(
        draw=draw_workers, tables=["cli.commands.workers:_print_workers"], commands=[("workers",)],
        whole=["batchwright-worker-deployment-7d9f8b6c5d-x2x4q", "4194304", "1000/1000", "3 d ago", "silent", "1.2.3"],
    ),
    "operations": Drawn(
        draw=draw_operations, commands=[("operations",)],
        tables=["cli.commands.workers:_print_operations", "cli.commands.workers:_print_payload"],
        whole=[LONG, "order_number", "required", str(MANY)],
    ),
    "schedules": Drawn(
        draw=draw_schedules, tables=["cli.commands.schedules:_print_schedules"], commands=[("schedule", "list")],
        whole=[
            "nightly-report-of-the-second-warehouse", "*/15 2,3,4 1-15 * 1-5", "America/Argentina/ComodRivadavia",
            f"{THEN:%Y-%m-%d %H:%M} UTC", str(MANY),
        ],
    ),
    "keys": Drawn(
        draw=draw_keys, tables=["cli.commands.keys:_print"], commands=[("key", "list")],
        whole=[UUID_TEXT, "bw_abcdef…", "live until", f"{THEN:%Y-%m-%d %H:%M} UTC", " ".join(Scope)],
    ),
    "pipeline": Drawn(
        draw=draw_pipeline, tables=["cli.commands.pipelines:_print"], commands=[("pipeline", "show")],
        whole=[UUID_TEXT, str(MANY), "succeeded", "cancelled"], has_cut=False,
    ),
    "pipeline, live": Drawn(
        draw=draw_pipeline_live, tables=["cli.commands.pipelines:_draw"], has_cut=False,
        whole=[UUID_TEXT, str(MANY), "RUNNING", "3 d 0 h"],
    ),
    "simulated": Drawn(
        draw=draw_simulated, tables=["cli.commands.simulate:_print_models"], has_cut=False,
        whole=[MODEL, str(MANY), "100%", "1234.50 s"],
    ),
    "tasks": Drawn(
        draw=draw_tasks, tables=["providers.commands.show:print_tasks"], commands=[("task", "list")],
        whole=[f"task_{HEX}", "PARTIAL_COMPLETE", NUMBER, "2,345", "12,345.68", "3 d"],
    ),
    "remote jobs": Drawn(
        draw=draw_remote_jobs, tables=["providers.commands.show:print_jobs"], commands=[("task", "show")],
        whole=["azure_openai", "submitting", f"{MANY - 2_655:,}/{NUMBER}", "in 1 min", f"batch_{HEX}{HEX}"],
    ),
    "task, live": Drawn(
        draw=draw_task_live, tables=["providers.commands.watch:_jobs"],
        whole=[f"task_{HEX}", "IN_PROGRESS", f"{MANY - 2_655:,}/{NUMBER} 2,345 failed", "polls in 1 min"],
    ),
    "providers": Drawn(
        draw=draw_providers, tables=["providers.commands.providers:_print_rows"], commands=[("providers",)],
        whole=["azure_openai", "held", "72 h", "completion, transcription", "cancel, find"], has_cut=False,
    ),
    "runs": Drawn(
        draw=draw_runs, tables=["ingest.commands.show:print_runs"], commands=[("ingest", "list")],
        whole=[f"run_{HEX}", "COMPLETED_WITH_ERRORS", f"{MANY - 9:,}/{NUMBER}", "2,345", "12,345.67", "3 d"],
    ),
    "items": Drawn(
        draw=draw_items, tables=["ingest.commands.items:print_items"], commands=[("ingest", "items")],
        whole=[f"item_{HEX}", "UNCHANGED", "5", "12,345.67"],
    ),
    "item": Drawn(
        draw=draw_item, tables=["ingest.commands.items:_print_steps", "ingest.commands.items:_print_events"],
        whole=["CONTENT_EXTRACTED", "Transient", "retry_scheduled", "in 1 min 30 s", NUMBER, "12.50"],
    ),
    "causes": Drawn(
        draw=draw_causes, tables=[], commands=[("ingest", "inbox")], whole=[f"{NUMBER}+", "FETCHED/handler_error"],
        has_cut=False,
    ),
    "collections": Drawn(
        draw=draw_collections, tables=["ingest.commands.collections:_print_collections"],
        commands=[("ingest", "collections")], whole=["papers-of-the-second-institute", NUMBER, "100.0 TB", "3 d ago"],
    ),
    "documents": Drawn(
        draw=draw_documents, tables=["ingest.commands.collections:_print_documents"],
        commands=[("ingest", "documents")], whole=[str(MANY), "100.0 TB"],
    ),
    "costs": Drawn(
        draw=draw_costs, tables=["ingest.commands.costs:_print"], commands=[("ingest", "costs")],
        whole=["realtime", NUMBER, "$12,345.67", "total"],
    ),
}  # fmt: skip
NOT_LISTS = {("ingest", "search")}
"""Commands with `--limit` that print passages and no table."""
COPIED = ("batchwright ", "  see:", "  act:", "see them:", "act:  ", "✗ ", "! ", "+  ")
"""Commands that print lines to copy, which the terminal wraps."""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", list(LISTS))
def test_a_list_shows_what_matters_at_any_width(
    name: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = LISTS[name]
    monkeypatch.setattr("batchwright.cli.show.terminal_width", lambda: width)
    monkeypatch.setattr("batchwright.cli.show.console", lambda: Console(highlight=False, width=width))
    for module in (batch_show, job_show, pipelines, provider_list, task_show, workers, ingest_show, ingest_inbox):
        monkeypatch.setattr(module, "console", lambda: Console(highlight=False, width=width))
    drawn.draw()
    lines = capsys.readouterr().out.splitlines()
    tabular = [line for line in lines if not line.startswith(COPIED)]
    assert [line for line in tabular if cell_len(line) > width] == []
    shown, packed = "\n".join(tabular), "".join(line.strip() for line in tabular)
    for text in drawn.whole:
        assert text in (shown if len(text) <= width - 2 else packed), f"{text!r} is not in\n{shown}"
    if width < WIDTHS[-1]:
        assert ("…" in shown.replace("bw_abcdef…", "")) >= (drawn.has_cut and width <= 80)


@pytest.mark.parametrize("name", [name for name in LISTS if not name.endswith("live")])
def test_a_pipe_gets_everything(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    LISTS[name].draw()
    shown = capsys.readouterr().out
    for text in LISTS[name].whole:
        assert text in shown
    assert "…" not in shown.replace("bw_abcdef…", "")


def test_every_table_and_every_list_is_drawn_here() -> None:
    """A new table, or a new command that lists something, must be added to `LISTS`."""
    assert {table for drawn in LISTS.values() for table in drawn.tables} == set(_tables())
    drawn_commands = {words for drawn in LISTS.values() for words in drawn.commands}
    listing = {words for words, command in TREE.items() if _lists_something(words, command)}
    assert listing - NOT_LISTS <= drawn_commands
    assert drawn_commands <= set(TREE)


def _lists_something(words: tuple[str, ...], command: Any) -> bool:
    is_leaf = not hasattr(command, "commands") or words == ("inbox",)
    has_limit = "--limit" in {name for flag in command.params for name in flag.opts}
    return is_leaf and (has_limit or (command.help or "").startswith("List "))


def _tables() -> Iterator[str]:
    """Functions outside of the toolkit that lay out a table."""
    root = Path(batchwright.__file__).parent
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        if module in ("cli.show", "cli.tables"):
            continue
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and _calls_table(function):
                yield f"{module}:{function.name}"


def _calls_table(function: ast.FunctionDef) -> bool:
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(name, ast.Name) and name.id in ("print_table", "table_lines") for name in called)


def test_no_command_lays_out_a_table_by_itself() -> None:
    """Rich's tables shrink all columns equally, which cuts statuses and times."""
    root = Path(batchwright.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "commands" in path.parts[:-1] or path.parent.name == "cli"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Table"
    }
    assert found == set()
