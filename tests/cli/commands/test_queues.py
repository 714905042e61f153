"""`batchwright queue …`."""

from __future__ import annotations

import pytest

from batchwright import NewJob
from tests.cli.conftest import SAMPLE, Cli, Inside
from tests.cli.sample import greet
from tests.cli.stage import Stage


def test_queues_are_listed_with_the_number_of_waiting_jobs(inside: Inside, stage: Stage) -> None:
    assert inside("queue", "list") == (0, "", "no queues: a queue exists once it has had a job\n")
    _, running = stage.put(NewJob(greet), NewJob(greet))
    stage.put(NewJob(greet, delay_seconds=60), NewJob(greet, queue="letters", tenant="b"))
    stage.claim(running)
    assert inside("queue", "pause", "letters") == (0, "paused: letters\n", "")
    default, letters = inside.json("queue", "list")
    assert (default["name"], default["due"], default["scheduled"], default["running"]) == ("default", 1, 1, 1)
    assert default["oldest_due_seconds"] >= 0
    assert (letters["name"], letters["due"], default["paused_at"]) == ("letters", 1, None)
    assert letters["paused_at"] is not None
    assert [one["name"] for one in inside.json("queue", "list", "--tenant", "b")] == ["letters"]
    lines = inside("queue", "list")[1].splitlines()
    assert lines[0].split() == ["queue", "due", "scheduled", "running", "oldest", "due", "paused", "since"]
    assert lines[2].split()[:4] == ["letters", "1", "0", "0"]
    assert lines[2].rstrip().endswith("UTC")


def test_pause_and_resume_accept_several_queues_and_name_unknown_ones(inside: Inside, stage: Stage) -> None:
    stage.put(NewJob(greet), NewJob(greet, queue="letters"))
    assert inside.json("queue", "pause", "default", "letters") == {"paused": ["default", "letters"]}
    assert all(one["paused_at"] for one in inside.json("queue", "list"))
    assert inside.json("queue", "resume", "letters") == {"resumed": ["letters"]}
    assert [bool(one["paused_at"]) for one in inside.json("queue", "list")] == [True, False]
    assert inside("queue", "resume", "leters") == (
        1,
        "",
        "error: there is no queue 'leters'; did you mean 'letters'?\n",
    )
    assert inside("queue", "pause")[2] == "error: Missing argument 'NAME...'. See: batchwright queue pause --help\n"


@pytest.mark.thorough
def test_a_worker_takes_jobs_again_from_a_resumed_queue(cli: Cli, publish: None) -> None:
    cli("job", "submit", "sample.greet", "--queue", "letters", "--delay", "3600")
    cli("queue", "pause", "letters")
    with cli.start("worker", SAMPLE) as worker:
        worker.until("runs .*sample.block")
        id = cli("job", "submit", "sample.greet", "--queue", "letters").stdout.strip()
        assert cli.json("job", "show", id)["waiting_on"][0]["reason"] == "paused_queue"
        cli("queue", "resume", "letters")
        cli.begun(id, "job.succeeded")
