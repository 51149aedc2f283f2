"""Uses LiteLLM and instructor on a running server, and prints what they got as JSON.

Usage: python older_clients.py URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any

import instructor
import litellm
import openai
from pydantic import BaseModel, Field

QUESTION = "Why do leaves change color in fall?"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


def main(url: str, model: str) -> None:
    print(json.dumps({"litellm": _litellm(url, model), "instructor": _instructor(url, model)}))


def _litellm(url: str, model: str) -> dict[str, Any]:
    litellm.telemetry = False
    there = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
    ollama = {"model": f"ollama_chat/{model}", "api_base": url}
    chunks = litellm.completion(**there, **body, temperature=0, stream=True)
    return {
        "whole": _text(litellm.completion(**there, **body, temperature=0)),
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "ollama": _text(litellm.completion(**ollama, **body, temperature=0)),
        "extra": _text(litellm.completion(**there, **body, seed=7, top_k=3)),
        "schema": _text(
            litellm.completion(**there, **{**body, "max_tokens": 80}, response_format=Person)
        ),
    }


def _text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def _instructor(url: str, model: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    result = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        ask = instructor.from_openai(client, mode=mode).chat.completions.create
        person = ask(
            model=model,
            response_model=Person,
            messages=[{"role": "user", "content": "Ada is 36 years old."}],
            max_retries=0,
            max_tokens=80,
        )
        result[mode.value] = person.model_dump()
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
