"""The driver contract and the backends. A call passes through these modules:

- `registry`, `urls`: find a driver by URL, and read the options of the URL.
- `contract`: the abstract driver, with a method for each call.
- `operations`: each call as a struct with the bounds of its fields.
- `validation`: checks a call once and passes it to the driver.
- `records`: settlements, settings, filters and pages.
- `waiting`: the loop that waits for work.
- `broker_protocol`: calls and answers between a client and a broker.
- `migrations`: numbered steps of a SQL schema.
- `engine`: the rules in SQL and Python, for SQLite, memory and object stores.
- `sqlite`, `memory`, `objectstore`, `postgres`, `redis`, `http`: the drivers. No driver imports another.
"""
