"""The lake: Delta tables made of the attempt log, read and kept without Spark. `taskharbor.spark.lake` computes them.

storage  where a lake is: a folder, or a prefix of an object store
tables   the columns of every table
files    Parquet files that a task writes and reads, and the facts about them that a commit needs
delta    tables, their commits by runs, and all tables of one run together
upkeep   compaction and vacuum
query    SQL by DuckDB, and an overview

Needs pyarrow and deltalake; `query` needs duckdb too.
"""
