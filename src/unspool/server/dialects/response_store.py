"""Stored responses, so that the next request can continue one by its id.

In memory, bounded in number and bytes. The oldest are evicted first; a restart loses all.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from unspool.server.http.errors import ApiError
from unspool.server.http.replies import to_json

MAX_STORED = 256
MAX_BYTES = 64 << 20  # bytes of all of them
Items = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Stored:
    response: bytes  # JSON: smaller than objects, and its size is known
    items: Items  # the input, earlier turns included
    output: Items
    size: int
    owner: str  # the only user who can access it


class RunningResponse(Protocol):
    """A response in progress."""

    def progress(self) -> dict[str, Any]: ...
    def cancel(self) -> dict[str, Any]: ...


class ResponseStore:
    """The last responses."""

    def __init__(self, limit: int = MAX_STORED, max_bytes: int = MAX_BYTES) -> None:
        self._limit, self._max_bytes = limit, max_bytes
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._size = 0
        self._running: dict[str, tuple[RunningResponse, str]] = {}  # with their owners

    @asynccontextmanager
    async def running(
        self, identity: str, response: RunningResponse, user: str
    ) -> AsyncIterator[None]:
        """While open, the response can be found by its id and cancelled."""
        self._running[identity] = (response, user)
        try:
            yield
        finally:
            del self._running[identity]

    def find_running(self, identity: str, user: str) -> RunningResponse | None:
        response, owner = self._running.get(identity, (None, ""))
        return response if owner == user else None

    def __len__(self) -> int:
        return len(self._stored)

    def add(
        self, response: dict[str, Any], items: Sequence[dict[str, Any]], user: str = ""
    ) -> None:
        text = to_json(response)
        size = len(text) + sum(len(to_json(item)) for item in items)
        self._stored[response["id"]] = _Stored(text, (*items,), (*response["output"],), size, user)
        self._size += size
        while len(self._stored) > self._limit or self._size > self._max_bytes:
            self._size -= self._stored.popitem(last=False)[1].size

    def response(self, identity: str, user: str = "") -> dict[str, Any]:
        response: dict[str, Any] = json.loads(self._find(identity, user).response)
        return response

    def items(self, identity: str, user: str = "") -> Items:
        return self._find(identity, user).items

    def conversation(self, identity: str, user: str = "") -> Items:
        """The conversation including the response itself: the start of the next one."""
        try:
            stored = self._find(identity, user)
        except ApiError as error:
            error.param, error.code = "previous_response_id", "previous_response_not_found"
            raise
        return stored.items + stored.output

    def delete(self, identity: str, user: str = "") -> None:
        self._size -= self._find(identity, user).size
        del self._stored[identity]

    def _find(self, identity: str, user: str) -> _Stored:
        stored = self._stored.get(identity)
        if stored is None or stored.owner != user:
            message = (
                f"Response with id {identity[:80]!r} not found: it was never stored, or evicted"
            )
            raise ApiError(404, message, code="response_not_found")
        return stored
