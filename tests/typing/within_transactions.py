"""Checked by mypy (`test_typing.py`) and pyright (`make lint`), never run: a transaction's kind decides whether to await."""

from typing import Any, assert_type

import psycopg
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from taskharbor import AsyncClient, Client, Harbor, JobHandle, JobRequest
from taskharbor.drivers.contract import Enqueued

harbor = Harbor("postgresql://localhost/app")


@harbor.job
async def double(number: int, *, loud: bool = False) -> int:
    return 2 * number


def synchronous(
    connection: psycopg.Connection[Any],
    session: Session,
    scoped: scoped_session[Session],
    core: Connection,
    client: Client,
) -> None:
    assert_type(double.within(connection).enqueue(1, loud=True), JobHandle[int])
    assert_type(double.within(session).enqueue(1).result(), int)
    assert_type(double.within(scoped).enqueue(1), JobHandle[int])
    assert_type(double.options(key="k").within(core).enqueue_many([(1,)]), list[JobHandle[int]])
    assert_type(client.within(session).enqueue(JobRequest(type="t")), Enqueued)
    assert_type(client.within(connection).enqueue_many([JobRequest(type="t")]), list[Enqueued])
    double.within(session).enqueue("one")  # type: ignore[arg-type]
    double.within(session).enqueue()  # type: ignore[call-arg]
    double.within("postgresql://localhost/app")  # type: ignore[call-overload]


async def asynchronous(
    connection: psycopg.AsyncConnection[Any],
    session: AsyncSession,
    scoped: async_scoped_session[AsyncSession],
    core: AsyncConnection,
    client: AsyncClient,
) -> None:
    assert_type(await double.within(connection).enqueue(1, loud=True), JobHandle[int])
    assert_type(await double.within(session).enqueue(1), JobHandle[int])
    assert_type(await double.within(scoped).enqueue(1), JobHandle[int])
    assert_type(await double.within(core).enqueue_many([(1,)]), list[JobHandle[int]])
    assert_type(await client.within(session).enqueue(JobRequest(type="t")), Enqueued)
    client.within(Session())  # type: ignore[arg-type]
