-- Queries of `batchwright check`.

-- name: server
SELECT current_setting('server_version_num')::integer, current_setting('server_version'), pg_is_in_recovery(),
       clock_timestamp()

-- name: session
-- Whether the settings of our connections are in force.
SELECT (SELECT jsonb_object_agg(lower(name), setting) FROM pg_settings WHERE lower(name) = ANY(%(names)s::text[])),
       quote_ident(current_user), has_database_privilege(current_database(), 'CREATE'), quote_ident(current_database())

-- name: connections
-- How many connections the server has for us, and how many of them other programs use now.
SELECT current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
           - coalesce(current_setting('reserved_connections', true), '0')::integer,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND application_name <> 'batchwright')

-- name: oldest_xmin
-- What prevents the removal of dead rows: an open transaction, a prepared one, or a replication slot.
SELECT holder, since, remedy FROM (
    SELECT format('pid %%s (%%s)', pid, concat_ws(', ', usename, nullif(application_name, ''), state)) AS holder,
           xact_start AS since, format('end it: SELECT pg_terminate_backend(%%s)', pid) AS remedy,
           greatest(age(backend_xmin), age(backend_xid)) AS age
    FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND coalesce(backend_xmin, backend_xid) IS NOT NULL
        AND pid <> pg_backend_pid() AND xact_start <= now() - make_interval(secs => %(seconds)s)
    UNION ALL
    SELECT format('the prepared transaction %%L', gid), prepared, format('end it: ROLLBACK PREPARED %%L', gid),
           age(transaction)
    FROM pg_prepared_xacts WHERE prepared <= now() - make_interval(secs => %(seconds)s)
    UNION ALL
    SELECT format('the replication slot %%L', slot_name), NULL,
           format('let its consumer catch up, or drop it: SELECT pg_drop_replication_slot(%%L)', slot_name), age(xmin)
    FROM pg_replication_slots WHERE xmin IS NOT NULL AND NOT active
) AS found
ORDER BY age DESC
LIMIT 1
