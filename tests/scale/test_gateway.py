"""The gateway in front of two servers, and the loss of a replica."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("aiohttp")

from helpers.local_replicas import Front, address, broken_replica, front, replica
from helpers.running_server import Running, settled

PROMPT = {"prompt": "The scheduler plans rows", "max_tokens": 12, "seed": 7, "temperature": 0.9}
NO_END = {"unspool": {"end": False}}
CHAT = {"messages": [{"role": "user", "content": "A page belongs to one place."}], "max_tokens": 5}
KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def two(chatty: Path) -> Iterator[tuple[Running, Running]]:
    with replica(chatty, "one") as first, replica(chatty, "two") as second:
        yield first, second


@pytest.fixture(scope="module")
def here(two: tuple[Running, Running]) -> Iterator[Front]:
    with front({"one": address(two[0]), "two": address(two[1])}) as running_front:
        yield running_front


def written(client: httpx.Client | Any, **fields: Any) -> str:
    answer = client.post("/v1/completions", json={**PROMPT, **NO_END, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def events(answer: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_the_same_text_as_without_a_gateway(here: Front, two: tuple[Running, Running]):
    with httpx.Client(base_url=two[0].url, timeout=60) as bare, here.client() as client:
        plain = written(bare)
        assert len(plain) > 5
        assert {written(client) for _ in range(3)} == {plain}
        assert written(client, seed=8) != plain
        body = {**PROMPT, **NO_END, "stream": True}
        streamed = client.post("/v1/completions", json=body)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.rstrip().endswith("data: [DONE]")
        pieces = [choice["text"] for event in events(streamed) for choice in event["choices"]]
        assert "".join(pieces) == plain and len(pieces) > 5


def test_other_apis_pass_too(here: Front):
    with here.client() as client:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/messages", CHAT),
            ("/api/chat", {"messages": CHAT["messages"], "options": {"num_predict": 5}}),
            ("/completion", {"prompt": "a", "n_predict": 3}),
            ("/tokenize", {"content": "a page"}),
            ("/v1/embeddings", {"input": "a page"}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        page = client.get("/")
        assert page.status_code == 200 and "<html" in page.text.lower()
        assert client.get("/nothing").status_code == 404
        refused = client.post("/v1/completions", json={"prompt": "a", "temprature": 1})
        assert refused.status_code == 400 and "temperature" in refused.text
        lines = client.post("/api/generate", json={"prompt": "a", "options": {"num_predict": 3}})
        assert json.loads(lines.text.splitlines()[-1])["done"] is True


def test_branches_and_responses_stay_with_their_replica(here: Front):
    with here.client() as client:
        branches = [client.post("/v1/tree", json={"prompt": f"{n} pages"}).json() for n in range(6)]
        assert {branch["id"].split("-")[1] for branch in branches} == {"one", "two"}
        for branch in branches:
            path = f"/v1/tree/{branch['id']}"
            resumed = client.post(f"{path}/resume", json={"max_tokens": 3})
            assert resumed.status_code == 200, resumed.text
            forked = client.post(f"{path}/fork", json={}).json()
            assert forked["id"].split("-")[1] == branch["id"].split("-")[1]
            assert forked["parent"] == branch["id"]
        listed = [branch["id"] for branch in client.get("/v1/tree").json()["data"]]
        assert {branch["id"] for branch in branches} < set(listed)
        for n in range(4):
            body = {"input": f"{n} of them", "max_output_tokens": 4}
            first = client.post("/v1/responses", json=body).json()
            again = client.post("/v1/responses", json={**body, "previous_response_id": first["id"]})
            assert again.status_code == 200, again.text
            assert again.json()["id"].split("_")[1] == first["id"].split("_")[1]
            assert client.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]


def test_objects_of_a_lost_replica_are_gone(here: Front):
    with here.client() as client:
        branch = client.post("/v1/tree", json={"prompt": "a"}).json()["id"]
        lost = branch.replace(branch.split("-")[1], "lost")
        answer = client.post(f"/v1/tree/{lost}/resume", json={})
        assert answer.status_code == 410
        assert answer.json()["error"]["code"] == "replica_gone"
        assert "start a new one" in answer.json()["error"]["message"]
        identity = "resp_lost_0123456789abcdef01234567"
        for answer in (
            client.get(f"/v1/responses/{identity}"),
            client.post("/v1/responses", json={"input": "a", "previous_response_id": identity}),
        ):
            assert answer.status_code == 410 and "response" in answer.json()["error"]["message"]


def test_counters_of_the_whole(here: Front):
    with here.client() as client:
        for n in range(4):
            written(client, prompt=f"{n} {PROMPT['prompt']}")
        text = client.get("/metrics").text
    for name in ("one", "two"):
        assert f'unspool_completion_tokens_total{{replica="{name}",model="tiny"}}' in text
        assert f'unspool_pages{{replica="{name}",model="tiny",state="total"}}' in text
    assert text.count("# TYPE unspool_requests_total counter") == 1
    assert 'unspool_gateway_requests_total{path="/v1/completions",status="200"}' in text


def test_clients_cannot_make_up_labels(here: Front):
    with here.client() as client:
        client.get("/v1/models")
        client.get("/page/app.js")
        before = labelled_paths(here)
        for n in range(3):
            for path in ("/page/{}", "/{}", "/v1/{}", "/v1/models/{}", "/v1/tree/{}", "/{}/a/b/c"):
                client.get(path.format(f"made_up_{n}"))
            client.request(f"MADE{n}", f"/v1/made_up_{n}")
        assert not any("made_up" in path for path in labelled_paths(here))
        allowed = {"other", "/page/{name:path}", "/v1/models/{model:path}", "/v1/tree/{identity}"}
        assert labelled_paths(here) - before <= allowed
        assert "x-unspool-route" not in client.get("/v1/models").headers


def labelled_paths(here: Front) -> set[str]:
    metrics = here.gateway.metrics.registry.collect()
    samples = [sample for metric in metrics for sample in metric.samples]
    return {sample.labels["path"] for sample in samples if "path" in sample.labels}


def test_a_client_that_hangs_up_ends_the_text(here: Front, two: tuple[Running, Running]):
    body = {**PROMPT, **NO_END, "max_tokens": 480, "stream": True}
    with here.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 30
    while here.gateway.pool.in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not here.gateway.pool.in_flight
    for server in two:
        settled(server)


def test_the_gate_is_at_the_gateway(chatty: Path):
    keys = (KEY, "key-of-another-user")
    options: dict[str, Any] = {"api_keys": keys, "cors": ("http://page.example",)}
    with (
        replica(chatty, "one", api_keys=keys) as server,
        front({"one": address(server)}, max_body=1000, **options) as here,
        here.client() as client,
    ):
        assert client.get("/v1/models").status_code == 401
        headers = {"authorization": f"Bearer {KEY}", "origin": "http://page.example"}
        answer = client.get("/v1/models", headers=headers)
        assert answer.status_code == 200
        assert answer.headers.get_list("access-control-allow-origin") == ["http://page.example"]
        assert len(answer.headers.get_list("x-request-id")) == 1
        large = client.post("/v1/completions", json={"prompt": "a" * 2000}, headers=headers)
        assert large.status_code == 413
        assert client.get("/health").status_code == 200
        assert client.get("/-/healthz").text == "success"
        other = {"x-api-key": keys[1]}
        branch = client.post("/v1/tree", json={"prompt": "a"}, headers=other).json()
        assert client.get("/v1/tree", headers=headers).json()["data"] == []  # another user's
        listed = client.get("/v1/tree", headers=other).json()["data"]
        assert [item["id"] for item in listed] == [branch["id"]]
        assert 'replica="one"' in client.get("/metrics", headers=headers).text
    with front({}) as here, here.client() as client:
        answer = client.get("/v1/models", headers={"host": "elsewhere.example"})
        assert answer.status_code == 403


def test_without_replicas_or_only_broken_ones_it_says_so():
    with front({}, wait=0.2) as here, here.client() as client:
        assert client.get("/ready").status_code == 503
        answer = client.post("/v1/completions", json=PROMPT)
        assert answer.status_code == 503 and "retry-after" in answer.headers
    with (
        broken_replica(lambda line: None) as broken,
        front({"a": broken, "b": "127.0.0.1:1"}) as here,
        here.client() as client,
    ):
        answer = client.post("/v1/completions", json=PROMPT)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "replica_lost"
        assert answer.headers["retry-after"] == "1"


def test_a_replica_that_dies_before_the_first_byte(two: tuple[Running, Running]):
    def silent(line: socket.socket) -> None:
        """Not a word."""

    def headers_only(line: socket.socket) -> None:
        line.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                     b"transfer-encoding: chunked\r\n\r\n")  # fmt: skip

    def half_an_answer(line: socket.socket) -> None:
        line.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"half": ')

    for dying in (silent, headers_only, half_an_answer):
        with (
            broken_replica(dying) as broken,
            front({"broken": broken, "two": address(two[1])}) as here,
            here.client() as client,
        ):
            texts = {written(client, prompt=f"{n} pages") for n in range(3)}
            assert len(texts) == 3
            text = client.get("/metrics").text
            assert "unspool_gateway_retries_total 1.0" in text  # then it is not asked again
            path = "/v1/tree/branch-broken-0123456789abcdef01234567"
            assert client.get(path).status_code == 503  # it still listens: worth another try
            here.chooser.addresses["broken"] = "127.0.0.1:1"
            assert client.get(path).status_code == 410


@pytest.mark.parametrize(
    ("path", "kind", "end"),
    [
        ("/v1/completions", "text/event-stream", 'data: {"error":{"message":'),
        ("/v1/messages", "text/event-stream", 'event: error\ndata: {"type":"error"'),
        ("/v1/responses", "text/event-stream", 'event: error\ndata: {"type":"error"'),
        ("/v1/tree/branch-broken-0123456789abcdef01234567/resume", "text/event-stream",
         'event: error\ndata: {"error":'),
        ("/completion", "text/event-stream", 'data: {"error":{"code":503'),
        ("/api/chat", "application/x-ndjson", '{"error":"the replica'),
    ],
)  # fmt: skip
def test_a_replica_that_dies_in_the_middle(path: str, kind: str, end: str):
    def dying(line: socket.socket) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
        line.sendall(head.encode() + b"9\r\ndata: 1\n\n\r\n")

    with (
        broken_replica(dying) as broken,
        front({"broken": broken}) as here,
        here.client() as client,
    ):
        answer = client.post(path, json={"stream": True})
        assert answer.text.startswith("data: 1\n\n" + end), answer.text
        assert "send the request again" in answer.text
        assert "unspool_gateway_broken_streams_total 1.0" in client.get("/metrics").text


def test_a_replica_that_drains_finishes_and_takes_nothing_new(chatty: Path):
    with (
        replica(chatty, "one", drain=30.0) as first,
        replica(chatty, "two") as second,
        front({"one": address(first), "two": address(second)}) as here,
        here.client() as client,
    ):
        ids = [client.post("/v1/tree", json={"prompt": "a"}).json()["id"] for _ in range(2)]
        branches = {branch.split("-")[1]: branch for branch in ids}
        body = {**PROMPT, **NO_END, "max_tokens": 200, "stream": True}
        replicas = {"one": first, "two": second}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            (busy,) = here.gateway.pool.in_flight
            replicas[busy].state.admission.is_stopping = True
            with here.client() as other:
                for n in range(3):
                    written(other, prompt=f"{n} other pages")
                assert other.post(f"/v1/tree/{branches[busy]}/resume", json={}).status_code == 410
            remaining = "".join(lines)
        assert remaining.endswith("[DONE]") and "error" not in remaining
        assert "unspool_gateway_broken_streams_total 0.0" in client.get("/metrics").text
