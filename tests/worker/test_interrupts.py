"""Signals are heard in whatever thread they arrive, and each counts once."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from taskharbor.worker.interpreter import interrupts

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")

Send = Callable[[int], None]


def to_another_thread(number: int) -> None:
    """As the kernel may choose to: no wait of the main thread is interrupted by it."""
    thread = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), number))
    thread.start()
    thread.join()


def to_the_process(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("send", [to_another_thread, to_the_process])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_once(send: Send, number: signal.Signals) -> None:
    heard: queue.Queue[int] = queue.Queue()
    with interrupts(heard.put):
        send(number)
        assert heard.get(timeout=30) == number
        send(number)
        assert heard.get(timeout=30) == number
    assert heard.empty()


def test_an_event_loop_that_takes_the_pipe_for_itself_hides_nothing() -> None:
    heard: queue.Queue[int] = queue.Queue()

    async def with_a_signal_of_its_own() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: None)
        to_the_process(signal.SIGTERM)
        assert await asyncio.to_thread(heard.get, timeout=30) == signal.SIGTERM
        loop.remove_signal_handler(signal.SIGUSR1)

    with interrupts(heard.put):
        asyncio.run(with_a_signal_of_its_own())


def test_what_was_there_before_is_there_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = threading.active_count()
    with interrupts(lambda number: None):
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads


def test_outside_of_the_main_thread_nothing_happens() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def elsewhere() -> None:
        with interrupts(lambda number: None):
            assert signal.getsignal(signal.SIGTERM) == before

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()


IDLE = """
import logging, signal, sys, threading
from taskharbor import Harbor

harbor = Harbor("memory://")

@harbor.job
async def greet() -> None: ...

class Misled(threading.Thread):
    def run(self):
        sys.stdin.readline()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

logging.basicConfig(level="INFO", stream=sys.stdout)
Misled(daemon=True).start()
harbor.worker(name="idle").run()
"""


def test_an_idle_worker_stops_by_a_signal_that_another_thread_received() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert any("serves" in line for line in process.stdout)
        process.communicate("now\n", timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
