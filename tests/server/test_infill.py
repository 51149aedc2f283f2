"""Gaps over HTTP: `suffix` of OpenAI's completions and of Ollama's, and llama.cpp's `/infill`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import unspool
from helpers.api_requests import parse_events
from helpers.running_server import default_entry, running
from helpers.word_model import FIM, save_worded
from unspool.decoding.infill import causal
from unspool.decoding.infill.fill import OtherFile, fim_prompt, fim_tokens

LEFT, RIGHT = "The scheduler plans rows, and the ", " builder makes a step of them."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model without FIM tokens, one with, and one that sees the whole text."""
    folders = {
        "plain": save_worded(tmp_path_factory.mktemp("plain")),
        "coder": save_worded(tmp_path_factory.mktemp("coder"), FIM),
        "masked": save_worded(tmp_path_factory.mktemp("masked")),
    }
    settings = folders["masked"] / "config.json"
    reply = json.loads(settings.read_text())
    settings.write_text(json.dumps(reply | {"unspool": {"sight": "whole", "mask_id": 3}}))

    entries = [
        default_entry(folder, name, memory=16 << 20, threads=1) for name, folder in folders.items()
    ]
    with running(entries) as result:
        yield result.http, {entry.name: entry.load() for entry in entries}


def test_a_suffix_is_ranked_with(served):
    client, lms = served
    expected = lms["plain"].fill(LEFT, unspool.gap(1, 4), RIGHT)
    body = {"model": "plain", "prompt": LEFT, "suffix": RIGHT, "max_tokens": 4, "n": 2}
    reply = client.post("/v1/completions", json=body | {"logprobs": 2}).json()
    assert [c["text"] for c in reply["choices"]] == [c.texts[0] for c in expected.candidates[:2]]
    assert {c["finish_reason"] for c in reply["choices"]} == {"stop"}
    first = reply["choices"][0]["logprobs"]
    assert len(first["token_logprobs"]) == len(expected.chosen.gap_steps[0])
    assert reply["usage"]["completion_tokens"] >= 2
    # several prompts with one suffix
    pair = client.post("/v1/completions", json=body | {"prompt": [LEFT, "It "], "n": 1}).json()
    assert pair["choices"][0]["text"] == expected.texts[0] and len(pair["choices"]) == 2


def test_a_suffix_streams(openai, served):
    client, lms = served
    api = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
    for name in ("plain", "coder"):
        body: dict[str, Any] = {"model": name, "prompt": LEFT, "suffix": RIGHT, "max_tokens": 6}
        body |= {"temperature": 0, "seed": 1}
        complete = api.completions.create(**body).choices[0].text
        chunks = list(api.completions.create(**body, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == complete
    tokens = fim_tokens(lms["coder"].tokenizer)
    prompt = fim_prompt(lms["coder"].tokenizer, tokens, LEFT, RIGHT)
    assert complete == lms["coder"].generate(prompt, max_tokens=6, temperature=0).text


def test_infill_by_fim_tokens(served):
    client, lms = served
    body = {"model": "coder", "input_prefix": "a = ", "input_suffix": "\nprint(a)\n", "prompt": "b",
            "input_extra": [{"filename": "c.py", "text": "c = 1\n"}], "n_predict": 5,
            "temperature": 0, "seed": 1}  # fmt: skip
    reply = client.post("/infill", json=body).json()
    tokenizer = lms["coder"].tokenizer
    prompt = fim_prompt(
        tokenizer, fim_tokens(tokenizer), "a = b", "\nprint(a)\n", [OtherFile("c.py", "c = 1\n")]
    )
    assert reply["prompt"] == tokenizer.decode(prompt)
    created = lms["coder"].generate(prompt, max_tokens=5, temperature=0)
    assert reply["content"] == created.text and reply["tokens_evaluated"] == len(prompt)
    streamed = client.post("/infill", json=body | {"stream": True}).text
    chunks = parse_events(streamed)
    assert "".join(chunk["content"] for chunk in chunks) == created.text
    assert chunks[-1]["stop"] and chunks[-1]["timings"]


def test_infill_without_fim_tokens_is_ranked(served, monkeypatch):
    client, lms = served
    body = {"model": "plain", "input_prefix": LEFT, "input_suffix": RIGHT, "n_predict": 3}
    expected = lms["plain"].fill(LEFT, unspool.gap(1, 3), RIGHT)
    monkeypatch.setattr(causal, "_MAX_FORKS", 4)  # in more than one batch
    reply = client.post("/infill", json=body).json()
    assert reply["content"] == expected.texts[0] and reply["stop_type"] == "eos"
    stopped = client.post("/infill", json=body | {"stop": [expected.texts[0][:1]]}).json()
    assert expected.texts[0][0] not in stopped["content"]
    empty = client.post("/infill", json=body | {"input_prefix": "", "n_predict": 2})
    assert empty.status_code == 200 and empty.json()["content"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {"input_suffix": "a"}, "input_prefix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}, "text"),
        ("/infill", {"input_prefix": "a" * 99_999, "input_suffix": "b"}, "context"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "grammar": 'root ::= "x"'}, "gap"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "a", "suffix": "b" * 99_999}, "context"),
    ],
)
def test_what_cannot_be_is_refused(served, path: str, body: dict[str, Any], words: str):
    client, _ = served
    refused = client.post(path, json={"model": "plain", **body})
    assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    # Those of llama.cpp have its shape.
    assert (refused.json()["error"]["code"] == 400) == (path == "/infill")


def test_a_model_that_sees_the_whole_text_fills_too(served):
    client, lms = served
    expected = lms["masked"].fill(LEFT, unspool.gap(1, 2), RIGHT)
    assert expected.by == "masked"
    body = {"model": "masked", "prompt": LEFT, "suffix": RIGHT, "max_tokens": 2}
    reply = client.post("/v1/completions", json=body).json()
    assert reply["choices"][0]["text"] == expected.texts[0]
    refused = client.post("/v1/completions", json={"model": "masked", "prompt": LEFT})
    assert refused.status_code == 400 and "left to right" in refused.text


@pytest.mark.parametrize("name", ["plain", "coder"])
def test_a_suffix_as_ollama_says_it(served, name):
    client, _ = served
    options = {"num_predict": 4, "temperature": 0}
    body = {"model": name, "prompt": LEFT, "suffix": RIGHT, "options": options, "stream": False}
    reply = client.post("/api/generate", json=body).json()
    expected = {"model": name, "prompt": LEFT, "suffix": RIGHT, "max_tokens": 4, "temperature": 0}
    answer = client.post("/v1/completions", json=expected).json()
    assert reply["response"] == answer["choices"][0]["text"] != ""
    assert reply["done_reason"] == answer["choices"][0]["finish_reason"]
    pieces = client.post("/api/generate", json=body | {"stream": True}).text.splitlines()
    assert "".join(json.loads(piece)["response"] for piece in pieces) == reply["response"]
    only = client.post("/api/generate", json=body | {"prompt": ""}).json()
    assert only["done_reason"] != "load" and only["response"]


def test_an_empty_suffix_asks_for_nothing(served):
    client, lms = served
    body = {"model": "plain", "prompt": LEFT, "suffix": "", "max_tokens": 3, "temperature": 0}
    reply = client.post("/v1/completions", json=body).json()
    expected = lms["plain"].generate(LEFT, max_tokens=3, temperature=0).text
    assert reply["choices"][0]["text"] == expected
