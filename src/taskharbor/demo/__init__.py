"""`taskharbor demo`: a few thousand jobs, two workers, one of them killed in the middle, and the proof that nothing went wrong.

app       the jobs
workload  what is enqueued, and how each job is meant to end
crew      the worker processes, and the kill
run       the story from the first enqueue to the last job
checks    what the store and the attempt log say about it afterwards
analysis  pipeline, audit and report over the same store, where Spark can run
"""
