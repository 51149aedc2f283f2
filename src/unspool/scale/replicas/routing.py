"""Prefix-aware routing: a prompt goes to the replica that has the longest prefix of it cached.

Replicas have prefix caches. A prompt with a cached prefix costs less there, so the router remembers
which prefixes it has sent to which replica, and balances this with the load. It has no tokenizer
and needs none: prompts with common bytes have common tokens. It hashes the request's bytes in
chunks (`text_hashes`), or tokens in pages where they are known (`page_hashes`).
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from unspool.errors import UnspoolError

PAGE = 16  # tokens per page, as in the engine's KV cache
CHUNK = 64  # bytes per chunk: about a page of English text
CAPACITY = 1 << 16  # pages remembered per replica: about a million tokens
SLACK = (
    1.0  # load above the average that is tolerated for a fully cached prompt, see tolerated_load
)
WARM = 64  # requests after which the cache of a new replica is about as full as the others


class NoReplicaError(UnspoolError):
    """There is no replica to choose from."""


def page_hashes(tokens: Sequence[int], page: int = PAGE) -> list[int]:
    """Return a 64-bit hash for each full page, of the page and all pages before it.

    The same in every process and on every machine, unlike Python's `hash`.
    """
    return _chained(array("q", tokens).tobytes(), page * 8)


def text_hashes(text: str | bytes, chunk: int = CHUNK) -> list[int]:
    """Return hashes as in `page_hashes`, of the text's bytes."""
    return _chained(text.encode("utf-8", "replace") if isinstance(text, str) else text, chunk)


def _chained(data: bytes, size: int) -> list[int]:
    before, hashes = b"", []
    for start in range(0, len(data) - size + 1, size):
        before = blake2b(before + data[start : start + size], digest_size=8).digest()
        hashes.append(int.from_bytes(before, "little"))
    return hashes


def tolerated_load(slack: float, load: Mapping[str, int], replicas: Collection[str]) -> float:
    """Return how many more requests in flight a replica with a fully cached prompt may have.

    It is `slack` times (1 + the average load): one request if all are idle, and enough for random
    fluctuations if all are busy.
    """
    mean = sum(load.get(replica, 0) for replica in replicas) / max(1, len(replicas))
    return slack * (1 + mean)


def _allowed(replicas: Collection[str], avoid: Collection[str]) -> list[str]:
    if not replicas:
        raise NoReplicaError("there is no replica for this request")
    return [replica for replica in replicas if replica not in avoid] or list(replicas)


def session_replica(session: str, replicas: Iterable[str]) -> str:
    """Return the replica of a session by rendezvous hashing.

    It is the same in every gateway, without stored state. When a replica is added or removed, only
    its sessions move.
    """

    def weight(replica: str) -> bytes:
        return blake2b(f"{session}\n{replica}".encode("utf-8", "replace"), digest_size=8).digest()

    return max(replicas, key=weight)


class PrefixRouter:
    """Remembers which prompt prefixes each replica has cached, and routes by them.

    The cost of a replica is its requests in flight, minus `tolerated_load` times the cached share
    of the prompt; the cheapest is chosen. So the longest prefix wins among equally busy replicas, a
    busy replica loses to an idle one, and a short common prefix has little effect.

    A new replica is idle and has an empty cache: if it got all requests until it is as busy as the
    others, it would have to prefill all of them. So each of its requests in flight counts as
    several at first (slow start).
    """

    def __init__(
        self, replicas: Iterable[str] = (), *, capacity_pages: int = CAPACITY, slack: float = SLACK
    ) -> None:
        self.capacity_pages, self.slack = capacity_pages, slack
        # Pages by replica, in LRU order.
        self._pages: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, set[str]] = {}  # replicas by page
        self._last_choice: dict[str, int] = {}  # number of the last choice by replica
        self._num_sent: dict[str, int] = {}  # requests by replica
        self._deficit: dict[str, int] = {}  # requests fewer than another when it was added
        self._choices = 0
        for replica in replicas:
            self.add(replica)

    @property
    def replicas(self) -> list[str]:
        return list(self._pages)

    def add(self, replica: str) -> None:
        if replica not in self._pages:
            self._deficit[replica] = min(WARM, max(self._num_sent.values(), default=0))
            self._pages[replica], self._num_sent[replica] = OrderedDict(), 0

    def remove(self, replica: str) -> None:
        """Forget a replica and its pages."""
        self._last_choice.pop(replica, None)
        self._num_sent.pop(replica, None)
        self._deficit.pop(replica, None)
        for page in self._pages.pop(replica, ()):
            self._forget(replica, page)

    def cached_pages(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return the length of the cached prefix in pages, by replica that has any."""
        lengths: dict[str, int] = {}
        holders: set[str] = set(self._pages)
        for count, page in enumerate(hashes, start=1):
            holders = holders & self._holders.get(page, set())
            if not holders:
                break
            lengths.update(dict.fromkeys(holders, count))
        return lengths

    def choose(
        self, hashes: Sequence[int], load: Mapping[str, int], avoid: Collection[str] = ()
    ) -> str:
        """Return the replica for a prompt.

        `load` is the number of requests in flight by replica; replicas in `avoid` are chosen only
        if there is no other.
        """
        allowed = _allowed(self._pages, avoid)
        cached, worth = self.cached_pages(hashes), tolerated_load(self.slack, load, allowed)

        def cost(replica: str) -> tuple[float, float, int, int]:
            share = cached.get(replica, 0) / max(1, len(hashes))
            busy = load.get(replica, 0) * self._weight(replica)
            # Ties go to the lower load, then to the fewest pages, then to the least recently
            # chosen: new prompts spread over all replicas.
            remembers, last = len(self._pages[replica]), self._last_choice.get(replica, 0)
            return busy - worth * share, busy, remembers, last

        replica = min(allowed, key=cost)
        self._choices += 1
        self._last_choice[replica] = self._choices
        self._num_sent[replica] += 1
        return replica

    def _weight(self, replica: str) -> float:
        """Return the weight of a request in flight: 1, more if the replica is new."""
        return max(1.0, self._deficit[replica] / (1 + self._num_sent[replica]))

    def record(self, replica: str, hashes: Sequence[int]) -> None:
        """Record that a replica got a prompt of these pages, and has them cached."""
        if (pages := self._pages.get(replica)) is None:
            return  # removed meanwhile
        # From the last page to the first: like the engine's prefix cache, evict the ends of prompts
        # before their beginnings.
        for page in reversed(hashes[: self.capacity_pages]):
            pages[page] = None
            pages.move_to_end(page)
            self._holders.setdefault(page, set()).add(replica)
        while len(pages) > self.capacity_pages:
            self._forget(replica, pages.popitem(last=False)[0])

    def _forget(self, replica: str, page: int) -> None:
        holders = self._holders[page]
        holders.discard(replica)
        if not holders:
            del self._holders[page]


class RoundRobin:
    """Round-robin routing, the baseline of prefix routing."""

    def __init__(self, replicas: Iterable[str] = ()) -> None:
        self.replicas = list(replicas)
        self._next = 0

    def add(self, replica: str) -> None:
        if replica not in self.replicas:
            self.replicas.append(replica)

    def remove(self, replica: str) -> None:
        if replica in self.replicas:
            self.replicas.remove(replica)

    def choose(
        self, hashes: Sequence[int], load: Mapping[str, int], avoid: Collection[str] = ()
    ) -> str:
        allowed = _allowed(self.replicas, avoid)
        replica = allowed[self._next % len(allowed)]
        self._next += 1
        return replica

    def record(self, replica: str, hashes: Sequence[int]) -> None:
        """Do nothing."""


Kind = Literal["kept", "session", "prompt", "shared", "any"]

_KEPT = re.compile(r"^(?:(?:branch|session)-([a-z0-9]+)-|(?:resp|msg)_([a-z0-9]+)_)[0-9a-f]{24}$")
_KEPT_PATHS = ("/v1/tree/", "/v1/responses/")
_SHARED = ("/v1/runs", "/v1/costs")
# In the order of a rendered prompt: the first fields are shared by the most requests.
_PROMPT = (
    "model",
    "tools",
    "system",
    "instructions",
    "context",
    "messages",
    "prompt",
    "input",
    "query",
)


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
