"""`batchwright schedule …`, on a real database and with a real worker."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import pytest

from tests.cli.conftest import SAMPLE, Cli, Inside

pytestmark = pytest.mark.usefixtures("publish")

DAILY = ["schedule", "create", "daily", "--cron", "0 6 * * *", "--type", "sample.greet"]


def test_create_list_show_pause_resume_run_and_delete_agree(inside: Inside) -> None:
    options = ["--timezone", "Europe/Berlin", "--payload", '{"name": "Ada"}', "--missed", "all"]
    code, out, err = inside(*DAILY, *options)
    assert (code, err) == (0, "")
    assert out.startswith("schedule daily was saved; next: ")
    assert "06:00 CE" in out
    listed = inside("schedule", "list")[1].splitlines()
    assert listed[0].split() == ["name", "next", "fires", "cron", "timezone", "type"]
    assert listed[1].split()[0] == "daily"
    assert listed[1].split()[-7:-1] == ["0", "6", "*", "*", "*", "Europe/Berlin"]
    shown = inside("schedule", "show", "daily")[1]
    assert "0 6 * * *, Europe/Berlin" in shown
    assert '{"name":"Ada"}' in shown
    assert shown.count("06:00 CE") == 5
    assert inside("schedule", "pause", "daily") == (0, "schedule daily is paused\n", "")
    assert "paused" in inside("schedule", "list")[1]
    assert inside("schedule", "resume", "daily")[1].startswith("schedule daily was resumed; next: ")
    id = inside("schedule", "run", "daily")[1].strip()
    assert inside.json("job", "show", id)["payload"] == {"name": "Ada"}
    assert f"last job      {id}" in inside("schedule", "show", "daily")[1]
    assert inside("schedule", "delete", "daily") == (0, "deleted schedule daily\n", "")
    assert inside("schedule", "list") == (0, "", "no schedules\n")


def test_create_passes_every_option_on_and_every_command_prints_json(inside: Inside) -> None:
    options = ["--missed", "skip", "--tick-field", "name", "--queue", "letters", "--priority", "2", "--deadline", "60"]
    keys = ["--key", "a", "--key", "b", "--on-held", "reject", "--max-attempts", "7", "--tenant", "them"]
    made = inside.json(*DAILY, *options, *keys)
    assert (made["tenant"], made["missed"], made["tick_field"]) == ("them", "skip", "name")
    assert made["job"] == {
        "operation": "sample.greet",
        "payload": {},
        "queue": "letters",
        "priority": 2,
        "max_attempts": 7,
        "exclusive_key": ["a", "b"],
        "on_held": "reject",
        "deadline_seconds": 60.0,
    }
    them = ["daily", "--tenant", "them"]
    assert inside.json("schedule", "list", "--tenant", "us") == []
    assert inside.json("schedule", "list") == inside.json("schedule", "list", "--tenant", "them") == [made]
    shown = inside.json("schedule", "show", *them)
    assert shown.pop("upcoming")[0] == made["next_at"]
    assert shown == made
    assert inside.json("schedule", "pause", *them)["paused_at"] is not None
    assert inside.json("schedule", "resume", *them)["paused_at"] is None
    job = inside.json("schedule", "run", *them)["id"]
    code, _, err = inside("schedule", "run", *them)
    assert (code, err.count("\n")) == (1, 1)
    assert f'error: the key ["a","b"] is held by job {job}' in err
    assert inside.json("schedule", "delete", *them)["last_job_id"] == job


def test_create_again_is_refused_and_with_replace_changes_the_schedule(inside: Inside) -> None:
    first = inside.json(*DAILY)
    assert inside(*DAILY) == (1, "", "error: a schedule 'daily' exists already; delete it, or replace it\n")
    again = inside.json(*DAILY, "--cron", "30 7 * * *", "--replace")
    assert (again["id"], again["cron"]) == (first["id"], "30 7 * * *")


def test_preview_needs_no_database(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_DATABASE_URL", "postgresql://127.0.0.1:1/nothing")
    code, out, err = inside("schedule", "preview", "0 12 * * *", "--timezone", "Asia/Tokyo", "-n", "3")
    assert (code, err) == (0, "")
    assert [line.endswith("12:00 JST)") and " 03:00 UTC  (" in line for line in out.splitlines()] == [True] * 3
    ticks = [datetime.fromisoformat(tick) for tick in inside.json("schedule", "preview", "*/5 * * * *")["ticks"]]
    assert timedelta() < ticks[0] - datetime.now(UTC) <= timedelta(minutes=5)
    assert {later - tick for tick, later in itertools.pairwise(ticks)} == {timedelta(minutes=5)}
    assert len(ticks) == 5


BAD_WORDS = [
    (["preview", "61 * * * *"], 1, "the minute '61' is not possible; use 0 to 59"),
    (["preview", "* * * * *", "--timezone", "Europe/Brelin"], 1, "did you mean 'Europe/Berlin'?"),
    (["create", "x", "--cron", "* * * * *", "--type", "sample.great"], 1, "did you mean 'sample.greet'?"),
    (["create", "x", "--cron", "* * * * *", "--type", "sample.greet", "-p", '{"name": 7}'], 1, "['name']: 7 is"),
    (["create", "x", "--cron", "* * * * *"], 2, "--type"),
    (["create", "x", "--cron", "* * * * *", "--type", "y", "--missed", "some"], 2, "--missed"),
    (["show", "nightly"], 1, "there is no schedule 'nightly'"),
    (["pause", "nightly"], 1, "there is no schedule 'nightly'"),
    (["list", "--tenant", "us", "--after", "a/b"], 1, "'a/b' is not a schedule name"),
    (["list", "--after", "a"], 1, "--after needs --tenant"),
    (["preview", "* * * * *", "--timezone", "localtime"], 1, "'localtime' differs from machine to machine; name"),
    (
        ["create", "x", "--cron", "* * * * *", "--type", "y", "--deadline", "soon"],
        1,
        "--deadline 'soon' is not a duration",
    ),
]


def test_a_mistake_is_refused_in_one_line(inside: Inside) -> None:
    for arguments, code, complaint in BAD_WORDS:
        left, out, err = inside("schedule", *arguments)
        assert (left, out) == (code, "")
        assert err.startswith("error: ")
        assert complaint in err
        assert err.count("\n") == 1


@pytest.mark.thorough
def test_a_worker_fires_what_is_due(cli: Cli) -> None:
    cli("schedule", "create", "often", "--cron", "* * * * *", "--type", "sample.greet", "-p", '{"name": "Ada"}')
    cli.rows("UPDATE batchwright.schedule SET next_at = date_trunc('minute', now()) RETURNING next_at")
    with cli.start("worker", SAMPLE):
        (row,) = cli.until("SELECT result FROM batchwright.job WHERE status = 'SUCCEEDED'")
    assert row == ("hello Ada",)
    assert cli.json("schedule", "show", "often")["last_error"] is None


def test_every_command_has_help_and_every_flag_says_what_it_does(inside: Inside) -> None:
    from typer.main import get_command

    from batchwright.commands import app

    group = get_command(app).commands["schedule"].load()
    assert set(group.commands) == {"create", "list", "show", "pause", "resume", "delete", "run", "preview"}
    for words, command in [([], group), *(([verb], command) for verb, command in group.commands.items())]:
        code, out, _ = inside("schedule", *words, "--help")
        assert code == 0
        assert command.help
        assert command.help.split()[0] in out
        for flag in command.params:
            assert getattr(flag, "help", None), f"{words}: {flag.name} has no help"
