"""`taskharbor demo`: a few thousand jobs, two workers, one of them killed in the middle, and the proof that nothing went wrong.

app       the jobs
workload  what is enqueued, and how each job is meant to end
run       the story from the first enqueue to the last job: the worker processes, the kill, and the judgement
analysis  pipeline, audit and report over the same store, where Spark can run
"""
