"""The docs as a site: it can be built, has no dead links, and loads nothing from other hosts."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tests.conftest import skip
from tests.examples.reader import ROOT, Block, blocks

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Elements for which a browser loads something by itself, and the attribute with the address.
LOADED = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "script": "src",
    "source": "src",
}
ELSEWHERE = re.compile(r"^(?:[a-z]+:)?//")
FORMLESS = ("", "html", "http", "ini", "mermaid", "sql", "text")


def build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("material") is None:
        skip("mkdocs-material is not installed; `make docs` installs it")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", target],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip


class Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.classes |= set((named.get("class") or "").split())
        if tag in LOADED and named.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(named.get(LOADED[tag]) or "")
        self.found += re.findall(r"url\(['\"]?([^'\")]+)", named.get("style") or "")


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    built = build(ROOT / "mkdocs.yml", tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES), "the page for addresses that are not found is missing"
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert not [place for place in loads.found if ELSEWHERE.match(place)], page
        assert "mermaid" not in loads.classes, f"{page}: the theme would load a script for this from another host"
    for style in tmp_path.rglob("*.css"):
        asked = re.findall(r"(?:@import|url\()\s*['\"]?([^'\")\s;]+)", style.read_text(encoding="utf-8"))
        assert not [place for place in asked if ELSEWHERE.match(place)], style
    found = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert {"quickstart.html", "decisions/index.html", "changelog.html"} <= {one["location"] for one in found["docs"]}
    assert (tmp_path / "search" / "search_index.js").exists(), (
        "the search index for readers who open the site from the disk is missing"
    )
    assert "claim" in (tmp_path / "lifecycles.html").read_text().partition('class="moves"')[2][:2000]


def test_a_dead_link_or_a_page_outside_of_the_navigation_fails_the_build(tmp_path):
    """A site of two pages, with the settings of ours."""
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "first.md").write_text("# First\n\n[a](gone.md) [b](first.md#gone) ![c](gone.png)\n")
    (tmp_path / "pages" / "orphan.md").write_text("# Orphan\n")
    settings = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": "pages", "hooks": [], "plugins": []}
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump({**settings, "nav": [{"First": "first.md"}]}))
    built = build(tmp_path / "tiny.yml", tmp_path / "site")
    assert built.returncode != 0
    said = built.stdout + built.stderr
    for complaint in ("'gone.md'", "'gone.png'", "#gone", "orphan.md"):
        assert complaint in said, said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_have_the_form_of_their_language(page):
    for block in blocks(page):
        assert problem(block) is None, f"{block.place}: {problem(block)}"


def problem(block: Block) -> str | None:
    """The problem of a block, as far as it can be found without running it."""
    checks = {"bash": _shell, "console": _console, "json": json.loads, "python": _python, "toml": tomllib.loads}
    if block.language in FORMLESS:
        return None
    if block.language == "yaml":
        return None if list(yaml.safe_load_all(block.text)) else "it is empty"
    if block.language not in checks:
        return f"nothing is known of the language {block.language!r}"
    try:
        checks[block.language](block.text if block.language != "console" else block)
    except (AssertionError, SyntaxError, ValueError) as error:
        return str(error)
    return None


def _python(text: str) -> None:
    compile(text, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def _shell(text: str) -> None:
    checked = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def _console(block: Block) -> None:
    assert block.text.startswith("$ "), "a console begins with a command after `$ `"
    _shell(block.commands())


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "if true; then\n"),
        ("cobol", "MOVE A TO B.\n"),
        ("console", "batchwright up\n"),
        ("json", "{'a': 1}\n"),
        ("python", "def f(:\n"),
        ("toml", "a = \n"),
    ],
)
def test_a_block_in_a_wrong_form_is_found(language, text):
    block = Block(page=ROOT / "README.md", line=1, section=0, language=language, text=text, mark="")
    assert problem(block) is not None
