"""What a request says about where it should go, found without a tokenizer or a model.

- *kept*: it names something that one replica keeps (a branch, a stored response, a thread). The
  replica's name is a part of such ids, so every gateway knows it, also one that has just been
  started.
- *session*: it names its session (`x-session-id`, or `prompt_cache_key` as OpenAI has it). The
  replica follows from the name.
- *prompt*: it has a prompt, whose beginning some replica may hold already.
- *shared*: it asks about something on the machine itself (training runs, reports of costs), which
  one replica, always the same, looks after.
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
_KEEPERS = ("/v1/tree/", "/v1/responses/")
_SHARED = ("/v1/runs", "/v1/costs")
# In the order in which they stand in a rendered prompt: what comes first is shared by most.
_PROMPT = ("model", "tools", "system", "instructions", "context", "messages", "prompt", "input")


@dataclass(slots=True)
class Asked:
    """Where one request should go; the router fills in whom there is to ask."""

    kind: Kind = "any"
    replica: str = ""  # of `kept`: the only one that can answer
    session: str = ""
    hashes: list[int] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)  # replicas that were tried, or seem to be lost
    load: Mapping[str, int] = field(default_factory=dict)  # requests in flight at each
    replicas: dict[str, str] = field(default_factory=dict)  # all there are: name -> address


def asked_by(method: str, path: str, headers: Mapping[bytes, bytes], body: bytes) -> Asked:
    """Read a request. What cannot be read goes anywhere: the replica says what is wrong with it."""
    for beginning in _KEEPERS:
        identity = path.removeprefix(beginning).partition("/")[0]
        if path.startswith(beginning) and (replica := replica_of(identity)):
            return Asked("kept", replica)
    if path.startswith(_SHARED):
        return Asked("shared", session="shared")
    fields = _json(body) if method == "POST" else {}
    thread = fields.get("thread")  # of Anthropic's messages
    before = fields.get("previous_response_id")
    before = thread.get("previous_message_id") if isinstance(thread, dict) else before
    if isinstance(before, str) and (replica := replica_of(before)):
        return Asked("kept", replica)
    hashes = text_hashes(_prompt(fields)) if fields else []
    session = headers.get(b"x-session-id", b"").decode("latin-1")
    key = fields.get("prompt_cache_key")
    if session := session or (key if isinstance(key, str) else ""):
        return Asked("session", session=session, hashes=hashes)
    return Asked("prompt" if hashes else "any", hashes=hashes)


def replica_of(identity: str) -> str:
    """The replica that gave out an id; empty if none did."""
    found = _KEPT.match(identity)
    return (found[1] or found[2]) if found else ""


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _prompt(fields: Mapping[str, Any]) -> str:
    """What a request gives the model to read, so that texts which begin alike have bytes that begin
    alike, in whatever order its fields came and whatever else it asks for."""
    parts = []
    for name in _PROMPT:
        value = fields.get(name)
        if isinstance(value, str):
            parts.append(value)
        elif isinstance(value, list):
            parts += [json.dumps(each, ensure_ascii=False, sort_keys=True) for each in value]
        elif value is not None:
            parts.append(json.dumps(value, ensure_ascii=False, sort_keys=True))
    return "\n".join(parts)
