"""Whatever the OpenAPI document lets a client send, and much that it does not: never a 500."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from unspool.serve.app import create_app
from unspool.serve.settings import ServeSettings
from unspool.serve.shelf import Entry, Shelf


def _document() -> dict[str, Any]:
    gate: Any = create_app(ServeSettings(), Shelf([Entry("smollm", lambda: None, 1)], room=1))[0]
    return gate.app.openapi()


schema = schemathesis.openapi.from_dict(_document())


def at_most(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def attack(case: Any, url: str) -> None:
    if isinstance(case.body, dict):  # what is written costs time, and is not what is tested here
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if name in case.body:
                case.body[name] = 1
    case.call_and_validate(base_url=url, checks=[not_a_server_error], timeout=60)


@schema.parametrize()
@at_most(3)
def test_no_500_whatever_is_sent(case: Any, server: Any):
    attack(case, server.url)


@pytest.mark.slow
@schema.parametrize()
@at_most(200)
def test_no_500_however_much_is_sent(case: Any, server: Any):
    attack(case, server.url)


def test_the_server_is_well_after_all_that(server: Any, lm: Any):
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": "Once upon a time", "max_tokens": 8, "seed": 2},
    )
    wanted = lm.generate("Once upon a time", max_tokens=8, seed=2).text
    assert answer.json()["choices"][0]["text"] == wanted
    assert server.house.admission.running == 0
