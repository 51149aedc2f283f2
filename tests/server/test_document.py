"""No request that the OpenAPI document allows or forbids gets a 500."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

import unspool
from helpers.running_server import Running, running, settled
from unspool.server.app import create_app
from unspool.server.http.settings import ServerSettings
from unspool.server.runtime.registry import ModelEntry, ModelRegistry
from unspool.train.routes import ServerTrainer


def _document() -> dict[str, Any]:
    wrapped: Any = create_app(
        ServerSettings(), ModelRegistry([ModelEntry("smollm", lambda: None, 1)], model_memory=1)
    )[0]
    return wrapped.app.openapi()


DOCUMENT = _document()
schema = schemathesis.openapi.from_dict(DOCUMENT)


def at_most(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server(small_entry: ModelEntry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that generates little, and trains nothing."""
    runs = tmp_path_factory.mktemp("runs")
    with (
        pytest.MonkeyPatch.context() as patch,
        running([small_entry], max_tokens=4, max_think=200, runs=runs) as served,
    ):
        patch.setattr(ServerTrainer, "command", [sys.executable, "-c", ""])
        yield served


OPERATIONS = [
    pytest.param(
        path,
        method,
        id=f"{method.upper()} {path}",
        marks=[pytest.mark.slow] * ((path, method) == ("/v1/costs", "post")),  # it measures
    )
    for path, item in DOCUMENT["paths"].items()
    for method in item
]


def attack(path: str, method: str, url: str, examples: int) -> None:
    """Send what the document says of one operation, and what it says cannot be."""

    def send(case: Any) -> None:
        case.call_and_validate(base_url=url, checks=[not_a_server_error], timeout=60)

    operation = schema[path][method]
    for mode in GenerationMode:
        try:
            at_most(examples)(given(case=operation.as_strategy(generation_mode=mode))(send))()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # nothing can be wrong with a bare GET


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_500_whatever_is_sent(path: str, method: str, server: Any):
    has_body = "requestBody" in DOCUMENT["paths"][path][method]
    attack(path, method, server.url, examples=6 if has_body else 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # making up a large request that fits its schema takes a second
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_500_however_much_is_sent(path: str, method: str, server: Any):
    attack(path, method, server.url, examples=200)


def test_the_server_is_well_after_all_that(server: Any, small_model: Path):
    options = {"max_tokens": 4, "seed": 2}
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": "the tree", **options}, timeout=60
    )
    with unspool.load(small_model, memory=8 << 20, threads=1) as lm:
        expected = lm.generate("the tree", **options).text
    assert answer.json()["choices"][0]["text"] == expected
    settled(server)
