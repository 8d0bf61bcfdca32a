"""The OpenAPI document, and a machine that asks everything it allows, and much that it forbids."""

from __future__ import annotations

from collections.abc import Iterator

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

from taskharbor.broker.app import ROUTES, openapi_document
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


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from taskharbor.broker.tokens import parse_token

    with running_broker(
        "memory://", tokens=(parse_token(f"tester:admin:{SECRET}"),), max_wait_seconds=0.01
    ) as url:
        yield url


@schema.parametrize()
@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_every_operation_answers_as_the_document_says(case: Case, url: str) -> None:
    case.call_and_validate(
        base_url=url, headers={"Authorization": f"Bearer {SECRET}"}, checks=CHECKS, excluded_checks=[]
    )
