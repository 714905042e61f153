"""The report of the demo's batch: its numbers, whether they add up, and how they are printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchwright.cli.show import number
from batchwright.db.check import Finding, Level
from batchwright.states import BatchStatus

_CHECKSUM_DIGITS = 12
_SAMPLE_CHARACTERS = 420


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of the database, the model server and the files at the end."""

    requests: int
    batch_id: str
    status: BatchStatus
    completed: int
    failed: int
    asked: int
    """Requests that the model server got."""
    asked_distinct: int
    asked_again: int
    answered_again: int
    """How many of those it had answered before. The first answer was lost before it was on disk: it is paid twice."""
    in_flight_max: int
    """Maximum number of requests that a worker has in flight, and so the maximum that its death may repeat."""
    killed_pid: int
    killed_shards: int
    killed_in_flight: int
    answers_adopted: int
    lease_seconds: float
    takeover_seconds: float | None
    """From the kill to the first answer of a later claim of a shard that the worker held; None if there was none."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    input_order_share: float
    """What the same caches would have saved if the requests had been sent in the order of the file."""
    seconds: float
    input_sha256: str
    """Checksum of the file as the demo wrote it, before it was submitted."""
    manifest: dict[str, Any] | None
    findings: Sequence[Finding]
    """Result of reading the files again."""
    samples: Sequence[str]
    saved_share: float = field(init=False)
    problems: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "saved_share", self.cached_tokens / max(1, self.prompt_tokens))
        object.__setattr__(self, "problems", list(self._problems()))

    @property
    def is_right(self) -> bool:
        return not self.problems

    def _problems(self) -> Iterator[str]:
        """Descriptions of all numbers that do not add up."""
        if self.status is not BatchStatus.COMPLETED or self.completed != self.requests or self.failed:
            yield f"the batch is {self.status.value} with {self.completed} of {self.requests} requests answered"
        if self.asked_distinct != self.requests or self.asked != self.requests + self.asked_again:
            yield f"the model server got {self.asked} requests, {self.asked_distinct} of them different"
        if self.asked_again > self.in_flight_max:
            yield f"{self.asked_again} requests were resent; a worker has at most {self.in_flight_max} in flight"
        if self.manifest is None:
            yield "there is no manifest"
            return
        counts = self.manifest["counts"]
        if (counts["total"], counts["completed"]) != (self.requests, self.completed):
            yield f"the manifest counts {counts}"
        if self.manifest["sha256"]["input"] != self.input_sha256:
            yield f"the input had the SHA-256 {self.input_sha256} when it was written"
        yield from (f"{one.name}: {one.text}" for one in self.findings if one.level is not Level.OK)


def print_report(report: Report, out: Console) -> None:
    out.print(_table(report))
    if report.manifest is not None:
        out.print(Text("Manifest, checked against the files", "bold"))
        out.print(_manifest(report.manifest, report.findings))
    if report.samples:
        out.print(Text("The first lines of the output file", "bold"))
    for line in report.samples:
        shown = line if len(line) <= _SAMPLE_CHARACTERS else f"{line[:_SAMPLE_CHARACTERS]}…"
        out.print(Text(shown, "bright_black"), soft_wrap=True)
    for problem in report.problems:
        out.print(Text(f"✗ {problem}", "bold red"), soft_wrap=True)
    if report.is_right:
        out.print(Text("✓ A worker died, and no answer was lost or duplicated.", "bold green"))
    else:
        out.print(Text("✗ The numbers do not add up: this is a bug in Batchwright.", "bold red"))


def _table(report: Report) -> Table:
    table = Table(show_header=False, title="Result", title_justify="left", title_style="bold")
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in _rows(report):
        table.add_row(name, value)
    return table


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "the batch", report.status.value
    yield "requests answered", f"{number(report.completed)} of {number(report.requests)}"
    yield "requests that the simulated server got", number(report.asked)
    yield "resent, because they were in flight when the worker died", number(report.asked_again)
    yield "  of these answered twice: the answer died with the worker", number(report.answered_again)
    yield "answers of the dead worker that were only on the disk, and kept", number(report.answers_adopted)
    if report.takeover_seconds is not None:
        name = f"first answer for a shard of the dead worker (lease {report.lease_seconds:g} s)"
        yield name, f"{report.takeover_seconds:.1f} s after the kill"
    yield "prompt tokens", number(report.prompt_tokens)
    yield "of these from the prefix cache", f"{number(report.cached_tokens)}, {report.saved_share:.0%}"
    yield "the same, if sent in the order of the file", f"{report.input_order_share:.0%}"
    yield "time of the batch", f"{report.seconds:.1f} s"
    yield "throughput", f"{report.requests / report.seconds:.0f} requests/s"


def _manifest(manifest: dict[str, Any], findings: Sequence[Finding]) -> Table:
    total, completed = manifest["lines"], manifest["counts"]["completed"]
    counts = {"input": total, "output": completed, "errors": total - completed}
    grid = Table.grid(padding=(0, 2))
    for finding in findings:
        sign = Text("  ✓", "green") if finding.level is Level.OK else Text("  ✗", "red")
        checksum = manifest["sha256"].get(finding.name)
        if finding.name not in counts:
            grid.add_row(sign, finding.name, finding.text)
        elif checksum is None:
            grid.add_row(sign, finding.name, "none")
        else:
            what = f"{number(counts[finding.name])} lines, sha256 {checksum[:_CHECKSUM_DIGITS]}…"
            grid.add_row(sign, finding.name, what)
    return grid
