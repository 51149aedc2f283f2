"""Frameworks that people build with, unchanged: LangChain, pydantic-ai, LiteLLM, instructor.

The last two want older packages than the rest, so they have an environment of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from helpers import assets

HERE = Path(__file__).parent
QUESTION = "Why do leaves change color in fall?"
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks GitHub for prices
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "NO_PROXY": "127.0.0.1",
}


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)


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
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    done = subprocess.run(
        [assets.python_clients(), HERE / "older_clients.py", server.url, server.model],
        capture_output=True,
        text=True,
        timeout=240,
        env=clean | QUIET,
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_litellm(older: dict[str, Any], lm: Any) -> None:
    expected = lm.chat(QUESTION, temperature=0, max_tokens=16).text
    result = older["litellm"]
    assert result["whole"] == result["streamed"] == result["ollama"] == expected
    assert {*json.loads(result["schema"])} == {"name", "age"}
    assert result["extra"] == lm.chat(QUESTION, top_k=3, seed=7, max_tokens=16).text


@pytest.mark.slow
def test_instructor(older: dict[str, Any]) -> None:
    for way, person in older["instructor"].items():
        assert Person.model_validate(person), way
