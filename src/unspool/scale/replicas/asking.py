"""Routing hints of a request, read without a tokenizer or a model.

- *kept*: it names an object that one replica stores (a branch, a stored response, a thread). Such
  ids contain the replica's name, so every gateway knows it, even right after its start.
- *session*: it names its session (`x-session-id`, or OpenAI's `prompt_cache_key`). The name
  determines the replica.
- *prompt*: it has a prompt, whose prefix a replica may have cached.
- *shared*: it is about the machine itself (training runs, cost reports); always the same replica
  answers these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unspool.scale.routing import text_hashes

Kind = Literal["kept", "session", "prompt", "shared", "any"]

_KEPT = re.compile(r"^(?:branch-([a-z0-9]+)-|(?:resp|msg)_([a-z0-9]+)_)[0-9a-f]{24}$")
_KEPT_PATHS = ("/v1/tree/", "/v1/responses/")
_SHARED = ("/v1/runs", "/v1/costs")
# In the order of a rendered prompt: the first fields are shared by the most requests.
_PROMPT = ("model", "tools", "system", "instructions", "context", "messages", "prompt", "input")


@dataclass(slots=True)
class RouteHints:
    """Routing hints of one request; the router fills in `replicas`."""

    kind: Kind = "any"
    replica: str = ""  # for `kept`: the only one that can answer
    session: str = ""
    hashes: list[int] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)  # replicas that failed or seem to be lost
    load: Mapping[str, int] = field(default_factory=dict)  # requests in flight by replica
    replicas: dict[str, str] = field(default_factory=dict)  # all replicas: name -> address


def read_hints(method: str, path: str, headers: Mapping[bytes, bytes], body: bytes) -> RouteHints:
    """Return the routing hints of a request; an invalid one goes to any replica."""
    for prefix in _KEPT_PATHS:
        identity = path.removeprefix(prefix).partition("/")[0]
        if path.startswith(prefix) and (replica := replica_of(identity)):
            return RouteHints("kept", replica)
    if path.startswith(_SHARED):
        return RouteHints("shared", session="shared")
    fields = _json(body) if method == "POST" else {}
    thread = fields.get("thread")  # of Anthropic's messages
    previous = fields.get("previous_response_id")
    previous = thread.get("previous_message_id") if isinstance(thread, dict) else previous
    if isinstance(previous, str) and (replica := replica_of(previous)):
        return RouteHints("kept", replica)
    hashes = text_hashes(_prompt(fields)) if fields else []
    session = headers.get(b"x-session-id", b"").decode("latin-1")
    key = fields.get("prompt_cache_key")
    if session := session or (key if isinstance(key, str) else ""):
        return RouteHints("session", session=session, hashes=hashes)
    return RouteHints("prompt" if hashes else "any", hashes=hashes)


def replica_of(identity: str) -> str:
    """Return the replica that issued an id, "" if it names none."""
    match = _KEPT.match(identity)
    return (match[1] or match[2]) if match else ""


def _json(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _prompt(fields: Mapping[str, Any]) -> str:
    """Return the prompt of a request as text, independent of field order and other fields.

    Prompts with a common prefix return texts with a common prefix.
    """
    parts = []
    for name in _PROMPT:
        value = fields.get(name)
        if isinstance(value, str):
            parts.append(value)
        elif isinstance(value, list):
            parts += [json.dumps(item, ensure_ascii=False, sort_keys=True) for item in value]
        elif value is not None:
            parts.append(json.dumps(value, ensure_ascii=False, sort_keys=True))
    return "\n".join(parts)
