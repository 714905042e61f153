"""The live view of a run, at the widths and heights that terminals have."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from rich.console import Console

from batchwright.ingest.commands import show
from batchwright.ingest.commands.items import print_items
from batchwright.ingest.commands.show import Seen, exit_code, make_funnel, money_text, print_runs
from batchwright.ingest.commands.watch import JsonLines, Lines, Meter, View
from batchwright.ingest.explain import Waits
from batchwright.ingest.items import Cause, Item
from batchwright.ingest.runs import Doubt, Run
from batchwright.states import ItemStatus, RunStatus

NOW = datetime.now(UTC)
ID = f"run_{7:032x}"
STAGES = [
    ["FETCHED"],
    ["CONTENT_EXTRACTED"],
    ["CHUNKED", "EMBEDDED", "ENTITY_EXTRACTED"],
    ["PERSISTED"],
    ["INDEXED"],
]
OPEN, DONE = ItemStatus.OPEN, ItemStatus.DONE
COUNTS = {
    (OPEN, "ENQUEUED"): 600,
    (OPEN, "FETCHED"): 50,
    (OPEN, "ENTITY_EXTRACTED"): 20,
    (DONE, "DONE"): 300,
    (ItemStatus.UNCHANGED, "DONE"): 1000,
    (ItemStatus.FAILED, "FAILED"): 30,
}


def run(**changes: Any) -> Run:
    values: dict[str, Any] = dict.fromkeys(Run.__dataclass_fields__)
    values |= {
        "id": ID,
        "tenant": "default",
        "collection": "papers",
        "status": RunStatus.RUNNING,
        "sources": ["/papers"],
        "config": {"embedding": {"model": "local"}, "entities": {"model": "patterns"}},
        "lane": "auto",
        "job_id": UUID(int=7),
        "spent": Decimal("1.5"),
        "reserved": Decimal("0.02"),
        "has_unknown_cost": False,
        "prompt_tokens": 1_200_000,
        "completion_tokens": 3_000,
        "calls": 420,
        "item_count_total": 2000,
        "item_count_done": 300,
        "item_count_unchanged": 1000,
        "item_count_failed": 30,
        "item_count_cancelled": 0,
        "retired_count": 0,
        "listed_at": NOW,
        "created_at": NOW,
    }
    return Run(**{**values, **changes})


def cause(code: str, count: int) -> Cause:
    message = f"{code} happened, and this message goes on and on, until no terminal in the world has room for it"
    names = ["a folder/with a long name/report.pdf", "b.pdf", "c.pdf"]
    return Cause("CHUNKED:Fatal:" + code, "CHUNKED", "Fatal", code, count, NOW, NOW, ["item_1"], names, message, [])


def full() -> Seen:
    """A run with everything that the view can show."""
    waits = [
        Waits(reason="rate", message="waits for the rate limit: the token limit of this minute is used up", count=200),
        Waits(reason="backoff", message="waits for a retry: retry 2 of 5 after: HTTP 503", count=7, until=NOW),
        Waits(reason="no_worker", message="no live worker runs documents", remedy="start one: batchwright worker"),
        Waits(reason="batch", message="waits for a batch"),
    ]
    estimate = {"cost": {"realtime": {"low": 3.2, "value": 4.1, "high": 5.6}}}
    seen = run(budget=Decimal(5), estimate=estimate)
    causes = [cause(f"cause_{number}", 10) for number in range(5)]
    return Seen(
        run=seen,
        funnel=make_funnel(STAGES, COUNTS),
        waits=waits,
        causes=causes,
        doubt=Doubt(2, Decimal("0.004"), 900),
    )


def draw(view: View, width: int) -> list[str]:
    out = Console(file=io.StringIO(), width=width, highlight=False)
    out.print(view)
    assert isinstance(out.file, io.StringIO)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_fits_a_small_terminal(width: int) -> None:
    view = View(full(), trouble="the database is unavailable: refused")
    lines = draw(view, width)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    assert lines[0].startswith(f"{ID}  RUNNING · ")
    assert any(line.endswith("1,330/2,000 documents") for line in lines[1:3])
    assert any(line.split()[:2] == ["ENQUEUED", "1,000"] for line in lines)
    assert any(line.split()[:3] == ["CHUNKED", "+2", "320"] for line in lines)
    assert any(line.startswith("  spent 1.50 of 5.00 · estimate 4.10 (3.20 to 5.60)") for line in lines)
    assert any("1,200,000 in · 3,000 out · 420 requests" in line for line in lines)
    assert sum(line.startswith("  ✗ 10 at CHUNKED, cause_") for line in lines) == 3
    assert any("200 documents: waits for the rate limit" in line for line in lines)


def test_the_funnel_counts_documents_that_have_reached_a_step_and_that_are_in_it() -> None:
    funnel = {stage.name: (stage.reached, stage.here) for stage in make_funnel(STAGES, COUNTS)}
    assert funnel == {
        "ENQUEUED": (1000, 600),
        "FETCHED": (370, 50),
        "CONTENT_EXTRACTED": (320, 0),
        "CHUNKED +2": (320, 20),
        "PERSISTED": (300, 0),
        "INDEXED": (300, 0),
        "DONE": (300, 0),
    }


def test_the_remaining_time_is_estimated_from_the_rate_of_the_last_minute() -> None:
    clock = iter([0.0, 30.0, 60.0, 90.0, 200.0])
    meter = Meter(lambda: next(clock))
    view = View(Seen(run=run()), meter=meter)
    meter.note(run(item_count_done=0))
    assert meter.per_minute is None
    for done in (100, 200, 300):
        meter.note(run(item_count_done=done))
    assert meter.per_minute == pytest.approx(200.0)
    assert view.pace() == "2,000: 300 done, 1,000 unchanged, 30 failed, 670 open · 200/min · 3 min 21 s left"
    meter.note(run(item_count_done=300))
    assert meter.per_minute is None, "no document has ended for a minute, so nothing is estimated"


def test_nothing_is_estimated_before_the_listing_is_done() -> None:
    view = View(Seen(run=run(listed_at=None, item_count_total=0, item_count_done=0, item_count_unchanged=0, calls=0)))
    assert view.pace() == "listing the sources"
    assert draw(view, 80)[1] == "  listing the sources"


def test_the_end_names_the_commands_that_can_be_run_next() -> None:
    ended = run(status=RunStatus.COMPLETED_WITH_ERRORS, ended_at=NOW, item_count_done=970)
    lines = draw(View(Seen(run=ended, waits=[Waits(reason="rate", message="old")])), 80)
    assert lines[-2:] == [f"  batchwright ingest inbox --run {ID}", '  batchwright ingest search papers "…"']
    assert not any("old" in line for line in lines)
    failed = run(status=RunStatus.FAILED, error={"code": "invalid_sources", "message": "no folder"}, ended_at=NOW)
    assert any("✗ invalid_sources: no folder" in line for line in draw(View(Seen(run=failed)), 80))


def test_costs_are_shown_with_what_is_unknown() -> None:
    free = {"cost": {"realtime": {"low": 0.0, "value": 0.0, "high": 0.0}}}
    assert money_text(run(calls=0)) is None
    assert money_text(run(calls=0, estimate=free)) is None
    assert money_text(run(reserved=Decimal(0))) == "spent 1.50"
    unknown = run(reserved=Decimal(0), has_unknown_cost=True)
    assert money_text(unknown) == "spent 1.50 or more: a price is unknown"
    estimate = {"cost": {"batch": {"low": 1.0, "value": 1.0, "high": 1.0}}}
    batch = run(lane="batch", estimate=estimate, reserved=Decimal("0.52"))
    assert money_text(batch, Doubt(1, Decimal("0.5"), 10)) == (
        "spent 1.50 · estimate 1.00 · reserved 0.0200 · in doubt 0.5000"
    )


def test_without_a_terminal_changes_are_printed_but_not_each_number(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 0.0, 0.5, 1.0, 9.0, 10.0])
    say = Lines(lambda: next(clock))
    view = View(Seen(run=run()))
    for done in (300, 301, 302, 303):
        view.seen = Seen(run=run(item_count_done=done), waits=[Waits(reason="batch", message="waits for a batch")])
        say(view)
    view.seen = Seen(run=run(status=RunStatus.COMPLETED, item_count_done=970, ended_at=NOW))
    say(view)
    said = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert [line.partition(" done")[0] for line in said] == [
        "RUNNING",
        "2,000: 300",
        "waits for a batch",
        "2,000: 303",
        "COMPLETED",
        "2,000: 970",
        f"batchwright ingest inbox --run {ID}",
        'batchwright ingest search papers "…"',
    ]


def test_json_lines_come_only_with_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    say = JsonLines()
    view = View(full())
    say(view)
    say(view)
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["spent"], found["in_doubt"]["calls"], found["item_count_open"]) == (1.5, 2, 670)
    assert found["waiting_on"][0]["reason"] == "rate"
    assert found["failures"][0]["code"] == "cause_0"


@pytest.fixture
def paper(width: int, monkeypatch: pytest.MonkeyPatch) -> Console:
    """Capture output as on a terminal of this width."""
    out = Console(file=io.StringIO(), width=width, highlight=False)
    monkeypatch.setattr(show, "console", lambda: out)
    monkeypatch.setattr("batchwright.cli.show.console", lambda: out)
    monkeypatch.setattr("batchwright.cli.show.terminal_width", lambda: width)
    return out


def printed(paper: Console) -> list[str]:
    assert isinstance(paper.file, io.StringIO)
    return paper.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_of_runs_fits_its_terminal(width: int, paper: Console) -> None:
    runs = [run(), run(status=RunStatus.COMPLETED_WITH_ERRORS, created_at=NOW - timedelta(days=3), spent=Decimal(120))]
    print_runs(runs)
    lines = printed(paper)
    assert max(map(len, lines)) <= width
    assert any(line.startswith(f"{ID}  RUNNING") for line in lines)
    for text in ("age", "3 d", "120.00", "COMPLETED_WITH_ERRORS", "collection"):
        assert any(text in line for line in lines), "nothing is cut"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_of_documents_fits_its_terminal(width: int, paper: Console) -> None:
    values: dict[str, Any] = dict.fromkeys(Item.__dataclass_fields__)
    error = {"code": "extraction_timeout", "message": "extraction took longer than 120 s (seconds)"}
    values |= {"id": f"item_{7:032x}", "name": "a folder/with a long name/report.pdf", "status": ItemStatus.FAILED}
    print_items([Item(**{**values, "retry_count": 5, "cost": Decimal("0.0123"), "last_error": error})])
    lines = printed(paper)
    assert max(map(len, lines)) <= width
    assert any(line.startswith(f"item_{7:032x}  FAILED  ") for line in lines)
    for text in ("0.0123", "a folder/with a", "extraction"):
        assert any(text in line for line in lines), "nothing is cut"


def test_the_exit_code_says_how_a_run_ended() -> None:
    codes = {status: exit_code(run(status=status)) for status in RunStatus}
    ended = (RunStatus.COMPLETED, RunStatus.COMPLETED_WITH_ERRORS, RunStatus.CANCELLED, RunStatus.FAILED)
    assert [codes[status] for status in ended] == [0, 4, 3, 1]


def test_a_command_that_works_on_the_run_itself_does_not_warn_of_missing_workers() -> None:
    view = View(full())
    assert any("no live worker" in line for line in view.troubles())
    view.is_worker = True
    assert not any("no live worker" in line for line in view.troubles())
    assert any("waits for a batch" in line for line in view.troubles())


def test_the_end_says_what_was_skipped_and_what_was_removed() -> None:
    assert View(Seen(run=run())).ending() == []
    skipped = {"total": 3, "counts": {"hidden": 2, "invalid": 1}, "shown": [{"name": "x", "reason": "invalid"}]}
    ended = run(status=RunStatus.COMPLETED, ended_at=NOW, skipped=skipped, retired_count=4, is_complete=True)
    assert View(Seen(run=ended)).ending()[:2] == [
        "removed 4, because their sources are gone",
        "left out 3: 2 hidden, 1 invalid",
    ]
