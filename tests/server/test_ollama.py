"""Ollama's API, used by the `ollama` package; and what else its clients send."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import ollama
import pytest

from helpers.api_requests import CITY, MESSAGES, PERSON, QUESTION, make_tool
from helpers.running_server import Running, running, wait_until
from unspool.lens.embeddings import embedding
from unspool.server.runtime.registry import ModelEntry

FEW = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def client(server: Any) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_chat(client, server, lm):
    created = lm.chat(QUESTION, temperature=0, max_tokens=12)
    result = client.chat(server.model, MESSAGES, options=FEW, logprobs=True, top_logprobs=2)
    assert result.message.role == "assistant" and result.message.content == created.text
    assert (result.done, result.done_reason, result.model) == (True, "length", server.model)
    assert result.eval_count == 12 and result.prompt_eval_count == len(created.prompt)
    assert result.total_duration >= result.eval_duration > 0 and result.prompt_eval_duration > 0
    logprobs = [step.logprob for step in created.steps]
    assert [item.logprob for item in result.logprobs] == pytest.approx(logprobs, abs=1e-4)
    assert all(len(item.top_logprobs) == 2 for item in result.logprobs)
    # Streams are lines of JSON, and what is sent unless a request says otherwise.
    body = {"model": server.model, "messages": MESSAGES, "options": FEW}
    reply = server.http.post("/api/chat", json=body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == created.text


def test_generate_and_go_on(client, server, lm):
    first = client.generate(server.model, QUESTION, system="You are brief.", options=FEW)
    messages = [{"role": "system", "content": "You are brief."}, *MESSAGES]
    created = lm.chat(messages, temperature=0, max_tokens=12)
    assert first.response == created.text
    assert first.context == [*created.prompt, *created.tokens]
    extra = client.generate(server.model, "And in spring?", context=first.context, options=FEW)
    ids = [*first.context, *lm.chat_prompt("And in spring?").ids]
    assert extra.response == lm.generate(ids, temperature=0, max_tokens=12).text
    pieces = list(client.generate(server.model, QUESTION, options=FEW, stream=True))
    assert pieces[-1].done and pieces[-1].context


def test_generate_raw(client, server, lm):
    result = client.generate(server.model, "The sky is", raw=True, options=FEW)
    assert result.response == lm.generate("The sky is", temperature=0, max_tokens=12).text
    assert result.context is None
    result = client.generate(
        server.model, "The sky is", raw=True, format=PERSON, options={"seed": 7}
    )
    assert {*json.loads(result.response)} == {"name", "age"}


def test_options_mean_what_they_mean_there(client, server, lm):
    options = {"seed": 7, "top_k": 5, "repeat_penalty": 1.3, "num_predict": 12, "num_ctx": 2048,
               "min_p": 0.1, "mirostat_tau": 5.0, "stop": ["###"]}  # fmt: skip
    result = client.chat(server.model, MESSAGES, options=options)
    usual = {"seed": 7, "top_k": 5, "min_p": 0.1, "max_tokens": 12}
    expected = lm.chat(QUESTION, repetition_penalty=1.3, penalty_window=64, **usual)
    assert result.message.content == expected.text
    result = client.chat(
        server.model, MESSAGES, options={"mirostat": 2, "seed": 7, "num_predict": 12}
    )
    assert result.message.content == lm.chat(QUESTION, mirostat_tau=5, seed=7, max_tokens=12).text


@pytest.mark.parametrize("form", ["json", PERSON])
def test_structured_output(client, server, form):
    options = {"temperature": 0, "num_predict": 100}
    result = client.chat(server.model, MESSAGES, format=form, options=options)
    if form != "json":
        assert {*json.loads(result.message.content)} == {"name", "age"}
    assert result.message.content.lstrip().startswith("{")


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: the city's name
    """
    return f"Snow in {city}, -3 degrees."


def test_tools(client, server, lm):
    """A small model rarely calls, so the call is ours; that it is read shows in the prompt."""
    result = client.chat(server.model, MESSAGES, tools=[get_weather], options=FEW)
    assert result.message.content or result.message.tool_calls
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    talk = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": get_weather("Oslo")},
    ]
    result = client.chat(server.model, talk, tools=[get_weather], options=FEW)
    assert result.prompt_eval_count > len(lm.chat_prompt(MESSAGES).ids) + 20


def test_a_call_comes_as_a_call(server):
    """Forced by a grammar under `unspool`, as nothing of Ollama's forces one."""
    tools = [make_tool(name="get_weather", parameters=CITY)]
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    body = {"messages": MESSAGES, "tools": tools, "options": {"unspool": {"choice": [written]}}}
    reply = server.http.post("/api/chat", json=body)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"name": "get_weather", "arguments": {"city": "Oslo"}}
    ]
    complete = server.http.post("/api/chat", json=body | {"stream": False}).json()
    assert complete["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


def test_embeddings(client, server, lm, monkeypatch):
    texts = ["Leaves fall.", "Snow falls."]
    result = client.embed(server.model, texts)
    for text, vector in zip(texts, result.embeddings, strict=True):
        np.testing.assert_allclose(vector, embedding(lm, lm.prompt_ids(text)), atol=1e-5)
    older = client.embeddings(server.model, texts[0])
    np.testing.assert_allclose(older.embedding, result.embeddings[0], atol=1e-6)
    # As a model of 64 tokens would: reading thousands takes minutes on a slow machine.
    monkeypatch.setattr(server.state.registry.loaded[server.model].lm, "context", 64)
    assert len(client.embed(server.model, "word " * 90).embeddings) == 1  # it is cut
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed(server.model, "word " * 90, truncate=False)


def test_which_models_there_are(client, server):
    (listed,) = client.list().models
    assert listed.model == f"{server.model}:latest" and listed.size > 1e6 and listed.digest
    (loaded,) = client.ps().models
    assert loaded.name == listed.model and loaded.context_length == 8192
    assert loaded.details.quantization_level == "float32"
    visible = client.show(server.model)
    assert visible.modelinfo["llama.block_count"] == 4 and "tools" in visible.capabilities
    assert "<|im_start|>" in visible.template
    assert "unspool" in server.http.get("/api/version").json()


def test_the_probes_of_its_clients(server):
    there = server.http.get("/", headers={"user-agent": "ollama-python/0.6"})
    assert there.text == "Ollama is running"
    assert server.http.head("/").status_code == 200
    assert "<html" in server.http.get("/", headers={"accept": "text/html"}).text


@pytest.mark.parametrize(
    ("ask", "status", "words"),
    [
        (lambda c, m: c.chat("nonsense", MESSAGES), 404, "no such model: 'nonsense'"),
        (lambda c, m: c.pull("llama3.2"), 501, "unspool serve --model"),
        (lambda c, m: c.delete(m), 501, "chosen when the server starts"),
        (lambda c, m: c.copy(m, "other"), 501, "NAME=PATH"),
        (lambda c, m: c.generate(m, "Hi", images=[b"abc"]), 400, "only text"),
        (lambda c, m: c.generate(m, "Hi", template="{{ .Prompt }}"), 400, "raw: true"),
        (lambda c, m: c.chat(m, MESSAGES, think=True), 400, "does not support thinking"),
        (lambda c, m: c.chat(m, MESSAGES, options={"temprature": 1}), 400, "mean 'temperature'"),
    ],
)
def test_what_is_refused(client, server, ask, status, words):
    with pytest.raises(ollama.ResponseError, match=words) as caught:
        ask(client, server.model)
    assert caught.value.status_code == status


@pytest.fixture(scope="module")
def unloadable(small_entry: ModelEntry) -> Iterator[Running]:
    """A server whose model may be unloaded."""
    with running([replace(small_entry, name="SmolLM2-135M-Instruct.Q4_1")]) as result:
        yield result


def test_names_as_ollama_writes_them(unloadable):
    for name in ("smollm2:latest", "SmolLM2-135M-Instruct", "smollm2-135m-instruct:q4_1"):
        body = {"model": name, "prompt": "Hi", "stream": False, "options": {"num_predict": 1}}
        result = unloadable.http.post("/api/generate", json=body).json()
        assert result["model"] == name and result["done"]
        body = {"model": name, "prompt": "Hi", "max_tokens": 1}
        result = unloadable.http.post("/v1/completions", json=body).json()
        assert result["model"] == unloadable.model


def test_a_model_is_let_go_and_comes_back(unloadable):
    client = ollama.Client(host=unloadable.url)
    assert client.generate(unloadable.model).done_reason == "load"
    assert len(client.ps().models) == 1
    assert client.generate(unloadable.model, keep_alive=0).done_reason == "unload"
    wait_until(lambda: not client.ps().models)
    assert client.list().models[0].details.family == ""  # known once it is loaded again
    assert client.chat(
        unloadable.model, MESSAGES, options={"num_predict": 1}, keep_alive="10m"
    ).done
    remaining = client.ps().models[0].expires_at.timestamp() - time.time()
    assert 0 < remaining < 700
    body = {"model": unloadable.model, "prompt": "Hi", "max_tokens": 1, "keep_alive": 0.01}
    assert unloadable.http.post("/v1/completions", json=body).status_code == 200
    wait_until(lambda: not client.ps().models)
