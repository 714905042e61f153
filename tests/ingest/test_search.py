"""Search: by words, by vectors, and by both together."""

from __future__ import annotations

import asyncio

import pytest

from batchwright.db.database import Database
from batchwright.errors import InvalidInput, NotFound, TooLarge, Transient
from batchwright.ingest.questions import Probes, mark, read_question
from batchwright.ingest.search import Search
from tests.ingest.stored import Meanings, Shelf

NASTY = [
    "'; DROP TABLE batchwright.ingest_chunk; --",
    "a & | ! <-> (b",
    ":* & !!",
    "'unfinished",
    '"unfinished phrase',
    "back\\slash \\' quote",
    '""',
    "- -- -",
    '-""',
    "%s %(query)s {x}",
    "<script>alert(1)</script>",
    "ⓤñïçödé 検索 🔎 ٠١٢",
    "c 1",
    "'c 1'",
    "a" * 1999,
    "- " * 900,
]
FILTERED = [
    ({"lang": "de"}, 40),
    ({"lang": "de", "no": "3"}, 2),
    ({"no": "5", "lang": "de"}, 0),
    ({"source": "s3://bucket/a/*"}, 60),
    ({"source": "s3://bucket/b_%/*"}, 60),
    ({"source": "s3://bucket/b__/*"}, 0),
    ({"name": "7.txt"}, 2),
    ({"page": "2"}, 60),
    ({"entity": "person"}, 2),
    ({"missing": "x"}, 0),
]


async def texts(shelf: Shelf, query: str, collection: str = "papers", *, tenant: str = "default", **options):
    found = await shelf.search.search(tenant, collection, query, **options)
    return [hit.text for hit in found.hits]


async def fill(shelf: Shelf, *given: str, **options) -> None:
    """A collection with one document for each text."""
    collection = await shelf.collection()
    space = await shelf.space(collection)
    for number, text in enumerate(given):
        await shelf.put(collection, f"{number}.txt", text, space=space, **options)


class TestWords:
    """By words alone."""

    async def by_words(self, shelf, query, **options):
        return await texts(shelf, query, mode="words", **options)

    async def test_a_long_question_finds_what_has_its_rare_words(self, shelf):
        padding = [f"the system of the year {n} was a large system in many ways" for n in range(20)]
        await fill(shelf, "photosynthesis happens in the chloroplast", "the system was large", *padding)
        found = await self.by_words(shelf, "in which part of the large system of a plant does photosynthesis happen?")
        assert found[0] == "photosynthesis happens in the chloroplast"

    async def test_words_match_whatever_their_endings(self, shelf):
        await fill(shelf, "she was running late", "nothing else")
        assert await self.by_words(shelf, "who runs?") == ["she was running late"]

    async def test_a_phrase_must_occur_exactly(self, shelf):
        await fill(shelf, "a red car and a blue house", "a blue car and a red house", "red, and a car")
        assert await self.by_words(shelf, '"red car" house') == ["a red car and a blue house"]

    async def test_excluded_words_are_not_in_the_hits(self, shelf):
        await fill(shelf, "jaguar the car", "jaguar the cat", "jaguar in a fast car chase")
        assert await self.by_words(shelf, "jaguar -car") == ["jaguar the cat"]
        assert set(await self.by_words(shelf, 'jaguar -"fast car"')) == {"jaguar the cat", "jaguar the car"}

    async def test_phrases_and_exclusions_hold_for_vectors_too(self, shelf):
        await fill(shelf, "jaguar the car", "jaguar the cat", "jaguar in a fast car chase")
        for mode in ("words", "vectors", "hybrid"):
            assert await texts(shelf, "jaguar -car", mode=mode) == ["jaguar the cat"]
            assert await texts(shelf, '"fast car" jaguar', mode=mode) == ["jaguar in a fast car chase"]

    async def test_a_hyphen_inside_a_word_excludes_nothing(self, shelf):
        await fill(shelf, "error ERR-4711 in the log", "error ERR-0815 in the log")
        assert (await self.by_words(shelf, "ERR-4711"))[0] == "error ERR-4711 in the log"

    async def test_headings_are_searched_and_weigh_more(self, shelf):
        collection = await shelf.collection()
        await shelf.put(collection, "a.txt", "warranty is mentioned here")
        await shelf.put(collection, "b.txt", "two years from the day of purchase", section=["Terms", "Warranty"])
        found = await self.by_words(shelf, "warranty")
        assert found == ["two years from the day of purchase", "warranty is mentioned here"]

    async def test_a_query_of_stop_words_says_so(self, shelf):
        await fill(shelf, "to be or not to be")
        found = await shelf.search.search("default", "papers", "to be or not", mode="words")
        assert (found.hits, found.used) == ([], ["words left out: the query has no words to search by"])

    async def test_another_language_has_other_endings(self, shelf):
        collection = await shelf.collection("deutsch", language="german")
        await shelf.put(collection, "a.txt", "Die Häuser der Stadt")
        assert await self.by_words(shelf, "Haus", collection="deutsch") == ["Die Häuser der Stadt"]

    async def test_common_words_together_find_what_has_both(self, shelf):
        """Each word is in too many chunks; searched alone, neither search would reach the chunk with both."""
        collection = await shelf.collection()
        await shelf.put(collection, "common.txt", *(f"machine {n}" for n in range(1200)), *["learning"] * 1200)
        await shelf.put(collection, "both.txt", "machine learning")
        await shelf.database.rows("ANALYZE batchwright.ingest_chunk")
        assert (await self.by_words(shelf, "machine learning"))[0] == "machine learning"


class TestMarks:
    """The marked words of the query."""

    async def test_words_are_marked_in_every_form_and_nowhere_else(self, shelf):
        text = "Running is fun; he runs <b>fast</b>, a runner at run-time. Prune!"
        await fill(shelf, text)
        found = await shelf.search.search("default", "papers", "the run", mode="words")
        (hit,) = found.hits
        assert [text[start:end] for start, end in hit.marks] == ["Running", "runs", "run"]

    async def test_of_a_compound_the_whole_is_marked_if_no_part_matches_alone(self, shelf):
        text = "write to ada@example.com today"
        await fill(shelf, text)
        (hit,) = (await shelf.search.search("default", "papers", "ada@example.com", mode="words")).hits
        assert [text[start:end] for start, end in hit.marks] == ["ada@example.com"]

    def test_marks_are_in_order_and_apart(self):
        assert mark("a-b c a", {"a", "c"}) == [(0, 1), (4, 5), (6, 7)]


class TestHybrid:
    """By words and vectors."""

    async def test_hybrid_finds_what_either_finds_and_more(self, shelf):
        """Only vectors find synonyms, and only words find identifiers."""
        groups = {"automobile": ["car", "vehicle"], "physician": ["doctor", "medic"], "ocean": ["sea", "deep"]}
        groups |= {"happy": ["glad", "merry"], "rapid": ["fast", "swift"], "dwelling": ["house", "home"]}
        thesaurus = {word: meaning for meaning, words in groups.items() for word in (meaning, *words)}
        shelf.embedder.thesaurus.update(thesaurus)
        synonyms = [(f"note {n}: the {words[0]} again", meaning) for n, (meaning, words) in enumerate(groups.items())]
        codes = [(f"part QX{n}77 is kept on shelf number {n}", f"where is QX{n}77") for n in range(6)]
        noise = [f"plain text {n} about item {n * 7 % 31} in room {n % 13}" for n in range(150)]
        await fill(shelf, *(text for text, _ in synonyms + codes), *noise)
        await shelf.spaces.settle(100)
        recall = {}
        for mode in ("words", "vectors", "hybrid"):
            found = [text in await texts(shelf, query, mode=mode, limit=10) for text, query in synonyms + codes]
            recall[mode] = sum(found) / len(found)
        assert recall["hybrid"] >= max(recall["words"], recall["vectors"])
        assert recall["hybrid"] == 1.0
        assert recall["words"] <= 0.5

    async def test_a_hit_says_where_it_is_and_how_it_was_found(self, shelf):
        collection = await shelf.collection()
        space = await shelf.space(collection)
        document, version = await shelf.put(
            collection,
            "docs/a.txt",
            "first",
            "the second passage",
            space=space,
            metadata={"year": "1999"},
            section=["S"],
        )
        await shelf.mention(version, "person", "Ada")
        found = await shelf.search.search("default", "papers", "second passage")
        hit = found.hits[0]
        assert (hit.collection, hit.source, hit.name, hit.document_id) == ("papers", "docs/a.txt", "a.txt", document)
        assert (hit.page_first, hit.page_last, hit.section, hit.char_start, hit.char_end) == (2, 2, ["S"], 0, 18)
        assert (hit.text, hit.ranks, hit.metadata) == (
            "the second passage",
            {"words": 1, "vectors": 1},
            {"year": "1999"},
        )
        assert hit.mentions == [{"type": "person", "text": "Ada", "char_start": 0, "char_end": 1}]
        assert found.used == ["words: english", f"vectors: meanings-32, {space.index}"]

    async def test_without_the_model_server_only_words_are_searched(self, shelf):
        await fill(shelf, "alpha")
        shelf.embedder.error = Transient("the model server does not answer")
        found = await shelf.search.search("default", "papers", "alpha")
        assert [hit.text for hit in found.hits] == ["alpha"]
        assert "vectors left out: meanings: the model server does not answer" in found.used
        with pytest.raises(Transient):
            await shelf.search.search("default", "papers", "alpha", mode="vectors")

    async def test_a_model_server_that_hangs_is_not_waited_for(self, shelf):
        await fill(shelf, "alpha")
        shelf.embedder.embed_query = lambda _: asyncio.Event().wait()
        search = Search(shelf.database, shelf.spaces, shelf.embedder_of, embed_seconds=0.01)
        found = await search.search("default", "papers", "alpha")
        assert [hit.text for hit in found.hits] == ["alpha"]
        assert "vectors left out: meanings: the model server does not answer" in found.used

    async def test_while_one_embedder_replaces_another_both_are_used(self, shelf):
        collection = await shelf.collection()
        embedders = {}
        for name in ("old", "new"):
            shelf.embedder = embedders[name] = Meanings({"car": "vehicle", "auto": "vehicle"})
            shelf.embedder.fingerprint = name
            await shelf.put(collection, f"{name}.txt", f"car {name}", space=await shelf.space(collection))
        search = Search(shelf.database, shelf.spaces, lambda space: embedders[space.fingerprint])
        found = await search.search("default", "papers", "auto", mode="vectors")
        assert {hit.text for hit in found.hits} == {"car old", "car new"}


class TestFilters:
    """Filters."""

    @pytest.fixture
    async def library(self, shelf):
        collection = await shelf.collection()
        space = await shelf.space(collection)
        for n in range(60):
            metadata = {"lang": "de" if n % 3 == 0 else "en", "no": str(n)}
            source = f"s3://bucket/{'a' if n % 2 else 'b_%'}/{n}.txt"
            _, version = await shelf.put(
                collection,
                source,
                f"report on page one of {n}",
                f"report on page two of {n}",
                space=space,
                metadata=metadata,
            )
            if n == 30:
                await shelf.mention(version, "person", "Ada")
        await shelf.spaces.settle(70)
        return shelf

    @pytest.mark.parametrize("few", [0, 5000])
    async def test_exactly_the_chunks_that_match_the_filter_are_found(self, library, monkeypatch, few):
        monkeypatch.setattr("batchwright.ingest.search._FEW_CHUNKS", few)
        for filters, count in FILTERED:
            for mode in ("words", "vectors", "hybrid"):
                found = await library.search.search(
                    "default", "papers", "report", mode=mode, filters=filters, limit=100
                )
                assert len(found.hits) == count, (filters, mode)
                for hit in found.hits:
                    assert all(hit.metadata[key] == value for key, value in filters.items() if key in ("lang", "no"))

    async def test_invalid_filters_are_refused(self, shelf):
        await fill(shelf)
        for filters in ({"page": "two"}, {"page": "-1"}, {"a\0": "b"}, {"a": "\ud800"}):
            with pytest.raises(InvalidInput, match="the filter"):
                await shelf.search.search("default", "papers", "report", filters=filters)


async def test_a_reader_sees_the_old_version_or_the_new_one_never_both_or_none(shelf, pool):
    """Searches run while versions are swapped by another connection; each sees one version of the document, whole."""
    collection = await shelf.collection()
    space = await shelf.space(collection)
    document, _ = await shelf.put(collection, "a.txt", "edition 0 one", "edition 0 two", space=space)
    reader = Shelf(Database(pool), use_pgvector=True, embedder=Meanings())
    is_over = asyncio.Event()
    seen = []

    async def write():
        for n in range(1, 25):
            version = await shelf.stage(document, [f"edition {n} one", f"edition {n} two"])
            async with shelf.database.transaction() as session:
                await shelf.publish(version, space, session)
            if n % 4 == 0:
                await shelf.spaces.settle()
        is_over.set()

    async def read(mode):
        while not is_over.is_set():
            found = await texts(reader, "edition", mode=mode)
            seen.append({text.split()[1] for text in found})
            assert len(found) == 2, found
            assert len(seen[-1]) == 1, found

    await asyncio.gather(write(), read("words"), read("vectors"), read("hybrid"))
    assert len({edition for editions in seen for edition in editions}) > 3


async def test_tenants_and_collections_are_separate(shelf):
    for tenant, name in [("a", "papers"), ("b", "papers"), ("a", "other")]:
        collection = await shelf.collection(name, tenant=tenant)
        space = await shelf.space(collection)
        await shelf.put(collection, "x.txt", f"secret of {tenant} {name}", space=space)
    for mode in ("words", "vectors", "hybrid"):
        assert await texts(shelf, "secret", tenant="a", mode=mode) == ["secret of a papers"]
    with pytest.raises(NotFound, match="no collection 'other'"):
        await texts(shelf, "secret", "other", tenant="b")


async def test_staged_and_retired_versions_are_not_found(shelf):
    collection = await shelf.collection()
    space = await shelf.space(collection)
    document, _ = await shelf.put(collection, "a.txt", "live words", space=space)
    await shelf.stage(document, ["staged words"])
    assert await texts(shelf, "words") == ["live words"]
    await shelf.collections.retire("default", "papers", document)
    assert await texts(shelf, "words") == []


async def test_any_typed_text_is_only_searched_for(shelf):
    await fill(shelf, "alpha beta", *NASTY)
    for query in NASTY:
        for mode in ("words", "vectors", "hybrid"):
            await texts(shelf, query, mode=mode)
    assert await texts(shelf, "alpha", mode="words") == ["alpha beta"]


@pytest.mark.parametrize(
    ("query", "error", "message"),
    [
        ("", InvalidInput, "empty"),
        (" \n", InvalidInput, "empty"),
        ("a\0b", InvalidInput, r"U\+0000"),
        ("a\ud800b", InvalidInput, r"U\+D800"),
        ("a" * 100_000, TooLarge, "100,000 characters; the limit is 2,000"),
    ],
)
def test_queries_that_cannot_be_searched_for_say_why(query, error, message):
    with pytest.raises(error, match=message):
        read_question(query)


async def test_options_out_of_range_are_refused(shelf):
    await fill(shelf)
    for options in ({"limit": 0}, {"limit": 101}, {"mode": "magic"}):
        with pytest.raises(InvalidInput, match=r"is .*; use "):
            await texts(shelf, "a", **options)


def test_a_query_is_parsed_into_its_parts():
    asked = read_question('find "red car" not-this -that -"blue sky" and - minus "open')
    assert asked.text == "find red car not-this and - minus open"
    assert asked.phrases == ("red car", "open")
    assert asked.excluded == ("that", "blue sky")


def test_the_work_of_a_query_is_limited():
    lexemes = [f"w{n}" for n in range(500)]
    planned = Probes.plan(1, lexemes, dict.fromkeys(lexemes[:100], 0.5))
    assert len(planned.probes) <= 21
    assert len(planned.lexemes) == 24
