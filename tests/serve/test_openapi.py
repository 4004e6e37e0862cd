"""Requests made up from the server's own OpenAPI document: whatever is asked, no answer is a fault
of ours. Few examples, the same ones in every run."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.serve.kit import Running

EXAMPLES = 3
FEW = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_no_request_is_a_fault(served: Running) -> None:
    schema = schemathesis.openapi.from_dict(served.get("/openapi.json").json())
    statuses: dict[str, set[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()

        @FEW
        @given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            response = case.call(base_url=served.url, timeout=30)
            statuses.setdefault(case.path, set()).add(response.status_code)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert "error" in response.json()

        ask()
    assert len(statuses) >= 13
    assert any(200 in codes for codes in statuses.values())
