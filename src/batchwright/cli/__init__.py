"""The command line: thin verbs over the client, the worker and the database's checks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from batchwright.app import VERSION
from batchwright.cli import (
    batch,
    check,
    demo,
    inbox,
    jobs,
    keys,
    migrate,
    pipelines,
    queues,
    schedules,
    serve,
    simulate,
    workers,
)
from batchwright.db.check import explained
from batchwright.errors import BatchwrightError, DatabaseUnavailable, JobCancelled

app = typer.Typer(
    name="batchwright",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("up")(serve.up)
app.command("worker")(serve.worker)
app.command("api")(serve.api)
app.command("migrate")(migrate.migrate)
app.command("check")(check.check)
app.command("demo")(demo.demo)
app.command("simulate")(simulate.simulate)
app.command("operations")(workers.operations)
app.command("workers")(workers.workers)
app.add_typer(batch.app, name="batch")
app.add_typer(jobs.app, name="job")
app.add_typer(pipelines.app, name="pipeline")
app.add_typer(queues.app, name="queue")
app.add_typer(inbox.app, name="inbox")
app.add_typer(keys.app, name="key")
app.add_typer(schedules.app, name="schedule")


@app.callback(invoke_without_command=True)
def batchwright(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Durable batch work for AI, in Python, on PostgreSQL."""
    if version:
        typer.echo(f"batchwright {VERSION}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Errors of ours and of the user's words are one line; anything else is a bug and shows its traceback."""
    try:
        code = app(prog_name="batchwright", standalone_mode=False)
    except DatabaseUnavailable as error:
        code = _complain(str(explained(error)), 1)
    except JobCancelled as error:
        code = _complain(str(error), jobs.CANCELLED)
    except BatchwrightError as error:
        code = _complain(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        # Typer brings its own click or uses the installed one; both mark errors in the command line like this.
        if not hasattr(error, "format_message"):
            raise
        path = getattr(getattr(error, "ctx", None), "command_path", "batchwright")
        code = _complain(f"{error.format_message()} See: {path} --help", getattr(error, "exit_code", 2))
    sys.exit(code if isinstance(code, int) else 0)


def _complain(text: str, code: int) -> int:
    """In one line, unless it shows what to write into a file: that keeps its own lines."""
    if "\n    " not in text:
        text = "; ".join(part.strip() for part in text.splitlines() if part.strip())
    typer.echo(f"error: {text}", err=True)
    return code
