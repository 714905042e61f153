"""`batchwright task …`: submit, watch and cancel work at outside providers, and fetch its results."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from batchwright.cli.flags import (
    Config,
    DatabaseUrl,
    Force,
    Json,
    OfTenant,
    OutputFile,
    on_part,
    open_part,
    run,
)
from batchwright.cli.paging import read_pages
from batchwright.cli.show import compact, print_json, size
from batchwright.cli.stop import end_if_nobody_reads
from batchwright.cli.targets import STANDARD_OUTPUT, open_target
from batchwright.errors import Conflict
from batchwright.files.part import FilesPart
from batchwright.providers.commands.show import Seen, as_json, exit_code, look_at, print_task, print_tasks
from batchwright.providers.commands.submit import submit
from batchwright.providers.commands.watch import watch as watch_task
from batchwright.providers.part import ProvidersPart
from batchwright.providers.tasks import Task
from batchwright.states import TaskStatus

_LIST_PAGE = 100

TaskId = Annotated[str, typer.Argument(metavar="ID", help="The task's id.", show_default=False)]
OfTaskStatus = Annotated[
    list[TaskStatus] | None,
    typer.Option("--status", case_sensitive=False, help="Only tasks with this status; may be repeated."),
]

app = typer.Typer(no_args_is_help=True)
app.command("submit")(submit)


@app.command("list")
def list_(
    status: OfTaskStatus = None,
    tenant: OfTenant = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of tasks to show.")] = 50,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List tasks, newest first."""

    async def go() -> list[Task]:
        async with open_part(ProvidersPart, database_url, config) as part:
            return await _fetch_newest(part, tenant, status, limit)

    tasks = run(go())
    if json:
        print_json([_without_jobs(task) for task in tasks])
    elif tasks:
        print_tasks(tasks)
    else:
        typer.echo("no such tasks", err=True)


@app.command()
def show(id: TaskId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Show a task: its jobs at providers, their status, what failed and why, and what it cost."""

    async def go() -> Seen:
        async with open_part(ProvidersPart, database_url, config) as part:
            return await look_at(part, await part.tasks.get(id, tenant=None))

    seen = run(go())
    if json:
        print_json(as_json(seen))
    else:
        print_task(seen)


@app.command()
def watch(id: TaskId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Show a task live until it ends, with a line for each job at a provider.

    The exit code is 0 if every result is good, 4 if some are not, 3 if the task was cancelled, and 1 if it failed.
    Without a terminal, changes are printed as lines. Watching does not poll the provider more often.
    """

    async def go() -> int:
        async with open_part(ProvidersPart, database_url, config) as part:
            return exit_code(await watch_task(part, id, json=json))

    raise typer.Exit(run(go()))


@app.command()
def cancel(id: TaskId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Cancel a task and, where the provider allows it, its jobs. Finished results are kept."""

    async def go() -> Task:
        async with open_part(ProvidersPart, database_url, config) as part:
            task = await part.tasks.cancel(id, tenant=None)
            part.core.doorbell.ring([task.queue])
            return task

    task = run(go())
    if json:
        print_json(_without_jobs(task))
    elif task.has_ended:
        typer.echo(f"task {task.id} is {task.status.value}")
    else:
        typer.echo(f"task {task.id} is being cancelled; see: batchwright task watch {task.id}")


@app.command()
def result(
    id: TaskId,
    output: OutputFile = STANDARD_OUTPUT,
    force: Force = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Write the merged result of an ended task: JSON for a transcription, JSON lines for a completion.

    An existing file is only overwritten with --force. With --json the command also counts what it wrote, on standard
    error unless --output names a file.
    """
    target = open_target("--output", output)
    if not force:
        target.refuse_to_overwrite("--output")

    async def go(part: ProvidersPart) -> tuple[Task, int]:
        from batchwright.files.local import copy_file

        task = await part.tasks.get(id, tenant=None)
        if not task.has_ended:
            raise Conflict(f"the task {id} is {task.status.value}, and has no result yet; see: task watch {id}")
        if task.result_file_id is None:
            raise Conflict(f"the task {id} is {task.status.value}, and has no result; see: batchwright task show {id}")
        files = part.core.part(FilesPart).files
        with target.replace() as stream:
            await copy_file(files, task.result_file_id, stream)
        return task, (await files.get(task.result_file_id, tenant=None)).bytes

    def tell(found: tuple[Task, int]) -> int:
        task, written = found
        counts = {"id": task.id, "bytes": written, "succeeded": task.succeeded, "failed": task.failed}
        if json and target.stream is None:
            print_json(counts)
        elif json:
            typer.echo(compact(counts), err=True)
        elif target.stream is None:
            typer.echo(f"wrote {size(written)} to {target}", err=True)
        return 0

    with end_if_nobody_reads():
        on_part(ProvidersPart, go, tell, database_url, config)


# ------------------------------------------------------------------------------------------------------------------


async def _fetch_newest(
    part: ProvidersPart, tenant: str | None, statuses: list[TaskStatus] | None, limit: int
) -> list[Task]:
    return await read_pages(
        lambda last, n: part.tasks.list(tenant, after=last.id if last else None, limit=n, statuses=statuses),
        limit,
        page=_LIST_PAGE,
    )


def _without_jobs(task: Task) -> dict[str, Any]:
    shown = as_json(Seen(task=task))
    del shown["jobs"], shown["waiting_on"]
    return shown
