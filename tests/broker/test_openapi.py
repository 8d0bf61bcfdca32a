"""The OpenAPI document, and a machine that asks everything it allows, and much that it forbids. A refusal changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from broker.broker_client import contents
from taskharbor.broker.app import openapi_document
from taskharbor.broker.routes import ROUTES
from taskharbor.broker.tokens import parse_token
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.testing.broker import running_broker

SECRET = "schemathesis-secret-0123456789"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
    unsupported_method,
]
schema = schemathesis.openapi.from_dict(openapi_document(ROUTES))
ask = settings(
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


store = MemoryDriver()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    tokens = (parse_token(f"tester:admin:{SECRET}"),)
    with running_broker(store.clone(), tokens=tokens, max_wait_seconds=0.01, sweeps=False) as url:
        yield url


def check(case: Case[Any], url: str) -> None:
    """The answer is as the document says, and a request that was refused changed nothing."""
    before = asyncio.run(contents(store))
    headers = {"Authorization": f"Bearer {SECRET}"}
    answer = case.call_and_validate(base_url=url, headers=headers, checks=CHECKS, excluded_checks=[])
    assert answer.status_code < 400 or asyncio.run(contents(store)) == before


@schema.parametrize()
@settings(ask, max_examples=2)
def test_every_operation_answers_as_the_document_says(case: Case[Any], url: str) -> None:
    check(case, url)


@pytest.mark.slow
@schema.parametrize()
@settings(ask, max_examples=20)
def test_every_operation_answers_many_requests_as_the_document_says(case: Case[Any], url: str) -> None:
    check(case, url)
