"""What the tests of several APIs ask for: a question, a person in JSON, and a tool."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, Field

QUESTION = "Why do leaves change color in fall?"
MESSAGES = [{"role": "user", "content": QUESTION}]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


PERSON = {**Person.model_json_schema(), "additionalProperties": False}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather of a city", "parameters": CITY}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def make_tool(**function: Any) -> dict[str, Any]:
    """A function as chats name it."""
    return {"type": "function", "function": function}


def parse_events(text: str) -> list[Any]:
    """The data of a whole stream of events, but for the mark at its end."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
