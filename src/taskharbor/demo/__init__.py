"""`taskharbor demo`: a few thousand jobs and two workers, one of which is killed in the middle; then a check of the result.

app       the jobs
workload  the jobs to enqueue, and the expected end of each
run       a run from the first enqueue to the last job: the worker processes, the kill, and the verdict
analysis  pipeline, audit and report over the same store, if Spark can run
"""
