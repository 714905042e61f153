"""How long a search takes in a collection of 100,000 chunks: by words, by vectors, and by both."""

import asyncio
import hashlib
import random
import time
from typing import Any

from batchwright.inference.local import LocalEmbedder
from batchwright.ingest.library import NewVersion
from batchwright.ingest.search import MODES
from batchwright.ingest.spaces import Space
from batchwright.settings import PREFIX
from benchmarks.documents.corpus import Writer
from benchmarks.documents.stage import COLLECTION, TENANT, Stage, stage
from benchmarks.tools import report
from benchmarks.tools.measure import percentile
from benchmarks.tools.sections import Ground

NAME = "search"
TITLE = "Search in a collection of 100,000 chunks"
SECONDS_MAX = 1_500.0
DATABASE_URL = f"{PREFIX}DATABASE_URL"
CHUNKS_PER_DOCUMENT = 50
CHUNK_WORDS = 120
TOPICS = 200
TOPIC_WORDS = 60
TOPIC_SHARE = 0.25
QUERIES = 200
WRITERS = 2
MILLISECONDS_MAX = 50
SETTINGS = f"""
    Documents of {CHUNKS_PER_DOCUMENT} chunks of {CHUNK_WORDS} words, by Zipf's law out of 20,000; a document has one of
    {TOPICS} topics, and a quarter of its words are among the {TOPIC_WORDS} of that topic, so that vectors lie in
    clusters. They are stored as a run stores them, with wordllama's vectors of 256 numbers; the HNSW index is then
    built at once. {QUERIES} different questions of three to eight words, common ones and some of a topic, one after the
    other, after 100 others: from the call in Python to the last of ten hits with its text, marks and source, the vector
    of the question included. Processor time is that of the caller and of PostgreSQL.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    count = ground.pick(100_000, 2_000)
    async with stage(ground) as on:
        began = time.monotonic()
        await fill(on, count // CHUNKS_PER_DOCUMENT)
        stored = time.monotonic()
        ground.tell(f"  stored in {stored - began:.0f} s")
        await index(ground, on)
        ground.tell(f"  indexed in {time.monotonic() - stored:.0f} s")
        modes = {mode: await ask(ground, on, mode) for mode in MODES}
        return {"chunks": await on.chunks(), "store_seconds": stored - began, "modes": modes}


async def fill(on: Stage, documents: int) -> None:
    ((collection,),) = await on.sql(
        "INSERT INTO batchwright.ingest_collection (tenant, name, created_at) "
        "VALUES (%(tenant)s, %(name)s, now()) RETURNING id",
        tenant=TENANT,
        name=COLLECTION,
    )
    embedder = LocalEmbedder()
    space = await on.part.spaces.ensure(
        collection, fingerprint=embedder.fingerprint, model=None, dimensions=embedder.dimensions or 0
    )
    await drop_index(on, space)
    numbers = iter(range(documents))
    await asyncio.gather(*(write(on, space, embedder, numbers) for _ in range(WRITERS)))


async def drop_index(on: Stage, space: Space) -> None:
    ((name,),) = await on.sql(
        "SELECT indexname FROM pg_indexes WHERE tablename = %(table)s AND indexdef LIKE '%%hnsw%%'",
        table=f"ingest_vectors_{space.id}",
    )
    await on.sql(f'DROP INDEX batchwright."{name}"')


async def write(on: Stage, space: Space, embedder: LocalEmbedder, numbers: Any) -> None:
    for number in numbers:
        texts = await asyncio.to_thread(make_texts, number)
        vectors = await asyncio.to_thread(embedder.vectors, texts)
        await store(on, space, number, texts, vectors)


def make_texts(number: int) -> list[str]:
    writer, topic = Writer(number), topic_words(number % TOPICS)
    return [
        " ".join(
            writer.draw.choice(topic) if writer.draw.random() < TOPIC_SHARE else word
            for word in writer.draw.choices(writer.words, cum_weights=writer.weights, k=CHUNK_WORDS)
        )
        for _ in range(CHUNKS_PER_DOCUMENT)
    ]


def topic_words(topic: int) -> list[str]:
    return random.Random(10_000 + topic).sample(Writer.words[200:], TOPIC_WORDS)


async def store(on: Stage, space: Space, number: int, texts: list[str], vectors: list[bytes]) -> None:
    """Store chunks as the last steps of a run do, with everything that search reads."""
    library, name = on.part.library, f"document-{number}"
    async with on.client.pool.transaction() as session:
        ((document_id,),) = await session.rows(
            "INSERT INTO batchwright.ingest_document (collection_id, source, name, created_at, updated_at) "
            "VALUES (%(collection)s, %(name)s, %(name)s, now(), now()) RETURNING id",
            {"collection": space.collection_id, "name": name},
        )
        new = NewVersion(
            document_id=document_id,
            collection_id=space.collection_id,
            item_id=f"item_{number:032x}",
            generation=1,
            recipe="benchmark",
            sha256=f"{number:064x}",
            steps={},
            metadata={"topic": number % TOPICS},
        )
        version_id = await library.persist(new, [chunk_row(*one) for one in enumerate(texts)], [], session=session)
        rows = await session.rows(
            "SELECT id FROM batchwright.ingest_chunk WHERE version_id = %(version)s ORDER BY number",
            {"version": version_id},
        )
        by_chunk = {id: vector for (id,), vector in zip(rows, vectors, strict=True)}
        await library.go_live(document_id, version_id, name=name, space=space, vectors=by_chunk, session=session)


def chunk_row(number: int, text: str) -> dict[str, Any]:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {
        "number": number,
        "key": digest,
        "hash": digest,
        "char_start": 1_000 * number,
        "char_end": 1_000 * number + len(text),
        "overlap": 0,
        "page_first": 1 + number // 3,
        "page_last": 1 + number // 3,
        "section": [f"Section {number // 10}"],
        "tokens": len(text) // 4,
        "text": text,
    }


async def index(ground: Ground, on: Stage) -> None:
    """All vectors in the index, and statistics as autovacuum would have them by now."""
    (space,) = await on.part.spaces.of((await on.part.collections.get(TENANT, COLLECTION)).id)
    create = (await on.part.spaces.statements_of(space))["create_index"]
    tables = ("ingest_chunk", f"ingest_vectors_{space.id}", "ingest_document", "ingest_version")
    for statement in (
        f"UPDATE batchwright.ingest_vectors_{space.id} SET is_indexed = true",
        f"SET maintenance_work_mem = '1GB'; {create}",
        "SELECT gin_clean_pending_list('batchwright.ingest_chunk_words')",
        *(f"VACUUM ANALYZE batchwright.{table}" for table in tables),
    ):
        await asyncio.to_thread(ground.server.scalar, statement, on.environment[DATABASE_URL])


async def ask(ground: Ground, on: Stage, mode: Any) -> dict[str, float]:
    search, times = on.part.search, []
    for question in make_questions(100, seed=1):
        await search.search(TENANT, COLLECTION, question, mode=mode)
    python, postgres = time.process_time(), ground.server.cpu_seconds() or 0.0
    for question in make_questions(QUERIES, seed=2):
        began = time.perf_counter()
        found = await search.search(TENANT, COLLECTION, question, mode=mode)
        times.append((time.perf_counter() - began) * 1000)
        if not found.hits or any("left out" in used for used in found.used):
            raise RuntimeError(f"{question!r} found {len(found.hits)}: {found.used}")
    python, postgres = time.process_time() - python, (ground.server.cpu_seconds() or 0.0) - postgres
    return {
        "p50": percentile(times, 50),
        "p95": percentile(times, 95),
        "worst": max(times),
        "cpu": (python + postgres) / QUERIES * 1000,
        "postgres": postgres / QUERIES * 1000,
    }


def make_questions(count: int, *, seed: int) -> list[str]:
    writer = Writer(seed)
    draw = writer.draw
    return [
        " ".join(
            draw.sample(topic_words(draw.randrange(TOPICS)), draw.randint(2, 4))
            + draw.choices(writer.words, cum_weights=writer.weights, k=draw.randint(1, 4))
        )
        for _ in range(count)
    ]


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    modes = figures["modes"] if figures else {}
    p95 = {mode: modes.get(mode, {}).get("p95") for mode in MODES}
    return [
        report.at_most(f"search over 100,000 chunks, {mode}, p95", MILLISECONDS_MAX, p95[mode], " ms") for mode in p95
    ]


def tables(figures: dict[str, Any]) -> str:
    columns = ("p50", "p95", "worst", "cpu", "postgres")
    rows = [[mode, *(f"{one[column]:.1f}" for column in columns)] for mode, one in figures["modes"].items()]
    return report.table([f"{figures['chunks']:,} chunks, ms", "p50", "p95", "worst", "CPU", "of it PostgreSQL"], rows)
