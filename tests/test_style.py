"""House rules that a machine can check."""

import ast
import re
from pathlib import Path

import batchwright

SOURCE = Path(batchwright.__file__).parent


def functions():
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0]
                body = first.end_lineno + 1 if ast.get_docstring(node) else first.lineno
                yield node.end_lineno - body + 1, f"{file.name}:{node.lineno} {node.name}"


def test_functions_are_short_in_the_tail():
    lengths = sorted(functions())
    assert lengths[int(len(lengths) * 0.90)][0] <= 25, lengths[-40:]
    assert lengths[int(len(lengths) * 0.99)][0] <= 60, lengths[-10:]


def test_public_names_are_sorted_complete_and_there():
    assert batchwright.__all__ == sorted(batchwright.__all__)
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {alias.name for node in froms if str(node.module).startswith("batchwright.") for alias in node.names}
    assert imported == set(batchwright.__all__)
    assert all(hasattr(batchwright, name) for name in batchwright.__all__)


def test_every_module_says_what_it_is_for():
    silent = [file.name for file in SOURCE.rglob("*.py") if not ast.get_docstring(ast.parse(file.read_text()))]
    assert silent == []


def test_only_statement_files_write_a_status():
    writers = re.compile(r"UPDATE\s+batchwright\.job\b|INSERT INTO batchwright\.job\b", re.IGNORECASE)
    assert [file.name for file in SOURCE.rglob("*.py") if writers.search(file.read_text(encoding="utf-8"))] == []
    assert [file.name for file in SOURCE.rglob("*.sql") if writers.search(file.read_text())] == ["jobs.sql"]


def test_only_the_engine_reads_jobs():
    reader = re.compile(r"batchwright\.job\b")
    inside = {SOURCE / "engine", SOURCE / "db" / "migrations"}
    outside = [file for file in SOURCE.rglob("*.sql") if file.parent not in inside]
    assert len(outside) > 5
    assert [file.name for file in outside if reader.search(file.read_text(encoding="utf-8"))] == []


def test_the_error_tree_in_the_docstring_is_the_tree():
    from batchwright import errors

    drawn = re.findall(r"^ *(?:[│ ]*[├└]── )?(\w+)(?: {2,}.*)?$", errors.__doc__.split("\n\n", 1)[1], re.MULTILINE)
    defined = [
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    assert sorted(drawn) == sorted(defined)
