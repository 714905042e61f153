"""`batchwright batch …` on batches in any state, which this process prepares."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from batchwright.batches.commands.show import Seen, exit_code, look_at
from batchwright.batches.commands.watch import Lines, Meter, View
from batchwright.batches.local import SenderLoad, Silence
from batchwright.batches.output.finalize import Finalizer
from batchwright.batches.part import BatchesPart
from batchwright.batches.seal import KeySource, Seal
from batchwright.batches.send.health import Complaint
from batchwright.batches.store import Batch, Pace
from batchwright.cli.show import print_facts
from batchwright.errors import StorageUnavailable
from batchwright.settings import load_settings
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.states import BatchStatus, JobStatus
from tests.batches.commands.cases import GOOD, MIXED, ended, ids, on_stage, read, waiting, write
from tests.batches.stage import Stage, given_up, request, staged
from tests.cli.conftest import Cli, Inside

VERBS = [
    ["show"],
    ["watch"],
    ["cancel"],
    ["pause"],
    ["resume"],
    ["retry"],
    ["results"],
    ["manifest"],
    ["repair"],
    ["priority", "3"],
    ["limits", "--max-in-flight", "2"],
]


@pytest.fixture
def folder(inside: Inside, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of files and of the work folder, for the command line and for prepared batches."""
    found = tmp_path / "data"
    found.mkdir()
    monkeypatch.setenv("BATCHWRIGHT_DATABASE_FOLDER", str(found))
    cli.environment["BATCHWRIGHT_DATABASE_FOLDER"] = str(found)
    return found


@pytest.fixture
def gateway(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL", "http://127.0.0.1:9")
    cli.environment["BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL"] = "http://127.0.0.1:9"


def files(cli: Cli) -> int:
    return len(cli.rows("SELECT FROM batchwright.file"))


# submit -----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.usefixtures("gateway")
def test_submit_list_show_and_cancel_agree(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl")
    id = cli("batch", "submit", "in.jsonl", "--metadata", "project=x=y", "--priority", "2").stdout.strip()
    (listed,) = cli.json("batch", "list", "--status", "validating")
    assert (listed["id"], listed["metadata"], listed["priority"]) == (id, {"project": "x=y"}, 2)
    assert id in cli("batch", "list").stdout
    shown = cli("batch", "show", id).stdout
    assert "validating" in shown
    assert "no live worker runs batches; a worker runs batches if it has a model server" in " ".join(shown.split())
    assert "batch.process" not in shown
    assert "is cancelling" in cli("batch", "cancel", id).stdout
    assert cli.rows("SELECT status::text, queue FROM batchwright.batch") == [("cancelling", "batches")]


@pytest.mark.usefixtures("gateway")
def test_submit_passes_every_option_on(inside: Inside, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl")
    options = ["--window", "90m", "--priority", "1", "--max-in-flight", "7", "--tenant", "acme"]
    id = inside.json("batch", "submit", str(file), *options)["id"]
    batch = inside.json("batch", "show", id)
    assert (batch["completion_window"], batch["priority"], batch["tenant"]) == ("90m", 1, "acme")
    assert (batch["limits"], batch["endpoint"]) == ({"max_in_flight": 7}, "/v1/chat/completions")
    assert inside.json("batch", "list", "--tenant", "other") == []


@pytest.mark.usefixtures("gateway")
def test_submit_encrypts_headers_that_a_gateway_lists_and_refuses_others(
    cli: Cli, inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_PASSTHROUGH_HEADERS", "x-tenant-id")
    monkeypatch.setenv("BATCHWRIGHT_TEST_TENANT", "Zebra-4711")
    submit = ["batch", "submit", str(write(tmp_path / "in.jsonl")), "--header"]
    code, _, err = inside(*submit, "X-Tenant-Id: env:BATCHWRIGHT_TEST_TENANT")
    assert (code, "there is no key for that" in err, files(cli)) == (1, True, 0)
    monkeypatch.setenv("BATCHWRIGHT_BATCHES_HEADER_KEY_ENV", "BATCHWRIGHT_TEST_KEY")
    monkeypatch.setenv("BATCHWRIGHT_TEST_KEY", base64.b64encode(bytes(32)).decode())
    code, _, err = inside(*submit, "x-other: Zebra-4711")
    assert (code, "Zebra" in err) == (1, False)
    assert "--header x-other is not in passthrough_headers of any gateway (x-tenant-id)" in err
    id = inside.json(*submit, "X-Tenant-Id: env:BATCHWRIGHT_TEST_TENANT")["id"]
    ((sealed, family, row),) = cli.rows("SELECT sealed_headers, family, b::text FROM batchwright.batch b")
    assert "Zebra" not in row + str(inside("batch", "show", id))
    seal = Seal(KeySource(variable="KEY"), {"KEY": base64.b64encode(bytes(32)).decode()})
    assert seal.open(bytes(sealed), family) == {"x-tenant-id": "Zebra-4711"}


@pytest.mark.usefixtures("gateway")
def test_the_same_key_gives_the_same_batch_and_stores_nothing_twice(cli: Cli, inside: Inside, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl")
    given = ["batch", "submit", str(file), "--idempotency-key", "once"]
    id = inside.json(*given)["id"]
    assert inside.json(*given)["id"] == id
    assert files(cli) == 1
    write(file, [request("other")])
    code, _, err = inside(*given)
    assert (code, err) == (1, "error: the Idempotency-Key was used before with another body\n")
    assert files(cli) == 1


@pytest.mark.usefixtures("folder")
def test_without_a_model_server_anywhere_submit_says_what_to_write(cli: Cli, inside: Inside, tmp_path: Path) -> None:
    code, out, err = inside("batch", "submit", str(write(tmp_path / "in.jsonl")))
    assert (code, out) == (1, "")
    assert err.startswith("error: no worker runs batches: no model server is configured.")
    assert "batchwright batch run FILE --url" in err
    assert "batchwright up --url http://127.0.0.1:8000, or global_inference_gateway.url in batchwright.toml" in err
    assert files(cli) == 0


@pytest.mark.usefixtures("gateway")
def test_submit_says_that_nobody_is_there_to_run_it(inside: Inside, tmp_path: Path) -> None:
    code, out, err = inside("batch", "submit", str(write(tmp_path / "in.jsonl")))
    assert (code, out.startswith("batch_")) == (0, True)
    assert err == "no live worker runs batches; start one: batchwright up, or batchwright worker\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--metadata", "project"], "--metadata 'project' is not NAME=VALUE, such as project=translation"),
        (["--metadata", "=x"], "metadata '': a name has 1 to 64 characters, and a value at most 512"),
        (["--window", "1y"], "Invalid value: '1y'."),
        (["--window", "30s"], "Invalid value: '30s'."),
        (["--endpoint", "/v1/images"], "--endpoint '/v1/images' is not supported in batches"),
        (["--idempotency-key", ""], "--idempotency-key has 0 characters"),
        (["--tenant", ""], "--tenant has 0 characters"),
    ],
)
@pytest.mark.usefixtures("gateway")
def test_a_bad_option_is_refused_in_one_line(
    cli: Cli, inside: Inside, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    code, out, err = inside("batch", "submit", str(write(tmp_path / "in.jsonl")), *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {complaint}")
    assert err.count("\n") == 1
    assert files(cli) == 0


@pytest.mark.usefixtures("gateway")
def test_a_file_over_the_limit_is_refused_and_leaves_nothing(
    cli: Cli, inside: Inside, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_BATCHES_FILE_BYTES_MAX", "100")
    code, _, err = inside("batch", "submit", str(write(tmp_path / "in.jsonl")))
    assert (code, err) == (1, "error: the file is larger than 100 bytes, which is the limit\n")
    assert files(cli) == 0
    assert [path for path in (folder / "files").rglob("*") if path.is_file()] == []


# Pause, cancel and the like ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
@pytest.mark.usefixtures("folder")
def test_a_batch_that_does_not_exist_is_named(inside: Inside, verb: list[str]) -> None:
    assert inside("batch", verb[0], "batch_0", *verb[1:]) == (1, "", "error: there is no batch 'batch_0'\n")


def test_a_batch_that_waits_for_the_store_says_so(inside: Inside, folder: Path, database_url: str) -> None:
    async def noted(stage: Stage) -> Batch:
        id = await stage.submit(GOOD)
        await stage.batchwright.part(BatchesPart).batches.note_wait(id, "store", "503 Slow Down")
        return await stage.get(id)

    batch = on_stage(database_url, folder, noted)
    words = "the store is unavailable: 503 Slow Down"
    assert f"waiting on  {words}" in inside("batch", "show", batch.id)[1]
    assert inside.json("batch", "show", batch.id)["waiting_on"][0] == words
    assert words in View(Seen(batch=batch), {}).troubles()


def test_watch_says_why_a_batch_failed(inside: Inside, folder: Path, database_url: str) -> None:
    lines = [request("good"), *({"custom_id": f"bad-{n}"} for n in range(5))]
    id = ended(database_url, folder, lines).id
    code, out, _ = inside("batch", "watch", id)
    assert code == 1
    assert out.count(" line ") == 3
    assert f"more: batchwright batch show {id}" in out


def test_a_waiting_batch_can_be_paused_changed_and_cancelled(inside: Inside, folder: Path, database_url: str) -> None:
    id = waiting(database_url, folder).id
    assert inside("batch", "pause", id) == (0, f"batch {id} is paused at its beginning\n", "")
    assert "validating, paused" in inside("batch", "show", id)[1]
    assert inside.json("batch", "resume", id)["paused_at"] is None
    assert inside("batch", "priority", id, "1") == (0, f"batch {id} has priority 1\n", "")
    assert "at most 3 requests in flight" in inside("batch", "limits", id, "--max-in-flight", "3")[1]
    assert inside.json("batch", "limits", id, "--max-in-flight", "0")["limits"] == {}
    assert inside.json("batch", "cancel", id)["status"] == "cancelling"
    assert inside("batch", "pause", id)[2] == "error: Cannot pause a batch with status 'cancelling'.\n"


@pytest.mark.parametrize(
    ("verb", "complaint"),
    [
        (["cancel"], "Cannot cancel a batch with status 'completed'."),
        (["pause"], "Cannot pause a batch with status 'completed'."),
        (["resume"], "Cannot resume a batch with status 'completed'."),
        (["priority", "3"], "Cannot change the priority of a batch with status 'completed'."),
        (["limits", "--max-in-flight", "2"], "Cannot limit a batch with status 'completed'."),
        (["retry"], "it has no error file, so no line is known to have failed."),
        (
            ["repair"],
            "Cannot repair a batch with status 'completed'; it must be one of 'failed', 'expired', 'cancelled'.",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_ended_batch_cannot_be_changed(
    inside: Inside, folder: Path, database_url: str, verb: list[str], complaint: str
) -> None:
    id = ended(database_url, folder).id
    code, out, err = inside("batch", verb[0], id, *verb[1:])
    assert (code, out) == (1, "")
    assert complaint in err


@pytest.mark.usefixtures("gateway")
def test_retry_resends_failed_lines_chosen_by_code(inside: Inside, folder: Path, database_url: str) -> None:
    batch = ended(database_url, folder, MIXED)
    assert "there are: odd." in inside("batch", "retry", batch.id, "--code", "other")[2]
    new = inside.json("batch", "retry", batch.id, "--code", "odd")["id"]
    found = inside.json("batch", "show", new)
    assert (found["retry_of"], found["retry_codes"], found["input_file_id"]) == (batch.id, ["odd"], batch.input_file_id)
    assert "Cannot retry a batch with status 'validating'" in inside("batch", "retry", new)[2]


# Show, list and watch ---------------------------------------------------------------------------------------------


def test_show_prints_counts_errors_tokens_cost_and_files(
    inside: Inside, folder: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_BATCHES_PRICES", '{"*": {"input": 1000000, "output": 1000000}}')
    batch = ended(database_url, folder, MIXED)
    found = inside.json("batch", "show", batch.id)
    assert (found["status"], found["done"], found["completed"], found["failed"]) == ("completed", 3, 2, 1)
    words = "a fault rule asks for status 400"
    assert found["error_summary"] == [{"code": "odd", "count": 1, "sample_custom_id": "bad", "message": words}]
    assert found["cost"] == batch.input_tokens + batch.output_tokens > 0
    shown = inside("batch", "show", batch.id)[1]
    for text in ("3/3", "2 completed · 1 failed", "large, small", str(batch.output_file_id), str(batch.error_file_id)):
        assert text in shown
    *_, table, said = shown.splitlines()
    assert (table.split(), said) == (["1", "odd", "bad"], f"odd: {words}")


def test_show_lists_what_is_wrong_with_the_input(inside: Inside, folder: Path, database_url: str) -> None:
    batch = ended(database_url, folder, [request("a"), request("a")])
    code, out, _ = inside("batch", "show", batch.id)
    assert code == 0
    assert "✗ line 2: duplicate_custom_id: The custom_id 'a'" in out


def test_list_reads_all_pages_and_filters(inside: Inside, folder: Path, database_url: str) -> None:
    async def three(stage: Stage) -> Batch:
        for tenant in ("default", "acme", "acme"):
            last = await stage.submit(GOOD, tenant=tenant)
        return await stage.get(last)

    last = on_stage(database_url, folder, three)
    assert len(inside.json("batch", "list")) == 3
    assert [one["id"] for one in inside.json("batch", "list", "--limit", "1")] == [last.id]
    assert len(inside.json("batch", "list", "--tenant", "acme", "--status", "validating")) == 2
    assert inside("batch", "list", "--status", "failed") == (0, "", "no such batches\n")


def test_watch_prints_lines_without_a_terminal_and_ends_with_the_batch(
    inside: Inside, folder: Path, database_url: str
) -> None:
    batch = ended(database_url, folder, MIXED)
    code, out, _ = inside("batch", "watch", batch.id)
    assert code == 4
    status, counts, advice = (line.split(" ", 1)[1] for line in out.splitlines())
    show = f"1 of 3 failed; see: batchwright batch show {batch.id}"
    assert advice == f"{show}; retry with: batchwright batch retry {batch.id}"
    assert status == "completed"
    assert counts.startswith("3/3 · 2 completed · 1 failed")
    code, out, _ = inside("batch", "watch", batch.id, "--json")
    assert code == 4
    assert out.count("\n") == 1


async def test_watch_follows_a_batch_to_its_end(cli: Cli, folder: Path, database_url: str) -> None:
    async with staged(database_url, folder) as stage:
        id = await stage.submit(GOOD)
        watching = asyncio.create_task(asyncio.to_thread(cli, "batch", "watch", id))
        await stage.until(id, lambda batch: batch.status is BatchStatus.VALIDATING)
        stage.work()
        done = await watching
    assert done.stdout.splitlines()[-1].endswith("4/4 · 4 completed · 0 failed")
    assert " completed\n" in done.stdout


async def test_show_and_watch_name_a_server_that_no_worker_reaches(folder: Path, database_url: str) -> None:
    """Those who run the model server look here first."""
    gateway = {"url": "http://127.0.0.1:9", "initial_backoff": 0.05, "max_backoff": 0.1}
    async with staged(database_url, folder, global_inference_gateway=gateway) as stage:
        id = await stage.submit([request(f"r{n}") for n in range(20)])
        stage.work()
        part = stage.batchwright.part(BatchesPart)
        async with asyncio.timeout(60):
            while not (seen := await look_at(part, await stage.get(id))).waiting:
                await asyncio.sleep(0.02)
        said = "the server of the model 'small' cannot be reached from 1 worker process; nothing is sent to it"
        assert seen.waiting == [said]
        assert said in View(seen, {}).troubles()
        await part.batches.cancel(id, tenant=None)


@pytest.mark.thorough
async def test_submit_waits_for_the_end_if_it_is_asked_to(
    cli: Cli, folder: Path, tmp_path: Path, database_url: str
) -> None:
    write(tmp_path / "in.jsonl", MIXED)
    async with staged(database_url, folder) as stage:
        stage.work()
        done = await asyncio.to_thread(cli, "batch", "submit", "in.jsonl", "--wait", code=4)
        (batch,) = await stage.batchwright.part(BatchesPart).batches.list(None)
    id, *_, counts, advice = done.stdout.splitlines()
    assert id == batch.id
    assert counts.endswith("3/3 · 2 completed · 1 failed")
    assert advice.endswith(f"retry with: batchwright batch retry {batch.id}")


@pytest.mark.parametrize(
    ("status", "counts", "code"),
    [
        (BatchStatus.COMPLETED, {"completed": 5}, 0),
        (BatchStatus.COMPLETED, {"completed": 4, "failed": 1}, 4),
        (BatchStatus.EXPIRED, {"completed": 4, "expired": 1}, 4),
        (BatchStatus.CANCELLED, {"completed": 4, "cancelled": 1}, 3),
        (BatchStatus.FAILED, {}, 1),
    ],
)
def test_the_exit_code_says_how_a_batch_ended(
    folder: Path, database_url: str, status: BatchStatus, counts: dict[str, int], code: int
) -> None:
    batch = waiting(database_url, folder)
    assert exit_code(replace(batch, status=status, total=5, **counts)) == code


# The live view ----------------------------------------------------------------------------------------------------


class Sending:
    def __init__(self, load: SenderLoad | None = None, silence: Silence | None = None) -> None:
        self._load = load or SenderLoad(17, 40)
        self._silence = silence or Silence(0.0)

    def load(self) -> SenderLoad:
        return self._load

    def silence(self) -> Silence:
        return self._silence

    def trouble(self) -> str | None:
        return "the server is away"

    def advice(self) -> str | None:
        return None


def drawn(view: View, width: int = 120) -> list[str]:
    out = Console(width=width, force_terminal=False, record=True, quiet=False, file=None)
    with out.capture() as captured:
        out.print(view)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_the_live_view_shows_all_that_matters(folder: Path, database_url: str) -> None:
    now = datetime.now(UTC)
    usage = {"small": {"input": 9_000, "cached": 4_500, "output": 1_000}}
    batch = replace(
        waiting(database_url, folder),
        status=BatchStatus.IN_PROGRESS,
        in_progress_at=now,
        total=2_000,
        completed=996,
        failed=4,
        input_tokens=9_000,
        cached_tokens=4_500,
        output_tokens=1_000,
        usage_by_model=usage,
        error_summary={"odd": [4, "r7"]},
    )
    prices = load_settings({"batches": {"prices": {"small": {"input": 100, "output": 100}}}}, environment={})
    view = View(Seen(batch=batch, pace=Pace(50.0, now)), prices.batches.prices, title="in.jsonl", sending=Sending())
    head, bar, pace, future, errors, trouble = drawn(view)
    assert head.startswith("in.jsonl  in_progress · ")
    assert bar.endswith("1,000/2,000 · 50%")
    assert pace == "  996 completed · 4 failed · 50.0 requests/s · 500 tokens/s · 17 in flight · limit 40"
    assert future == "  done in 20.0 s · cost 1.00 · 50% of prompt tokens from a cache"
    assert errors == "  4 failed with odd, such as r7"
    assert trouble == "  the server is away"
    late = replace(batch, expires_at=now + timedelta(seconds=5))
    view.seen = Seen(batch=late, pace=Pace(50.0, now))
    assert "too late for its window" in drawn(view)[3]
    view.seen = Seen(batch=replace(batch, paused_at=now), pace=Pace(50.0, now))
    assert drawn(view)[0].startswith("in.jsonl  in_progress, paused · ")
    assert drawn(view, 40)[1] == f"  {'━' * 9}{'─' * 10}  1,000/2,000 · 50%"


def in_progress(database_url: str, folder: Path, **values: Any) -> Batch:
    now = datetime.now(UTC)
    known: dict[str, Any] = {"status": BatchStatus.IN_PROGRESS, "in_progress_at": now, "total": 200, "completed": 197}
    return replace(waiting(database_url, folder), **known | values)


def test_retries_show_as_waiting_and_no_end_is_estimated(folder: Path, database_url: str) -> None:
    batch, now = in_progress(database_url, folder), datetime.now(UTC)
    retrying = Sending(SenderLoad(0, 40, retrying=3, retry_seconds=12.3))
    view = View(Seen(batch=batch, pace=Pace(90.0, now)), {}, title="in.jsonl", sending=retrying)
    _, _, pace, *rest = drawn(view)
    assert pace.endswith(" · 0 in flight · limit 40 · 3 waiting to retry (next in 12.3 s)")
    assert rest == ["  the server is away"]
    view.sending = Sending(SenderLoad(2, 40, retrying=1))
    assert drawn(view)[2].endswith(" · 2 in flight · limit 40 · 1 waiting to retry")
    assert drawn(view)[3] == "  done in 1.0 s"
    others = View(Seen(batch=replace(batch, completed=200), pace=Pace(90.0, now)), {})
    assert "done in" not in " ".join(drawn(others))


def test_missing_answers_are_shown_with_the_errors_that_came_instead(
    folder: Path, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, now = in_progress(database_url, folder), datetime.now(UTC)
    late = Complaint("request_timeout", None, 3, "the server did not answer within 30 s, the request_timeout")
    full = Complaint(None, 503, 12, "The model is loading.")
    silent = Sending(silence=Silence(40.4, [full, late]))
    view = View(Seen(batch=batch, pace=Pace(2.0, now)), {}, sending=silent)
    text = (
        "no answer for 40 s; 12 answered 503 (The model is loading.); 3 timed out (the server did not answer within "
        "30 s, the request_timeout)"
    )
    assert drawn(view, 300)[3:] == [f"  {text}", "  the server is away"]
    view.sending = Sending(silence=Silence(9.9, [full, late]))
    assert drawn(view, 300)[3:] == ["  done in 1.5 s", "  the server is away"]
    others = Seen(batch=batch, pace=Pace(2.0, now, silent_seconds=75.0), shards={JobStatus.RUNNING: 1})
    assert drawn(View(others, {}))[3:] == ["  no answer for 1 min 15 s"]
    lines, said = Lines(lambda: 0.0), []
    for seconds in (0.0, 9.0, 10.0, 15.0, 19.9, 20.0, 39.0, 41.0, 1.0, 12.0):
        view.sending = Sending(silence=Silence(seconds))
        capsys.readouterr()
        lines(view)
        said += [seconds for line in capsys.readouterr().out.splitlines() if "no answer for" in line]
    assert said == [10.0, 20.0, 41.0, 12.0]


def test_progress_lines_are_printed_less_often_the_longer_a_batch_takes(
    folder: Path, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    batch = replace(waiting(database_url, folder), status=BatchStatus.IN_PROGRESS, total=1_000_000)
    view = View(Seen(batch=batch), {})
    lines = Lines(lambda: now[0])

    def said(seconds: int) -> int:
        """The number of lines printed in this time, while the batch makes progress."""
        capsys.readouterr()
        for _ in range(seconds):
            now[0] += 1.0
            view.seen = Seen(batch=replace(view.batch, completed=view.batch.completed + 1))
            lines(view)
        return len(capsys.readouterr().out.splitlines())

    assert said(60) > 25
    assert 60 < said(3540) < 300
    assert said(3600) == 60


def test_the_meter_measures_the_recent_rate(folder: Path, database_url: str) -> None:
    now = [0.0]
    meter = Meter(lambda: now[0])
    batch = waiting(database_url, folder)
    meter.note(batch)
    assert meter.rates() is None
    for second in range(1, 31):
        now[0] = float(second)
        pace = 10 if second <= 15 else 30
        batch = replace(batch, completed=batch.completed + pace, output_tokens=batch.output_tokens + 2 * pace)
        meter.note(batch)
    assert meter.rates() == (30.0, 60.0)
    now[0] = 60.0
    rates = meter.rates()
    assert rates is not None
    assert rates.requests < 10


def test_facts_are_not_cut_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("batchwright.cli.show.console", lambda: Console(width=30))
    print_facts([("look", f"batchwright batch show batch_{'0' * 32}")])
    assert "".join(capsys.readouterr().out.split()) == f"lookbatchwrightbatchshowbatch_{'0' * 32}"


# Results ----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_results_of_an_ended_batch_are_its_files(
    inside: Inside, cli: Cli, folder: Path, database_url: str, tmp_path: Path
) -> None:
    batch = ended(database_url, folder, MIXED)
    answers, failures = tmp_path / "answers.jsonl", tmp_path / "failures.jsonl"
    found = inside.json("batch", "results", batch.id, "-o", str(answers), "--errors", str(failures))
    assert found == {"lines": 2, "errors": 1}
    assert (ids(read(answers)), ids(read(failures))) == (["good", "also good"], ["bad"])
    assert cli("batch", "results", batch.id, "-o", "-").stdout.encode() == answers.read_bytes()
    everything = cli("batch", "results", batch.id, "--errors", "-").stdout.encode()
    assert everything == answers.read_bytes() + failures.read_bytes()
    again = ("batch", "results", batch.id, "-o", str(failures), "--errors", str(answers))
    assert inside(*again)[2] == (
        f"error: --output {failures} exists already: write --force to overwrite it, or name another file\n"
    )
    assert inside(*again, "--force")[0] == 0
    assert answers.read_bytes() + failures.read_bytes() != everything == failures.read_bytes() + answers.read_bytes()
    shown = cli("batch", "results", batch.id)
    assert shown.stdout.encode() == failures.read_bytes()
    assert shown.stderr == "wrote 2 answers; 1 lines failed: --errors FILE writes them to a file of their own\n"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_error_says_why_there_are_no_results(
    inside: Inside, folder: Path, database_url: str, tmp_path: Path
) -> None:
    batch = ended(database_url, folder, [request("a"), request("a")])
    assert inside("batch", "results", batch.id)[2] == f"error: the batch {batch.id} has no files: it is failed\n"
    whole = ended(database_url, folder)
    missing = tmp_path / "no" / "out.jsonl"
    assert inside("batch", "results", whole.id, "-o", str(missing))[2] == (
        f"error: --output {missing} cannot be written: there is no folder {missing.parent}, or you may not write to "
        "it\n"
    )
    assert "are the same file" in inside("batch", "results", whole.id, "-o", "x", "--errors", "./x")[2]


@pytest.mark.thorough
def test_a_reader_that_closes_the_pipe_early_is_not_an_error(cli: Cli, folder: Path, database_url: str) -> None:
    batch = ended(database_url, folder, [request(f"r{n}", max_tokens=2000) for n in range(200)])
    command = [sys.executable, "-P", "-m", "batchwright", "batch", "results", batch.id]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=cli.folder, env=cli.environment, **pipes) as reading:
        assert reading.stdout is not None
        assert reading.stderr is not None
        assert reading.stdout.read(10)
        reading.stdout.close()
        assert reading.stderr.read() == b""
        assert reading.wait(45) == 0


@pytest.mark.thorough
async def test_results_of_a_running_batch_are_the_finished_lines_and_follow_prints_the_rest(
    cli: Cli, folder: Path, database_url: str, tmp_path: Path
) -> None:
    """One line is answered only after `--follow` has started."""
    parts: dict[str, Any] = {"global_inference_gateway": {"request_timeout": 0.5, "max_retries": 1_000_000}}
    simulator = SimulatorSettings(any_model=Profile(), faults=["hang:match=Say late"])
    answers, failures = tmp_path / "answers.jsonl", tmp_path / "failures.jsonl"
    async with staged(database_url, folder, simulator=simulator, **parts) as stage:
        stage.work()
        id = await stage.submit([*MIXED, request("late")])
        await stage.until(id, lambda batch: batch.done == 3)
        so_far = await asyncio.to_thread(cli, "batch", "results", id)
        with cli.start("batch", "results", id, "--follow", "-o", str(answers), "--errors", str(failures)) as following:
            await until(lambda: answers.exists() and len(read(answers)) == 2)
            stage.simulator.put_faults([])
            assert await asyncio.to_thread(following.ended) == 0
    assert sorted(ids([orjson.loads(line) for line in so_far.stdout.splitlines()])) == ["also good", "bad", "good"]
    assert sorted(ids(read(answers))) == ["also good", "good", "late"]
    assert ids(read(failures)) == ["bad"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


# Manifest, repair, gc ---------------------------------------------------------------------------------------------


def test_the_manifest_can_be_verified_until_a_file_changes(inside: Inside, folder: Path, database_url: str) -> None:
    batch = ended(database_url, folder, MIXED)
    assert inside.json("batch", "manifest", batch.id)["counts"]["completed"] == 2
    code, out, _ = inside("batch", "manifest", batch.id, "--verify")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["✓", "input"],
        ["✓", "output"],
        ["✓", "errors"],
        ["✓", "custom_ids"],
    ]
    (stored,) = (folder / "files").rglob(str(batch.output_file_id))
    stored.write_bytes(stored.read_bytes().replace(b"also good", b"also_good"))
    code, out, _ = inside("batch", "manifest", batch.id, "--verify", "--json")
    assert code == 1
    assert '"level": "error"' in out


def test_a_batch_that_runs_has_no_manifest(inside: Inside, folder: Path, database_url: str) -> None:
    id = waiting(database_url, folder).id
    assert inside("batch", "manifest", id)[2] == f"error: the batch {id} has no manifest: it is validating\n"


def test_repair_writes_the_files_of_a_batch_that_ended_without_them(
    inside: Inside, folder: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise StorageUnavailable("the store is away")

    async def act(stage: Stage) -> Batch:
        stage.work()
        return await given_up(stage, patched, await stage.submit(MIXED))

    with monkeypatch.context() as patched:
        patched.setattr(Finalizer, "write", broken)
        batch = on_stage(database_url, folder, act)
    assert (batch.status, batch.manifest, batch.completed) == (BatchStatus.FAILED, None, 2)
    hint = f"the batch {batch.id} has no files: it is failed; try batchwright batch repair {batch.id}"
    assert inside("batch", "results", batch.id)[2] == f"error: {hint}\n"
    assert inside.json("batch", "repair", batch.id)["counts"] == {
        "total": 3,
        "completed": 2,
        "failed": 1,
        "expired": 0,
        "cancelled": 0,
    }
    assert inside("batch", "manifest", batch.id, "--verify")[0] == 0
    assert inside.json("batch", "show", batch.id)["status"] == "failed"
    assert "its files are written, and no further answer was found" in inside("batch", "repair", batch.id)[2]


def test_repair_refuses_a_batch_without_answers(inside: Inside, cli: Cli, folder: Path, database_url: str) -> None:
    refused = ended(database_url, folder, [request("a"), request("a")])
    assert "nothing of it was sent" in inside("batch", "repair", refused.id)[2]


def test_gc_counts_first_and_then_removes(inside: Inside, cli: Cli, folder: Path, database_url: str) -> None:
    batch = ended(database_url, folder)
    assert inside("batch", "gc", "--dry-run") == (0, "", "nothing to remove\n")
    cli.rows(
        "UPDATE batchwright.file SET deleted_at = now() - interval '1 day' WHERE id = %s RETURNING id",
        batch.output_file_id,
    )
    found = inside.json("batch", "gc", "--dry-run")
    assert (found["dry_run"], found["deleted_files"]["count"]) == (True, 1)
    assert found["bytes"] == found["deleted_files"]["bytes"] > 0
    out = inside("batch", "gc")[1]
    assert out.splitlines()[1].split()[:3] == ["deleted", "files", "1"]
    assert cli.rows("SELECT FROM batchwright.file WHERE id = %s", batch.output_file_id) == []
