-- Search over words: the most selective lexemes, bounded candidates for each, and their exact score.

-- name: prepare
SELECT collection.id, collection.language,
    ARRAY(
        SELECT word.lexeme FROM unnest(to_tsvector(collection.language::regconfig, %(text)s)) AS word
        ORDER BY word.positions[1]),
    ARRAY(
        SELECT phraseto_tsquery(collection.language::regconfig, phrase)::text
        FROM unnest(%(phrases)s::text[]) AS phrase),
    ARRAY(
        SELECT phraseto_tsquery(collection.language::regconfig, phrase)::text
        FROM unnest(%(excluded)s::text[]) AS phrase)
FROM batchwright.ingest_collection AS collection
WHERE collection.tenant = %(tenant)s AND collection.name = %(name)s AND collection.deleted_at IS NULL

-- Lexemes that are in many chunks of all collections together, by the statistics of ANALYZE.
-- name: common
SELECT common.lexeme, common.share
FROM pg_stats AS stats
CROSS JOIN LATERAL unnest(stats.most_common_elems::text::text[], stats.most_common_elem_freqs) AS common (lexeme, share)
WHERE stats.schemaname = 'batchwright' AND stats.tablename = 'ingest_chunk' AND stats.attname = 'words'
    AND common.lexeme IS NOT NULL

-- Each probe is one lexeme, or several together, and finds a bounded number of chunks. Rare lexemes weigh more.
-- part: probes
WITH found AS MATERIALIZED (
    SELECT probe.number, hit.id
    FROM unnest(%(probes)s::text[]) WITH ORDINALITY AS probe (query, number)
    CROSS JOIN LATERAL (
        SELECT chunk.id FROM batchwright.ingest_chunk AS chunk
        WHERE chunk.words @@ probe.query::tsquery
        LIMIT %(reach)s
    ) AS hit
),
weighed AS (
    SELECT found.number, ln(1 + 100000.0 / count(*))::float8 AS weight FROM found GROUP BY found.number
),
summed AS (
    SELECT found.id, sum(weighed.weight) AS weight
    FROM found JOIN weighed ON weighed.number = found.number
    GROUP BY found.id
),
telling AS MATERIALIZED (
    SELECT lexeme.query::tsquery AS query, coalesce(lexeme.weight, weighed.weight, 0) AS weight
    FROM unnest(%(lexemes)s::text[], %(numbers)s::integer[], %(weights)s::float8[]) AS lexeme (query, number, weight)
    LEFT JOIN weighed ON weighed.number = lexeme.number
)

-- part: score
SELECT chunk.id, score.score
FROM best
JOIN batchwright.ingest_chunk AS chunk ON chunk.id = best.id
CROSS JOIN LATERAL (SELECT chunk.words || ''::tsvector AS words OFFSET 0) AS loaded
CROSS JOIN LATERAL (
    SELECT sum(telling.weight * ts_rank(loaded.words, telling.query)) AS score FROM telling
) AS score
WHERE score.score > 0
ORDER BY score.score DESC, chunk.id
LIMIT %(limit)s

-- name: words
:probes,
best AS (SELECT summed.id FROM summed ORDER BY summed.weight DESC, summed.id LIMIT %(candidates)s)
:score

-- `OFFSET 0` keeps the planner from reading all chunks that pass.
-- name: words_passing
:probes,
best AS (
    SELECT top.id
    FROM (
        SELECT summed.id, summed.weight FROM summed ORDER BY summed.weight DESC, summed.id LIMIT %(reach)s
    ) AS top
    CROSS JOIN LATERAL (
        SELECT version.id FROM batchwright.ingest_chunk AS chunk :with_document
        WHERE chunk.id = top.id AND :passes
        OFFSET 0
    ) AS passing
    ORDER BY top.weight DESC, top.id
    LIMIT %(candidates)s
)
:score

-- If a filter leaves few chunks, all of them are examined.
-- name: words_among
WITH telling AS MATERIALIZED (
    SELECT lexeme.query::tsquery AS query, lexeme.weight
    FROM unnest(%(lexemes)s::text[], %(guesses)s::float8[]) AS lexeme (query, weight)
),
best AS (
    SELECT allowed.id
    FROM unnest(%(chunk_ids)s::bigint[]) AS allowed (id)
    JOIN batchwright.ingest_chunk AS chunk ON chunk.id = allowed.id
    WHERE %(condition)s::text IS NULL OR chunk.words @@ %(condition)s::text::tsquery
)
:score

-- Phrases and exclusions also apply to the results of vectors.
-- name: meeting
SELECT chunk.id
FROM unnest(%(chunk_ids)s::bigint[]) WITH ORDINALITY AS found (id, rank)
JOIN batchwright.ingest_chunk AS chunk ON chunk.id = found.id
WHERE chunk.words @@ %(condition)s::text::tsquery
ORDER BY found.rank

-- The chunks that pass, if they are few: found by metadata if the filter has any, else by document.
-- name: passing
SELECT chunk.id
FROM batchwright.ingest_version AS version
JOIN batchwright.ingest_document AS document ON document.id = version.document_id
JOIN batchwright.ingest_chunk AS chunk ON chunk.version_id = version.id
WHERE version.collection_id = %(collection_id)s AND version.state = 'live' AND :passes
LIMIT %(limit)s

-- name: passing_documents
WITH documents AS MATERIALIZED (
    SELECT document.id, document.live_version
    FROM batchwright.ingest_document AS document
    WHERE document.collection_id = %(collection_id)s AND document.live_version IS NOT NULL
        AND (%(source)s::text IS NULL OR document.source LIKE %(source)s)
        AND (%(name)s::text IS NULL OR document.name LIKE %(name)s)
)
SELECT chunk.id
FROM documents
JOIN batchwright.ingest_chunk AS chunk ON chunk.version_id = documents.live_version :with_document
WHERE :passes
LIMIT %(limit)s

-- name: hits
SELECT chunk.id, document.id, document.source, document.name, chunk.page_first, chunk.page_last, chunk.section,
    chunk.char_start, chunk.char_end, chunk.text, version.metadata,
    ARRAY(
        SELECT jsonb_build_object('type', mention.type, 'text', mention.text,
            'char_start', mention.char_start, 'char_end', mention.char_end)
        FROM batchwright.ingest_mention AS mention
        WHERE mention.chunk_id = chunk.id
        ORDER BY mention.char_start
        LIMIT %(mentions)s)
FROM unnest(%(chunk_ids)s::bigint[]) AS wanted (id)
JOIN batchwright.ingest_chunk AS chunk ON chunk.id = wanted.id :with_document

-- Words of the hits that match the query, whatever their endings. They are returned as lines: a list of this many words
-- would take a third of the Python time of a search.
-- name: matching_words
SELECT word FROM string_to_table(%(words)s::text, chr(10)) AS word
WHERE to_tsvector(%(language)s::text::regconfig, word) @@ %(query)s::text::tsquery
