"""The graph of steps, the keys of steps, and which steps run again after a change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchwright.errors import ConfigurationError
from batchwright.ingest.pipeline import Graph, Step, load_steps
from batchwright.states import ItemStatus
from tests.ingest.bench import remote
from tests.ingest.fake_provider import FakeProvider
from tests.ingest.stage import ingest_stage

ALL = ["CHUNKED", "CONTENT_EXTRACTED", "EMBEDDED", "ENTITY_EXTRACTED", "FETCHED", "INDEXED", "PERSISTED"]


def make(name, after=(), before=(), fingerprint="1"):
    async def run(ctx):
        return {}

    return Step(name=name, after=tuple(after), before=tuple(before), run=run, fingerprint=lambda _: fingerprint)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([make("A"), make("A")], "two steps are called 'A'"),
        ([make("A"), make("B", ["C"])], "the step 'B' names 'C', which is not a step; known: A, B"),
        ([make("A"), make("B", ["A"], ["D"])], "names 'D', which is not a step"),
        ([make("A"), make("B", ["A", "C"]), make("C", ["B"])], "steps wait for each other: "),
        ([make("A", ["A"])], "steps wait for each other"),
        ([make("A"), make("B")], "only one step may come first, not A, B"),
        ([make("a")], "'a' needs a name of capitals"),
        ([make("A-B")], "needs a name of capitals"),
        ([make("A" * 65)], "needs a name of capitals"),
        ([make("DONE")], "no step can be called 'DONE'"),
        ([make("ENQUEUED")], "no step can be called 'ENQUEUED'"),
    ],
)
def test_an_invalid_graph_is_refused_with_the_reason(steps, words):
    with pytest.raises(ConfigurationError, match=words):
        Graph(steps)


def test_our_own_steps_are_in_the_order_of_the_design():
    graph = load_steps()
    assert graph.first == "FETCHED"
    assert graph.waits_for["PERSISTED"] == {"CHUNKED", "EMBEDDED", "ENTITY_EXTRACTED"}
    assert graph.ready({"FETCHED", "CONTENT_EXTRACTED"}) == sorted(["CHUNKED", "EMBEDDED", "ENTITY_EXTRACTED"])
    done = []
    reached = [graph.reached(done)]
    for name in ("FETCHED", "CONTENT_EXTRACTED", "EMBEDDED", "CHUNKED", "ENTITY_EXTRACTED", "PERSISTED", "INDEXED"):
        done.append(name)
        reached.append(graph.reached(done))
    extracted = "CONTENT_EXTRACTED"
    assert reached == ["ENQUEUED", "FETCHED", *[extracted] * 3, "ENTITY_EXTRACTED", "PERSISTED", "INDEXED"]


def test_a_key_depends_on_the_content_and_on_all_fingerprints_of_earlier_steps():
    def keys(content="x", **prints):
        steps = [make("A"), make("B", ["A"]), make("C", ["A"]), make("D", ["B"])]
        graph = Graph([replace(one, fingerprint=lambda _, one=one: prints.get(one.name, "1")) for one in steps])
        found = {}
        for name in graph.order:
            found[name] = graph.key(name, found, {}, content)
        return found

    base = keys()
    assert keys() == base
    assert {name for name, key in keys(B="2").items() if key != base[name]} == {"B", "D"}
    assert {name for name, key in keys(A="2").items() if key != base[name]} == set("ABCD")
    assert {name for name, key in keys(content="y").items() if key != base[name]} == set("ABCD")


# What a change costs --------------------------------------------------------------------------------------------


@pytest.fixture
async def provider():
    async with FakeProvider() as provider:
        yield provider


async def completed(stage, run):
    """Steps that ran, and steps whose results were reused, over all items."""
    sql = """
        SELECT step.step, step.is_reused, count(*) FROM batchwright.ingest_step AS step
        JOIN batchwright.ingest_item AS item ON item.id = step.item_id
        WHERE item.run_id = %(id)s AND step.state = 'done' GROUP BY 1, 2
    """
    rows = await stage.rows(sql, id=run.id)
    return {step: n for step, reused, n in rows if not reused}, {step: n for step, reused, n in rows if reused}


REST = {"FETCHED": 4, "PERSISTED": 4, "INDEXED": 4}


async def test_which_steps_run_again_after_each_change_and_what_they_cost(database_url, tmp_path, provider):
    """Four documents; after each change: (steps that run, reused steps, paid calls, unchanged documents)."""
    tables = remote(provider)
    tables["model_gateways"]["newer"] = tables["model_gateways"]["embedder"]
    async with ingest_stage(database_url, tmp_path, **tables) as stage:
        stage.work()

        async def change(**values):
            before = len(provider.entries)
            run = await stage.succeed(**values)
            ran, reused = await completed(stage, run)
            return ran, reused, len(provider.entries) - before, run.item_count_unchanged

        for number in range(4):
            stage.write(f"{number}.txt", " ".join(f"Word{number}x{n} is here." for n in range(60)))
        assert await change() == (dict.fromkeys(ALL, 4), {}, 8, 0)
        assert await change() == ({}, {}, 0, 4)
        others = {"CONTENT_EXTRACTED": 4, "CHUNKED": 4, "EMBEDDED": 4, "ENTITY_EXTRACTED": 4}
        assert await change(metadata={"team": "blue"}) == (REST, others, 0, 0)

        smaller = {"overrides": {"chunk_characters": 600}}
        ran, reused, calls, unchanged = await change(**smaller)
        behind = {"CHUNKED": 4, "EMBEDDED": 4, "ENTITY_EXTRACTED": 4}
        assert (ran, reused, unchanged) == ({**REST, **behind}, {"CONTENT_EXTRACTED": 4}, 0)
        assert calls >= 8
        assert await change(**smaller) == ({}, {}, 0, 4)
        assert (await change())[2] == 0  # changed back: all answers are kept

        newer = {"overrides": {"embedding_model": "newer"}}
        others = {"CONTENT_EXTRACTED": 4, "CHUNKED": 4, "ENTITY_EXTRACTED": 4}
        assert await change(**newer) == ({**REST, "EMBEDDED": 4}, others, 4, 0)

        none = {"overrides": {"embedding_model": "newer", "entities": "none"}}
        others = {"CONTENT_EXTRACTED": 4, "CHUNKED": 4, "EMBEDDED": 4}
        assert await change(**none) == ({**REST, "ENTITY_EXTRACTED": 4}, others, 0, 0)

        stage.write("2.txt", "An edit. " + (stage.folder / "2.txt").read_text())
        assert await change(**none) == (dict.fromkeys(ALL, 1), {}, 1, 3)

        (stage.folder / "3.txt").touch()  # a new time, but the same content
        assert await change(**none) == ({"FETCHED": 1}, {}, 0, 4)

        forced = {"overrides": {**none["overrides"], "force": True}}
        assert await change(**forced) == (dict.fromkeys(ALL, 4), {}, 0, 0)


async def test_new_types_of_entities_cause_requests_only_for_entities(database_url, tmp_path, provider):
    for types, calls in ((("person",), 2), (("person", "river"), 1), (("person", "river"), 0)):
        async with ingest_stage(database_url, tmp_path, **remote(provider, entity_types=types)) as stage:
            stage.write("a.txt", "Anna met Berta at the Elbe.")
            stage.work()
            before = len(provider.entries)
            await stage.succeed()
            assert [one["kind"] for one in provider.entries[before:]].count("entities") == min(1, calls)
            assert len(provider.entries) - before == calls


# A step of one's own --------------------------------------------------------------------------------------------

NEW = """
from batchwright.ingest.pipeline import step


@step("LANGUAGE_FOUND", after="CONTENT_EXTRACTED", before="PERSISTED", fingerprint="{version}")
async def find_language(ctx):
    text = await ctx.text()
    return {{"language": "German" if " und " in text.text else "English", "by": "{version}"}}
"""


async def test_a_new_step_is_one_file(database_url, tmp_path, provider):
    """It needs no migration and no change in another file; finished documents run only the new step."""
    async with ingest_stage(database_url, tmp_path, **remote(provider)) as stage:
        stage.write("a.txt", "Anna und Berta.")
        stage.write("b.txt", "Anna and Berta.")
        stage.work()
        await stage.succeed()
    paid = len(provider.entries)
    for version in ("1", "2"):
        file = tmp_path / f"language{version}.py"
        file.write_text(NEW.format(version=version))
        async with ingest_stage(database_url, tmp_path, **remote(provider, steps=(str(file),))) as stage:
            stage.work()
            run = await stage.succeed()
            ran, reused = await completed(stage, run)
            assert ran == {"FETCHED": 2, "LANGUAGE_FOUND": 2, "PERSISTED": 2, "INDEXED": 2}
            assert sorted(reused) == ["CHUNKED", "CONTENT_EXTRACTED", "EMBEDDED", "ENTITY_EXTRACTED"]
            for name, item in (await stage.items(run.id)).items():
                outputs = {one.step: one.output for one in await stage.part.items.steps(item.id)}
                language = "German" if name == "a.txt" else "English"
                assert outputs["LANGUAGE_FOUND"] == {"language": language, "by": version}
                told = [step for event, step in await stage.step_events(item) if event == "step_completed"]
                assert told.index("CONTENT_EXTRACTED") < told.index("LANGUAGE_FOUND") < told.index("PERSISTED")
            again = await stage.succeed()
            assert again.item_count_unchanged == 2
    assert len(provider.entries) == paid


RANDOM = """
import random
from batchwright.ingest import context, chunk


def cut(text, settings):
    end = random.SystemRandom().randrange(1, len(text.text))
    whole = chunk.chunk_text(text, settings)[0]
    return [type(whole)(start=0, end=end, overlap=0, page_first=None, page_last=None, section=())]
"""


async def test_a_chunker_that_is_not_deterministic_is_a_fatal_error(database_url, tmp_path, monkeypatch):
    namespace = {}
    exec(RANDOM, namespace)
    monkeypatch.setattr("batchwright.ingest.context.chunk_text", namespace["cut"])
    async with ingest_stage(database_url, tmp_path) as stage:
        stage.write("a.txt", "Anna met Berta. " * 500)
        stage.work()
        run = await stage.run()
        (item,) = (await stage.items(run.id)).values()
        assert (item.status, item.last_error_kind) == (ItemStatus.FAILED, "Fatal")
        assert item.cause == "PERSISTED:Fatal:nondeterministic_chunker"
        assert "must be a pure function" in item.last_error["message"]
        assert await stage.rows("SELECT count(*) FROM batchwright.ingest_version") == [(0,)]
