"""The Spark pipeline: a data source, a lake made of the attempt log, and workers on executors.

Needs `taskharbor[spark]` and Java 17 or newer. In the order in which data passes through them:

- `session`: starts Spark, and checks that it can run.
- `source`: the data source that reads and writes jobs.
- `workers`: workers on executors.
- `lake`: tables made of the attempt log.
- `audit`: checks the guarantees over these tables.
- `report`: an HTML page about them.
"""
