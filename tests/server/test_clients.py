"""Programs and frameworks that people point at such a server, unchanged.

`llm`, lm-eval, `openai` for Node, LangChain, pydantic-ai; LiteLLM and instructor need older
packages and have their own environment. Open WebUI cannot be installed here: its requests are made
by hand.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import assets
from helpers.api_requests import (
    MESSAGES,
    PERSON,
    QUESTION,
    WEATHER,
    Person,
    make_tool,
    parse_events,
)
from unspool.lens.embeddings import embedding

HERE = Path(__file__).parent
AGAIN = "And in spring?"


def run(command: list[Any], params: str | None = None, **environment: str) -> str:
    """What a program printed; all it said, where it failed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    done = subprocess.run(
        [*map(str, command)],
        input=params,
        stdin=subprocess.DEVNULL if params is None else None,
        capture_output=True,
        text=True,
        timeout=240,
        env=clean | environment,
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


# -- llm -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The command `llm`, told of the server as its manual says."""
    from click.testing import CliRunner
    from llm.cli import cli

    folder = tmp_path_factory.mktemp("llm")
    usual = {"model_name": server.model, "api_base": f"{server.url}/v1"}
    models = [
        {"model_id": "unspool", **usual, "supports_schema": True, "supports_tools": True},
        {"model_id": "unspool-raw", **usual, "completion": True},
        {"model_id": "unspool-responses", **usual, "responses": True},
    ]
    # JSON is YAML.
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models), "utf-8")

    def called(*arguments: Any) -> str:
        runner = CliRunner(env={"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": None})
        result = runner.invoke(cli, [*map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout.removesuffix("\n")

    return called


def test_llm_streams_and_goes_on(llm, lm):
    options = ["-o", "temperature", 0, "-o", "max_tokens", 24]
    first = lm.chat(QUESTION, temperature=0, max_tokens=24).text
    assert llm("-m", "unspool", QUESTION, *options) == first
    replies = [{"role": "assistant", "content": first}, {"role": "user", "content": AGAIN}]
    second = lm.chat([*MESSAGES, *replies], temperature=0, max_tokens=24).text
    assert llm("--continue", AGAIN, *options) == second


@pytest.mark.slow
def test_llm_without_streaming_with_a_seed_and_a_schema(llm, lm):
    options = ["-o", "temperature", 0.8, "-o", "seed", 7, "-o", "max_tokens", 60]
    params = ["--no-log", "--no-stream", "--schema", json.dumps(PERSON), *options]
    text = llm("-m", "unspool", "Invent a person.", *params)
    expected = lm.chat(
        "Invent a person.", json_schema=PERSON, temperature=0.8, seed=7, max_tokens=60
    )
    assert text == expected.text and {*json.loads(text)} == {"name", "age"}


@pytest.mark.slow
def test_llm_with_the_other_endpoints(llm, lm):
    assert {"OpenAI Chat: unspool", "OpenAI Responses: unspool-responses"} <= {
        *llm("models").splitlines()
    }
    raw = llm("-m", "unspool-raw", "--no-log", "The sky is", "-o", "temperature", 0,
              "-o", "max_tokens", 8)  # fmt: skip
    assert raw == lm.generate("The sky is", temperature=0, max_tokens=8).text
    text = llm("-m", "unspool-responses", "--no-log", QUESTION, "-o", "temperature", 0,
               "-o", "max_tokens", 16)  # fmt: skip
    assert text == lm.chat(QUESTION, temperature=0, max_tokens=16).text


# -- lm-eval ---------------------------------------------------------------------------------

QUIZ = [
    ("The capital of France is", ["Paris", "Berlin", "Madrid"], 0),
    ("The opposite of hot is", ["tall", "cold", "quick"], 1),
    ("A spider has", ["two legs", "six legs", "eight legs"], 2),
]


@pytest.fixture(scope="module")
def evaluated(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What lm-eval measures through the server."""
    folder = tmp_path_factory.mktemp("lm-eval")
    tasks, rows = folder / "tasks", folder / "quiz.json"
    tasks.mkdir()
    lines = (json.dumps({"question": q, "choices": c, "answer": a}) for q, c, a in QUIZ)
    rows.write_text("\n".join(lines), "utf-8")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test"}  # fmt: skip
    text = {**data, "doc_to_text": "{{question}}", "doc_to_target": "{{choices[answer]}}"}
    task = {"task": "quiz", **text, "output_type": "multiple_choice", "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}  # fmt: skip
    (tasks / "quiz.yaml").write_text(json.dumps(task), "utf-8")
    command = [sys.executable, HERE / "lm_eval_client.py", tasks, server.url, server.model]
    reply = run(command, HF_HOME=str(folder / "hf"), HF_HUB_OFFLINE="1")
    return json.loads(reply.splitlines()[-1])


@pytest.mark.slow
def test_lm_eval_scores_answers_as_the_engine_does(evaluated, lm):
    hits, normed_hits = 0, 0
    samples = sorted(evaluated["samples"]["quiz"], key=lambda sample: sample["doc_id"])
    for (question, choices, answer), sample in zip(QUIZ, samples, strict=True):
        start = len(lm.tokenizer.encode(question))
        scores = [lm.score(f"{question} {choice}", top=1).positions[start:] for choice in choices]
        expected = [sum(position.logprob for position in score) for score in scores]
        greedy = [all(p.token == p.candidates[0].token for p in score) for score in scores]
        reply = [resp for ((resp, _),) in sample["resps"]]
        assert reply == pytest.approx(expected, abs=1e-4)
        assert [is_greedy for ((_, is_greedy),) in sample["resps"]] == greedy
        hits += int(np.argmax(expected)) == answer
        normed = [score / len(choice) for score, choice in zip(expected, choices, strict=True)]
        normed_hits += int(np.argmax(normed)) == answer
    result = evaluated["results"]["quiz"]
    assert result["acc,none"] == pytest.approx(hits / len(QUIZ))
    assert result["acc_norm,none"] == pytest.approx(normed_hits / len(QUIZ))


# -- openai for Node -------------------------------------------------------------------------


def test_openai_for_node(server, lm):
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    chat = {"model": server.model, "messages": MESSAGES, "seed": 7, "max_tokens": 24}
    params = {"model": server.model, "chat": chat, "schema": PERSON, "tool": make_tool(**WEATHER)}
    reply = run(["node", HERE / "client.mjs", server.url, assets.node_openai()], json.dumps(params))
    result = json.loads(reply)
    created = lm.chat(QUESTION, seed=7, max_tokens=24)
    assert result["models"] == [server.model]
    assert result["chat"] == result["stream"] == created.text and result["usage"] == len(
        created.tokens
    )
    assert result["call"] == result["streamedCall"] and result["reason"] == "tool_calls"
    assert result["call"]["name"] == "weather"
    assert [*json.loads(result["call"]["arguments"])] == ["city"]
    assert result["json"] == lm.chat(QUESTION, json_schema=PERSON, seed=7, max_tokens=100).text
    for text, vector in zip(["Leaves fall.", "Snow falls."], result["embeddings"], strict=True):
        np.testing.assert_allclose(vector, embedding(lm, lm.prompt_ids(text)), atol=1e-5)
    assert result["response"] == lm.chat(QUESTION, temperature=0, max_tokens=12).text
    assert (result["error"]["class"], result["error"]["status"]) == ("NotFoundError", 404)
    assert f"available: {server.model}" in result["error"]["message"]


# -- Open WebUI ------------------------------------------------------------------------------


def test_what_open_webui_sends(server, lm):
    """After its `routers/openai.py`, `routers/tasks.py` and `utils/payload.py`."""
    headers = {"Authorization": "Bearer none"}
    listed = server.http.get("/v1/models", headers=headers).json()["data"]
    assert [(model["id"], model["object"]) for model in listed] == [(server.model, "model")]
    system = {"role": "system", "content": "You are brief."}
    messages = [system, {"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    params = {"temperature": 0.7, "top_p": 0.9, "seed": 7, "stop": ["###"], "max_tokens": 24}
    body = {"stream": True, "model": server.model, "messages": messages, **params}
    body |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
    body |= {"stream_options": {"include_usage": True}, "unspool": {"min_p": 0.1}}
    reply = server.http.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = parse_events(reply.text)
    reported = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1])
    expected = lm.chat([system, *MESSAGES], min_p=0.1, **params)
    assert reported == expected.text
    assert chunks[-1]["usage"]["completion_tokens"] == len(expected.tokens)
    # Tools that it runs itself, and what it sends when one has answered.
    call = {"index": 0, "id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}  # fmt: skip
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Snow, -3 degrees."},
    ]
    body |= {"messages": messages, "max_tokens": 8, "tools": [make_tool(**WEATHER)]}
    reply = server.http.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200


# -- frameworks ------------------------------------------------------------------------------

QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks GitHub for prices
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "NO_PROXY": "127.0.0.1",
}


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_langchain(server: Any, lm: Any) -> None:
    langchain = pytest.importorskip("langchain_openai")
    there = {"base_url": f"{server.url}/v1", "api_key": "none", "model": server.model}
    chat = langchain.ChatOpenAI(**there, temperature=0, max_tokens=16)
    expected = lm.chat(QUESTION, temperature=0, max_tokens=16).text
    assert chat.invoke(QUESTION).content == expected
    assert "".join(piece.content for piece in chat.stream(QUESTION)) == expected
    extra = langchain.ChatOpenAI(**there, max_tokens=60, extra_body={"top_k": 5, "min_p": 0.1})
    for way in ("json_schema", "function_calling"):
        result = extra.with_structured_output(Person, method=way).invoke("Ada is 36 years old.")
        assert isinstance(result, Person)

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return city

    called = extra.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Oslo?")
    assert called.tool_calls[0]["name"] == "get_weather"


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_pydantic_ai(server: Any, lm: Any) -> None:
    agents = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    model = OpenAIChatModel(server.model, provider=provider)
    settings = {"temperature": 0.0, "max_tokens": 16}
    agent = agents.Agent(model, model_settings=settings)
    expected = lm.chat(QUESTION, temperature=0, max_tokens=16).text
    assert agent.run_sync(QUESTION).output == expected
    settings = {"seed": 7, "max_tokens": 80, "extra_body": {"top_k": 20}}
    for kind in (agents.ToolOutput, agents.NativeOutput):
        body = agents.Agent(model, output_type=kind(Person), model_settings=settings)
        assert isinstance(body.run_sync("Ada is 36 years old.").output, Person)


@pytest.fixture(scope="module")
def older(server: Any) -> dict[str, Any]:
    """What LiteLLM and instructor found through the server, in an environment of their own."""
    command = [assets.python_clients(), HERE / "older_clients.py", server.url, server.model]
    return dict(json.loads(run(command, **QUIET).splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_litellm(older: dict[str, Any], lm: Any) -> None:
    expected = lm.chat(QUESTION, temperature=0, max_tokens=16).text
    result = older["litellm"]
    assert result["whole"] == result["streamed"] == result["ollama"] == expected
    assert {*json.loads(result["schema"])} == {"name", "age"}
    assert result["extra"] == lm.chat(QUESTION, top_k=3, seed=7, max_tokens=16).text


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_instructor(older: dict[str, Any]) -> None:
    for way, person in older["instructor"].items():
        assert Person.model_validate(person), way
