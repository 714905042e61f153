"""`batchwright batch run`: a whole batch in one command, killed and interrupted and resumed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from batchwright.batches.commands import watch
from batchwright.batches.local import LocalRun
from batchwright.simulator import Remote, running_process
from tests.batches.commands.cases import MIXED, ids, read, write
from tests.batches.stage import request
from tests.cli.conftest import SECONDS_MAX, Cli, Inside, Running
from tests.examples.test_docs import example, shell
from tests.support import sparsely
from tests.telemetry.test_tracing import Collector, collector, environment, traced

__all__ = ["collector", "environment", "traced"]
KEY = "BATCHWRIGHT_TEST_KEY"
IN_FLIGHT = 8


@pytest.fixture(scope="module")
def model_server() -> Iterator[Remote]:
    """A model that answers at once, and one that takes a tenth of a second for a token."""
    with running_process("--model", "small:instant", "--model", "large:instant", "--model", "slow:instant") as found:
        found.change("slow", decode_rate=10.0, decode_rate_total=10_000.0, max_running=1000)
        yield found


@pytest.fixture
def simulator(model_server: Remote) -> Remote:
    model_server.put_faults([])
    model_server.reset()
    return model_server


@pytest.fixture
def folder(inside: Inside, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "data"
    found.mkdir()
    settings = {
        "BATCHWRIGHT_DATABASE_FOLDER": str(found),
        "BATCHWRIGHT_BATCHES_CHECKPOINT_SECONDS": "0.1",
        "BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_MAX_RETRIES": "0",
        "BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL": "http://127.0.0.1:9",
        "BATCHWRIGHT_WORKER_STOP_GRACE_SECONDS": "8",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    cli.environment |= settings
    return found


def slow(n: int) -> list[dict[str, Any]]:
    return [request(f"r{number}", model="slow", max_tokens=1) for number in range(n)]


def command(simulator: Remote, *more: str) -> list[str]:
    return ["batch", "run", "in.jsonl", "--url", simulator.url, *more]


@contextlib.contextmanager
def begun(cli: Cli, arguments: Sequence[str], done: int) -> Iterator[Running]:
    """A run that has this many answers, and continues."""
    with cli.start(*arguments) as running:
        cli.until("SELECT FROM batchwright.batch WHERE completed >= %s", done)
        yield running


def read_id(cli: Cli) -> str:
    ((id,),) = cli.rows("SELECT id FROM batchwright.batch")
    return str(id)


# From the beginning to the end ------------------------------------------------------------------------------------


def test_one_command_runs_a_file_and_leaves_its_answers_in_order(
    inside: Inside, cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    lines = [request(f"r{n}", model="small" if n % 3 else "large") for n in range(50)]
    write(tmp_path / "in.jsonl", lines)
    code, out, err = inside(*command(simulator))
    assert (code, err) == (0, "")
    assert "✓ completed: 50 of 50 lines were answered" in out
    assert ids(read(tmp_path / "in.out.jsonl")) == [f"r{n}" for n in range(50)]
    assert not (tmp_path / "in.errors.jsonl").exists()
    assert simulator.stats()["received"] == 50


def test_one_file_may_mix_the_endpoints_of_its_lines(
    inside: Inside, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    """vLLM's own batch files do so; this server answers each endpoint in vLLM's format."""
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "embed": ("/v1/embeddings", {"input": ["a", "b"]}),
        "moderate": ("/v1/moderations", {"input": "fine"}),
        "rerank": ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}),
        "rerank-2": ("/rerank", {"query": "q", "documents": ["a", "b"]}),
        "score": ("/v1/score", {"text_1": "q", "text_2": ["a", "b"]}),
        "score-2": ("/score", {"queries": "q", "documents": ["a", "b"]}),
    }
    lines = [
        {"custom_id": id, "method": "POST", "url": url, "body": {"model": "small", **body}}
        for id, (url, body) in bodies.items()
    ]
    write(tmp_path / "in.jsonl", [request("chat"), *lines])
    found = inside.json(*command(simulator))
    assert (found["exit_code"], found["completed"], found["failed"]) == (0, 7, 0)
    answers = {line["custom_id"]: line["response"]["body"] for line in read(tmp_path / "in.out.jsonl")}
    assert list(answers) == ["chat", *bodies]
    assert answers["chat"]["choices"][0]["message"]["content"]
    assert [one["object"] for one in answers["embed"]["data"]] == ["embedding", "embedding"]
    assert answers["moderate"]["results"][0]["flagged"] is False
    assert len(answers["rerank"]["results"]) == len(answers["rerank-2"]["results"]) == 2
    assert answers["score"]["data"] == answers["score-2"]["data"]
    told = sum(answer.get("usage", {}).get("prompt_tokens", 0) for answer in answers.values())
    assert (found["input_tokens"], found["output_tokens"]) == (told, 4)
    write(tmp_path / "in.jsonl", [request("chat"), {**lines[0], "url": "/v1/audio/speech"}, *lines[1:]])
    code, out, _ = inside(*command(simulator, "--force"))
    assert code == 1
    assert "'/v1/audio/speech' is not supported in batches: it answers with audio" in " ".join(out.split())


@pytest.mark.thorough
def test_headers_of_the_command_line_go_with_each_request_and_are_not_stored(
    inside: Inside, cli: Cli, simulator: Remote, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_TEST_FAULT", "418:code=teapot")
    write(tmp_path / "in.jsonl")
    headers = ["--header", "X-Simulator-Fault: env:BATCHWRIGHT_TEST_FAULT", "--header", "x-team: Zebra-4711"]
    code, out, err = inside(*command(simulator, *headers))
    assert (code, err) == (4, "")
    assert [line["response"]["status_code"] for line in read(tmp_path / "in.errors.jsonl")] == [418] * 4
    assert "Zebra" not in out + str(cli.rows("SELECT b::text FROM batchwright.batch b"))
    code, _, err = inside(*command(simulator, "--header", "x-team Zebra-4711"))
    assert (code, "write it like --header 'x-team: search'" in " ".join(err.split())) == (1, True)
    code, _, err = inside(*command(simulator, "--header", "Host: Zebra-4711"))
    assert (code, "headers has host, which is set" in " ".join(err.split()), "Zebra" in err) == (1, True, False)


def test_nothing_but_the_batch_is_left_behind(
    inside: Inside, cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl")
    found = inside.json(*command(simulator, "-o", "answers.jsonl"))
    assert (found["status"], found["exit_code"], found["completed"]) == ("completed", 0, 4)
    assert (found["output"], found["errors"]) == (str(tmp_path / "answers.jsonl"), None)
    ((queue,),) = cli.rows("SELECT queue FROM batchwright.batch")
    assert queue.startswith("~run-")
    assert cli.rows("SELECT FROM batchwright.queue") == []
    assert cli.rows("SELECT FROM batchwright.worker") == []
    assert [path.name for path in (folder / "work").glob("*.lock")] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "data", "in.jsonl"]


def test_failed_lines_have_a_file_of_their_own_and_an_exit_code(
    inside: Inside, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", MIXED)
    code, out, _ = inside(*command(simulator, "--errors", "failures.jsonl"))
    assert code == 4
    assert f"! completed, 1 of 3 failed; see {tmp_path / 'failures.jsonl'}; retry with the same command and" in out
    assert ids(read(tmp_path / "in.out.jsonl")) == ["good", "also good"]
    assert ids(read(tmp_path / "failures.jsonl")) == ["bad"]
    assert out.splitlines()[-2].split() == ["1", "odd", "bad"]
    assert out.splitlines()[-1].startswith("odd: ")


@pytest.mark.thorough
def test_if_answers_cannot_be_written_they_are_kept_and_the_error_says_so(
    cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", slow(20))
    target = tmp_path / "results"
    target.mkdir()
    arguments = command(simulator, "-o", "results/out.jsonl")
    with begun(cli, [*arguments, "--max-in-flight", "2"], 2) as run:
        target.rmdir()
        run.until("out.jsonl cannot be written: No such file or directory; every answer is kept: correct that, and")
        assert run.ended() == 1
    target.mkdir()
    cli(*arguments)
    assert len(read(target / "out.jsonl")) == 20
    assert simulator.stats()["received"] == 20


@pytest.mark.thorough
def test_a_run_is_one_trace(inside: Inside, simulator: Remote, folder: Path, tmp_path: Path, traced: Collector) -> None:
    write(tmp_path / "in.jsonl")
    assert inside(*command(simulator))[0] == 0
    made = traced.named("create-batch")
    runs = [span for span in traced.spans if span.name == "process-batch"]
    assert len(runs) == 2
    assert {(span.trace_id, span.parent) for span in runs} == {(made.trace_id, made.id)}


def test_failed_lines_can_be_resent_and_the_answers_are_merged(
    inside: Inside, cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", [request(f"r{n}") for n in range(20)])
    simulator.put_faults(["500:match=Say r3", "500:match=Say r17"])
    assert inside(*command(simulator))[0] == 4
    assert ids(read(tmp_path / "in.errors.jsonl")) == ["r3", "r17"]
    simulator.put_faults(["500:match=Say r17"])
    assert inside(*command(simulator, "--retry-failed"))[0] == 4
    assert ids(read(tmp_path / "in.errors.jsonl")) == ["r17"]
    simulator.put_faults([])
    found = inside.json(*command(simulator, "--retry-failed"))
    assert (found["total"], found["completed"], found["failed"]) == (20, 20, 0)
    assert ids(read(tmp_path / "in.out.jsonl")) == [f"r{n}" for n in range(20)]
    assert read(tmp_path / "in.errors.jsonl") == []
    assert simulator.stats()["received"] == 20 + 2 + 1
    code, out, _ = inside(*command(simulator, "--retry-failed"))
    assert code == 0
    assert simulator.stats()["received"] == 23
    (tokens,) = [line for line in out.splitlines() if line.startswith("  tokens")]
    assert found["input_tokens"] == sum(n for (n,) in cli.rows("SELECT input_tokens FROM batchwright.batch"))
    assert f"{found['input_tokens']:,} in" in tokens
    assert f"{found['output_tokens']:,} out" in tokens


@pytest.mark.thorough
def test_an_interrupted_retry_counts_the_lines_answered_before(
    inside: Inside, cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl")
    simulator.put_faults(["500:match=Say r2."])
    before = orjson.loads(inside(*command(simulator, "--json"))[1])
    assert (before["completed"], before["failed"]) == (3, 1)
    simulator.put_faults(["503"])
    arguments = [sys.executable, "-P", "-m", "batchwright", *command(simulator, "--retry-failed", "--json")]
    with subprocess.Popen(arguments, cwd=tmp_path, env=cli.environment, stdout=subprocess.PIPE) as retry:
        try:
            cli.until("SELECT FROM batchwright.batch WHERE status = 'in_progress'")
            retry.send_signal(signal.SIGINT)
            found = orjson.loads(retry.communicate(timeout=SECONDS_MAX)[0])
        finally:
            retry.kill()
    assert (found["exit_code"], found["total"], found["completed"]) == (130, 4, 3)
    assert (found["input_tokens"], found["output_tokens"]) == (before["input_tokens"], before["output_tokens"])


def test_an_error_names_the_bad_line_and_the_corrected_file_runs(
    inside: Inside, cli: Cli, simulator: Remote, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in.jsonl")
    with monkeypatch.context() as strict:
        strict.setenv("BATCHWRIGHT_BATCHES_REQUESTS_MAX", "3")
        code, out, _ = inside(*command(simulator))
    assert code == 1
    assert "✗ failed: nothing was sent" in out
    assert "✗ too_many_tasks: The batch has more than the 3 requests maximum." in out
    assert not (tmp_path / "in.out.jsonl").exists()
    assert inside(*command(simulator))[0] == 0
    assert sorted(cli.rows("SELECT status::text FROM batchwright.batch")) == [("completed",), ("failed",)]


def test_a_limit_holds_for_all_models_together(inside: Inside, simulator: Remote, folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", slow(30))
    assert inside(*command(simulator, "--max-in-flight", "3"))[0] == 0
    assert simulator.stats()["in_flight_max"] == 3


def test_the_key_of_the_server_is_read_from_the_environment(
    inside: Inside, cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in.jsonl")
    with running_process(api_key="secret") as locked:
        arguments = command(locked, "--api-key-env", KEY)
        code, out, err = inside(*arguments)
        assert (code, out) == (1, "")
        assert err == f"error: the gateway's key is the environment variable {KEY}, which is not set\n"
        assert cli.rows("SELECT FROM batchwright.file") == []
        monkeypatch.setenv(KEY, "secret")
        assert inside(*arguments)[0] == 0


# A slow or failing server -----------------------------------------------------------------------------------------


def test_a_timeout_can_be_given_and_is_named_with_its_setting(
    inside: Inside, simulator: Remote, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment variable applies to --url, too, although no url is configured."""
    monkeypatch.delenv("BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL")
    monkeypatch.setenv("BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_REQUEST_TIMEOUT", "400ms")
    simulator.put_faults(["hang"])
    write(tmp_path / "in.jsonl")
    for more, limit in (([], "0.4"), (["--timeout", "500ms", "--again"], "0.5")):
        code, out, err = inside(*command(simulator, *more))
        words = f"the server did not answer within {limit} s, the request_timeout"
        assert (code, err) == (4, "")
        assert "! completed, 4 of 4 failed; see " in out
        assert out.splitlines()[-1] == f"request_timeout: {words}"
        assert {line["error"]["message"] for line in read(tmp_path / "in.errors.jsonl")} == {words}
    code, _, err = inside(*command(simulator, "--timeout", "soon"))
    assert (code, err) == (1, "error: --timeout 'soon' is not a duration: write 90s, 5m, 1h or 2d\n")


def test_a_run_without_answers_says_so_until_they_come(
    inside: Inside, simulator: Remote, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MAX_RETRIES": "100", "INITIAL_BACKOFF": "100ms", "MAX_BACKOFF": "100ms"}.items():
        monkeypatch.setenv(f"BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_{name}", value)
    monkeypatch.setattr("batchwright.batches.commands.watch.STALLED_SECONDS", 0.1)
    say, said = watch._say, []

    def hear(view: watch.View, text: str) -> None:
        said.append(text)
        if "timed out" in text:
            simulator.put_faults([])
        say(view, text)

    monkeypatch.setattr("batchwright.batches.commands.watch._say", hear)
    simulator.put_faults(["hang"])
    write(tmp_path / "in.jsonl")
    code, out, _ = inside(*command(simulator, "--timeout", "300ms"))
    assert (code, "4 of 4 lines were answered" in out) == (0, True)
    (silence, *_) = [text for text in said if "timed out" in text]
    pattern = r"no answer for \d s; \d+ timed out \(the server did not answer within 0.3 s, the request_timeout\)"
    assert re.fullmatch(pattern, silence)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("401:message=bring a key", "it wants a key. Put the key into an environment variable"),
        ("404:message=nothing here", "--url is the address of the server"),
        ("not_json", "it is a web site or a proxy"),
    ],
)
def test_a_common_mistake_is_named_with_the_words_of_the_server(
    inside: Inside, simulator: Remote, folder: Path, tmp_path: Path, fault: str, words: str
) -> None:
    simulator.put_faults([fault])
    write(tmp_path / "in.jsonl")
    code, out, _ = inside(*command(simulator))
    assert code == 4
    assert words in out


@pytest.mark.thorough
def test_a_server_that_speaks_no_tls_is_named_while_it_is_waited_for(
    cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl")
    url = simulator.url.replace("http:", "https:")
    with cli.start("batch", "run", "in.jsonl", "--url", url, "-o", "-", "--errors", "e.jsonl") as run:
        run.until(f"{url}: the server could not be reached: it does not speak TLS; if it is a plain http server, ")
        run.signal(signal.SIGINT)
        assert run.ended() == 130
        run.until(r"resume:  batchwright batch run --resume batch_\w+\n           or the same command again")


# Running it again -------------------------------------------------------------------------------------------------


def test_a_finished_run_writes_its_output_again_without_sending_requests(
    inside: Inside, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl")
    assert inside(*command(simulator))[0] == 0
    written = (tmp_path / "in.out.jsonl").read_bytes()
    (tmp_path / "in.out.jsonl").unlink()
    code, out, _ = inside(*command(simulator, "--endpoint", "/v1/chat/completions"))
    assert code == 0
    assert "was done already, on " in out
    assert "--again sends all of it again" in out
    assert (tmp_path / "in.out.jsonl").read_bytes() == written
    assert simulator.stats()["received"] == 4
    assert inside(*command(simulator, "--again"))[0] == 0
    assert simulator.stats()["received"] == 8


@pytest.mark.parametrize("changed", [["-o", "other.jsonl"], ["--url", "http://localhost:{port}"]])
def test_another_output_or_server_is_another_batch(
    inside: Inside, simulator: Remote, folder: Path, tmp_path: Path, changed: list[str]
) -> None:
    write(tmp_path / "in.jsonl")
    port = simulator.url.rpartition(":")[2]
    assert inside(*command(simulator))[0] == 0
    assert inside(*command(simulator, "--force", *(word.format(port=port) for word in changed)))[0] == 0
    assert simulator.stats()["received"] == 8


def test_an_error_file_of_an_earlier_run_is_removed_if_no_line_fails(
    inside: Inside, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl")
    (tmp_path / "in.errors.jsonl").write_text("stale")
    assert inside(*command(simulator, "--force"))[0] == 0
    assert (tmp_path / "in.errors.jsonl").read_text() == ""


# Output files -------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_device_and_a_pipe_are_written_to_and_not_replaced_by_a_file(
    cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", MIXED)
    os.mkfifo(tmp_path / "pipe")
    null = device(tmp_path / "null", 3)
    with subprocess.Popen(["cat", "pipe"], cwd=tmp_path, stdout=subprocess.PIPE) as reader:
        try:
            found = cli.json(*command(simulator, "-o", "pipe", "--errors", str(null)), code=4)
            lines = reader.communicate(timeout=SECONDS_MAX)[0].splitlines()
        finally:
            reader.kill()
    assert ids([orjson.loads(line) for line in lines]) == ["good", "also good"]
    assert (found["output"], found["errors"]) == (str(tmp_path / "pipe"), str(null))
    assert (tmp_path / "pipe").is_fifo()
    assert null.is_char_device()
    cli(*command(simulator, "-o", str(null), "--errors", str(null)), code=4)
    assert null.is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir() if path != null) == ["data", "in.jsonl", "pipe"]


@pytest.mark.thorough
def test_a_full_device_is_an_error_and_the_answers_are_kept(
    cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl")
    full = device(tmp_path / "full", 7)
    said = cli(*command(simulator, "-o", str(full)), code=1).stderr
    assert f"{full} cannot be written: No space left on device; every answer is kept" in said


@pytest.mark.thorough
@pytest.mark.parametrize("name", sparsely(["-", "/dev/stdout"], 2))
def test_standard_output_gets_lines_and_nothing_else(
    cli: Cli, simulator: Remote, folder: Path, tmp_path: Path, name: str
) -> None:
    write(tmp_path / "in.jsonl", MIXED)
    done = cli(*command(simulator, "-o", name), code=4)
    assert ids([orjson.loads(line) for line in done.stdout.splitlines()]) == ["good", "also good"]
    assert "! completed, 1 of 3 failed; see " in done.stderr
    assert ids(read(tmp_path / "in.errors.jsonl")) == ["bad"]
    again = cli(*command(simulator, "-o", "-", "--errors", "-", "--json"), code=4)
    assert {line["custom_id"] for line in map(orjson.loads, again.stdout.splitlines())} == {"good", "bad", "also good"}
    assert orjson.loads(again.stderr)["output"] == "-"
    assert simulator.stats()["received"] == 3


@pytest.mark.thorough
def test_a_file_that_exists_is_overwritten_only_by_force_or_by_the_run_that_wrote_it(
    inside: Inside, cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", MIXED)
    (tmp_path / "other.jsonl").write_bytes((tmp_path / "in.jsonl").read_bytes().replace(b"good", b"better"))
    output, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    arguments = command(simulator, "-o", "out.jsonl")
    for file, flag in ((output, "--output"), (errors, "--errors")):
        file.write_text("precious")
        code, out, err = inside(*arguments)
        assert (code, out) == (1, "")
        assert err == (f"error: {flag} {file} exists already: write --force to overwrite it, or name another file\n")
        assert file.read_text() == "precious"
        file.unlink()
    assert cli.rows("SELECT FROM batchwright.file") == []
    assert simulator.stats()["received"] == 0
    output.touch()
    assert inside(*arguments)[0] == 4
    first = output.read_bytes()
    for more in ([], ["--retry-failed"], ["--again"]):
        assert inside(*arguments, *more)[0] == 4
    assert output.read_bytes() != first
    output.write_bytes(first)  # as if the last one had been killed before it wrote
    assert inside(*arguments)[0] == 4
    assert output.read_bytes() != first
    theirs = ["batch", "run", "other.jsonl", *arguments[3:]]
    assert "exists already" in inside(*theirs)[2]
    assert inside(*theirs, "--force")[0] == 4
    assert ids(read(output)) == ["better", "also better"]
    assert "exists already" in inside(*arguments)[2]
    assert ids(read(output)) == ["better", "also better"]


def device(path: Path, minor: int) -> Path:
    """A copy of a system device (minor 3 is null, 7 is full), so that a bug of ours cannot damage the original."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        with path.open("wb"):
            return path
    except OSError:
        path.unlink(missing_ok=True)
        assert os.geteuid() != 0 or not os.access("/dev", os.W_OK), "a bug of ours could replace the system's device"
        return {3: Path("/dev/null"), 7: Path("/dev/full")}[minor]


def test_a_reader_that_closes_the_pipe_ends_the_display_and_not_the_run(
    cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", slow(4))
    run = f"{sys.executable} -P -m batchwright {' '.join(command(simulator, '--max-in-flight', '1'))}"
    script = f"set -o pipefail; {run} | head -n 1"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, cwd=tmp_path, env=cli.environment, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 1
    assert re.fullmatch(
        r"nobody reads the output any more; the run continues: batchwright batch watch batch_\w+\n", done.stderr
    )
    assert len(read(tmp_path / "in.out.jsonl")) == 4


# Killed and interrupted -------------------------------------------------------------------------------------------


def test_a_killed_run_resumes_where_it_stopped_and_resends_only_what_was_in_flight(
    cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", slow(240))
    arguments = command(simulator, "--max-in-flight", str(IN_FLIGHT))
    with begun(cli, arguments, 60) as first:
        first.signal(signal.SIGKILL)
        first.ended()
    assert len(cli.rows("SELECT FROM batchwright.job WHERE locked_by IS NOT NULL AND status = 'RUNNING'")) == 1
    began = time.monotonic()
    found = cli.json(*arguments)
    assert time.monotonic() - began < 25, "it waited 30 s for the lease of the killed worker"
    assert (found["exit_code"], found["total"], found["completed"]) == (0, 240, 240)
    assert ids(read(tmp_path / "in.out.jsonl")) == [f"r{n}" for n in range(240)]
    asked = simulator.asked(over=1)
    assert asked["distinct"] == 240
    assert 0 < asked["repeated"] <= IN_FLIGHT
    assert len(cli.rows("SELECT FROM batchwright.batch")) == 1


def test_an_abandoned_run_has_a_name_and_is_resumed_by_its_id_although_its_file_was_edited(
    inside: Inside, cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", slow(240))
    arguments = command(simulator, "--max-in-flight", str(IN_FLIGHT))
    with begun(cli, arguments, 20) as first:
        running = inside("batch", "list")[1]
        first.signal(signal.SIGKILL)
        first.ended()
    id = read_id(cli)
    assert ("in.jsonl" in running, "stopped" in running) == (True, False)
    listed = inside("batch", "list")[1]
    assert re.search(rf"{id} +stopped +\d+/240", listed)
    assert f"\nresume: batchwright batch run --resume {id}\n" in listed
    shown = inside("batch", "show", id)[1]
    assert "in_progress, stopped" in shown
    assert f"{tmp_path / 'in.jsonl'}, on {simulator.url}" in shown
    assert f"nobody runs it: its command was stopped or killed; resume it: batchwright batch run --resume {id}" in shown
    write(tmp_path / "in.jsonl", [request("new")])
    code, _, err = inside(*arguments, "-o", "new.jsonl")
    assert code == 0
    assert "an earlier run of this file is unfinished; this one is a new batch and sends every line" in err
    assert re.search(rf"  {id}: in.jsonl has changed since; \d+/240 done\n", err)
    assert re.search(r"to resume it \(saves \d+ answers, \d+ tokens\):\n", err)
    commands = [line for line in err.splitlines() if line.startswith("      ")]
    assert commands == [f"      batchwright batch run --resume {id}", f"      batchwright batch cancel {id}"]
    assert max(map(len, commands)) <= 80
    found = inside.json("batch", "run", "--resume", id)
    assert (found["id"], found["exit_code"], found["completed"]) == (id, 0, 240)
    assert ids(read(tmp_path / "in.out.jsonl")) == [f"r{n}" for n in range(240)]
    assert simulator.asked(over=1)["repeated"] <= IN_FLIGHT
    assert inside("batch", "list")[1].count("in.jsonl") == 2


@pytest.mark.thorough
@pytest.mark.parametrize("number", sparsely([signal.SIGINT, signal.SIGTERM], 2))
def test_an_interrupted_run_waits_for_answers_in_flight_and_can_be_resumed(
    cli: Cli, simulator: Remote, folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    write(tmp_path / "in.jsonl", slow(240))
    arguments = command(simulator, "--max-in-flight", str(IN_FLIGHT))
    with begun(cli, arguments, 20) as first:
        first.signal(number)
        assert first.ended() == 128 + number
        first.until(r"stopped at \d+/240; every answer is kept")
        first.until(r"cancel:  batchwright batch cancel batch_")
    assert cli.rows("SELECT FROM batchwright.worker") == []
    shown = cli("batch", "show", read_id(cli)).stdout
    assert f"resume it: batchwright batch run --resume {read_id(cli)}" in shown
    assert cli.json(*arguments)["completed"] == 240
    assert simulator.asked(over=1)["repeated"] == 0


@pytest.mark.thorough
def test_a_run_that_waits_for_its_server_can_be_interrupted_and_resumed(
    cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl")
    simulator.put_faults(["503"])
    arguments = command(simulator)
    with cli.start(*arguments) as first:
        cli.until("SELECT FROM batchwright.batch WHERE status = 'in_progress'")
        first.signal(signal.SIGINT)
        assert first.ended() == 130
    simulator.put_faults([])
    assert cli.json(*arguments)["completed"] == 4


@pytest.mark.thorough
def test_the_same_run_twice_at_a_time_is_refused(cli: Cli, simulator: Remote, folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl")
    simulator.put_faults(["hang:match=Say r2."])
    with begun(cli, command(simulator), 3) as first:
        second = cli(*command(simulator), code=1)
        assert second.stderr == (
            f"error: the process {first.pid} runs this batch already; see its progress: batchwright batch list\n"
        )


@pytest.mark.thorough
def test_a_run_that_was_left_can_be_cancelled_and_keeps_its_answers(
    cli: Cli, simulator: Remote, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.jsonl", slow(200))
    arguments = command(simulator, "--max-in-flight", "4")
    with begun(cli, arguments, 10) as first:
        first.signal(signal.SIGKILL)
        first.ended()
    id = read_id(cli)
    found = cli.json("batch", "cancel", id)
    assert (found["status"], found["completed"] >= 10, found["done"]) == ("cancelled", True, 200)
    assert cli.rows("SELECT FROM batchwright.queue") == []
    assert len(cli("batch", "results", id).stdout.splitlines()) == found["completed"]
    again = cli(*arguments, "--json", code=3)
    assert '"status": "cancelled"' in again.stdout
    assert len(read(tmp_path / "in.out.jsonl")) == found["completed"]


@pytest.mark.thorough
def test_a_run_whose_batch_is_cancelled_says_so(cli: Cli, simulator: Remote, folder: Path, tmp_path: Path) -> None:
    cli.environment["BATCHWRIGHT_BATCHES_CANCEL_GRACE_SECONDS"] = "0.2"
    write(tmp_path / "in.jsonl", slow(20))
    simulator.put_faults(["hang:match=Say r7."])
    with begun(cli, command(simulator), 19) as first:
        assert cli.json("batch", "cancel", read_id(cli))["status"] in {"cancelling", "cancelled"}
        assert first.ended() == 3
    assert len(read(tmp_path / "in.out.jsonl")) == 19
    (failed,) = read(tmp_path / "in.errors.jsonl")
    assert (failed["custom_id"], failed["error"]["code"]) == ("r7", "batch_cancelled")


# Mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file or directory"),
        (["in.jsonl", "--url", "nowhere"], "--url is 'nowhere'; write http://nowhere"),
        (["in.jsonl", "--url", "localhost:9000"], "--url is 'localhost:9000'; write http://localhost:9000"),
        (["in.jsonl", "-o", "in.jsonl"], "input, output and errors must be three files, not "),
        (["in.jsonl", "-o", "x", "--errors", "./x"], "--output and --errors are the same file, "),
        (["in.jsonl", "-o", "data"], "--output "),
        (["in.jsonl", "-o", "no/x"], "--output "),
        (["in.jsonl", "-o", "data/new.sock"], "--output data/new.sock is a socket"),
        (["in.jsonl", "-o", "x" * 250, "--errors", "e"], "--output "),
        (["in.jsonl", "--errors", "x" * 300], "--errors "),
        (["-"], "standard input cannot be read twice; write it to a file"),
        (["in.jsonl", "--window", "soon"], "Invalid value: 'soon'."),
        (["in.jsonl", "--again", "--retry-failed"], "--again sends every line again"),
        (["in.jsonl", "--endpoint", "/v1/images"], "--endpoint '/v1/images' is not supported in batches"),
        ([], "name a FILE of requests, or a batch to --resume; for a first file: batchwright batch example"),
        (["in.jsonl", "--resume", "batch_1"], "--resume takes FILE from the batch; leave FILE out"),
        (["--resume", "batch_1"], "there is no batch 'batch_1'"),
        (["in.jsonl", "--url", "http://127.0.0.1:9/v1/v1"], "--url ends with /v1/v1, which each request adds itself"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_stored_or_sent(
    inside: Inside, cli: Cli, folder: Path, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    write(tmp_path / "in.jsonl")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("data/new.sock")
    code, out, err = inside("batch", "run", *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {complaint}")
    assert cli.rows("SELECT FROM batchwright.file") == []


def test_without_a_server_it_says_what_to_write(
    inside: Inside, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL")
    monkeypatch.delenv("BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_MAX_RETRIES")
    write(tmp_path / "in.jsonl")
    err = inside("batch", "run", "in.jsonl")[2]
    assert err.startswith("error: there is no model server to send to; write --url http://127.0.0.1:8000, or configure")


def test_a_file_that_grows_while_it_is_read_is_refused(
    inside: Inside, cli: Cli, simulator: Remote, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "in.jsonl")
    own = LocalRun.own_fields

    def grow(run: LocalRun) -> dict[str, Any]:
        with file.open("ab") as target:
            target.write(b"\n")
        return own(run)

    monkeypatch.setattr(LocalRun, "own_fields", grow)
    code, _, err = inside(*command(simulator))
    assert (code, err) == (
        1,
        "error: in.jsonl changed while it was read; wait until it is complete, and run the command again\n",
    )
    assert cli.rows("SELECT FROM batchwright.batch") == []
    assert [path for path in (folder / "files").rglob("*") if path.is_file()] == []


# The page -----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_what_the_docs_print_works_with_the_embedded_database() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="batchwright-docs-") as name:
        Path(name).chmod(0o755)
        said = shell(Path(name), example("batch-run.sh").replace("9000", port))
    assert said.returncode == 0, said.stderr
    assert "words.jsonl can be run: 200 requests to /v1/chat/completions" in said.stdout
    assert said.stdout.count("✓ completed: 200 of 200 lines were answered") == 2
    assert "was done already" in said.stdout
    assert "all 200 of the input exactly once" in said.stdout
