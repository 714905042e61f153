"""The examples of docs/batches.md run as printed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from pathlib import Path

import openai
import pytest

from tests.conformance.conftest import Running
from tests.conftest import skip

PAGE = Path(__file__).parents[2] / "docs" / "batches.md"
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```(?:python|bash)\n(.*?)```", re.DOTALL)


def example(name: str) -> str:
    found = dict(EXAMPLE.findall(PAGE.read_text(encoding="utf-8")))
    return found[name]


def test_the_program_runs_as_printed(running: Running, tenant: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = example("batch.py").replace("http://127.0.0.1:8765/v1", running.url)
    names: dict[str, openai.OpenAI] = {}
    exec(compile(program.replace('"unused"', repr(running.secret(tenant))), "batch.py", "exec"), names)
    names["client"].close()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("completed 3 ")
    assert [line.split()[0] for line in said[1:]] == ["word-0", "word-1", "word-2"]


async def test_the_commands_run_as_printed(running: Running, tenant: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        skip("curl is not installed")
    script = example("batches.sh").replace("http://127.0.0.1:8765/v1", running.url)
    key = await asyncio.to_thread(running.secret, tenant)
    process = await asyncio.create_subprocess_exec(
        "bash", "-eu", "-o", "pipefail", "-c", script,
        cwd=tmp_path, env={**os.environ, "KEY": key, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        said, problems = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, problems.decode()
    lines = said.decode().splitlines()
    again, *results, summary, counts, first, status, beginning, kind = lines
    assert again == first
    assert sorted(re.findall(r'"custom_id":"(.)"', "".join(results))) == ["a", "b"]
    assert "'sample_custom_id': 'b'" in summary
    assert "'completed': 1" in counts
    assert status in ("cancelling", "cancelled")
    assert (beginning, kind) == ('{"custom_id": "a",', "list")
