"""What `make docs` adds to the pages of docs/: pages from the project's folder, the shelf of decisions, and charts."""

from __future__ import annotations

import html
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Files outside of docs/ and the page that each of them becomes.
EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/README.md"))
FROM_ROOT = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    **{f"examples/{name}/README.md": f"examples/{name}.md" for name in EXAMPLES},
}
_SOURCES = {page: source for source, page in FROM_ROOT.items()}
_LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CHART = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ARROW = re.compile(r"^\s+(\S+) --> (\S+?)(?:: (.*))?$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Add every decision note, the newest first, and every example to the navigation."""
    shelves = {name: pages for shelf in config.nav for name, pages in shelf.items()}
    notes = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"), reverse=True)
    shelves["Decisions"][1:] = [f"decisions/{note.name}" for note in notes]
    shelves["Reference"].append({"Examples": [f"examples/{name}.md" for name in EXAMPLES]})
    return config


def on_files(files: Files, *, config: Any) -> Files:
    for source, page in FROM_ROOT.items():
        files.append(File.generated(config, page, abs_src_path=os.fspath(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Change links to those of the site, and state diagrams to tables."""
    place = page.file.src_uri
    source = _SOURCES.get(place, f"docs/{place}")
    charted = _CHART.sub(lambda found: chart(found[1]), markdown)
    parts, last = [], 0
    for fence in _FENCE.finditer(charted):
        parts += [_relink(charted[last : fence.start()], source, place), fence[0]]
        last = fence.end()
    return "".join([*parts, _relink(charted[last:], source, place)])


def _relink(text: str, source: str, place: str) -> str:
    def linked(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        page = FROM_ROOT.get(target, target.removeprefix("docs/"))
        return f"{found[1]}{posixpath.relpath(page, posixpath.dirname(place) or '.')}{found[3] or ''}{found[4]}"

    return _LINK.sub(linked, text)


def chart(lines: str) -> str:
    """A state diagram as a table: rows are the states before a move, columns those after it."""
    moves = {(before, after): verbs for before, after, verbs in _ARROW.findall(lines) if "[*]" not in (before, after)}
    states = list(dict.fromkeys(state for move in moves for state in move))
    sources = [state for state in states if any(before == state for before, _ in moves)]
    targets = [state for state in states if any(after == state for _, after in moves)]
    head = "".join(f"<th>{html.escape(state)}</th>" for state in targets)
    rows = "".join(
        f"<tr><th>{html.escape(source)}</th>"
        + "".join(f"<td>{html.escape(moves.get((source, target), ''))}</td>" for target in targets)
        + "</tr>"
        for source in sources
    )
    return f'<table class="moves"><thead><tr><th>from ↓ to →</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
