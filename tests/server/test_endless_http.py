"""Texts longer than the context over HTTP: `unspool.endless`, and Ollama's `shift`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.running_server import Running, default_entry, running, settled

CONTEXT, WRITTEN = 96, 150
PROMPT = "the rows of the tree"
ASKED: dict[str, Any] = {"max_tokens": WRITTEN, "temperature": 0, "seed": 1, "end": False}
LONG = "the rows of the tree " * 60  # by far more than the context


@pytest.fixture(scope="module")
def serving(small_model: Path) -> Iterator[Running]:
    entry = default_entry(small_model, memory=16 << 20, context=CONTEXT, threads=1)
    with running([entry]) as result:
        yield result


@pytest.fixture
def lm(serving: Running) -> Any:
    return serving.state.registry.loaded[serving.model].lm


@pytest.fixture
def client(serving: Running) -> Iterator[httpx.Client]:
    yield serving.http
    settled(serving)


def local_text(lm: Any, prompt: Any, endless: bool | int) -> str:
    """The same text, written here."""
    expected = {**ASKED, "endless": endless}
    text: str = lm.generate(prompt, **expected).text
    return text


def test_a_completion_goes_on_beyond_the_context(client: httpx.Client, lm: Any):
    body = {**ASKED, "prompt": PROMPT}
    ends = client.post("/v1/completions", json=body).json()
    assert ends["usage"]["completion_tokens"] < WRITTEN, "it ends where the context does"
    for endless in (True, 7):
        answer = client.post("/v1/completions", json={**body, "unspool": {"endless": endless}})
        reply = answer.json()
        assert reply["usage"]["completion_tokens"] == WRITTEN
        assert reply["choices"][0]["text"] == local_text(lm, PROMPT, endless)
        assert "outgrew the context of 96 tokens" in answer.headers["x-unspool-note"]


def test_a_chat_goes_on_beyond_the_context(client: httpx.Client, lm: Any):
    messages = [{"role": "user", "content": PROMPT}]
    body = {**ASKED, "messages": messages, "unspool": {"endless": True}}
    reply = client.post("/v1/chat/completions", json=body).json()
    assert reply["usage"]["completion_tokens"] == WRITTEN
    content = reply["choices"][0]["message"]["content"]
    assert content == local_text(lm, lm.chat_prompt(messages).ids, True)
    body["stream"] = True
    lines = client.post("/v1/chat/completions", json=body).text
    assert lines.count("data: {") > WRITTEN // 2


def test_a_prompt_may_be_longer_than_the_context(client: httpx.Client, lm: Any):
    body = {**ASKED, "max_tokens": 5, "prompt": LONG}
    refused = client.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    reply = client.post("/v1/completions", json={**body, "unspool": {"endless": True}}).json()
    expected = {**ASKED, "max_tokens": 5, "endless": True}
    assert reply["choices"][0]["text"] == lm.generate(LONG, **expected).text
    # Without a limit it is as long as the context.
    chat = {"messages": [{"role": "user", "content": LONG}], "unspool": {"endless": True}}
    reply = client.post("/v1/chat/completions", json={**chat, "end": False}).json()
    assert reply["usage"]["completion_tokens"] == CONTEXT


def test_llama_cpp_tells_that_it_was_truncated(client: httpx.Client, lm: Any):
    body = {**ASKED, "prompt": PROMPT, "unspool": {"endless": True}}
    reply = client.post("/completion", json=body).json()
    assert reply["tokens_predicted"] == WRITTEN and reply["truncated"]
    assert reply["content"] == local_text(lm, PROMPT, True)
    short = client.post("/completion", json={**body, "max_tokens": 5}).json()
    assert not short["truncated"]


@pytest.mark.parametrize(("stored", "endless"), [(None, True), (7, 7), (-1, True)])
def test_ollama_shifts(client: httpx.Client, lm: Any, stored: int | None, endless: bool | int):
    options = {"num_predict": WRITTEN, "temperature": 0, "seed": 1, "ignore_eos": True}
    if stored is not None:
        options["num_keep"] = stored
    body = {"prompt": PROMPT, "raw": True, "stream": False, "options": options}
    ends = client.post("/api/generate", json=body).json()
    assert ends["eval_count"] < WRITTEN
    answer = client.post("/api/generate", json={**body, "shift": True})
    assert "num_keep" not in answer.headers.get("x-unspool-ignored", "")
    reply = answer.json()
    assert reply["eval_count"] == WRITTEN
    assert reply["response"] == local_text(lm, PROMPT, endless)


def test_what_is_wrong_is_said(client: httpx.Client):
    for endless in (0, -3, "yes", 90):
        body = {**ASKED, "prompt": PROMPT, "unspool": {"endless": endless}}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 400 and "endless" in answer.json()["error"]["message"]
