"""`batchwright demo` as `make demo` runs it, only smaller; and its report if the numbers do not agree."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime, timedelta
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from batchwright.app import AsyncBatchwright
from batchwright.batches.plan.shards import Shard
from batchwright.db.check import Finding, Level
from batchwright.db.database import Pool
from batchwright.demo import requests as demo_requests
from batchwright.demo.batch import Server, Stage, read_takeover
from batchwright.demo.report import Report, print_report
from batchwright.demo.requests import MODELS, input_order_share, write_requests
from batchwright.demo.stage import Tethered, own_environment
from batchwright.errors import BatchwrightError
from batchwright.settings import load_settings
from batchwright.simulator import Remote
from batchwright.states import BatchStatus
from tests.cli.conftest import Cli, Inside

SLOW = 120.0
IN_FLIGHT_MAX = 48
SHA = {"input": "aa" * 32, "output": "bb" * 32, "errors": None}
RIGHT = Report(
    requests=300,
    batch_id="batch_1",
    status=BatchStatus.COMPLETED,
    completed=300,
    failed=0,
    asked=340,
    asked_distinct=300,
    asked_again=40,
    answered_again=2,
    in_flight_max=IN_FLIGHT_MAX,
    killed_pid=4711,
    killed_shards=3,
    killed_in_flight=38,
    answers_adopted=5,
    lease_seconds=3,
    takeover_seconds=3.25,
    prompt_tokens=200_000,
    cached_tokens=180_000,
    completion_tokens=6_000,
    input_order_share=0.5,
    seconds=10.0,
    input_sha256=SHA["input"] or "",
    manifest={"lines": 300, "counts": {"total": 300, "completed": 300, "failed": 0}, "sha256": SHA, "files": {}},
    findings=[Finding(name, Level.OK, "as it should be") for name in ("input", "output", "errors", "custom_ids")],
    samples=['{"custom_id":"letter-00000"}'],
)


def changed(**values: Any) -> Report:
    return dataclasses.replace(RIGHT, **values)


def printed(report: Report) -> str:
    out = Console(file=StringIO(), width=100)
    print_report(report, out)
    assert isinstance(out.file, StringIO)
    return out.file.getvalue()


def numbers(pattern: str, text: str) -> tuple[int, ...]:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern!r} is not in:\n{text}"
    return tuple(int(one.replace(",", "")) for one in found.groups())


# The whole demo ---------------------------------------------------------------------------------------------------


def test_the_demo_loses_no_answer_and_touches_no_database_of_the_users(cli: Cli) -> None:
    said = cli("demo", "--requests", "300", seconds=SLOW).stdout
    assert "a simulated model server is up" in said
    assert "no model runs" in said
    assert re.search(r"watch it in a browser: http://127\.0\.0\.1:\d+/ui$", said, re.MULTILINE)
    assert re.search(r"\d+/300 · .* requests/s · .* tokens/s · \d+ in flight · done in", said)
    _, shards, in_flight = numbers(
        r"killed worker (\d+) with SIGKILL: it held (\d+) shards?, and (\d+) of its requests", said
    )
    assert 1 <= shards <= 5, "300 requests make at most this many shards of 64 and a rest"
    assert "the other worker has taken over, and its first answer for them came" in said
    assert "300 of 300" in said
    (asked,) = numbers(r"requests that the simulated server got +│ +(\d+)", said)
    (again,) = numbers(r"in flight when the worker died +│ +(\d+)", said)
    assert asked == 300 + again
    assert 1 <= in_flight <= again <= IN_FLIGHT_MAX
    assert re.search(r"✓  output +300 lines, sha256 [0-9a-f]{12}…", said)
    assert "all 300 of the input exactly once" in said
    samples = [line for line in said.splitlines() if line.startswith('{"id":"batch_req_')]
    assert re.findall(r'"custom_id":"(letter-\d+)"', "".join(samples)) == ["letter-00000", "letter-00001"]
    assert "no answer was lost or duplicated" in said
    assert cli.rows("SELECT count(*) FROM batchwright.job") == [(0,)]
    assert_gone(said)


@pytest.mark.thorough
def test_the_pipeline_loses_nothing_and_touches_no_database_of_the_users(cli: Cli) -> None:
    said = cli("demo", "--pipeline", "--children", "20", seconds=SLOW).stdout
    assert "with SIGKILL while it held" in said
    assert "its lease expired: its jobs are back in the queue" in said
    assert "20 of 20" in said
    assert "20, 20 distinct" in said
    assert "nothing was lost or done twice" in said
    assert cli.rows("SELECT count(*) FROM batchwright.job") == [(0,)]
    assert_gone(said)


def assert_gone(said: str) -> None:
    (folder,) = [line.rsplit(" ", 1)[-1] for line in said.splitlines() if "starting its own PostgreSQL" in line]
    assert Path(folder).parent == Path(tempfile.gettempdir())
    assert not Path(folder).exists()


# The command ------------------------------------------------------------------------------------------------------


def test_the_help_shows_both_forms(inside: Inside) -> None:
    code, said, _ = inside("demo", "--help")
    assert code == 0
    for word in ("--requests", "--pipeline", "--children", "--json", "simulated", "exit code is 1"):
        assert word in " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--children", "30"], "--children is for the pipeline"),
        (["--pipeline", "--requests", "300"], "--requests is for the batch"),
        (["--requests", "299"], "greater than or equal to 300"),
        (["--keep", "--json"], "leave --json out"),
    ],
)
def test_options_that_do_not_fit_are_refused(inside: Inside, arguments: list[str], reason: str) -> None:
    code, said, complained = inside("demo", *arguments)
    assert code != 0
    assert said == ""
    assert reason in complained


@pytest.mark.parametrize(("report", "code"), [(RIGHT, 0), (changed(completed=299, failed=1), 1)])
def test_the_exit_code_says_whether_the_numbers_agree(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, report: Report, code: int
) -> None:
    async def run_batch(requests: int, out: Console, *, keep: bool) -> Report:
        assert out.quiet
        assert not keep
        return report

    monkeypatch.setattr("batchwright.demo.batch.run_batch", run_batch)
    ended, said, _ = inside("demo", "--json")
    assert ended == code
    told = orjson.loads(said)
    assert told["requests"] == 300
    assert told["status"] == "completed"
    assert told["saved_share"] == 0.9
    assert told["problems"] == list(report.problems)


# The report -------------------------------------------------------------------------------------------------------


def test_a_report_whose_numbers_agree_has_no_problems() -> None:
    assert RIGHT.problems == []
    said = printed(RIGHT)
    for words in ("3.2 s after the kill", "180,000, 90%", "50%", "sha256 aaaaaaaaaaaa…", "letter-00000", "✓ A worker"):
        assert words in said
    assert "✗" not in said


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"status": BatchStatus.FAILED}, "the batch is failed"),
        ({"completed": 299}, "299 of 300 requests answered"),
        ({"failed": 1}, "the batch is completed"),
        ({"asked_distinct": 299}, "got 340 requests, 299 of them different"),
        ({"asked": 341}, "got 341 requests"),
        ({"asked": 349, "asked_again": 49}, "49 requests were resent; a worker has at most 48 in flight"),
        ({"manifest": None}, "there is no manifest"),
        ({"manifest": {**(RIGHT.manifest or {}), "counts": {"total": 300, "completed": 299}}}, "the manifest counts"),
        ({"input_sha256": "cc" * 32}, "the input had the SHA-256 cccc"),
        ({"findings": [Finding("output", Level.ERROR, "it has the SHA-256 dddd")]}, "output: it has the SHA-256 dddd"),
        ({"findings": [Finding("output", Level.WARNING, "it was deleted")]}, "output: it was deleted"),
    ],
)
def test_numbers_that_do_not_agree_are_reported(values: dict[str, Any], problem: str) -> None:
    report = changed(**values)
    assert not report.is_right
    assert any(problem in one for one in report.problems), report.problems
    said = printed(report)
    assert "this is a bug in Batchwright" in said
    assert "✓ A worker died" not in said


# The input --------------------------------------------------------------------------------------------------------


def requests_of(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_the_requests_are_all_different_and_the_same_each_time(tmp_path: Path) -> None:
    path, other = tmp_path / "one", tmp_path / "two"
    assert write_requests(path, 1_000) == write_requests(other, 1_000)
    assert path.read_bytes() == other.read_bytes()
    lines = requests_of(path)
    assert len({line["custom_id"] for line in lines}) == 1_000
    assert len({orjson.dumps(line["body"]) for line in lines}) == 1_000
    assert Counter(line["body"]["model"] for line in lines) == {one.name: 10 * one.percent for one in MODELS}


def test_the_requests_share_long_system_prompts_and_are_mixed(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    prompts = write_requests(path, 1_000)
    pairs = [(line["body"]["model"], line["body"]["messages"][0]["content"]) for line in requests_of(path)]
    assert len(set(pairs)) == prompts
    assert min(len(prompt) for _, prompt in pairs) > 2_048
    assert min(Counter(pairs).values()) > demo_requests.REQUESTS_PER_PROMPT // 2
    assert sum(one == following for one, following in pairwise(pairs)) < 100
    assert {model for model, _ in pairs[:100]} == {model.name for model in MODELS}


def test_the_order_of_the_file_saves_less_than_the_order_of_the_prompts(tmp_path: Path) -> None:
    path, ordered = tmp_path / "mixed", tmp_path / "ordered"
    write_requests(path, 1_500)
    lines = sorted(requests_of(path), key=lambda line: line["body"]["messages"][0]["content"])
    ordered.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    assert 0.3 < input_order_share(path) < 0.8 < 0.9 < input_order_share(ordered) < 0.95


# The figure of the takeover ---------------------------------------------------------------------------------------

BATCH = f"batch_{1:032x}"
KILLED_AT = datetime(2026, 7, 1, 12, tzinfo=UTC)


async def register(pool: Pool, shard: Shard, claim: int, seconds_after_kill: float) -> None:
    """Add a registered answer of this claim."""
    await pool.rows(
        "INSERT INTO batchwright.batch (id, tenant, job_id, queue, priority, endpoint, input_file_id, "
        "completion_window, family, created_at, expires_at) VALUES (%(id)s, 'default', gen_random_uuid(), 'batches', "
        "5, '/v1/chat/completions', 'file-1', '24h', %(id)s, now(), now() + interval '1 day') "
        "ON CONFLICT DO NOTHING RETURNING id",
        {"id": shard.batch_id},
    )
    await pool.rows(
        "INSERT INTO batchwright.batch_segment (batch_id, shard, claim, seq, host, start_byte, end_byte, lines, tally, "
        "registered_at) VALUES (%(id)s, %(shard)s, %(journal)s, 0, 'host', 0, 1, 1, '{}', %(at)s) RETURNING id",
        {
            "id": shard.batch_id,
            "shard": shard.number,
            "journal": shard.journal_number(claim),
            "at": KILLED_AT + timedelta(seconds=seconds_after_kill),
        },
    )


async def test_the_takeover_is_the_first_answer_of_a_later_claim_of_a_lost_shard(pool: Pool) -> None:
    whole = Shard(batch_id=BATCH, model="m", number=3, start=0, count=1_000)
    lost, kept = (dataclasses.replace(whole, branch=branch) for branch in (100, 400))
    held = [(lost, 1)]
    for shard, claim, seconds in ((lost, 1, -0.1), (whole, 1, -5.2), (kept, 1, -4.0), (kept, 1 + 1, 0.5)):
        await register(pool, shard, claim, seconds)
    await register(pool, dataclasses.replace(lost, batch_id=f"batch_{2:032x}"), 2, 0.7)
    await register(pool, dataclasses.replace(lost, round=1), 1, 0.8)
    assert await read_takeover(pool, BATCH, held, KILLED_AT) is None
    await register(pool, lost, 3, 4.5)
    await register(pool, lost, 2, 3.25)
    assert await read_takeover(pool, BATCH, held, KILLED_AT) == 3.25
    assert await read_takeover(pool, BATCH, [(whole, 1)], KILLED_AT) is None
    assert await read_takeover(pool, BATCH, [], KILLED_AT) is None


# Environment and workers ------------------------------------------------------------------------------------------


def test_nothing_of_the_users_settings_reaches_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCHWRIGHT_DATABASE_URL", "BATCHWRIGHT_CONFIG", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.setenv(name, "the user's")
    environment = own_environment(tmp_path, "[log]\n")
    assert "the user's" not in environment.values()
    assert Path(environment["BATCHWRIGHT_CONFIG"]).read_text() == "[log]\n"
    assert environment["PATH"]


async def test_a_worker_that_exits_by_itself_ends_the_demo_and_its_last_output_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("once\nthe disk is on fire\n")
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    with subprocess.Popen([sys.executable, "-c", "input(); exit(3)"], stdin=subprocess.PIPE) as simulator:
        stage = Stage(
            batchwright=AsyncBatchwright(settings=load_settings(environment={})),
            server=Server(Remote("http://127.0.0.1:1", simulator, None)),
            crew=[Tethered(process=worker, log=log)],
            folder=tmp_path,
        )
        await worker.wait()
        with pytest.raises(BatchwrightError, match="ended unexpectedly: once; the disk is on fire"):
            stage.check()
        stage.killed.add(worker.pid)
        stage.check()
        simulator.communicate(b"\n")
        with pytest.raises(BatchwrightError, match="the simulated model server has ended with 3"):
            stage.check()
