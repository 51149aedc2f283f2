"""No request that the OpenAPI document allows or forbids gets a 500."""

from __future__ import annotations

import json
import re
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
JSON = {"content-type": "application/json"}


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


ODD: list[Any] = [None, True, -1, 0, 10**20, 1e308, "", "x" * 300, "\0 \ud83d", [], [None], {},
                  [[]], {"a": [1]}]  # fmt: skip
ODD_NAMES = ["..", "%00", "a" * 300, "%f0%9f%8d%81", "branch-0"]


@pytest.fixture(scope="module")
def examples(server: Running) -> dict[str, Any]:
    """The example request of each path, as the documentation page has them."""
    page = httpx.get(f"{server.url}/docs").text
    match = re.search(r'id="examples">(.*?)</script>', page, re.DOTALL)
    assert match
    result: dict[str, Any] = json.loads(match[1])
    return result


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_odd_values_get_no_500(
    path: str, method: str, server: Running, examples: dict[str, Any]
) -> None:
    """Each field of a request in turn has a value of another type or out of all bounds."""
    operation = DOCUMENT["paths"][path][method]
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def send(url: str, **params: Any) -> None:
            answer = client.request(method, url, **params)
            assert answer.status_code < 500 or answer.status_code == 501, (url, params, answer.text)

        query = [item["name"] for item in operation.get("parameters", ()) if item["in"] == "query"]
        for name in ODD_NAMES if "{" in path else [""]:
            url = re.sub(r"\{.*?\}", name, path)
            send(url)
            for parameter in query:
                send(url, params={parameter: ODD_NAMES[len(parameter) % 5]})
        if "requestBody" not in operation:
            return
        branch = client.post("/v1/tree", json={"prompt": "the tree"}).json()["id"]
        client.post(f"/v1/tree/{branch}/resume", json={"max_tokens": 4})
        url = path.replace("{identity}", branch).replace("{name}", "none")
        schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = DOCUMENT["components"]["schemas"][schema.rpartition("/")[2]]["properties"]
        for number, field in enumerate(fields):
            for value in (ODD[(5 * number + 3 * k) % len(ODD)] for k in range(4)):
                send(url, content=json.dumps({**examples[path], field: value}), headers=JSON)
        client.delete(f"/v1/tree/{branch}")


@pytest.mark.slow
@pytest.mark.timeout(3600)  # making up a large request that fits its schema takes a second
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_500_whatever_is_sent(path: str, method: str, server: Running):
    """What the document says of one operation, and what it says cannot be."""

    def send(case: Any) -> None:
        case.call_and_validate(base_url=server.url, checks=[not_a_server_error], timeout=60)

    few = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]
    for mode in GenerationMode:
        try:
            few(given(case=operation.as_strategy(generation_mode=mode))(send))()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # nothing can be wrong with a bare GET


def test_the_server_is_well_after_all_that(server: Any, small_model: Path):
    options = {"max_tokens": 4, "seed": 2}
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": "the tree", **options}, timeout=60
    )
    with unspool.load(small_model, memory=8 << 20, threads=1) as lm:
        expected = lm.generate("the tree", **options).text
    assert answer.json()["choices"][0]["text"] == expected
    settled(server)
