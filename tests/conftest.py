"""Servers, certificates and Spark, for the tests that need real ones.

A server that is missing skips its tests on a laptop and fails them in CI, where nobody reads the skips. Tests that need a
server which pip cannot bring are marked `installed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
import trustme

from needing import Certificate, Entered, need
from taskharbor_testkit.servers import (
    PostgresAt,
    PostgresServer,
    RedisAt,
    ServerMissing,
    drop_prefix,
    drop_schema,
    given_or_shared_postgres,
    given_or_shared_redis,
    postgres_versions,
    shared_postgres,
    with_fresh_prefix,
    with_fresh_schema,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _needing_servers() -> Generator[None, object, object]:
    try:
        return (yield)
    except ServerMissing as error:
        missing = str(error)
    need(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from _needing_servers())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Also where a test, or the conformance kit on its behalf, starts a server without a fixture."""
    return (yield from _needing_servers())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An `async def` test runs on an event loop of its own, and leaves none behind."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, Entered):
                    arguments[name] = await stack.enter_async_context(value.manager)
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    return True


@pytest.fixture(scope="session")
def postgres_server() -> PostgresAt:
    """The server that TASKHARBOR_TEST_POSTGRES names, or the newest PostgreSQL, shared by all tests of this process."""
    return given_or_shared_postgres()


@pytest.fixture(scope="session")
def oldest_postgres_server() -> PostgresServer:
    """The oldest major that is to be had, shared likewise: do not stop it."""
    return shared_postgres(min(postgres_versions(), default=None))


@pytest.fixture
def postgres_url(postgres_server: PostgresAt) -> Iterator[str]:
    """The server with a schema of the test's own, which is dropped afterwards."""
    url = with_fresh_schema(postgres_server.url)
    yield url
    drop_schema(url)


@pytest.fixture(scope="session")
def redis_server() -> RedisAt:
    """The server that TASKHARBOR_TEST_REDIS names, or the newest Redis, shared by all tests of this process."""
    return given_or_shared_redis()


@pytest.fixture
def redis_url(redis_server: RedisAt) -> Iterator[str]:
    """The server with a prefix of the test's own, whose keys are removed afterwards."""
    url = with_fresh_prefix(redis_server.url)
    yield url
    drop_prefix(url)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    folder = tmp_path_factory.mktemp("tls")
    files = Certificate(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(files.chain)
    issued.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.authority)
    return files


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One for all tests of a process: starting it takes longer than most of them."""
    from taskharbor.demo.analysis import SMALL
    from taskharbor.spark.session import SparkUnavailable, check, local_session

    try:
        check()
    except SparkUnavailable as error:
        need(str(error))
    # As the demo does with little data; what is not little asks for `compiling` of `spark/stores.py`. And no note of the line
    # that made each column: that is most of what it costs to make one.
    settings = {**SMALL, "spark.sql.shuffle.partitions": "1"}
    settings["spark.python.sql.dataFrameDebugging.enabled"] = "false"
    # A task that fails is tried three times.
    session = local_session("tests", master="local[2,3]", settings=settings)
    yield session
    session.stop()
