"""`windlass job …`, `migrate` and the forms of errors, in real processes."""

from __future__ import annotations

import uuid

import pytest

from tests.cli.conftest import SAMPLE, Cli, Inside
from windlass.app import VERSION

pytestmark = pytest.mark.usefixtures("publish")


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
    assert cli.rows("SELECT payload FROM windlass.job WHERE id = %s", id) == [({"name": "Alan"},)]


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["submit", "sample.great"], 1, "no worker knows the operation 'sample.great'; did you mean 'sample.greet'?"),
        (["submit", "sample.greet", "-p", "{name: Ada}"], 1, "the payload is not JSON: "),
        (["submit", "sample.greet", "-p", "@nowhere.json"], 1, "the payload cannot be read from nowhere.json: "),
        (["submit", "sample.greet", "-p", '{"name": 7}'], 1, "sample.greet: ['name']: 7 is not of type 'string'"),
        (["submit", "sample.greet", "--run-after", "soon"], 1, "'soon' is no time; write 2026-"),
        (["submit", "sample.greet", "--deadline", "2099-01-01"], 1, "'2099-01-01' has no time zone; write 2026-"),
        (["submit", "sample.greet", "--priority", "12"], 2, "--priority"),
        (["show", "here"], 1, "'here' is no job id"),
        (["list", "--status", "LOST"], 2, "LOST"),
        (["submit"], 2, "Missing argument 'TYPE'. See: windlass job submit --help"),
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
        "UPDATE windlass.job SET status = 'RUNNING', locked_by = 'gone', locked_at = now(), lease_until = now(), "
        "started_at = now() WHERE id = %s RETURNING id",
        id,
    )
    assert inside.json("job", "recover", id)["status"] == "QUEUED"


def test_wait_and_watch_end_with_the_job(cli: Cli) -> None:
    """One worker for all of it: results, exit codes, and what is printed without a terminal."""
    with cli.start("worker", SAMPLE) as worker:
        worker.until("runs sample.block")
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


def test_watch_of_a_cancelled_job_leaves_with_3(inside: Inside) -> None:
    id = inside("job", "submit", "sample.greet")[1].strip()
    inside("job", "cancel", id, "--reason", "not today")
    code, out, _ = inside("job", "watch", id)
    assert code == 3
    assert out.splitlines()[-1].endswith("cancelled: not today")


def test_a_database_that_is_not_there_is_one_line_with_a_remedy(cli: Cli) -> None:
    cli.environment["WINDLASS_DATABASE_URL"] = "postgresql://nobody:secret@127.0.0.1:1/nothing"
    said = cli("job", "list", code=1).stderr
    assert said.startswith("error: ")
    assert said.endswith("start the server, or correct host and port in WINDLASS_DATABASE_URL\n")
    assert said.count("\n") == 1
    assert "secret" not in said


def test_a_url_that_cannot_be_read_is_not_repeated(inside: Inside) -> None:
    code, out, err = inside("job", "list", "--database-url", "postgres//me:secret@db/shop")
    assert (code, out) == (1, "")
    assert err == (
        "error: the database's URL cannot be read; write it as postgresql://user:password@host:5432/database\n"
    )


COMMANDS = ["up", "worker", "migrate", "check", "demo", "job"]
VERBS = ["submit", "list", "show", "watch", "cancel", "recover", "rerun"]


@pytest.mark.parametrize("words", [[], *([one] for one in COMMANDS), *(["job", one] for one in VERBS)])
def test_every_command_has_help_and_every_flag_says_what_it_does(inside: Inside, words: list[str]) -> None:
    from typer.main import get_command

    from windlass.cli import app

    command = get_command(app)
    for word in words:
        command = command.commands[word]
    code, out, _ = inside(*words, "--help")
    assert code == 0
    assert command.help
    assert command.help.split()[0] in out
    for flag in command.params:
        assert getattr(flag, "help", None) or getattr(flag, "hidden", False), f"{words}: {flag.name} has no help"


def test_the_version_is_printed(inside: Inside) -> None:
    assert inside("--version") == (0, f"windlass {VERSION}\n", "")
