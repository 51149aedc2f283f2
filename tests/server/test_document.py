"""No request that the OpenAPI document allows or forbids gets a 500."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

import unspool
from helpers.running_server import Running, running, settled
from unspool.server.runtime.registry import ModelEntry
from unspool.train.routes import ServerTrainer

JSON = {"content-type": "application/json"}
ODD: list[Any] = [None, True, -1, 0, 10**20, 1e308, "", "x" * 300, "\0 \ud83d", [], [None], {},
                  [[]], {"a": [1]}]  # fmt: skip
ODD_NAMES = ["..", "%00", "a" * 300, "%f0%9f%8d%81", "branch-0"]


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


def operations(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(path, method) for path, item in document["paths"].items() for method in item]


def odd_requests(
    path: str,
    operation: dict[str, Any],
    document: dict[str, Any],
    example: Any,
    ids: dict[str, str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each name, parameter and field in turn has a value of another type or out of all bounds."""
    query = [item["name"] for item in operation.get("parameters", ()) if item["in"] == "query"]
    for name in ODD_NAMES if "{" in path else [""]:
        url = re.sub(r"\{.*?\}", name, path)
        yield url, {}
        for parameter in query:
            yield url, {"params": {parameter: ODD_NAMES[len(parameter) % 5]}}
    if "requestBody" in operation:
        url = path.format_map(ids)
        schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = document["components"]["schemas"][schema.rpartition("/")[2]]["properties"]
        for number, field in enumerate(fields):
            for value in (ODD[(5 * number + 3 * k) % len(ODD)] for k in range(2)):
                content = json.dumps({**example, field: value})
                yield url, {"content": content, "headers": JSON}


def test_odd_values_get_no_500(server, document, examples, small_model):
    faults = []
    ids = {"name": "none", "slot": "0"}
    ids["session_id"] = server.http.post("/v1/tree/sessions", json={}).json()["id"]
    for path, method in operations(document):
        if (path, method) == ("/v1/costs", "post"):  # it measures
            continue
        branch = server.http.post("/v1/tree", json={"prompt": "the tree"}).json()["id"]
        ids["identity"] = branch
        server.http.post(f"/v1/tree/{branch}/resume", json={"max_tokens": 4})
        operation = document["paths"][path][method]
        for url, params in odd_requests(path, operation, document, examples.get(path), ids):
            answer = server.http.request(method, url, **params)
            if answer.status_code >= 500 and answer.status_code != 501:
                faults.append((method, url, params, answer.text))
        server.http.delete(f"/v1/tree/{branch}")
    assert not faults
    # The server is well after all that.
    body = {"prompt": "the tree", "max_tokens": 4, "seed": 2}
    answer = server.http.post("/v1/completions", json=body).json()
    with unspool.load(small_model, memory=8 << 20, threads=1) as lm:
        assert answer["choices"][0]["text"] == lm.generate(**body).text
    settled(server)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # making up a large request that fits its schema takes a second
def test_no_500_whatever_is_sent(server: Running, document: dict[str, Any]):
    """What the document says of each operation, and what it says cannot be."""
    import schemathesis
    from schemathesis.checks import not_a_server_error

    def send(case: Any) -> None:
        case.call_and_validate(base_url=server.url, checks=[not_a_server_error], timeout=60)

    few = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    schema = schemathesis.openapi.from_dict(document)
    for path, method in operations(document):
        for mode in schemathesis.GenerationMode:
            try:
                few(given(case=schema[path][method].as_strategy(generation_mode=mode))(send))()
            except Unsatisfiable:
                assert mode is schemathesis.GenerationMode.NEGATIVE  # nothing wrong with a bare GET
