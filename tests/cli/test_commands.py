"""The whole tree of commands: each has its help, its JSON, and completes in a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from batchwright.cli import app
from batchwright.cli.simulate import PROFILE_NAMES
from batchwright.simulator import PROFILES

SERVERS = {("up",), ("worker",), ("api",)}
"""Commands that run until they are stopped, and so have no result."""


def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*words, name))


TREE = dict(walk(get_command(app)))
LEAVES = [words for words, command in TREE.items() if not hasattr(command, "commands")]


def test_the_tree_has_every_command_that_people_are_told_of() -> None:
    there = {" ".join(words) for words in LEAVES}
    assert there >= {
        "pipeline show",
        "pipeline cancel",
        "queue list",
        "queue pause",
        "queue resume",
        "operations",
        "workers",
        "inbox list",
        "inbox rerun",
        "inbox dismiss",
        "job cancel",
        "job rerun",
    }


@pytest.mark.parametrize("words", list(TREE), ids=" ".join)
def test_every_command_and_every_flag_says_what_it_does(words: tuple[str, ...]) -> None:
    """Whole: markup takes what stands in brackets for a style, and swallows it unless it is escaped."""
    command = TREE[words]
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "1000"})
    assert shown.exit_code == 0
    said = packed(shown.output)
    assert command.help
    assert all(packed(part) in said for part in command.help.partition("\f")[0].split("\n\n"))
    for flag in (flag for flag in command.params if not getattr(flag, "hidden", False)):
        assert flag.help, f"{words}: {flag.name} has no help"
        assert packed(flag.help) in said, f"{words}: {flag.name}"
        assert packed(flag.metavar or "") in said, f"{words}: {flag.name}"


def packed(text: str) -> str:
    """Without white space and frames, and without what escapes a bracket."""
    return "".join(text.replace("\\[", "[").replace("│", "").split())


@pytest.mark.parametrize("words", [words for words in LEAVES if words not in SERVERS], ids=" ".join)
def test_every_command_with_a_result_prints_json(words: tuple[str, ...]) -> None:
    assert "--json" in {name for flag in TREE[words].params for name in flag.opts}


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_the_same_flag_means_the_same_everywhere(words: tuple[str, ...]) -> None:
    helps = {flag.name: flag.help for flag in TREE[words].params}
    for shared in ("json", "database_url", "config", "dry_run", "yes"):
        for other in LEAVES:
            theirs = {flag.name: flag.help for flag in TREE[other].params}
            if shared in helps and shared in theirs:
                assert helps[shared] == theirs[shared], f"{words} and {other}: --{shared}"


def complete(shell: str, line: str) -> subprocess.CompletedProcess[str]:
    """What the shell's completion would offer behind this line."""
    words = line.split(" ")
    return subprocess.run(
        [sys.executable, "-P", "-m", "batchwright"],
        env={
            **os.environ,
            "_BATCHWRIGHT_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            "_TYPER_COMPLETE_ARGS": line,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=45,
    )


def test_a_shell_completes_commands_and_the_values_of_flags() -> None:
    assert complete("bash", "batchwright pipe").stdout.split() == ["pipeline"]
    offered = complete("bash", "batchwright job list --status ").stdout.split()
    assert offered == ["QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_printed(shell: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "batchwright", "--show-completion", shell],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=45,
    )
    assert f"_BATCHWRIGHT_COMPLETE=complete_{shell}" in shown.stdout
    assert shown.stderr == ""


def test_a_command_loads_neither_the_demo_nor_the_simulator_nor_a_workers_upkeep() -> None:
    """Each takes a part of the half second in which a command has to be there."""
    asked = "import sys, batchwright.cli; print(*sys.modules)"
    there = set(
        subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True).stdout.split()
    )
    others = {
        "batchwright.cli.demo_batch",
        "batchwright.simulator",
        "batchwright.batches.collector",
        "batchwright.batches.runtime",
    }
    assert there.isdisjoint(others | {"starlette", "wreq", "opentelemetry"})


def test_the_help_of_the_simulator_names_its_profiles() -> None:
    assert ", ".join(PROFILES) == PROFILE_NAMES
