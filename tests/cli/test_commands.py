"""The whole tree of commands: each has help and JSON output, and completes in a shell."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import batchwright
from batchwright.commands import LazyCommand, app
from batchwright.simulator import PROFILES

SERVERS = {("up",), ("worker",), ("api",)}
"""Commands that run until they are stopped, and so have no result."""


def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands of the tree, including those of parts, which are loaded."""
    command = command.load() if isinstance(command, LazyCommand) else command
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*words, name))


TREE = dict(walk(get_command(app)))
LEAVES = [words for words, command in TREE.items() if not hasattr(command, "commands")]


def test_the_tree_has_every_documented_command() -> None:
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


def test_the_commands_on_pages_without_data_exist() -> None:
    """A page without data shows a command. Its words up to the first argument are in the tree."""
    templates = Path(batchwright.__file__).parent.rglob("*.html")
    shown = [line for path in templates for line in re.findall(r'command="batchwright ([a-z ]+)', path.read_text())]
    assert len(shown) >= 5
    for line in shown:
        words = tuple(line.split())
        known = max((words[:n] for n in range(len(words) + 1) if words[:n] in TREE), key=len)
        assert known in LEAVES, f"batchwright {line}: {' '.join(known)} has no such command"


@pytest.mark.parametrize("words", list(TREE), ids=" ".join)
def test_every_command_and_every_flag_says_what_it_does(words: tuple[str, ...]) -> None:
    """Text in brackets must be shown, too: the markup removes it as a style unless it is escaped."""
    command = TREE[words]
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "1000"})
    assert shown.exit_code == 0
    said = packed(shown.output)
    assert command.help
    assert all(packed(part) in said for part in command.help.partition("\f")[0].split("\n\n"))
    for flag in (flag for flag in command.params if not getattr(flag, "hidden", False)):
        assert flag.help, f"{words}: {flag.name} has no help"
        if not words:  # the list of all commands only has room for the names of flags
            assert flag.opts[0] in said
            continue
        assert packed(flag.help) in said, f"{words}: {flag.name}"
        assert packed(flag.metavar or "") in said, f"{words}: {flag.name}"


def packed(text: str) -> str:
    """The text without white space, frames and escapes of brackets."""
    return "".join(text.replace("\\[", "[").replace("│", "").split())


@pytest.mark.parametrize(
    "words", [words for words in LEAVES if words not in SERVERS | {("batch", "example")}], ids=" ".join
)
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


def test_a_value_has_the_same_name_everywhere() -> None:
    """A tenant is a NAME, and a length of time a DURATION, in every command."""
    wanted = {"--tenant": "NAME", "--window": "DURATION", "--timeout": "DURATION", "--delay": "DURATION"}
    shown = {
        (words, name): flag.metavar
        for words in LEAVES
        for flag in TREE[words].params
        for name in flag.opts
        if name in wanted
    }
    assert {name for _, name in shown} == set(wanted)
    assert {key: metavar for key, metavar in shown.items() if metavar != wanted[key[1]]} == {}


def complete(shell: str, line: str) -> subprocess.CompletedProcess[str]:
    """The suggestions of the shell's completion for this line."""
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


# What is loaded -----------------------------------------------------------------------------------------------------

HEAVY = {"fastapi", "opentelemetry", "orjson", "psycopg", "pydantic", "starlette", "uvicorn", "wreq"}


def loaded(*arguments: str) -> set[str]:
    """The modules that a command has imported when it ends."""
    code = f"""
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
sys.argv = ["batchwright", *{arguments!r}]
from batchwright.commands import main
main()
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=45)
    return set(done.stderr.split())


def test_the_list_of_commands_is_printed_without_loading_any_of_them() -> None:
    there = loaded("--help")
    assert there.isdisjoint(HEAVY)
    ours = {name for name in there if name.startswith("batchwright.")}
    names = ("files", "webhooks", "web", "batches", "providers", "ingest")
    parts = {*names, *(f"{name}.part" for name in names), "builtin", "part"}
    assert ours == {
        f"batchwright.{name}"
        for name in (
            "cli",
            "cli.exit_codes",
            "cli.hangup",
            "cli.help",
            "commands",
            "errors",
            "plugins",
            "states",
            *parts,
        )
    }


def test_the_simulator_needs_no_database() -> None:
    there = loaded("simulate", "--help")
    assert there.isdisjoint(HEAVY - {"orjson", "pydantic"})  # Typer itself loads pydantic to read flags
    assert "batchwright.settings" not in there


@pytest.mark.parametrize("words", [("job", "list"), ("batch", "list"), ("schedule", "preview")], ids=" ".join)
def test_a_command_loads_neither_the_demo_nor_the_simulator_nor_a_workers_upkeep(words: tuple[str, ...]) -> None:
    others = {
        "batchwright.demo.batch",
        "batchwright.simulator",
        "batchwright.batches.upkeep.collector",
        "batchwright.batches.runtime",
    }
    assert loaded(*words, "--help").isdisjoint(others | {"starlette", "wreq", "opentelemetry"})


def test_a_command_of_one_part_loads_no_other_part() -> None:
    ours = {name for name in loaded("job", "--help") if name.startswith("batchwright.batches.")}
    assert ours == {"batchwright.batches.part"}


@pytest.mark.thorough
@pytest.mark.timed("CPU time is compared")
def test_the_list_of_commands_takes_at_most_twice_the_cpu_of_loading_typer_and_rich() -> None:
    """Compared with loading all of rich that Typer needs for help; several runs, because the machine is shared."""
    base = ["-c", "import typer, typer.rich_utils"]
    ratios = [cpu_seconds("-m", "batchwright", "--help") / cpu_seconds(*base) for _ in range(5)]
    assert min(ratios) <= 2, ratios


def cpu_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-P", *arguments], check=True, stdout=subprocess.DEVNULL, timeout=45)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


# Parts of other packages --------------------------------------------------------------------------------------------

POST = """
import typer

from batchwright.part import Command, Part


class PostPart(Part):
    name = "post"
    commands = {
        "letter": Command("post:letter", "Write a letter."),
        "stamp": Command("post:stamps", "Buy and count stamps."),
        "lost": Command("post:nowhere", "Is not there."),
        "broken": Command("post_broken:app", "Cannot be imported."),
        "odd": Command("post:POSTAGE", "Is no command."),
    }


def letter(to: str) -> None:
    "Write a letter to somebody."
    typer.echo(f"Dear {to}")


POSTAGE = 0.95
stamps = typer.Typer(no_args_is_help=True)


@stamps.command()
def buy(n: int) -> None:
    "Buy stamps."
    typer.echo(f"bought {n}")
"""


class Posted:
    """`batchwright …` with the installed package `post`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "post.py").write_text(POST)
        (folder / "post_broken.py").write_text("import no_such_module\n")
        self.install("post:PostPart")

    def install(self, *parts: str) -> None:
        about = self.folder / "post-1.0.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: post\nVersion: 1.0\n")
        named = "".join(f"part{n} = {part}\n" for n, part in enumerate(parts))
        (about / "entry_points.txt").write_text(f"[batchwright.parts]\n{named}")

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "batchwright", *arguments],
            env={**os.environ, "PYTHONPATH": str(self.folder), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
            timeout=45,
        )
        assert done.returncode == code, done
        return done.stdout if code == 0 else done.stderr


@pytest.fixture
def posted(tmp_path: Path) -> Posted:
    return Posted(tmp_path)


def test_a_part_of_another_package_brings_commands_and_groups(posted: Posted) -> None:
    listed = posted("--help")
    assert "Write a letter." in listed
    assert "Buy and count stamps." in listed
    assert posted("letter", "Ada") == "Dear Ada\n"
    assert posted("stamp", "buy", "3") == "bought 3\n"
    assert "Write a letter to somebody." in posted("letter", "--help")
    assert "Buy and count stamps." in posted("stamp", "--help"), "a group without help has its line in the list"


def test_a_command_that_cannot_be_loaded_names_its_part_and_why(posted: Posted) -> None:
    assert posted("lost", code=1) == (
        "error: the command 'lost' of the part 'post' (post:nowhere) cannot be loaded: "
        "AttributeError: module 'post' has no attribute 'nowhere'\n"
    )
    assert posted("broken", "--help", code=1) == (
        "error: the command 'broken' of the part 'post' (post_broken:app) cannot be loaded: "
        "ModuleNotFoundError: No module named 'no_such_module'\n"
    )
    assert posted("odd", code=1).startswith(
        "error: the command 'odd' of the part 'post' (post:POSTAGE) cannot be loaded: "
    )
    assert posted("letter", "Ada") == "Dear Ada\n", "other commands still work"


def test_two_commands_of_one_name_are_refused(posted: Posted) -> None:
    (posted.folder / "mail.py").write_text(
        "from post import PostPart\n\nclass MailPart(PostPart):\n    name = 'mail'\n"
    )
    posted.install("post:PostPart", "mail:MailPart")
    said = posted("--help", code=1)
    assert said == "error: two parts have a command 'letter': 'post' and 'mail'; remove one of them\n"


def test_an_unknown_command_is_refused_with_similar_ones() -> None:
    done = subprocess.run([sys.executable, "-m", "batchwright", "jobs"], capture_output=True, text=True, timeout=45)
    assert done.returncode == 2
    assert "No such command 'jobs'. Did you mean 'job'" in done.stderr


# --------------------------------------------------------------------------------------------------------------------


def test_the_help_of_the_simulator_names_its_profiles() -> None:
    (flag,) = [flag for flag in TREE["simulate",].params if flag.name == "profile_name"]
    assert ", ".join(PROFILES) in flag.help


# Help that fits on a screen -----------------------------------------------------------------------------------------


def shown_help(*words: str) -> str:
    return CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).output


def test_the_list_of_commands_fits_a_screen_and_is_grouped_by_what_people_do() -> None:
    lines = shown_help().splitlines()
    assert len(lines) < 24, "one line is left for the prompt"
    assert max(map(len, lines)) <= 80
    groups = [line.split()[0] for line in lines[3:] if not line.startswith(" ")]
    assert groups == ["Start", "Batches", "Jobs", "Operate", "Options"]
    assert {words[0] for words in TREE if words} <= {word for line in lines for word in line.split()[:2]}


def test_each_group_begins_with_the_command_after_which_it_is_named() -> None:
    first = {line.split()[0]: line.split()[1] for line in shown_help().splitlines()[3:] if not line.startswith(" ")}
    assert (first["Start"], first["Batches"], first["Jobs"]) == ("up", "batch", "job")


@pytest.mark.parametrize("words", [words for words in TREE if words], ids=" ".join)
def test_help_breaks_no_word_and_shows_flags_as_flags_at_80_columns(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = TREE[words].get_help(typer.Context(TREE[words], info_name=" ".join(words)))
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in "".join(part for part in said.split() if part.startswith("-")), "no flag is cut"
    seen = set(said.replace(",", " ").split())
    for flag in (flag for flag in TREE[words].params if not getattr(flag, "hidden", False)):
        names = [*flag.opts, *flag.secondary_opts] if flag.param_type_name == "option" else []
        assert set(names) <= seen, f"{words}: {flag.name}"
        for word in (flag.help or "").replace(",", " ").split():
            assert word in seen, f"{words}: {word!r} is broken"
    assert "<" not in said.replace("<=", ""), "help shows no types in brackets"
