"""Batches in OpenAI's format: requests in, lines of its output file out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import unspool
from helpers.batch_support import batch, read_lines, write_rows
from unspool.scale.batch.rows import row_seed

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is a page?"}]


def request(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, **body} if url == CHAT else body
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def test_requests_are_answered_as_the_server_does(tmp_path: Path, chatty: Path):
    rows = write_rows(
        tmp_path / "in.jsonl",
        [
            request("plain"),
            request("own", max_completion_tokens=3, temperature=0, seed=9),
            request("text", "/v1/completions", prompt="A node", n=2, max_tokens=5),
            request("answer", "/v1/responses", input="What is a page?", max_output_tokens=16),
            request("vector", "/v1/embeddings", input="A node"),
        ],
    )
    output = tmp_path / "out.jsonl"
    assert batch(chatty, rows, output) == 0
    lines = {line["custom_id"]: line for line in read_lines(output)}
    assert list(lines) == ["plain", "own", "text", "answer", "vector"]
    for line in lines.values():
        assert line["error"] is None and line["id"].startswith("batch_req_")
        assert line["response"]["status_code"] == 200
        assert line["response"]["request_id"].startswith("req_")
    bodies = {name: line["response"]["body"] for name, line in lines.items()}
    lm = unspool.load(chatty)
    seed = row_seed(7, json.dumps("plain"))
    expected = lm.chat(MESSAGES, seed=seed, max_tokens=12)
    assert bodies["plain"]["choices"][0]["message"]["content"] == expected.text
    assert bodies["plain"]["usage"]["completion_tokens"] == len(expected.tokens)
    expected = lm.chat(MESSAGES, seed=9, max_tokens=3, temperature=0)
    assert bodies["own"]["choices"][0]["message"]["content"] == expected.text
    seed = row_seed(7, json.dumps("text"))
    for number, choice in enumerate(bodies["text"]["choices"]):
        alone = lm.generate("A node", seed=seed, sample=number, max_tokens=5)
        assert choice["text"] == alone.text
    assert bodies["answer"]["object"] == "response"
    assert len(bodies["vector"]["data"][0]["embedding"]) == lm.config.width
    lm.close()


def test_requests_that_cannot_be_answered(
    tmp_path: Path, chatty: Path, capsys: pytest.CaptureFixture[str]
):
    wrong = "invalid_request_error"
    bad = [
        (request("model", model="gpt-4o-mini"), "model_not_found"),
        (request("hot", temperature=-3), wrong),
        (request("typo", temprature=1), "unknown_parameter"),
        (request("long", "/v1/completions", prompt="a " * 2000), "context_length_exceeded"),
        ({**request("url"), "url": "/v1/images"}, wrong),
        ({**request("method"), "method": "GET"}, wrong),
        ({**request("body"), "body": None}, wrong),
        (request("stream", stream=True), wrong),
    ]
    inputs = [*(row for row, _ in bad), request("good"), request("good")]
    rows = write_rows(tmp_path / "in.jsonl", [*inputs, {**request("x"), "custom_id": None}, 7])
    output = tmp_path / "out.jsonl"
    assert batch(chatty, rows, output) == 1
    assert [line["custom_id"] for line in read_lines(output)] == ["good"]
    failed = read_lines(tmp_path / "out.errors.jsonl")
    for (row, code), line in zip(bad, failed, strict=False):
        response = line["response"]
        assert line["custom_id"] == row["custom_id"] and line["error"]["code"] == code, line
        assert response["status_code"] == (404 if code == "model_not_found" else 400), line
        assert response["body"]["error"]["message"] in line["error"]["message"]
    assert [line["custom_id"] for line in failed[len(bad) :]] == ["good", None, None]
    for line in failed[-3:]:
        assert line["response"] is None and line["error"]["code"] == "invalid_row"
    assert "--any-model" in capsys.readouterr().err


def test_any_model(tmp_path: Path, chatty: Path):
    rows = write_rows(tmp_path / "in.jsonl", [request("a", model="gpt-4o-mini")])
    assert batch(chatty, rows, tmp_path / "out.jsonl", "--any-model") == 0
    (line,) = read_lines(tmp_path / "out.jsonl")
    assert line["response"]["body"]["model"] == chatty.name
