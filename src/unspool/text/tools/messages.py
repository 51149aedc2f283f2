"""Conversations with calls of functions, from OpenAI's form to what a chat template takes.

In OpenAI's form an assistant message carries `tool_calls`, each with an id, a name and its
arguments as JSON text; a message of the role `tool` answers one of them by its id. Templates want
the arguments as objects, some want one call a message or short ids, and those that know nothing of
calls want plain text. Each function here is one such step, over messages that `checked_calls` has
copied and checked.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unspool.errors import UnspoolError
from unspool.text.chat.messages import Message, checked_messages, joined_parts

Messages = list[dict[str, Any]]


def checked_calls(messages: Sequence[Message]) -> Messages:
    """Copies of the messages with arguments as objects and the name of its call in each result.

    UnspoolError for a call without a name or with arguments that are no JSON object, and for a
    result that belongs to no call.
    """
    names: dict[str, str] = {}  # of the calls so far, by their id
    checked = []
    for number, message in enumerate(checked_messages(messages), start=1):
        # A template that asks whether there are tool_calls means it, so no empty ones.
        given = {key: value for key, value in message.items() if value is not None}
        given.setdefault("content", "")
        where = f"message {number} ({given['role']})"
        calls = given.pop("tool_calls", None)
        if calls:
            if not isinstance(calls, list):
                raise UnspoolError(f"{where}: tool_calls must be a list")
            given["tool_calls"] = [_checked_call(call, where) for call in calls]
            for call in given["tool_calls"]:
                if "id" in call:
                    names[call["id"]] = call["function"]["name"]
        if given["role"] == "tool":
            answered = given.get("tool_call_id")
            if not isinstance(answered, str) or answered not in names:
                raise UnspoolError(
                    f"{where} answers the call {answered!r:.80}, which no message before it makes:"
                    " give the tool_call_id of an assistant's call"
                )
            given.setdefault("name", names[answered])
        checked.append(given)
    return checked


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise UnspoolError(f"{where}: a call needs a function with a name, not {call!r:.80}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise UnspoolError(
                f"{where}: the arguments of the call of {name!r:.80} are not JSON"
            ) from None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise UnspoolError(
            f"{where}: the arguments of the call of {name!r:.80} are not a JSON object"
        )
    checked = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(call.get("id"), str):
        checked = {"id": call["id"], **checked}
    return checked


def one_call_each(messages: Messages) -> Messages:
    """Several calls of one message as several messages, each with its result behind it."""
    done: Messages = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            done.append(message)
            continue
        results: Messages = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            content = message["content"] if number == 0 else ""
            done.append({**message, "content": content, "tool_calls": [call]})
            done += [each for each in results if each["tool_call_id"] == call.get("id")]
        ids = {call.get("id") for call in calls}
        done += [each for each in results if each["tool_call_id"] not in ids]
    return done


def words_as_thoughts(messages: Messages) -> Messages:
    """Words beside a call as part of the thought before it, for templates with no place for them:
    harmony's refuses both, and Gemma's ends the turn behind them."""
    done = []
    for message in messages:
        words = _text(message) if message.get("tool_calls") else ""
        if words:
            thought = "\n\n".join(filter(None, (message.get("reasoning_content"), words)))
            told = {"reasoning_content": thought, "thinking": thought, "content": ""}
            message = {**message, **told}
        done.append(message)
    return done


def call_ids_shortened(messages: Messages) -> Messages:
    """Ids of nine letters and digits, as Mistral's templates insist on; the same for the same."""
    for message in messages:
        for number, call in enumerate(message.get("tool_calls", [])):
            call["id"] = _nine(call.get("id", f"call {number}"))
        if message["role"] == "tool":
            message["tool_call_id"] = _nine(message["tool_call_id"])
    return messages


def _nine(name: str) -> str:
    if re.fullmatch(r"[a-zA-Z0-9]{9}", name):
        return name
    letters = string.ascii_letters + string.digits
    return "".join(letters[byte % 62] for byte in hashlib.sha256(name.encode()).digest()[:9])


def calls_as_text(
    messages: Messages, written: Callable[[Sequence[Mapping[str, Any]]], str]
) -> Messages:
    """Calls as part of the content, for a template that does not write them."""
    done = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            text = written([call["function"] for call in calls])
            content = _text(message)
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**rest, "content": f"{content}\n{text}" if content else text}
        done.append(message)
    return done


def results_as_text(messages: Messages) -> Messages:
    """Results as messages of the user, for a template that does not know the role `tool`.

    Results in a row are one message, and words of the user behind them belong to it too: many
    templates insist that user and assistant take turns.
    """
    done: Messages = []
    behind_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            message = {"role": "user", "content": text}
        if behind_result and message["role"] == "user":
            done[-1] = {**done[-1], "content": f"{done[-1]['content']}\n{_text(message)}"}
        else:
            done.append(message)
        behind_result = is_result
    return done


def with_instructions(messages: Messages, text: str, takes_system: bool) -> Messages:
    """The messages with a text behind the caller's system message, or as a new one.

    Where the template takes no system message it stands before the first words of the user.
    """
    first = messages[0]
    if first["role"] == "system":
        content = _text(first)
        return [{**first, "content": f"{content}\n\n{text}" if content else text}, *messages[1:]]
    if not takes_system and first["role"] == "user":
        return [{**first, "content": f"{text}\n\n{_text(first)}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _text(message: Mapping[str, Any]) -> str:
    text: str = joined_parts(dict(message))["content"]
    return text
