"""The live view of a task, at the widths that terminals have."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from rich.console import Console

from batchwright.providers.commands.show import Seen, exit_code
from batchwright.providers.commands.watch import Lines, View
from batchwright.providers.jobs import RemoteJob
from batchwright.providers.tasks import Target, Task
from batchwright.states import TaskStatus

NOW = datetime.now(UTC)
ID = f"task_{7:032x}"


def task(**changes: Any) -> Task:
    values: dict[str, Any] = dict.fromkeys(Task.__dataclass_fields__)
    values |= {
        "id": ID,
        "tenant": "default",
        "status": TaskStatus.IN_PROGRESS,
        "task_type": "completion",
        "targets": [Target("openai", "gpt-5-mini")],
        "inputs": [],
        "invalid_urls": [],
        "job_id": UUID(int=7),
        "succeeded": 0,
        "failed": 0,
        "created_at": NOW,
        "deadline_at": NOW + timedelta(hours=26),
    }
    return Task(**{**values, **changes})


def job(number: int = 0, **changes: Any) -> RemoteJob:
    values: dict[str, Any] = dict.fromkeys(RemoteJob.__dataclass_fields__)
    values |= {
        "key": f"bw-{number}",
        "number": number,
        "provider": "openai",
        "model": "gpt-5-mini",
        "phase": "submitted",
        "raw_status": "in_progress",
        "failures": 0,
        "due_seconds": 80.0,
        "created_at": NOW,
    }
    return RemoteJob(**{**values, **changes})


def draw(seen: Seen, width: int) -> list[str]:
    out = Console(file=io.StringIO(), width=width, highlight=False)
    out.print(View(seen))
    assert isinstance(out.file, io.StringIO)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_every_job_is_shown_with_its_phase_and_its_numbers(width: int) -> None:
    jobs = [
        job(total=1_000, succeeded=998, failed=2, cost=0.0123),
        job(1, provider="vertex", model="gemini-2.5-flash-lite", raw_status="JOB_STATE_RUNNING"),
        job(2, provider="anthropic", model="claude-haiku-4-5", phase="planned", raw_status=None, due_seconds=-1.0),
    ]
    lines = draw(Seen(task=task(), jobs=jobs), width)
    assert lines[0].startswith(f"{ID}  IN_PROGRESS · ")
    first, second, third = (line for line in lines[1:] if not line.startswith("    "))
    for text in ("openai/gpt-5-mini", "submitted", "1,000/1,000 2 failed", "0.0123"):
        assert text in first
    assert second.startswith("  vertex/")
    assert "submitted" in second
    assert "planned" in third
    assert sum("polls now" in line for line in lines) == 1, "nothing is cut"
    assert sum("JOB_STATE_RUNNING" in line for line in lines) == 1
    assert max(map(len, lines)) <= width


def test_errors_and_their_remedies_are_shown_below_the_jobs() -> None:
    broken = job(phase="ended", error={"code": "invalid_file", "message": "line 3 is no JSON"})
    lines = draw(Seen(task=task(cancel_note="azure cannot cancel"), jobs=[broken], waiting=["no worker"]), 80)
    assert lines[2:] == ["  openai/gpt-5-mini: invalid_file: line 3 is no JSON", "  azure cannot cancel", "  no worker"]
    ended = task(status=TaskStatus.COMPLETED, succeeded=3, cost=1.5, result_file_id="file-1", ended_at=NOW)
    assert draw(Seen(task=ended), 80)[1:] == [
        "  3 good, 0 failed · cost 1.50",
        f"  batchwright task result {ID}",
    ]


def test_of_many_jobs_only_the_first_open_ones_are_shown() -> None:
    jobs = [job(number, phase="ended" if number < 30 else "submitted") for number in range(40)]
    lines = draw(Seen(task=task(), jobs=jobs), 80)
    assert sum("submitted" in line for line in lines) == 10
    assert lines[-1] == "  … and 20 more"


def test_without_a_terminal_each_change_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say = Lines()
    view = View(Seen(task=task(), jobs=[job(total=2, succeeded=0)]))
    say(view)
    say(view)
    view.seen = Seen(task=view.task, jobs=[replace(view.seen.jobs[0], succeeded=1, due_seconds=3.0)])
    say(view)
    said = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "IN_PROGRESS",
        "openai/gpt-5-mini submitted in_progress 0/2",
        "openai/gpt-5-mini submitted in_progress 1/2",
    ]


def test_the_exit_code_says_how_a_task_ended() -> None:
    codes = {status: exit_code(task(status=status)) for status in TaskStatus}
    assert [codes[status] for status in (TaskStatus.COMPLETED, TaskStatus.PARTIAL_COMPLETE)] == [0, 4]
    assert [codes[status] for status in (TaskStatus.CANCELLED, TaskStatus.FAILED)] == [3, 1]
