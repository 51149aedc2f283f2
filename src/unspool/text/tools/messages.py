"""Convert conversations with tool calls from OpenAI's format to that of a chat template.

In OpenAI's format an assistant message has `tool_calls`, each with an id, a name and its arguments
as JSON text; a message of the role `tool` answers one of them by its id. Templates expect the
arguments as objects, some expect one call per message or short ids, and those without tool support
expect plain text. Each function here is one such conversion, for messages that `checked_calls` has
copied and validated.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unspool.errors import UnspoolError
from unspool.text.chat.messages import Message, join_text_parts, validate_messages

Messages = list[dict[str, Any]]


def validate_calls(messages: Sequence[Message]) -> Messages:
    """Return copies of the messages, with arguments as objects and the function name in results.

    Raises UnspoolError for a call without a name or whose arguments are not a JSON object, and for
    a result without a call.
    """
    names: dict[str, str] = {}  # function names of the calls so far, by id
    checked = []
    for number, message in enumerate(validate_messages(messages), start=1):
        # Templates test whether tool_calls is defined, so drop empty ones.
        copy = {key: value for key, value in message.items() if value is not None}
        copy.setdefault("content", "")
        where = f"message {number} ({copy['role']})"
        calls = copy.pop("tool_calls", None)
        if calls:
            if not isinstance(calls, list):
                raise UnspoolError(f"{where}: tool_calls must be a list")
            copy["tool_calls"] = [_validate_call(call, where) for call in calls]
            for call in copy["tool_calls"]:
                if "id" in call:
                    names[call["id"]] = call["function"]["name"]
        if copy["role"] == "tool":
            call_id = copy.get("tool_call_id")
            if not isinstance(call_id, str) or call_id not in names:
                raise UnspoolError(
                    f"{where} answers the tool call {call_id!r:.80}, which is in no message before"
                    " it: give the tool_call_id of an assistant's call"
                )
            copy.setdefault("name", names[call_id])
        checked.append(copy)
    return checked


def _validate_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise UnspoolError(f"{where}: a tool call needs a function with a name, got {call!r:.80}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise UnspoolError(
                f"{where}: the arguments of the tool call {name!r:.80} are not JSON"
            ) from None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise UnspoolError(
            f"{where}: the arguments of the tool call {name!r:.80} are not a JSON object"
        )
    checked = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(call.get("id"), str):
        checked = {"id": call["id"], **checked}
    return checked


def split_calls(messages: Messages) -> Messages:
    """Split messages with several calls into one message per call, each followed by its result."""
    converted: Messages = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            converted.append(message)
            continue
        results: Messages = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        for number, call in enumerate(calls):
            content = message["content"] if number == 0 else ""
            converted.append({**message, "content": content, "tool_calls": [call]})
            converted += [result for result in results if result["tool_call_id"] == call.get("id")]
        ids = {call.get("id") for call in calls}
        converted += [result for result in results if result["tool_call_id"] not in ids]
    return converted


def text_to_reasoning(messages: Messages) -> Messages:
    """Move text next to a call into the reasoning before it, for templates that do not allow both:
    harmony's refuses it, and Gemma's ends the turn after it."""
    converted = []
    for message in messages:
        text = _text(message) if message.get("tool_calls") else ""
        if text:
            reasoning = "\n\n".join(filter(None, (message.get("reasoning_content"), text)))
            fields = {"reasoning_content": reasoning, "thinking": reasoning, "content": ""}
            message = {**message, **fields}
        converted.append(message)
    return converted


def shorten_call_ids(messages: Messages) -> Messages:
    """Shorten ids to nine letters and digits, as Mistral's templates require; deterministic."""
    for message in messages:
        for number, call in enumerate(message.get("tool_calls", [])):
            call["id"] = _short_id(call.get("id", f"call {number}"))
        if message["role"] == "tool":
            message["tool_call_id"] = _short_id(message["tool_call_id"])
    return messages


def _short_id(name: str) -> str:
    if re.fullmatch(r"[a-zA-Z0-9]{9}", name):
        return name
    letters = string.ascii_letters + string.digits
    return "".join(letters[byte % 62] for byte in hashlib.sha256(name.encode()).digest()[:9])


def calls_to_text(
    messages: Messages, write_calls: Callable[[Sequence[Mapping[str, Any]]], str]
) -> Messages:
    """Write calls into the content, for a template that does not write them."""
    converted = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            text = write_calls([call["function"] for call in calls])
            content = _text(message)
            fields = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**fields, "content": f"{content}\n{text}" if content else text}
        converted.append(message)
    return converted


def results_to_text(messages: Messages) -> Messages:
    """Convert results to user messages, for a template without the role `tool`.

    Consecutive results and the user's next message become one message: many templates require that
    user and assistant alternate.
    """
    converted: Messages = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            message = {"role": "user", "content": text}
        if after_result and message["role"] == "user":
            converted[-1] = {
                **converted[-1],
                "content": f"{converted[-1]['content']}\n{_text(message)}",
            }
        else:
            converted.append(message)
        after_result = is_result
    return converted


def add_instructions(messages: Messages, text: str, takes_system: bool) -> Messages:
    """Append a text to the system message, or add it as a new one.

    If the template supports no system message, it is put before the first user message.
    """
    first = messages[0]
    if first["role"] == "system":
        content = _text(first)
        return [{**first, "content": f"{content}\n\n{text}" if content else text}, *messages[1:]]
    if not takes_system and first["role"] == "user":
        return [{**first, "content": f"{text}\n\n{_text(first)}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _text(message: Mapping[str, Any]) -> str:
    text: str = join_text_parts(dict(message))["content"]
    return text
