"""`batchwright migrate`: once, twice, and two at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.cli.conftest import SAMPLE, Cli


def test_two_processes_migrate_at_once_and_one_of_them_does_it(empty_cli: Cli) -> None:
    with ThreadPoolExecutor(2) as threads:
        both = [one.result() for one in [threads.submit(empty_cli, "migrate") for _ in range(2)]]
    assert max(done.stdout.splitlines()[0] for done in both) == "nothing to do: the schema is current"
    assert sum("applied 0001_jobs" in done.stdout for done in both) == 1
    assert empty_cli.json("migrate") == {"applied": []}


def test_a_schema_that_is_behind_is_refused_with_the_remedy(empty_cli: Cli) -> None:
    for arguments in (["job", "list"], ["worker", SAMPLE]):
        said = empty_cli(*arguments, code=1).stderr
        assert said.splitlines()[-1].endswith("run: batchwright migrate")
