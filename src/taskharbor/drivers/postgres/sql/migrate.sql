-- name: tables
SELECT tablename FROM pg_tables WHERE schemaname = $1

-- name: applied
SELECT name, breaks FROM $schema.migrations

-- name: lock
SELECT pg_advisory_xact_lock(hashtextextended('taskharbor migrations ' || $1::text, 0))

-- name: create_schema
CREATE SCHEMA IF NOT EXISTS $schema

-- name: create_table
CREATE TABLE IF NOT EXISTS $schema.migrations (name text PRIMARY KEY, breaks boolean NOT NULL, applied_at timestamptz DEFAULT now())

-- name: is_applied
-- Functions of a later version (functions_0002...) count as well.
SELECT 1 FROM $schema.migrations
WHERE name = $1 OR starts_with($1, 'functions_') AND starts_with(name, 'functions_') AND left(name, 14) > left($1, 14)

-- name: record
INSERT INTO $schema.migrations (name, breaks) VALUES ($1, $2)

-- name: condition
-- True if the tables came from another cluster; the server's time; true if tomorrow has its partitions.
SELECT (SELECT system_id FROM $schema.epochs ORDER BY epoch DESC LIMIT 1) <> (SELECT system_identifier FROM pg_control_system()),
    (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    to_regclass(format('%I.%I', $1::text,
                       to_char((clock_timestamp() + interval '1 day') AT TIME ZONE 'UTC', '"attempts_"YYYYMMDD'))) IS NOT NULL
