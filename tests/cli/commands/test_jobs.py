"""`batchwright job …`, `migrate` and the forms of errors, in real processes."""

from __future__ import annotations

import io
import sys
import uuid

import pytest

from batchwright import NewJob
from batchwright.app import VERSION
from batchwright.cli.commands import jobs
from batchwright.db.database import complete
from batchwright.engine import bulk, views
from batchwright.engine.named_queues import NamedQueues
from tests.cli.conftest import SAMPLE, Cli, Inside
from tests.cli.sample import family, greet
from tests.cli.stage import Stage

pytestmark = pytest.mark.usefixtures("publish")


@pytest.mark.thorough
def test_submit_list_show_and_cancel_tell_one_story(cli: Cli) -> None:
    id = cli("job", "submit", "sample.greet", "--payload", '{"name": "Ada"}', "--queue", "letters").stdout.strip()
    (listed,) = cli.json("job", "list", "--status", "queued", "--queue", "letters")
    assert (listed["id"], listed["payload"]) == (id, {"name": "Ada"})
    assert id in cli("job", "list", "--type", "sample.greet").stdout
    assert cli("job", "cancel", id).stdout == "cancelled 1 job\n"
    shown = cli("job", "show", id).stdout
    assert "CANCELLED" in shown
    assert "job.cancelled" in shown
    assert cli("job", "cancel", id).stdout == "nothing to cancel: already ended\n"


def test_submit_passes_every_option_on(inside: Inside, tmp_path) -> None:
    (tmp_path / "payload.json").write_text('{"name": "Grace"}')
    options = ["--priority", "2", "--max-attempts", "7", "--key", "a", "--key", "b", "--idempotency-key", "once"]
    times = ["--run-after", "2099-01-01T00:00:00+00:00", "--deadline", "2099-01-02T00:00:00+00:00"]
    given = ["job", "submit", "sample.greet", "--payload", "@payload.json", *options, *times]
    id = inside.json(*given)["id"]
    assert inside.json(*given) == {"id": id}
    job = inside.json("job", "show", id)
    assert (job["priority"], job["max_attempts"], job["exclusive_key"]) == (2, 7, '["a","b"]')
    assert (job["run_after"], job["deadline"]) == ("2099-01-01T00:00:00+00:00", "2099-01-02T00:00:00+00:00")
    assert (job["payload"], job["idempotency_key"]) == ({"name": "Grace"}, "once")
    assert [event["event"] for event in job["events"]] == ["job.enqueued"]


def test_submit_reads_the_payload_from_standard_input(cli: Cli) -> None:
    id = cli("job", "submit", "sample.greet", "-p", "-", input='{"name": "Alan"}').stdout.strip()
    assert cli.rows("SELECT payload FROM batchwright.job WHERE id = %s", id) == [({"name": "Alan"},)]


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["submit", "sample.great"], 1, "no worker knows the operation 'sample.great'; did you mean 'sample.greet'?"),
        (["submit", "sample.greet", "-p", "{name: Ada}"], 1, "the payload is not JSON: "),
        (["submit", "sample.greet", "-p", "@nowhere.json"], 1, "the payload cannot be read from nowhere.json: "),
        (["submit", "sample.greet", "-p", '{"name": 7}'], 1, "sample.greet: ['name']: 7 is not of type 'string'"),
        (["submit", "sample.greet", "--run-after", "soon"], 1, "'soon' is not a time; write 2026-"),
        (["submit", "sample.greet", "--deadline", "2099-01-01"], 1, "'2099-01-01' has no time zone; write 2026-"),
        (["submit", "sample.greet", "--priority", "12"], 2, "--priority"),
        (["show", "here"], 1, "'here' is not a job id"),
        (["list", "--status", "LOST"], 2, "LOST"),
        (["submit"], 2, "Missing argument 'TYPE'. See: batchwright job submit --help"),
    ],
)
def test_bad_words_are_answered_in_one_line(inside: Inside, arguments: list[str], code: int, complaint: str) -> None:
    left, out, err = inside("job", *arguments)
    assert (left, out) == (code, "")
    assert err.startswith("error: ")
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", ["show", "watch", "cancel", "recover", "rerun"])
def test_a_job_that_does_not_exist_is_named(inside: Inside, verb: str) -> None:
    id = str(uuid.uuid4())
    assert inside("job", verb, id) == (1, "", f"error: there is no job {id}\n")


def test_recover_and_rerun_say_why_not(cli: Cli, inside: Inside) -> None:
    id = inside("job", "submit", "sample.greet")[1].strip()
    assert "it is QUEUED, not RUNNING" in inside("job", "recover", id)[2]
    assert "only a FAILED or CANCELLED job can be rerun" in inside("job", "rerun", id)[2]
    inside("job", "cancel", id)
    assert inside("job", "rerun", id) == (0, f"job {id} was rerun: QUEUED\n", "")
    cli.rows(
        "UPDATE batchwright.job SET status = 'RUNNING', locked_by = 'gone', locked_at = now(), lease_until = now(), "
        "started_at = now() WHERE id = %s RETURNING id",
        id,
    )
    assert inside.json("job", "recover", id)["status"] == "QUEUED"


@pytest.mark.thorough
def test_wait_and_watch_end_with_the_job(cli: Cli) -> None:
    """One worker for all of it: results, exit codes, and what is printed without a terminal."""
    with cli.start("worker", SAMPLE) as worker:
        worker.until("runs .*sample.block")
        waited = cli("job", "submit", "sample.greet", "-p", '{"name": "Ada"}', "--wait")
        assert waited.stdout.splitlines()[1] == '"hello Ada"'
        failed = cli("job", "submit", "sample.fail", "--wait", code=1)
        assert failed.stderr.endswith("failed: no_paper: the paper is out\n")
        watched = cli("job", "submit", "sample.family", "-p", '{"children": 3}', "--watch").stdout.splitlines()
        assert [line.split()[2] for line in watched if "job." in line] == [
            "job.enqueued",
            "job.started",
            "job.waited",
            "job.joined",
            "job.started",
            "job.succeeded",
        ]
        assert any(line.endswith("3 succeeded") for line in watched)
        assert watched[-1].startswith("SUCCEEDED after ")
        assert watched[-1].endswith(": 3")
        id = cli.json("job", "list", "--status", "FAILED")[0]["id"]
        assert "FAILED after" in cli("job", "watch", id, code=1).stdout
        lines = cli("job", "watch", id, "--json", code=1).stdout.splitlines()
        assert '"job.failed"' in lines[-1]


def test_a_list_and_a_job_say_what_they_wait_for(inside: Inside, stage: Stage) -> None:
    stage.worker()
    holder, id = stage.put(NewJob(greet, exclusive_key="k"), NewJob(greet, exclusive_key="k", delay_seconds=60))
    stage.claim(holder)
    complete(NamedQueues(stage.queue.database).pause("default"))
    line = next(line for line in inside("job", "list")[1].splitlines() if str(id) in line)
    assert line.rstrip().endswith("time, pause, key")
    shown = inside("job", "show", str(id))[1]
    assert "waiting on" in shown
    assert "the queue 'default' is paused" in shown
    assert f'its key ["k"] is held by job {holder} (RUNNING)' in shown
    for job in (inside.json("job", "show", str(id)), inside.json("job", "list", "--status", "queued")[0]):
        assert [one["reason"] for one in job["waiting_on"]] == ["run_after", "paused_queue", "exclusive_key"]
        assert set(job["waiting_on"][0]) == {"reason", "message", "until", "job_id"}
        assert (job["waiting_on"][0]["until"], job["waiting_on"][2]["job_id"]) == (job["run_after"], str(holder))
    assert inside.json("job", "show", str(holder))["waiting_on"] == []


def test_every_filter_of_the_list_is_passed_on(inside: Inside, stage: Stage) -> None:
    (mine,) = stage.failed(1, tenant="b", queue="letters")
    parent, _ = stage.put(NewJob(family, {"children": 1}), NewJob(greet))
    (child,) = stage.hand_over(parent, 1)
    assert len(inside.json("job", "list")) == 4, "of every tenant"

    def listed(*flags: str) -> list[str]:
        return [job["id"] for job in inside.json("job", "list", *flags)]

    for flags in (
        ["--tenant", "b"],
        ["--code", "no_paper"],
        ["--queue", "letters"],
        ["--type", "sample.fail"],
        ["--status", "failed"],
        ["--status", "failed", "--status", "cancelled"],
        ["--pipeline", str(mine)],
        ["--created-before", "2099-01-01T00:00:00+00:00", "--code", "no_paper"],
    ):
        assert listed(*flags) == [str(mine)], flags
    assert listed("--parent", str(parent)) == [str(child)]
    assert listed("--created-after", "2099-01-01T00:00:00+00:00") == []
    assert inside("job", "list", "--tenant", "nobody") == (0, "", "no such jobs\n")


@pytest.mark.parametrize("verb", ["cancel", "rerun"])
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "no jobs are named; write batchwright job {verb} ID, or a filter such as --type NAME or --status STATUS"),
        (["--yes"], "no jobs are named; "),
        (
            ["--type", "sample.greet"],
            "there is no terminal to confirm on; add --yes to {verb} them, or --dry-run to count",
        ),
        ([str(uuid.uuid4()), "--type", "x"], "give job ids or a filter, not both; --dry-run is only for a filter"),
        ([str(uuid.uuid4()), "--dry-run"], "give job ids or a filter, not both; --dry-run is only for a filter"),
    ],
)
def test_many_jobs_are_never_meant_by_mistake(
    inside: Inside, stage: Stage, verb: str, arguments: list[str], complaint: str
) -> None:
    (id,) = stage.put()
    code, out, err = inside("job", verb, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {complaint.format(verb=verb)}")
    assert err.count("\n") == 1
    assert stage.status(id) == "QUEUED"


def test_many_jobs_are_counted_cancelled_and_rerun_by_filter(inside: Inside, stage: Stage) -> None:
    ids = stage.put(*(NewJob(greet, queue="letters") for _ in range(3)))
    (other,) = stage.put()
    given = ["--queue", "letters", "--type", "sample.greet", "--status", "queued", "--tenant", "default"]
    assert inside("job", "cancel", *given, "--dry-run") == (0, "would cancel 3 jobs\n", "")
    assert inside.json("job", "cancel", *given, "--dry-run") == {"dry_run": True, "matched": 3, "changed": 0}
    assert inside("job", "cancel", *given, "--yes", "--reason", "not today") == (0, "cancelled 3 jobs\n", "")
    assert {stage.status(id) for id in ids} == {"CANCELLED"}
    assert complete(stage.queue.get(ids[0])).error == {
        "kind": "cancelled",
        "code": "cancelled",
        "type": "Cancelled",
        "message": "not today",
    }
    assert inside("job", "cancel", *given, "--yes") == (0, "nothing to cancel: no open job matches\n", "")
    again = ["job", "rerun", "--queue", "letters", "--code", "cancelled", "--yes"]
    assert inside.json(*again) == {"dry_run": False, "matched": 3, "changed": 3}
    assert {stage.status(id) for id in ids} == {"QUEUED"} == {stage.status(other)}
    assert "nothing to rerun" in inside(*again)[1]


def test_more_than_one_call_can_change_is_done_with_a_progress_line(
    inside: Inside, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "BULK_MAX", 2)
    ids = stage.put(*(NewJob(greet) for _ in range(5)))
    code, out, err = inside("job", "cancel", "--type", "sample.greet", "--yes")
    assert (code, out) == (0, "cancelled 5 jobs\n")
    assert err.splitlines() == ["cancelled 2 of 5 jobs", "cancelled 4 of 5 jobs"]
    assert {stage.status(id) for id in ids} == {"CANCELLED"}


@pytest.mark.parametrize(("answer", "ended"), [("y\n", "CANCELLED"), ("n\n", "QUEUED"), ("", "QUEUED")])
def test_on_a_terminal_one_is_asked(
    inside: Inside, stage: Stage, monkeypatch: pytest.MonkeyPatch, answer: str, ended: str
) -> None:
    (id,) = stage.put()
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    code, out, err = inside("job", "cancel", "--type", "sample.greet")
    assert "cancel 1 job? [y/N]" in err + out
    assert code == (0 if ended == "CANCELLED" else 130)
    assert stage.status(id) == ended


def test_children_that_only_their_parents_can_bring_back_are_explained(inside: Inside, stage: Stage) -> None:
    (parent,) = stage.put(NewJob(family, {"children": 1}))
    stage.fail(*stage.hand_over(parent, 1))
    said = inside("job", "rerun", "--type", "sample.greet", "--yes")[1]
    assert said.startswith("rerun 0 jobs; 1 left unchanged: children are rerun with their parents")
    assert inside.json("job", "rerun", "--status", "failed", "--yes")["changed"] == 1
    assert stage.status(parent) == "RUNNING"
    assert inside.json("job", "show", str(parent))["children"] == {"QUEUED": 1}


def test_watch_of_a_cancelled_job_leaves_with_3(inside: Inside) -> None:
    id = inside("job", "submit", "sample.greet")[1].strip()
    inside("job", "cancel", id, "--reason", "not today")
    code, out, _ = inside("job", "watch", id)
    assert code == 3
    assert out.splitlines()[-1].endswith("cancelled: not today")


def test_a_database_that_is_not_there_is_one_line_with_a_remedy(cli: Cli) -> None:
    cli.environment["BATCHWRIGHT_DATABASE_URL"] = "postgresql://nobody:secret@127.0.0.1:1/nothing"
    said = cli("job", "list", code=1).stderr
    assert said.startswith("error: ")
    assert said.endswith("start the server, or correct host and port in BATCHWRIGHT_DATABASE_URL\n")
    assert said.count("\n") == 1
    assert "secret" not in said


def test_a_url_that_cannot_be_read_is_not_repeated(inside: Inside) -> None:
    code, out, err = inside("job", "list", "--database-url", "postgres//me:secret@db/shop")
    assert (code, out) == (1, "")
    assert err == (
        "error: the database's URL cannot be read; write it as postgresql://user:password@host:5432/database\n"
    )


def test_the_version_is_printed(inside: Inside) -> None:
    assert inside("--version") == (0, f"batchwright {VERSION}\n", "")


def test_a_list_that_finds_nothing_for_long_says_how_far_it_has_looked(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "_SCAN_MAX", 1)
    monkeypatch.setattr(jobs, "_LOOKS_MAX", 2)
    ids = [inside.json("job", "submit", "sample.greet", "-p", '{"name": "Ada"}')["id"] for _ in range(4)]
    oldest = inside.json("job", "show", ids[0])
    inside("job", "submit", "sample.greet", "-p", '{"name": "Ada"}', "--queue", "rare")
    code, out, err = inside("job", "list", "--queue", "nowhere")
    assert (code, out) == (0, "")
    assert "were searched; search older ones: --created-before 20" in err
    assert inside("job", "list", "--queue", "nowhere", "--created-before", oldest["created_at"])[2] == "no such jobs\n"
