"""`batchwright batch example`: a first batch without reading the documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from batchwright.batches.plan.lines import ENDPOINTS, GoodLine, LineCheck
from tests.cli.conftest import Cli, Inside


def test_every_endpoint_has_an_example_that_passes_the_check(inside: Inside) -> None:
    for endpoint in ENDPOINTS:
        code, out, err = inside("batch", "example", "--endpoint", endpoint, "--count", "12", "--model", "my-model")
        assert code == 0
        lines = [LineCheck(endpoint).check(line.encode(), 1) for line in out.splitlines()]
        assert [line.custom_id for line in lines] == [f"request-{n}" for n in range(1, 13)]
        assert {line.model for line in lines if isinstance(line, GoodLine)} == {"my-model"}
        assert "batchwright batch run requests.jsonl --url http://127.0.0.1:8000" in err
        assert ("batchwright simulate" in err) is ("audio" not in endpoint)


def test_its_output_can_be_checked_and_is_only_requests(inside: Inside, tmp_path: Path) -> None:
    _, out, _ = inside("batch", "example")
    (tmp_path / "requests.jsonl").write_text(out)
    found = inside.json("batch", "check", str(tmp_path / "requests.jsonl"))
    assert (found["requests"], found["problems"]["total"]) == (10, 0)
    assert all(orjson.loads(line)["body"]["model"] == "small" for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--count", "0"], "Invalid value for '--count'"),
        (
            ["--endpoint", "/v1/images"],
            "--endpoint '/v1/images' is not supported in batches; use one of /v1/chat/completions",
        ),
    ],
)
def test_an_example_that_cannot_be_made_says_why(inside: Inside, arguments: list[str], complaint: str) -> None:
    code, out, err = inside("batch", "example", *arguments)
    assert (code != 0, out) == (True, "")
    assert complaint in err


def test_a_reader_that_closes_the_pipe_early_gets_no_error(cli: Cli) -> None:
    command = f"{sys.executable} -P -m batchwright batch example --count 20000 | head -n 2"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=cli.environment, check=True)
    assert len(done.stdout.splitlines()) == 2
    assert "Traceback" not in done.stderr
