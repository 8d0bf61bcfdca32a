"""A program that uses its client, forks, and goes on in both processes: `forking_program.py URL os.fork|multiprocessing`.

With os.fork it does what gunicorn's --preload does: the app is imported and used before the workers are forked.
"""

import multiprocessing
import os
import signal
import sys

from taskharbor import Client, Harbor, JobRequest, JobState

PATIENCE = 60

url, way = sys.argv[1:]
harbor, client = Harbor(url), Client(url)


@harbor.job
def hello(name: str) -> None: ...


def enqueue(name: str) -> None:
    client.enqueue(JobRequest(type="hello", payload={"name": name}))
    hello.enqueue(name)


def child(name: str) -> None:
    signal.alarm(PATIENCE)
    enqueue(name)


signal.alarm(PATIENCE)
enqueue("before")
codes: list[int | None] = []
for number in range(2):
    if way == "os.fork":
        pid = os.fork()
        if not pid:
            child(f"child {number}")
            sys.exit()
        enqueue("during")
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    else:
        process = multiprocessing.get_context("fork").Process(target=child, args=(f"child {number}",))
        process.start()
        enqueue("during")
        process.join()
        codes.append(process.exitcode)
    enqueue("after")
print(codes, sum(queue.counts[JobState.READY] for queue in client.stats()))
