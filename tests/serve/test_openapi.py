"""Requests made up from the server's own OpenAPI document: whatever is asked, no answer is a fault
of ours. Few examples; `make soak` sends more."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.serve.kit import Running

EXAMPLES = 4
FAULTS_ALLOWED = {501, 503}


@pytest.fixture(scope="module")
def api(served: Running) -> object:
    return schemathesis.openapi.from_dict(served.get("/openapi.json").json())


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_no_request_is_a_fault(case: schemathesis.Case, served: Running) -> None:
    response = case.call(base_url=served.url, timeout=30)
    assert response.status_code < 500 or response.status_code in FAULTS_ALLOWED, response.text
    if response.status_code >= 400:
        assert "error" in response.json()
