-- A table of the user. Its name and columns replace :table, :id, :text and :type, in the form in which `describe`
-- returns them: the server has quoted them. Values are parameters. Columns have the prefix `source.`: ORDER BY with a bare name would
-- use the column of the result, which is text.

-- name: describe
SELECT schema.nspname, class.relname,
       format('%%I.%%I', schema.nspname, class.relname),
       (SELECT json_object_agg(attname, json_build_object(
                   'name', quote_ident(attname), 'type', format_type(atttypid, atttypmod), 'not_null', attnotnull))
        FROM pg_attribute WHERE attrelid = class.oid AND attnum > 0 AND NOT attisdropped),
       ARRAY(SELECT attribute.attname::text
             FROM pg_index AS i JOIN pg_attribute AS attribute
                ON attribute.attrelid = i.indrelid AND attribute.attnum = i.indkey[0]
             WHERE i.indrelid = class.oid AND i.indisunique AND i.indisvalid AND i.indnkeyatts = 1
                AND i.indpred IS NULL AND i.indexprs IS NULL),
       has_table_privilege(class.oid, 'SELECT')
FROM pg_class AS class
JOIN pg_namespace AS schema ON schema.oid = class.relnamespace
WHERE class.oid = to_regclass(%(table)s) AND class.relkind IN ('r', 'p', 'm', 'f', 'v')

-- The last id of the next page of rows.
-- name: boundary
SELECT :id::text FROM :table AS source WHERE :conditions ORDER BY :id OFFSET %(rows)s - 1 LIMIT 1

-- name: exists
SELECT true FROM :table AS source WHERE :conditions LIMIT 1

-- Reads one character more than the limit, to detect a text that is too long.
-- name: page
SELECT :id::text, left(:text::text, %(characters)s + 1)
FROM :table AS source
WHERE :conditions
ORDER BY :id
LIMIT %(rows)s
