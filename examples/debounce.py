"""Keyed jobs: a burst of wishes for one customer becomes one execution, with the latest payload."""

from taskharbor import Harbor

harbor = Harbor("sqlite:///debounce.db")
runs: list[int] = []


@harbor.job
async def reindex(customer: str, version: int) -> None:
    runs.append(version)


if __name__ == "__main__":
    for version in range(100):
        reindex.options(key="customer:ada").enqueue("ada", version)
    harbor.worker(until_empty=True).run()
    print("100 wishes, executions:", runs)
    assert runs == [99]
