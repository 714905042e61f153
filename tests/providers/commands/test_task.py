"""`batchwright task …` with simulated providers and a real worker."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.providers.commands.conftest import Shell
from tests.support import sparsely

URL = "https://audio.example.com/call.wav"
SPEECH = {"azure": URL, "aws": "call.wav", "google": "call.wav", "sarvam": "call.wav"}
COMPLETIONS = ("anthropic", "azure_openai", "gemini", "groq", "mistral", "openai", "together", "vertex")


def nothing_was_made(shell: Shell) -> None:
    assert [shell.count(table) for table in ("task", "provider_job", "job", "file")] == [0, 0, 0, 0]
    assert shell.jobs() == []


# submit, watch and result -----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.usefixtures("worker")
def test_every_simulated_provider_returns_a_result(shell: Shell) -> None:
    audio, requests = shell.write("call.wav"), shell.write_chat("saw", "plane")
    speech = dict(SPEECH)
    if importlib.util.find_spec("aiobotocore") is None:
        del speech["aws"]
    ids = {name: shell("task", "submit", where, "--provider", name).strip() for name, where in speech.items()}
    for name in COMPLETIONS:
        ids[name] = shell("task", "submit", requests, "--model", f"{name}/any-model").strip()
    for name, id in ids.items():
        assert "COMPLETED" in shell("task", "watch", id), name
    assert audio in shell("task", "show", ids["sarvam"])
    asked = shell.simulator.stats()["requests"]
    assert {name: asked[f"{name}.create"] for name in ids} == dict.fromkeys(ids, 1), "one paid job each"
    (line, _) = shell("task", "result", ids["anthropic"]).splitlines()
    assert json.loads(line)["custom_id"] == "line-0"


@pytest.mark.usefixtures("worker")
def test_a_task_with_a_bad_input_is_partially_completed_and_says_so(shell: Shell) -> None:
    names = [shell.write(name) for name in ("one.wav", "two__fail_400__.wav", "three.wav")]
    said = shell("task", "submit", *names, "--provider", "sarvam", "--language", "en-IN", "--wait", code=4)
    id, *lines = said.splitlines()
    assert any("PARTIAL_COMPLETE" in line for line in lines)
    assert any(line.endswith("2 good, 1 failed") for line in lines)
    assert lines[-1].endswith(f"batchwright task result {id}")
    shown = shell("task", "show", id)
    assert "3: one.wav, two__fail_400__.wav, three.wav" in shown
    assert '{"language":"en-IN"}' in shown
    assert "✗ two__fail_400__.wav: " in shown
    shell("task", "watch", id, code=4)
    (listed,) = shell.json("task", "list", "--status", "partial_complete")
    assert (listed["id"], listed["succeeded"], listed["failed"]) == (id, 2, 1)
    assert shell.json("task", "list", "--status", "failed") == []


@pytest.mark.thorough
@pytest.mark.usefixtures("worker")
def test_a_result_is_written_to_a_file_that_is_only_overwritten_by_force(shell: Shell) -> None:
    requests = shell.write_chat("saw")
    models = ["--model", "openai/gpt-5-mini", "--model", "anthropic/claude-haiku-4-5"]
    id = shell("task", "submit", requests, *models, "--wait").splitlines()[0]
    printed = shell("task", "result", id)
    assert len(printed.splitlines()) == 2, "a line for each model"
    code, out, err = shell.run("task", "result", id, "-o", "out.jsonl")
    assert (code, out) == (0, "")
    assert err.startswith("wrote ")
    assert err.endswith("out.jsonl\n")
    assert (shell.folder / "out.jsonl").read_text() == printed
    assert "--force" in shell.refused("task", "result", id, "-o", "out.jsonl")
    counts = {"id": id, "bytes": len(printed), "succeeded": 2, "failed": 0}
    assert shell.json("task", "result", id, "-o", "out.jsonl", "--force") == counts
    code, out, err = shell.run("task", "result", id, "--json")
    assert (code, out, json.loads(err)) == (0, printed, counts)
    assert (shell.folder / "out.jsonl").read_text() == printed


@pytest.mark.thorough
@pytest.mark.usefixtures("worker")
def test_watch_as_json_prints_an_object_for_each_change(shell: Shell) -> None:
    shell.write("call.wav")
    said = shell("task", "submit", "call.wav", "--provider", "sarvam", "--wait", "--json")
    seen = [json.loads(line) for line in said.splitlines()]
    assert seen[-1]["status"] == "COMPLETED"
    assert [job["phase"] for job in seen[-1]["jobs"]] == ["ended"]
    assert seen[-1]["jobs"][0]["provider"] == "sarvam"
    assert len(set(said.splitlines())) == len(seen)
    shown = shell.json("task", "show", seen[-1]["id"])
    assert shown == seen[-1]


def test_a_task_that_no_worker_runs_says_so_and_has_no_result_yet(shell: Shell) -> None:
    code, out, err = shell.run("task", "submit", URL, "--provider", "azure", "--metadata", "project=x")
    assert code == 0
    assert "no live worker runs tasks" in err
    id = out.strip()
    assert "no result yet" in shell.refused("task", "result", id)
    assert "waiting on" in shell("task", "show", id)
    assert shell.json("task", "show", id)["metadata"] == {"project": "x"}
    assert shell.json("task", "cancel", id)["cancel_requested_at"] is not None
    assert f"task {id} is being cancelled" in shell("task", "cancel", id)


@pytest.mark.thorough
def test_a_task_is_cancelled_at_its_provider(open_shell: Callable[..., Shell]) -> None:
    shell = open_shell("--queue-seconds", "0", "--run-seconds", "3600")
    with shell.cli.start("worker"):
        id = shell("task", "submit", shell.write_chat("saw"), "--model", "openai/gpt-5-mini").strip()
        shell.cli.until("SELECT FROM batchwright.provider_job WHERE phase = 'submitted'")
        shell("task", "cancel", id)
        # The simulated provider takes some seconds to cancel a job.
        shell.simulator.call("POST", "/simulator/clock", {"advance": 60})
        assert "CANCELLED" in shell("task", "watch", id, code=3)
    assert "batch_cancelled" in shell("task", "result", id)
    assert "is CANCELLED" in shell("task", "cancel", id)


@pytest.mark.thorough
def test_a_refused_credential_holds_the_provider_and_its_tasks(open_shell: Callable[..., Shell]) -> None:
    shell = open_shell("--queue-seconds", "0", "--run-seconds", "0", SIMULATED_PROVIDER_KEY="wrong")
    shell.write("call.wav")
    with shell.cli.start("worker"):
        id = shell("task", "submit", "call.wav", "--provider", "sarvam").strip()
        shell.cli.until("SELECT FROM batchwright.task WHERE waiting_message IS NOT NULL")
    (waits, *_) = shell.json("task", "show", id)["waiting_on"]
    assert "sarvam" in waits.lower()
    held = {one["name"]: one["held"] for one in shell.json("providers")}
    assert held["sarvam"] is not None
    assert held["azure"] is None
    assert "✗ sarvam: held: " in shell("providers")
    assert shell.jobs() == []


@pytest.mark.thorough
def test_a_task_says_which_call_fails(open_shell: Callable[..., Shell]) -> None:
    shell = open_shell("--fault", "503:route=openai.upload:message=the stairs are swept")
    id = shell("task", "submit", shell.write_chat("saw"), "--model", "openai/gpt-5-mini").strip()
    with shell.cli.start("worker"):
        shell.cli.until("SELECT FROM batchwright.provider_job WHERE failures > 0")
    assert "the stairs are swept" in shell("task", "show", id)
    (job,) = shell.json("task", "show", id)["jobs"]
    assert "the stairs are swept" in job["call_error"]


@pytest.mark.thorough
def test_a_task_says_why_its_inputs_cannot_be_read(shell: Shell) -> None:
    id = shell("task", "submit", "https://nowhere.invalid/a.jsonl", "--model", "openai/gpt-5-mini").strip()
    with shell.cli.start("worker"):
        shell.cli.until("SELECT FROM batchwright.job WHERE message IS NOT NULL")
    assert "nowhere.invalid" in shell("task", "show", id)


# Inputs -----------------------------------------------------------------------------------------------------------


def test_the_type_follows_from_the_name_of_the_first_input(shell: Shell) -> None:
    requests = shell.write_chat("saw")
    found = shell.json("task", "submit", requests, "--model", "openai/m", "--dry-run")
    assert (found["task_type"], found["inputs"]) == ("completion", ["requests.jsonl"])
    assert shell.json("task", "submit", URL, "--provider", "azure", "--dry-run")["task_type"] == "transcription"
    shell.run("task", "submit", requests, "--model", "openai/m")
    ((file_id,),) = shell.cli.rows("SELECT id FROM batchwright.file")
    assert shell.json("task", "submit", file_id, "--model", "openai/m", "--dry-run")["task_type"] == "completion"


def test_a_dry_run_stores_and_creates_nothing(shell: Shell) -> None:
    shell.write("call.wav")
    flags = ["--option", "diarization=true", "--option", "speakers_max=2", "--timeout", "90m"]
    said = shell("task", "submit", "call.wav", URL, "nonsense://x", "--provider", "sarvam", *flags, "--dry-run")
    assert said.splitlines() == [
        "would create a transcription for sarvam/saaras:v3",
        "  inputs    2: call.wav, call.wav",
        "  left out  nonsense://x",
        "  gives up  after 1 h 30 min",
    ]
    nothing_was_made(shell)


def test_lines_that_a_provider_cannot_take_are_named_before_the_file_is_stored(shell: Shell) -> None:
    name = shell.write("bad.jsonl", b'{"custom_id": "a"}\nnonsense\n')
    for flags in ([], ["--dry-run"]):
        said = shell.refused("task", "submit", name, "--model", "openai/m", *flags)
        assert "line 1" in said
        assert "line 2" in said
    nothing_was_made(shell)


def test_unusable_inputs_are_left_out_and_named(shell: Shell) -> None:
    shell.write("notes.txt")
    code, _, err = shell.run("task", "submit", URL, "ftp://example.com/x.wav", "notes.txt", "--provider", "azure")
    assert code == 0
    assert "left out, because it cannot be used: ftp://example.com/x.wav\n" in err
    assert "left out, because it cannot be used: notes.txt\n" in err


def test_the_same_key_and_file_are_the_same_task(shell: Shell) -> None:
    shell.write("call.wav")
    command = ["task", "submit", "call.wav", "--provider", "sarvam", "--idempotency-key", "monday"]
    assert shell(*command) == shell(*command)
    assert (shell.count("task"), shell.count("file")) == (1, 1)
    shell.write("call.wav", b"other")
    assert "used before with another body" in shell.refused(*command)
    assert shell.count("file") == 1


def test_signatures_of_urls_are_not_shown(shell: Shell) -> None:
    _, out, _ = shell.run("task", "submit", f"{URL}?sig=secret", "--provider", "azure")
    shown = json.dumps(shell.json("task", "show", out.strip())) + shell("task", "show", out.strip())
    assert "call.wav" in shown
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    sparsely(
        [
            ([URL, "--provider", "azur"], "there is no provider 'azur'; did you mean 'azure'?"),
            ([URL, "--provider", "openai"], "support tasks of the type transcription; use aws, azure, google, sarvam"),
            ([URL], "set the provider of this task; use one of: aws, azure, google, sarvam"),
            ([URL, "--provider", "azure", "--type", "song"], "there is no task type 'song'; use one of: transcription"),
            (["ftp://example.com/x.wav", "--provider", "azure"], "it must begin with https://"),
            (["https://", "--provider", "azure"], "none of the inputs can be used: https://"),
            (["https:/example.com/x.wav", "--provider", "azure"], "there is no file 'https:/example.com/x.wav' here"),
            (["", "--provider", "azure"], "cannot be read"),
            (["missing.wav", "--provider", "sarvam"], "there is no file 'missing.wav' here"),
            (["here.wav", "missing.wav", "--provider", "sarvam"], "there is no file 'missing.wav' here"),
            (["here.wav", "--provider", "azure"], "used: here.wav: 'here.wav' is stored where Azure cannot fetch it"),
            (["empty.wav", "--provider", "sarvam"], "used: empty.wav: 'empty.wav' is empty"),
            (["file-0123", "--provider", "sarvam"], "there is no file 'file-0123'"),
            (["-", "--provider", "sarvam"], "there is no file '-' here"),
            (["here.wav", "--provider", "sarvam", "--option", "languag=en"], "the option 'languag' is unknown"),
            (
                ["here.wav", "--provider", "sarvam", "--option", "diarization=maybe"],
                "diarization must be true or false",
            ),
            (["here.wav", "--provider", "sarvam", "--option", "x"], "--option 'x' is not NAME=VALUE"),
            (["here.wav", "--provider", "sarvam", "--metadata", "x"], "--metadata 'x' is not NAME=VALUE"),
            (["here.wav", "--provider", "sarvam", "--metadata", f"x={'y' * 600}"], "a value at most 512"),
            (["here.wav", "--provider", "sarvam", "--timeout-hours", "0"], "--timeout-hours 0 is out of range"),
            (["here.wav", "--provider", "sarvam", "--timeout-hours", "721"], "--timeout-hours 721 is out of range"),
            (["here.wav", "--provider", "sarvam", "--timeout", "31d"], "--timeout 31d is out of range: use 1s to 30d"),
            (["here.jsonl", "--provider", "openai"], "a completion needs at least one model"),
            (["here.jsonl", "--model", "gpt"], "the model 'gpt' has no provider"),
            (["here.jsonl", "here.jsonl", "--model", "openai/m"], "a completion has one input"),
        ],
        4,
    ),
)
def test_a_mistake_is_refused_in_one_line_and_nothing_is_created(
    shell: Shell, arguments: list[str], words: str
) -> None:
    shell.write("here.wav")
    shell.write("empty.wav", b"")
    shell.write_chat("saw", name="here.jsonl")
    assert words in shell.refused("task", "submit", *arguments)
    nothing_was_made(shell)


def test_no_input_at_all_is_an_error_of_the_command_line(shell: Shell) -> None:
    assert "Missing argument 'INPUT...'" in shell.refused("task", "submit", "--provider", "azure", code=2)


def test_a_missing_credential_is_named_by_its_variable(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIMULATED_PROVIDER_KEY")
    said = shell.refused("task", "submit", URL, "--provider", "azure")
    assert said.rstrip().endswith("the environment variable SIMULATED_PROVIDER_KEY, which is not set")
    nothing_was_made(shell)


@pytest.mark.parametrize("verb", ["show", "watch", "cancel", "result"])
def test_a_task_that_is_not_there_is_an_error(shell: Shell, verb: str) -> None:
    assert shell.refused("task", verb, "task_0") == "error: there is no task 'task_0'\n"


def test_a_list_without_tasks_is_empty(shell: Shell, tmp_path: Path) -> None:
    assert shell.json("task", "list") == []
    assert shell.run("task", "list") == (0, "", "no such tasks\n")
