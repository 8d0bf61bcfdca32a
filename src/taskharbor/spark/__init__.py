"""Spark on both sides of the queue: a data source, a lake of everything that happened, executors that work.

Needs `taskharbor[spark]` and Java 17 or newer. `source` is the data source, `lake` the tables made of the attempt log,
`audit` what proves the guarantees from them, `report` the page of plots, `workers` the executors.
"""
