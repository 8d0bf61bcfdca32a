"""A worker's process: Python's settings, and signals, which are heard in whatever thread they arrive, each once."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from taskharbor import Harbor
from taskharbor.worker.process_setup import SWITCH_SECONDS, YOUNG_OBJECTS, interrupts

posix = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("chosen", [None, (50_000, 20, 30)], ids=["python's", "the program's"])
def test_a_worker_sets_python_up_for_itself_and_puts_it_back(chosen: tuple[int, int, int] | None) -> None:
    harbor = Harbor("memory://")
    seen: list[tuple[float, tuple[int, int, int], int]] = []

    def look() -> None:
        seen.append((sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()))

    @harbor.job
    async def job() -> None:
        look()

    python = gc.get_threshold()
    gc.set_threshold(*(chosen or python))
    try:
        look()
        job.enqueue()
        harbor.worker(until_empty=True).run()
        look()
        before, during, after = seen
        assert after[:2] == before[:2]
        assert during[0] == min(before[0], SWITCH_SECONDS)
        if chosen is None:
            assert during[1][0] == YOUNG_OBJECTS
            assert during[2] > before[2] + 1000
        else:
            assert during[1] == chosen
    finally:
        gc.set_threshold(*python)


def to_another_thread(number: int) -> None:
    """As the kernel may choose to: no wait of the main thread is interrupted by it."""
    thread = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), number))
    thread.start()
    thread.join()


def to_the_process(number: int) -> None:
    os.kill(os.getpid(), number)


@posix
@pytest.mark.parametrize("send", [to_another_thread, to_the_process])
def test_a_signal_is_heard_once_and_earlier_settings_come_back(send: Callable[[int], None]) -> None:
    heard: queue.Queue[int] = queue.Queue()
    before = [signal.getsignal(number) for number in BOTH]
    with interrupts(heard.put):
        for number in (*BOTH, *BOTH):
            send(number)
            assert heard.get(timeout=30) == number
    assert heard.empty()
    assert [signal.getsignal(number) for number in BOTH] == before
    assert signal.set_wakeup_fd(-1) == -1
    # Threads of earlier tests may still be ending.
    assert "taskharbor-signals" not in [thread.name for thread in threading.enumerate()]


@posix
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


async def test_outside_of_the_main_thread_nothing_happens() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def elsewhere() -> None:
        with interrupts(lambda number: None):
            assert signal.getsignal(signal.SIGTERM) == before

    await asyncio.to_thread(elsewhere)
