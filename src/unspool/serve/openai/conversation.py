"""A conversation that came by an API, on its way to the model: what the endpoints share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from unspool.serve.core.options import check_one_grammar
from unspool.serve.core.state import Call
from unspool.serve.http.errors import bad_request
from unspool.serve.openai.tools import ToolUse, chat_prompt


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """What a request comes to."""

    ids: list[int]
    options: dict[str, Any]  # of `LanguageModel.stream`
    use: ToolUse


def set_format(
    options: dict[str, Any], kind: str | None, schema: dict[str, Any] | None, name: str
) -> None:
    """The form that the answer must have; `name` is the parameter that asks for it."""
    if kind is None or kind == "text":
        return
    check_one_grammar(options, name)
    if kind == "json_object":
        options["json"] = True
    elif schema is None:
        raise bad_request(f"{name} of type json_schema needs a schema", name)
    else:
        options["json_schema"] = schema or {"type": "object"}


def called(identity: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as templates know it."""
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def asked(
    call: Call,
    messages: list[dict[str, Any]],
    use: ToolUse,
    options: dict[str, Any],
    most: int | None,
) -> PreparedChat:
    """Messages in OpenAI's form as ids. On a thread: templates and tokenizing take their time."""
    if len(messages) > call.served.lm.context:
        raise bad_request(
            f"{len(messages):,} messages are more than the model's context can hold",
            code="context_length_exceeded",
        )
    if messages and messages[-1].get("tool_calls"):
        first = messages[-1]["tool_calls"][0]
        raise bad_request(f"the call {first['id'][:80]!r} has no result: give it behind the call")
    tools = [json.dumps(tool.as_openai()) for tool in use.offered]
    call.check_text(*tools, *(message.get("content") or "" for message in messages))
    ids = chat_prompt(call.served, messages, use, options).ids
    options["max_tokens"] = call.token_limit(most, len(ids))
    return PreparedChat(ids, options, use)
