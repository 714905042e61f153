"""What the docs print is run, as a newcomer would."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from windlass import AsyncWindlass
from windlass.testing import drain

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```python\n(.*?)```", re.DOTALL)


def examples() -> list[tuple[str, str]]:
    return [found for page in PAGES for found in EXAMPLE.findall(page.read_text(encoding="utf-8"))]


def example(name: str) -> str:
    texts = {text for found, text in examples() if found == name}
    assert len(texts) == 1, f"{name} is printed in {len(texts)} versions"
    return texts.pop()


@pytest.fixture
def folder():
    """A folder that the embedded server's user may enter."""
    path = Path(tempfile.mkdtemp(prefix="windlass-docs-"))
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
    environment = {**os.environ, "WINDLASS_DATABASE_FOLDER": str(folder / "data"), "WINDLASS_LOG_FORM": "text"}
    environment.pop("WINDLASS_DATABASE_URL", None)
    up = subprocess.Popen(
        [sys.executable, "-m", "windlass", "up", "hello.py"],
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
    async with AsyncWindlass(database_url=database_url, operations=[pages.announce]) as windlass:
        assert await drain(windlass) == 0
