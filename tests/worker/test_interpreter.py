import gc
import sys

from taskharbor import Harbor
from taskharbor.worker.interpreter import SWITCH_SECONDS, YOUNG_OBJECTS


def settings() -> tuple[float, tuple[int, int, int]]:
    return sys.getswitchinterval(), gc.get_threshold()


def test_a_worker_sets_python_up_for_its_process_and_puts_it_back() -> None:
    harbor = Harbor("memory://")
    seen: list[tuple[float, tuple[int, int, int]]] = []
    frozen: list[int] = []

    @harbor.job
    async def look() -> None:
        seen.append(settings())
        frozen.append(gc.get_freeze_count())

    before = settings()
    frozen.append(gc.get_freeze_count())
    look.enqueue()
    harbor.worker(until_empty=True).run()
    assert settings() == before
    ((switch, threshold),) = seen
    assert switch == min(before[0], SWITCH_SECONDS)
    assert threshold[0] == YOUNG_OBJECTS
    assert frozen[1] > frozen[0] + 1000


def test_somebody_elses_settings_are_left_alone() -> None:
    harbor = Harbor("memory://")
    seen: list[tuple[int, int, int]] = []

    @harbor.job
    async def look() -> None:
        seen.append(gc.get_threshold())

    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 30)
    try:
        look.enqueue()
        harbor.worker(until_empty=True).run()
        assert seen == [(50_000, 20, 30)]
        assert gc.get_threshold() == (50_000, 20, 30)
    finally:
        gc.set_threshold(*before)
