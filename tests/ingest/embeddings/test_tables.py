"""A table as the source: read by ranges of its ids, and only if a setting allows it."""

import pytest

from batchwright.errors import ConfigurationError, JobFailed
from batchwright.ingest.embeddings.settings import EmbeddingSettings
from tests.ingest.embeddings.stage import embedding_stage, near

ARTICLES = """
CREATE TABLE public.articles (id bigint PRIMARY KEY, body text, language text NOT NULL, rank integer);
INSERT INTO public.articles SELECT n, 'article ' || n, CASE n %% 3 WHEN 0 THEN 'de' ELSE 'en' END, nullif(n %% 5, 0)
FROM generate_series(1, 1000) AS n;
"""


@pytest.fixture
async def stage(database_url, tmp_path):
    tables = {"tables": ["public.articles", "shop.*", "public.Odd"]}
    async with embedding_stage(database_url, tmp_path, embeddings=tables) as stage:
        for statement in ARTICLES.split(";")[:-1]:
            await stage.batchwright.pool.rows(statement, {})
        stage.work()
        yield stage


def articles(**more):
    return {"table": "public.articles", "id": "id", "text": "body", **more}


async def ids(stage, result):
    return [line["id"] for line in await stage.lines(result["file_id"])]


async def test_all_rows_are_embedded_in_the_order_of_their_ids(stage):
    result = await stage.run(articles(), batch_size=150)
    found = await stage.lines(result["file_id"])
    assert [line["id"] for line in found] == list(range(1, 1001))
    assert near(found[776]["embedding"], "article 777")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"language": "de"}, [n for n in range(1, 1001) if n % 3 == 0]),
        ({"language": "de", "rank": None}, [n for n in range(1, 1001) if n % 15 == 0]),
        ({"rank": 4}, [n for n in range(1, 1001) if n % 5 == 4]),
    ],
)
async def test_rows_can_be_chosen_by_their_values(stage, where, expected):
    result = await stage.run(articles(where=where), batch_size=40)
    assert await ids(stage, result) == expected


async def test_a_value_is_never_a_statement(stage):
    id = await stage.submit(articles(where={"language": "de' OR true --"}))
    with pytest.raises(JobFailed, match="empty_source"):
        await stage.batchwright.wait(id, timeout=30)
    assert (await stage.rows("SELECT count(*) FROM public.articles")) == [(1000,)]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (articles(table="public.articles; DROP TABLE articles"), "no_table|table_unreadable"),
        (articles(table="public.articles WHERE true"), "no_table|table_unreadable"),
        (articles(table="public.nothing"), "no_table"),
        (articles(table="batchwright.api_key"), "table_not_allowed"),
        (articles(table="pg_catalog.pg_authid"), "table_not_allowed"),
        (articles(id='id" FROM articles --'), "no_column"),
        (articles(text="(SELECT 1)"), "no_column"),
        (articles(where={"1=1 OR id": 1}), "no_column"),
        (articles(where={"language": 5}), "table_unreadable"),
        (articles(id="rank"), "id_not_unique"),
        (articles(id="body"), "id_not_unique"),
    ],
)
async def test_a_source_that_cannot_or_may_not_be_read_is_refused(stage, source, code):
    id = await stage.submit(source)
    with pytest.raises(JobFailed, match=code):
        await stage.batchwright.wait(id, timeout=30)
    assert (await stage.rows("SELECT count(*) FROM public.articles")) == [(1000,)]


async def test_the_error_says_how_to_allow_a_table(stage):
    await stage.batchwright.pool.rows("CREATE TABLE public.secrets (id integer PRIMARY KEY, body text)", {})
    id = await stage.submit(articles(table="public.secrets"))
    with pytest.raises(JobFailed, match=r'allow it: \[embeddings\] tables = \["public.secrets"\]'):
        await stage.batchwright.wait(id, timeout=30)


async def test_names_that_need_quotes_and_other_types_of_ids_work(stage):
    for statement in (
        'CREATE TABLE public."Odd" ("the %% id" uuid PRIMARY KEY, "te:xt" text)',
        """INSERT INTO public."Odd" SELECT ('00000000-0000-0000-0000-' || lpad(n::text, 12, '0'))::uuid, 'odd ' || n
           FROM generate_series(1, 25) AS n""",
    ):
        await stage.batchwright.pool.rows(statement, {})
    result = await stage.run({"table": 'public."Odd"', "id": "the % id", "text": "te:xt"}, batch_size=10)
    assert await ids(stage, result) == [f"00000000-0000-0000-0000-{n:012}" for n in range(1, 26)]


async def test_rows_without_text_are_listed_by_their_ids(stage):
    await stage.batchwright.pool.rows("UPDATE public.articles SET body = NULL WHERE id IN (7, 500)", {})
    result = await stage.run(articles(), batch_size=100)
    assert (result["rows"], result["failed"]) == (998, 2)
    assert [one["id"] for one in await stage.lines(result["errors_file_id"])] == [7, 500]


async def test_a_view_cannot_write(stage):
    for statement in (
        "CREATE SCHEMA shop",
        """CREATE FUNCTION shop.leak() RETURNS text LANGUAGE sql VOLATILE AS
           $$ DELETE FROM public.articles RETURNING body $$""",
        "CREATE TABLE shop.item (id integer PRIMARY KEY, body text GENERATED ALWAYS AS ('fixed') STORED)",
        "INSERT INTO shop.item (id) SELECT generate_series(1, 150)",
    ):
        await stage.batchwright.pool.rows(statement, {})
    result = await stage.run({"table": "shop.item", "id": "id", "text": "body"}, batch_size=60)
    assert await ids(stage, result) == list(range(1, 151))
    await stage.batchwright.pool.rows("CREATE VIEW shop.trap AS SELECT 1 AS id, shop.leak() AS body", {})
    id = await stage.submit({"table": "shop.trap", "id": "id", "text": "body"})
    with pytest.raises(JobFailed, match="id_not_unique"):
        await stage.batchwright.wait(id, timeout=30)


@pytest.mark.parametrize("name", ["articles", "a.b.c", "", "public.", "* . *"])
def test_a_table_of_the_settings_has_a_schema(name):
    with pytest.raises(ConfigurationError, match=r'write "schema.table"'):
        EmbeddingSettings(tables=(name,))


def test_tables_of_batchwright_and_of_the_server_are_never_allowed():
    settings = EmbeddingSettings(tables=("batchwright.*", "pg_catalog.*", "information_schema.*", "shop.*"))
    assert settings.allows("shop", "item")
    assert not settings.allows("batchwright", "file")
    assert not settings.allows("pg_catalog", "pg_authid")
    assert not settings.allows("information_schema", "tables")
