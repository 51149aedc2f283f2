"""What every request passes first: pages of other origins, and the names that counters have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from helpers.running_server import Running, running
from unspool.server.runtime.registry import ModelEntry

LOAD = "/v1/models/tiny/load"
FOREIGN = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "http://evil.example", "content-type": "text/plain"},
    {"origin": "http://evil.example", "content-type": "application/x-www-form-urlencoded"},
    {"origin": "http://evil.example", "content-type": "text/plain; a=application/json"},
]
CHANGES = [
    ("POST", LOAD),
    ("POST", "/v1/tree/branch/stop"),
    ("POST", "/v1/tree"),
    ("POST", "/v1/runs"),
    ("POST", "/v1/runs/name/stop"),
    ("POST", "/v1/completions"),
    ("POST", "/api/generate"),
    ("PATCH", "/v1/tree/branch"),
    ("PUT", "/v1/tree/branch"),
    ("DELETE", "/v1/tree/branch"),
    ("DELETE", "/v1/costs/name"),
    ("DELETE", "/v1/responses/name"),
]


@pytest.fixture(scope="module")
def gate_server(small_entry: ModelEntry) -> Iterator[Running]:
    with running([replace(small_entry, name="tiny")]) as server:
        yield server


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_a_page_of_another_origin_changes_nothing(gate_server: Running, method: str, path: str):
    for headers in FOREIGN:
        answer = gate_server.http.request(method, path, headers=headers, content=b"")
        assert answer.status_code == 403, (headers, answer.text)
        assert "--cors" in answer.text and "application/json" in answer.text


def test_others_are_let_in(gate_server: Running):
    """Programs, pages of the server's own, and JSON, which browsers send only where CORS lets
    them."""
    host = gate_server.url.removeprefix("http://")
    for headers in (
        {},
        {"content-type": "text/plain"},
        {"origin": f"http://{host}"},
        {"origin": f"https://{host}", "content-type": "text/plain"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"origin": "http://behind.example", "sec-fetch-site": "same-origin"},
        {"origin": "http://evil.example", "content-type": "application/json"},
        {"origin": "http://evil.example", "content-type": "Application/JSON; charset=utf-8"},
    ):
        assert gate_server.http.post(LOAD, headers=headers).status_code == 200, headers
    for path in ("/v1/models", "/health"):
        answer = gate_server.http.get(path, headers=FOREIGN[0])
        assert answer.status_code == 200


def test_origins_that_cors_allows_are_let_in(small_entry: ModelEntry):
    with running([replace(small_entry, name="tiny")], cors=("https://page.example",)) as server:
        for origin, status in (("https://page.example", 200), ("https://evil.example", 403)):
            assert server.http.post(LOAD, headers={"origin": origin}).status_code == status


def test_clients_cannot_make_up_labels(gate_server: Running):
    client = gate_server.http
    for n in range(2):
        for path in ("/page/{}", "/{}", "/v1/{}", "/v1/models/{}", "/v1/tree/{}", "/{}/a/b"):
            answer = client.get(path.format(f"made_up_{n}"))
            assert "x-unspool-route" not in answer.headers
        client.request(f"MADE{n}", f"/v1/made_up_{n}")
        client.post("/tokenize", json={"content": "a", "model": f"made_up_{n}"})
    assert "made_up" not in client.get("/metrics").text


def test_models_that_are_not_listed_are_among_those_that_run(gate_server, small_entry, monkeypatch):
    entry = replace(small_entry, name="puzzle")
    registry, client = gate_server.state.registry, gate_server.http
    monkeypatch.setattr(registry, "find", lambda name: entry if name == "puzzle" else None)
    answer = client.post("/tokenize", json={"content": "a", "model": "puzzle"})
    assert answer.status_code == 200
    names = {model["name"] for model in client.get("/api/ps").json()["models"]}
    assert names == {"tiny:latest", "puzzle:latest"}
