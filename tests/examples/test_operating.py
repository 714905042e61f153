"""The pages for operators name only metrics, commands, settings and tables that exist, and their examples work."""

import asyncio
import dataclasses
import functools
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from batchwright import AsyncBatchwright, operation, pytest_plugin
from batchwright.commands import app
from batchwright.db.database import DatabaseSettings, connect_arguments
from batchwright.engine.exposition import DATABASE_UP, PROCESS_METRICS, STANDING_METRICS
from batchwright.engine.metrics import WORKER_METRICS
from batchwright.engine.worker.health import OWN_METRICS
from batchwright.plugins import load, part_kinds
from batchwright.settings import PREFIX, is_table, settings_class
from batchwright.storage import store
from tests.examples import test_docs
from tests.examples.test_docs import PAGES, ROOT, example, shell

folder = test_docs.folder

OPERATING = ROOT / "docs" / "operating.md"
# The page about parts has the command and settings of its example, which is installed and run in tests/test_parts.py.
GUIDES = [page for page in PAGES if page.name not in ("configuration.md", "http-reference.md", "parts.md")]
OF_PROCESSES = (*PROCESS_METRICS, *OWN_METRICS, DATABASE_UP)
OF_PARTS = [metric for kind in part_kinds() for metric in load(kind.metrics)]
METRICS = {one.full_name: one for one in (*WORKER_METRICS, *STANDING_METRICS, *OF_PARTS, *OF_PROCESSES)}
OUTSIDE = {"BATCHWRIGHT_CONFIG", "BATCHWRIGHT_REQUIRE_ALL", "BATCHWRIGHT_TEST_DATABASE_URL"}


def text_of(page) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str, *languages: str) -> list[str]:
    return [
        body
        for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if language in languages
    ]


def inline(text: str) -> list[str]:
    """The code between backticks, outside of blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


# Metrics ------------------------------------------------------------------------------------------------------------


def rows() -> dict[str, str]:
    """The rows of the tables of metrics: the names, and the column of labels."""
    tables = re.findall(r"^\| metric \|.*?\n\n", text_of(OPERATING), re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", "".join(tables), re.MULTILINE))


def test_exactly_the_existing_metrics_are_explained():
    assert rows().keys() == METRICS.keys()


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_explained_with_its_labels(name):
    labels, _, _ = rows()[name].replace("*this process*", ";").partition(";")
    assert tuple(re.findall(r"\w+", labels)) == METRICS[name].labels


def test_metrics_of_this_process_alone_are_marked_as_such():
    own = {one.full_name for one in OF_PROCESSES}
    assert {name for name, labels in rows().items() if "*this process*" in labels} == own


def test_exactly_the_results_of_batches_are_explained():
    explained = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \|", text_of(OPERATING).partition("| result | reason |")[2], re.MULTILINE
    )
    expected = METRICS["jobs_processed_total"].expected
    assert tuple(explained[: len(expected)]) == expected


def test_rules_and_prose_name_metrics_that_exist():
    found = 0
    for page in GUIDES:
        for name in re.findall(r"\bbatchwright_[a-z_]+\b(?!/)", text_of(page)):
            assert known(name) or hasattr(pytest_plugin, name), f"{page.name}: {name}"
            found += 1
    assert found


def known(name: str) -> bool:
    """Whether a word is a metric, or a series of a histogram."""
    plain = METRICS.get(re.sub(r"_(bucket|count|sum)$", "", name))
    return name in METRICS or (plain is not None and plain.kind == "histogram")


def test_blocks_of_yaml_are_valid_and_alert_rules_are_complete():
    documents = [one for text in blocks(text_of(OPERATING), "yaml") for one in yaml.safe_load_all(text)]
    (groups,) = [one["groups"] for one in documents if "groups" in one]
    rules = groups[0]["rules"]
    assert len(rules) == len({rule["alert"] for rule in rules}) >= 10
    for rule in rules:
        assert any(known(word) for word in re.findall(r"\w+", rule["expr"])), rule
        assert all(known(word) for word in re.findall(r"(\w+)(?=[{[])", rule["expr"])), rule
    assert sum(one.get("kind") == "Deployment" for one in documents) == 2


def test_metrics_that_every_process_shows_are_never_summed_over_processes():
    shared = [name for name in METRICS if "*this process*" not in rows()[name]]
    texts = list(blocks(text_of(OPERATING), "yaml"))
    assert sum(name in text for text in texts for name in shared)
    for text in texts:
        for name in shared:
            assert not re.search(rf"\bsum\((rate\()?{name}\b", text), name


# Commands and settings ----------------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """The words after `batchwright` of each command on a page, up to the end of the command in a shell."""
    lines = [line for body in blocks(text, "bash", "console", "ini") for line in body.replace("\\\n", " ").splitlines()]
    found = [words for line in [*lines, *inline(text)] for words in _words(line)]
    deployed = [args for body in blocks(text, "yaml") for args in re.findall(r"args: \[batchwright, ([^\]]*)\]", body)]
    return found + [args.split(", ") for args in deployed]


def _words(line: str) -> list[list[str]]:
    found = []
    for start in re.finditer(r"(?:^|[\s$(/])batchwright (?=[a-z])", line):
        rest = re.split(r"[;&|<>)]", line[start.end() :])[0]
        try:
            found.append(shlex.split(rest, comments=True))
        except ValueError:  # a quote that continues in the next line
            found.append(rest.split())
    return found


@functools.cache
def tree():
    return typer.main.get_command(app)


@functools.cache
def loaded(name: str):
    """A command of a part, which the tree loads when it is called."""
    return tree().commands[name].load()


def refused(words: list[str]) -> str | None:
    """The first word that is neither a command nor an option of the one before it."""
    command = tree()
    rest = list(words)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return rest[0]
        command = loaded(rest.pop(0)) if command is tree() else command.commands[rest.pop(0)]
    options = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help", "-h"}
    return next((word for word in rest if re.match(r"--?[a-z]", word) and word.split("=")[0] not in options), None)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_commands_that_a_page_names_exist(page):
    for words in commands(text_of(page)):
        assert refused(words) is None, f"{page.name}: batchwright {' '.join(words)}"


def test_a_command_or_an_option_that_does_not_exist_is_found():
    assert refused(["queue", "drain"]) == "drain"
    assert refused(["job", "cancel", "ID", "--force"]) == "--force"
    assert refused(["job", "cancel", "--status", "queued", "--dry-run"]) is None
    assert commands("`batchwright queue pause NAME`\n```console\n$ batchwright check --processes 2   # all\n```\n") == [
        ["check", "--processes", "2"],
        ["queue", "pause", "NAME"],
    ]


SINGLE = {PREFIX + part.name.upper() for part in dataclasses.fields(settings_class()) if not is_table(part)}


def settings() -> set[str]:
    parts = [part for part in dataclasses.fields(settings_class()) if is_table(part)]
    return {f"{part.name}.{one.name}" for part in parts for one in dataclasses.fields(part.default_factory())}


def span_attributes() -> set[str]:
    """Attributes of the object store's spans, which look like settings."""
    return set(re.findall(r'"(storage\.[a-z]+)"', Path(store.__file__).read_text()))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_settings_that_a_page_names_exist(page):
    known, text = settings(), text_of(page)
    parts = "|".join(sorted({name.partition(".")[0] for name in known}))
    named = [code.partition(" ")[0] for code in inline(text) if re.match(rf"({parts})\.[a-z_]+( = .*)?$", code)]
    events = {"job"}
    assert {name for name in named if name.partition(".")[0] not in events} <= known | span_attributes()
    variables = {PREFIX + name.upper().replace(".", "_") for name in known} | SINGLE | OUTSIDE
    assert set(re.findall(r"\bBATCHWRIGHT_[A-Z_]+\b", text)) <= variables


# PostgreSQL ---------------------------------------------------------------------------------------------------------


async def test_printed_queries_can_be_run(pool):
    asked = 0
    for body in blocks(text_of(OPERATING), "sql"):
        for statement in filter(str.strip, body.replace(":'id'", "'00000000-0000-0000-0000-000000000000'").split(";")):
            if not re.match(r"\s*(CREATE|GRANT|ALTER ROLE)\b", statement):  # these statements affect the whole server
                await pool.rows(statement)
                asked += 1
    assert asked >= 5


async def test_settings_of_postgresql_exist(pool):
    text = text_of(OPERATING)
    (file,) = [body for body in blocks(text, "ini") if body.startswith("# postgresql.conf")]
    named = set(re.findall(r"^(\w+) = ", file, re.MULTILINE))
    section = text.partition("## PostgreSQL settings")[2].partition("### synchronous_commit")[0]
    for cell in re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE):
        named |= set(re.findall(r"`(\w+)`", cell))
    known = {name for (name,) in await pool.rows("SELECT name FROM pg_settings")}
    assert len(named) >= 10
    assert named <= known


def test_the_settings_for_a_role_behind_a_pooler_are_those_of_our_connections():
    form = r"ALTER ROLE batchwright IN DATABASE batchwright SET (\w+) = '?(\w+)'?;"
    listed = dict(re.findall(form, text_of(OPERATING)))
    set_by_us = dict(re.findall(r"-c (\w+)=(\w+)", connect_arguments(DatabaseSettings())["options"]))
    assert {name: re.sub(r"^(\d+)s$", r"\g<1>000", value) for name, value in listed.items()} == set_by_us


# Examples that are run ----------------------------------------------------------------------------------------------


@operation("greet")
async def greet(name: str) -> str:
    return name


async def publish(database_url: str) -> None:
    async with AsyncBatchwright(database_url=database_url, operations=[greet]) as batchwright:
        await batchwright.worker().register()


def test_schedules_work_as_printed(database_url, monkeypatch):
    asyncio.run(publish(database_url))
    monkeypatch.setenv("BATCHWRIGHT_DATABASE_URL", database_url)
    told = {}
    for words in commands(f"```bash\n{example('schedules.sh')}```"):
        answer = CliRunner().invoke(app, words)
        assert answer.exit_code == 0, (words, answer.output)
        told[words[1]] = answer.output
    assert told["preview"].count("06:00 CE") == 3
    assert told["create"].startswith("schedule morning was saved; next: "), "the second time with --replace"
    assert "Europe/Berlin" in told["show"]
    assert told["delete"] == "deleted schedule morning\n"


@pytest.mark.thorough
def test_schedules_over_http_backup_and_restore_work_as_printed(folder):
    (folder / "hello.py").write_text(example("hello.py"))
    told = shell(
        folder,
        f"""
        batchwright up hello.py & UP=$!
        until batchwright operations greet >/dev/null 2>&1; do sleep 0.2; done
        {example("http.sh").partition("#")[0]}
        {example("schedules-http.sh")}
        mkdir -p "$BATCHWRIGHT_DATABASE_FOLDER/files" && echo kept > "$BATCHWRIGHT_DATABASE_FOLDER/files/answers"
        {example("backup.sh")}
        batchwright key create late
        kill $UP; wait $UP
        {example("restore.sh")}
        batchwright key list
        cat "$FOLDER/files/answers"
        """,
    )
    assert told.returncode == 0, told
    assert told.stdout.endswith("kept\n"), "the files of batches are in the backup, too"
    assert len(re.findall(r"^20\d\d-", told.stdout, re.MULTILINE)) == 2, "next_at and paused_at"
    assert re.search(r"✓ schema +current", told.stdout)
    keys = told.stdout.partition("✓ schema")[2]
    assert re.search(r" docs$", keys, re.MULTILINE)
    assert not re.search(r" late$", keys, re.MULTILINE), "files from after the backup are gone"
