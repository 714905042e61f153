"""Examples of the docs that tests need by name, and links; tests/examples/test_pages.py runs whole pages."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import skip
from tests.ingest.stage import ingest_stage

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```(?:python|bash|sql)\n(.*?)```", re.DOTALL)


def examples() -> list[tuple[str, str]]:
    return [found for page in PAGES for found in EXAMPLE.findall(page.read_text(encoding="utf-8"))]


def example(name: str) -> str:
    texts = {text for found, text in examples() if found == name}
    assert len(texts) == 1, f"{name} is printed in {len(texts)} versions"
    return texts.pop()


@pytest.fixture
def folder():
    """A folder that the user of the embedded server may enter."""
    path = Path(tempfile.mkdtemp(prefix="batchwright-docs-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_generated_pages_are_up_to_date():
    found = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_links_between_pages_have_targets():
    found = 0
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
            found += 1
    assert found


def test_examples_that_are_printed_twice_are_the_same():
    assert len(example("hello.py").splitlines()) == 11
    assert example("pages.py")
    assert example("test_pages.py")


def test_the_test_of_the_quickstart_passes_as_printed(folder):
    """As a new user runs it, with an embedded server. pytest loads our code only for tests that need it."""
    for name in ("pages.py", "test_pages.py"):
        (folder / name).write_text(example(name))
    (folder / "conftest.py").write_text(
        "import sys\nloaded = {name for name in sys.modules if name.startswith(('batchwright', 'psycopg'))}\n"
        "assert loaded == {'batchwright', 'batchwright.pytest_plugin'}, loaded\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "test_pages.py"],
        cwd=folder, env={**kept, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout
    assert "1 passed" in told.stdout


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


async def test_the_printed_file_of_a_custom_step_works(database_url, tmp_path):
    (tmp_path / "languages.py").write_text(example("languages.py"))
    async with ingest_stage(database_url, tmp_path, ingest={"steps": [str(tmp_path / "languages.py")]}) as stage:
        stage.write("a.txt", "Das ist nicht der Anfang und nicht das Ende.")
        stage.work()
        run = await stage.succeed()
        (item,) = (await stage.items(run.id)).values()
        (found,) = [one for one in await stage.part.items.steps(item.id) if one.step == "LANGUAGE_FOUND"]
        assert found.output == {"language": "de"}
