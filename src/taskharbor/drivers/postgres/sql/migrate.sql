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
