-- name: isolation
SELECT current_setting('default_transaction_isolation')

-- name: tables
SELECT tablename FROM pg_tables WHERE schemaname = %(schema)s

-- name: applied
SELECT name, breaks FROM $schema.migrations

-- name: lock
SELECT pg_advisory_xact_lock(hashtextextended('taskharbor migrations ' || %(schema)s::text, 0))

-- name: prepare
CREATE SCHEMA IF NOT EXISTS $schema

-- name: create_table
CREATE TABLE IF NOT EXISTS $schema.migrations (name text PRIMARY KEY, breaks boolean NOT NULL, applied_at timestamptz DEFAULT now())

-- name: is_applied
SELECT 1 FROM $schema.migrations WHERE name = %(name)s

-- name: record
INSERT INTO $schema.migrations (name, breaks) VALUES (%(name)s, %(breaks)s)

-- name: condition
-- Whether the tables were brought here from another cluster; the server's time; whether tomorrow has its partitions.
SELECT (SELECT system_id FROM $schema.epochs ORDER BY epoch DESC LIMIT 1) <> (SELECT system_identifier FROM pg_control_system()),
    (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    to_regclass(format('%%I.%%I', %(schema)s::text,
                       to_char((clock_timestamp() + interval '1 day') AT TIME ZONE 'UTC', '"attempts_"YYYYMMDD'))) IS NOT NULL

-- name: begin_epoch
SELECT $schema.begin_epoch()

-- name: add_days
SELECT $schema.add_days(%(now)s::bigint)
