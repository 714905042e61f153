"""What the docs print is run, as a newcomer would."""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from batchwright import AsyncBatchwright
from batchwright.testing import drain
from tests.conftest import skip
from tests.ingest.stage import ingest_stage

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```(?:python|bash)\n(.*?)```", re.DOTALL)


def examples() -> list[tuple[str, str]]:
    return [found for page in PAGES for found in EXAMPLE.findall(page.read_text(encoding="utf-8"))]


def example(name: str) -> str:
    texts = {text for found, text in examples() if found == name}
    assert len(texts) == 1, f"{name} is printed in {len(texts)} versions"
    return texts.pop()


@pytest.fixture
def folder():
    """A folder that the embedded server's user may enter."""
    path = Path(tempfile.mkdtemp(prefix="batchwright-docs-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_generated_pages_are_up_to_date():
    found = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_examples_that_are_printed_twice_are_the_same():
    assert len(example("hello.py").splitlines()) == 11
    assert example("pages.py")
    assert example("test_pages.py")


def test_the_quickstart_works_as_printed_with_the_embedded_database(folder):
    (folder / "hello.py").write_text(example("hello.py"))
    environment = {
        **os.environ,
        "BATCHWRIGHT_API_PORT": "0",
        "BATCHWRIGHT_DATABASE_FOLDER": str(folder / "data"),
        "BATCHWRIGHT_LOG_FORM": "text",
    }
    environment.pop("BATCHWRIGHT_DATABASE_URL", None)
    up = subprocess.Popen(
        [sys.executable, "-m", "batchwright", "up", "hello.py"],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said = subprocess.run(
            [sys.executable, "hello.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
        )
        assert said.stdout == "Hello, Ada!\n", said.stderr
    finally:
        up.terminate()
        printed, _ = up.communicate(timeout=60)
    assert up.returncode == 0, printed


async def test_the_pipeline_of_the_quickstart_counts_words(database_url, folder):
    (folder / "pages.py").write_text(example("pages.py"))
    spec = importlib.util.spec_from_file_location("pages", folder / "pages.py")
    pages = importlib.util.module_from_spec(spec)
    sys.modules["pages"] = pages
    try:
        spec.loader.exec_module(pages)
        namespace: dict[str, object] = {}
        exec(compile(example("test_pages.py"), "test_pages.py", "exec"), namespace)
        await namespace["test_the_book_is_counted"](database_url)
    finally:
        del sys.modules["pages"]
    async with AsyncBatchwright(database_url=database_url, operations=[pages.announce]) as batchwright:
        assert await drain(batchwright) == 0


def shell(folder: Path, script: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a printed script as a reader would, on a port and a database of its own."""
    if shutil.which("curl") is None:
        skip("curl is not installed")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
    environment = {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BATCHWRIGHT_API_PORT": port,
        "BATCHWRIGHT_DATABASE_FOLDER": str(folder / "data"),
        **settings,
    }
    return subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", script.replace("8765", port)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=110,
    )  # fmt: skip


@pytest.mark.thorough
def test_the_story_of_the_readme_ends_well_although_its_worker_is_killed(folder):
    shutil.copytree(ROOT / "examples", folder / "examples")
    told = shell(folder, example("story.sh"))
    assert told.returncode == 0, told
    assert '"job.rescued"' in told.stdout
    assert '"csv_ingest.resumed"' in told.stdout
    assert "event: end" in told.stdout
    shown = told.stdout.partition("event: end")[2]
    assert "SUCCEEDED" in shown
    assert "emission_recalc" in shown


@pytest.mark.thorough
def test_the_http_examples_work_as_printed(folder):
    (folder / "hello.py").write_text(example("hello.py"))
    start = """
        batchwright up hello.py & UP=$!
        curl -s --retry 60 --retry-delay 1 --retry-connrefused http://127.0.0.1:8765/readyz
        until batchwright operations greet >/dev/null 2>&1; do sleep 0.2; done
    """
    told = shell(folder, f"{start}\n{example('http.sh')}\nkill $UP; wait $UP")
    assert told.returncode == 0, told
    lines = told.stdout.splitlines()
    assert any("job.succeeded" in line for line in lines)
    assert "SUCCEEDED" in lines
    assert lines[-5:-1] == ["list", "True", "2", "2"], "two jobs would be cancelled, and two were"
    assert lines[-1].startswith("20")


@pytest.mark.thorough
def test_the_tasks_of_the_docs_run_as_printed_against_simulated_providers(folder):
    script = f"{example('tasks.sh')}\n{example('tasks-http.sh')}\nkill $UP $SIMULATOR; wait $UP $SIMULATOR"
    told = shell(folder, script.replace("--providers --write", "--providers --port 0 --write"))
    assert told.returncode == 0, told
    assert "1 good, 0 failed" in told.stdout
    assert "6 good, 0 failed" in told.stdout
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 6
    assert '"text":"Transcript of call.wav."' in told.stdout
    assert '"name":"together"' in told.stdout


@pytest.mark.thorough
def test_the_provider_batch_of_the_docs_runs_as_printed(folder):
    told = shell(folder, example("provider-batch.sh").replace("--providers --write", "--providers --port 0 --write"))
    assert told.returncode == 0, told
    assert "6 of 6 lines were answered" in told.stdout
    assert "1 anthropic, 1 openai" in told.stdout
    assert len((folder / "requests.out.jsonl").read_text().splitlines()) == 6


@pytest.mark.thorough
def test_a_provider_batch_over_http_runs_as_printed(folder):
    script = f"{example('provider-batches.sh')}\nkill $UP $SIMULATOR; wait $UP $SIMULATOR"
    told = shell(folder, script.replace("--providers --write", "--providers --port 0 --write"))
    assert told.returncode == 0, told
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in answers] == ["saw", "plane", "chisel"]
    assert {one["response"]["body"]["model"] for one in answers} == {"claude-haiku-4-5"}


@pytest.mark.thorough
def test_documents_are_read_and_found_as_printed(folder):
    """The second run is over the same files, and finds nothing to do."""
    told = shell(folder, example("documents.sh"))
    assert told.returncode == 0, told
    assert "tides.md" in told.stdout
    assert "east pier" in told.stdout
    assert re.search(r"2 unchanged", told.stdout), told.stdout


async def test_a_step_of_ones_own_is_the_file_that_is_printed(database_url, tmp_path):
    (tmp_path / "languages.py").write_text(example("languages.py"))
    async with ingest_stage(database_url, tmp_path, ingest={"steps": [str(tmp_path / "languages.py")]}) as stage:
        stage.write("a.txt", "Das ist nicht der Anfang und nicht das Ende.")
        stage.work()
        run = await stage.succeed()
        (item,) = (await stage.items(run.id)).values()
        (found,) = [one for one in await stage.part.items.steps(item.id) if one.step == "LANGUAGE_FOUND"]
        assert found.output == {"language": "de"}
