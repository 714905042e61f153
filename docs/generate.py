"""Write the pages that follow from code: the lifecycles from states.py, the settings from their classes.

`python docs/generate.py` writes them; with `--check` it only says whether they are up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from pathlib import Path

from windlass.settings import PREFIX, Settings
from windlass.states import LIFECYCLES, Lifecycle

DOCS = Path(__file__).parent


def lifecycles() -> str:
    parts = ["# Lifecycles\n", "Generated from `states.py` by `make docs`. The database refuses every other move.\n"]
    parts += [_lifecycle(lifecycle) for lifecycle in LIFECYCLES]
    return "\n".join(parts)


def _lifecycle(lifecycle: Lifecycle) -> str:
    lines = [f"## {lifecycle.name.capitalize()}\n", "```mermaid", "stateDiagram-v2", f"    [*] --> {lifecycle.initial}"]
    for source, target in dict.fromkeys((move.source, move.target) for move in lifecycle.moves):
        verbs = ", ".join(move.verb for move in lifecycle.moves if (move.source, move.target) == (source, target))
        lines.append(f"    {source} --> {target}: {verbs}")
    lines += [f"    {state} --> [*]" for state in sorted(lifecycle.terminal)]
    lines += ["```\n", "| state | what it means |", "|---|---|"]
    lines += [f"| `{state}` | {meaning} |" for state, meaning in lifecycle.meanings.items()]
    lines += ["", "| verb | from | to | when |", "|---|---|---|---|"]
    lines += [f"| {move.verb} | `{move.source}` | `{move.target}` | {move.why} |" for move in lifecycle.moves]
    return "\n".join(lines) + "\n"


def configuration() -> str:
    lines = [
        "# Configuration\n",
        "Generated from the settings classes by `make docs`.\n",
        f"The file `windlass.toml`, or the one that `{PREFIX}CONFIG` names, comes first,",
        "then the environment, then flags; the last one wins.\n",
        "```toml",
        'operations = ["shop.jobs"]',
        "",
        "[worker]",
        "concurrency = 50",
        "queue_limits = { gpu = 1 }",
        "```\n",
    ]
    for part in dataclasses.fields(Settings):
        if part.default_factory is dataclasses.MISSING:
            lines += [f"## {part.name}\n", *_table(Settings, None, only=part.name)]
        else:
            kind = type(part.default_factory())
            lines += [f"## [{part.name}]\n", f"{inspect.getdoc(kind)}\n", *_table(kind, part.name)]
    return "\n".join(lines)


def _table(kind: type, part: str | None, only: str | None = None) -> list[str]:
    notes = _notes(kind)
    lines = ["| setting | environment | default | meaning |", "|---|---|---|---|"]
    for setting in dataclasses.fields(kind):
        if only in (None, setting.name):
            name = f"{part}.{setting.name}" if part else setting.name
            default = setting.default if setting.default is not dataclasses.MISSING else setting.default_factory()
            shown = "unset" if default is None else repr(default)
            variable = PREFIX + name.upper().replace(".", "_")
            lines.append(f"| `{name}` | `{variable}` | `{shown}` | {notes.get(setting.name, '')} |")
    return [*lines, ""]


def _notes(kind: type) -> dict[str, str]:
    """The string below each field, which is its documentation."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    notes: dict[str, str] = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            notes[node.target.id] = " ".join(str(after.value.value).split())
    return notes


PAGES = {"lifecycles.md": lifecycles, "configuration.md": configuration}


def main() -> int:
    stale = []
    for name, write in PAGES.items():
        page, text = DOCS / name, write()
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                page.write_text(text, encoding="utf-8")
    for name in stale:
        sys.stdout.write(f"docs/{name} {'is not up to date: run make docs' if '--check' in sys.argv else 'written'}\n")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
