"""What every request passes first: pages of other origins, and the names that counters have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from helpers import tiny_gguf
from helpers.running_server import Running, default_entry, running

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
    ("POST", "/v1/models/tiny/load"),
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
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write_tiny(tmp_path_factory.mktemp("gate") / "tiny.gguf")


@pytest.fixture(scope="module")
def gate_server(tiny_path: Path) -> Iterator[Running]:
    with running([default_entry(tiny_path, "tiny", memory=16 << 20)]) as server:
        yield server


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_a_page_of_another_origin_changes_nothing(gate_server: Running, method: str, path: str):
    with httpx.Client(base_url=gate_server.url, timeout=30) as client:
        for headers in FOREIGN:
            answer = client.request(method, path, headers=headers, content=b"")
            assert answer.status_code == 403, (headers, answer.text)
            assert "--cors" in answer.text and "application/json" in answer.text


def test_others_are_let_in(gate_server: Running):
    """Programs, pages of the server's own, and JSON, which browsers send only where CORS lets
    them."""
    host = gate_server.url.removeprefix("http://")
    url = f"{gate_server.url}/v1/models/tiny/load"
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
        assert httpx.post(url, headers=headers, timeout=30).status_code == 200, headers
    for path in ("/v1/models", "/health"):
        answer = httpx.get(gate_server.url + path, headers=FOREIGN[0], timeout=30)
        assert answer.status_code == 200


def test_origins_that_cors_allows_are_let_in(tiny_path: Path):
    entries = [default_entry(tiny_path, "tiny", memory=16 << 20)]
    with running(entries, cors=("https://page.example",)) as server:
        url = f"{server.url}/v1/models/tiny/load"
        for origin, status in (("https://page.example", 200), ("https://evil.example", 403)):
            answer = httpx.post(url, headers={"origin": origin}, timeout=30)
            assert answer.status_code == status


def test_clients_cannot_make_up_labels(gate_server: Running):
    with httpx.Client(base_url=gate_server.url, timeout=30) as client:
        for n in range(5):
            for path in ("/page/{}", "/{}", "/v1/{}", "/v1/models/{}", "/v1/tree/{}", "/{}/a/b"):
                answer = client.get(path.format(f"made_up_{n}"))
                assert "x-unspool-route" not in answer.headers
            client.request(f"MADE{n}", f"/v1/made_up_{n}")
            client.post("/tokenize", json={"content": "a", "model": f"made_up_{n}"})
        assert "made_up" not in client.get("/metrics").text


def test_models_that_are_not_listed_are_among_those_that_run(
    gate_server: Running, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
):
    entry = default_entry(tiny_path, "puzzle", memory=16 << 20)
    registry = gate_server.state.registry
    monkeypatch.setattr(registry, "find", lambda name: entry if name == "puzzle" else None)
    with httpx.Client(base_url=gate_server.url, timeout=30) as client:
        answer = client.post("/tokenize", json={"content": "a", "model": "puzzle"})
        assert answer.status_code == 200
        answer = client.get("/api/ps")
        assert answer.status_code == 200
        names = {model["name"] for model in answer.json()["models"]}
        assert names == {"tiny:latest", "puzzle:latest"}
