"""Responses that are kept, so that the next request can go on with one by its id.

In memory, and bounded by their number and by their size. The oldest go first; a restart forgets
all.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unspool.serve.http.errors import ApiError
from unspool.serve.http.replies import to_json

MAX_STORED = 256
ROOM = 64 << 20  # bytes of all of them
Items = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    response: bytes  # JSON: smaller than objects, and its size is known
    given: Items  # the input, earlier turns included; shared with what they were kept for
    output: Items
    size: int


class ResponseStore:
    """The last responses."""

    def __init__(self, most: int = MAX_STORED, room: int = ROOM) -> None:
        self._most, self._room = most, room
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response: dict[str, Any], given: Sequence[dict[str, Any]]) -> None:
        text = to_json(response)
        size = len(text) + sum(len(to_json(item)) for item in given)
        self._kept[response["id"]] = _Kept(text, (*given,), (*response["output"],), size)
        self._size += size
        while len(self._kept) > self._most or self._size > self._room:
            self._size -= self._kept.popitem(last=False)[1].size

    def response(self, identity: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._find(identity).response)
        return found

    def given(self, identity: str) -> Items:
        return self._find(identity).given

    def so_far(self, identity: str) -> Items:
        """The whole conversation, the response itself included: what the next one goes on with."""
        try:
            found = self._find(identity)
        except ApiError as error:
            error.param, error.code = "previous_response_id", "previous_response_not_found"
            raise
        return found.given + found.output

    def forget(self, identity: str) -> None:
        self._size -= self._find(identity).size
        del self._kept[identity]

    def _find(self, identity: str) -> _Kept:
        if identity not in self._kept:
            message = (
                f"Response with id {identity[:80]!r} not found: it is not kept here (any more)"
            )
            raise ApiError(404, message, code="response_not_found")
        return self._kept[identity]
