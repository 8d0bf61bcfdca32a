"""`taskharbor demo`: a few thousand jobs and two workers, one of which is killed in the middle; then a check of the result.

app       the job types
run       a run: the jobs to enqueue, the worker processes, the kill, and the verdict
analysis  pipeline, audit and report over the same store, if Spark can run
"""
