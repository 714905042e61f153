"""`batchwright demo`: a real batch, a killed worker, and a check that nothing was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from batchwright.cli.flags import Json, run
from batchwright.cli.show import console, print_json
from batchwright.errors import InvalidInput
from batchwright.telemetry.logs import configure_logs

if TYPE_CHECKING:
    from batchwright.demo.documents import DocumentReport
    from batchwright.demo.pipeline import Tally
    from batchwright.demo.report import Report

_REQUESTS = 3_000
_CHILDREN = 200
_REPORTS = 60


def demo(
    requests: Annotated[
        int | None,
        typer.Option(min=300, max=50_000, help=f"Number of requests; by default {_REQUESTS:,}.", show_default=False),
    ] = None,
    pipeline: Annotated[bool, typer.Option("--pipeline", help="Run a pipeline of jobs instead of a batch.")] = False,
    children: Annotated[
        int | None,
        typer.Option(
            min=20,
            max=10_000,
            help=f"Number of child jobs of the pipeline; by default {_CHILDREN}.",
            show_default=False,
        ),
    ] = None,
    documents: Annotated[
        bool,
        typer.Option("--documents", help="Process a folder of documents and search it instead."),
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the dashboard running until Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """Run a batch of requests to three models, kill one of its workers, and show that nothing is lost.

    The model server is simulated: no model runs, and it costs nothing. With --documents, a small model in the worker
    computes the embeddings, without a network. The exit code is 1 if the numbers do not add up.

    The demo has its own database and files, in a temporary folder that it removes at the end. While the demo runs, its
    dashboard is at the printed address.
    """
    if children is not None and not pipeline:
        raise InvalidInput("--children is for the pipeline; write --pipeline too, or --requests for a larger batch")
    if documents and (pipeline or requests is not None):
        raise InvalidInput("--documents is a separate demo; leave --pipeline and --requests out")
    if requests is not None and pipeline:
        raise InvalidInput("--requests is for the batch; leave --pipeline out, or write --children for more jobs")
    if keep and json:
        raise InvalidInput("--keep prints the address of the dashboard for people; leave --json out")
    configure_logs("ERROR", "text")
    out = Console(quiet=True) if json else console()
    ended = run(_run_documents(out, keep) if documents else _run(requests, pipeline, children, out, keep))
    if json:
        print_json(ended)
    if not ended.is_right:
        raise typer.Exit(1)


async def _run_documents(out: Console, keep: bool) -> DocumentReport:
    from batchwright.demo.documents import run_documents

    return await run_documents(_REPORTS, out, keep=keep)


async def _run(requests: int | None, pipeline: bool, children: int | None, out: Console, keep: bool) -> Report | Tally:
    from batchwright.demo.batch import run_batch  # imported here, because `--help` does not need it
    from batchwright.demo.pipeline import run_pipeline

    if pipeline:
        return await run_pipeline(children or _CHILDREN, out, keep=keep)
    return await run_batch(requests or _REQUESTS, out, keep=keep)
