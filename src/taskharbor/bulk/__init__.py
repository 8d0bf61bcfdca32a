"""Bulk access: whole tables in and out of a store, for callers that move millions of rows.

One mechanism over the driver contract, in the order in which data passes through it:

- `store`: the synchronous interface, which PostgreSQL implements in its own way. It cuts the tables into parts and reads them.
- `stage`: packs new jobs into blobs of the store.
- `publish_staged`: turns the blobs into jobs.
- `cursors`: places in the attempt log.
- `tables`: makes Arrow batches.

`tables` and `store` need pyarrow.
"""
