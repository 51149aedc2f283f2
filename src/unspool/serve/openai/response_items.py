"""Input items of `/v1/responses`: as they are stored, and as messages for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unspool.serve.http.routes import new_id
from unspool.serve.openai.chat_prompt import tool_call
from unspool.serve.openai.responses_schema import (
    Content,
    FunctionCallItem,
    Item,
    MessageItem,
    ReasoningItem,
)

Items = Sequence[dict[str, Any]]


def items_of(value: str | Sequence[Item] | None) -> list[dict[str, Any]]:
    """The input of a request as items with ids."""
    if value is None:
        return []
    if isinstance(value, str):
        value = [MessageItem(role="user", content=value)]
    return [_item_json(item) for item in value]


def _item_json(item: Item) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        content = _parts(item.content, is_output=item.role == "assistant")
        prefix, fields = "msg_", {"type": "message", "role": item.role, "content": content}
    elif isinstance(item, FunctionCallItem):
        prefix = "fc_"
        fields = item.model_dump(include={"type", "call_id", "name", "arguments"})
    elif isinstance(item, ReasoningItem):
        parts = [part.model_dump() for part in item.content or ()]
        prefix, fields = "rs_", {"type": "reasoning", "summary": [], "content": parts}
    else:
        prefix, fields = "fco_", item.model_dump(include={"type", "call_id"})
        fields["output"] = _join_text(item.output)
    return {"id": item.id or new_id(prefix), "status": "completed", **fields}


def _parts(content: Content, *, is_output: bool) -> list[dict[str, Any]]:
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    if is_output:
        return [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return [{"type": "input_text", "text": text} for text in texts]


def _join_text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def drop_oldest(items: Items, count: int) -> list[dict[str, Any]]:
    """The items without the first `count`. Instructions stay; a call's result goes with it."""
    dropped = {item["call_id"] for item in items[:count] if item["type"] == "function_call"}
    first = [item for item in items[:count] if item.get("role") in ("system", "developer")]
    last = [
        item
        for item in items[count:]
        if item["type"] != "function_call_output" or item["call_id"] not in dropped
    ]
    return [*first, *last]


def messages_of(instructions: str | None, items: Items) -> list[dict[str, Any]]:
    """A conversation as messages for chat templates."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    reasoning = ""  # of the next assistant message
    for item in items:
        if item["type"] == "reasoning":
            reasoning = "".join(part["text"] for part in item["content"])
        elif item["type"] == "message":
            _add_message(messages, item)
        elif item["type"] == "function_call":
            call = tool_call(item["call_id"], item["name"], item["arguments"])
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            messages.append(result)
        is_answer = item["type"] != "reasoning" and messages[-1]["role"] == "assistant"
        if reasoning and is_answer:
            messages[-1]["reasoning_content"], reasoning = reasoning, ""
    return messages


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    role = "system" if item["role"] == "developer" else item["role"]
    content = "".join(part["text"] for part in item["content"])
    if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        # Many templates take only one system message, at the beginning.
        messages[0]["content"] += "\n\n" + content
    else:
        messages.append({"role": role, "content": content})
