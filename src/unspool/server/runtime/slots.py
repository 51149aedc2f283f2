"""llama.cpp's slots, saved to files and restored: `POST /slots/{id}?action=save|restore|erase`.

Unspool has no slots: all texts share one prefix cache. Here a slot is the last text of the requests
that named it with `id_slot`. A request that names none gets the slot whose text starts most like
its own, else the one that was not used for the longest time, as in llama.cpp. On a server with API
keys, slots are separate for each key, and so are folders of files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from unspool.engine.page_files import (
    StoredPages,
    insert_computed,
    num_common,
    page_access,
    read_computed,
)
from unspool.errors import UnspoolError
from unspool.server.http.errors import ApiError, bad_request
from unspool.session import Session

_NAME = re.compile(r"[^\x00-\x1f\x7f/\\:*?\"<>|]{1,255}")
_SIMILAR = 0.1  # of a text must be the same for its slot to be taken


class Slots:
    """The last text of each slot, of one server. Owned by the event loop."""

    def __init__(self, folder: Path | None, count: int) -> None:
        self._folder, self._count = folder, count
        # By user and slot: (model, tokens), last used last.
        self._texts: dict[str, dict[int, tuple[str, list[int]]]] = {}

    def record(self, user: str, model: str, tokens: list[int], slot: int | None) -> None:
        """Note the text that a request has left."""
        if self._folder is None:
            return
        texts = self._texts.setdefault(user, {})
        if slot is None or not 0 <= slot < self._count:
            slot = self._choose(texts, model, tokens)
        texts.pop(slot, None)
        texts[slot] = (model, tokens)

    def _choose(
        self, texts: dict[int, tuple[str, list[int]]], model: str, tokens: Sequence[int]
    ) -> int:
        best, most = None, _SIMILAR * len(tokens)
        for slot, (name, text) in texts.items():
            if name == model and (common := num_common(text, list(tokens))) > most:
                best, most = slot, common
        if best is not None:
            return best
        unused = next((slot for slot in range(self._count) if slot not in texts), None)
        return next(iter(texts)) if unused is None else unused

    def text(self, user: str, slot: int, model: str) -> list[int]:
        """The tokens of a slot; none if it was last used with another model."""
        name, tokens = self._texts.get(user, {}).get(slot, (model, []))
        return tokens if name == model else []

    def erase(self, user: str, slot: int) -> int:
        return len(self._texts.get(user, {}).pop(slot, ("", []))[1])

    def check(self, slot: int) -> None:
        if self._folder is None:
            raise ApiError(
                501,
                "this server saves no slots; start it with --slot-save-path DIR",
                code="not_implemented",
            )
        if not 0 <= slot < self._count:
            raise bad_request(f"the slot must be 0 to {self._count - 1}, got {slot}", "id_slot")

    def file(self, user: str, name: str) -> Path:
        """The path of a user's file. Raises 400 for a name that is not a plain one."""
        assert self._folder is not None
        path = self._folder / user / name
        if not _NAME.fullmatch(name) or name.startswith(".") or path.is_symlink():
            raise bad_request(
                f"filename must be the name of a file in the folder of slots, got {name[:80]!r}",
                "filename",
            )
        return path


def save_text(lm: Session, tokens: Sequence[int], path: Path) -> dict[str, Any]:
    """Write a text with its computed pages to a file. Slow: run it on a thread."""
    began = perf_counter()
    stored = _computed_text(lm, tokens)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        identity = lm.engine.page_identity(lm.engine.adapters.number(lm.adapter))
        stored.write(path, identity, is_durable=True)
        size = path.stat().st_size
    except OSError as error:
        raise ApiError(
            507, f"{path.name} cannot be written: {error.strerror or error}", code="not_stored"
        ) from error
    timings = {"save_ms": 1000 * (perf_counter() - began)}
    return {"n_saved": len(stored.tokens), "n_written": size, "timings": timings}


def _computed_text(lm: Session, tokens: Sequence[int]) -> StoredPages:
    """The pages of a text; it is computed again if they were evicted."""
    if page_access(lm.engine) is None:
        return StoredPages(list(tokens), np.empty((0, 0), np.uint8))
    if len(tokens) > 1:
        with lm.open_branch(tokens[:-1]) as branch:
            if branch.num_computed < len(tokens) - 2:
                lm.engine.extend(branch)
    stored = read_computed(lm.engine, tokens, adapter=lm.engine.adapters.number(lm.adapter))
    if stored is None:
        raise bad_request("the slot has no text to save")
    return stored


def restore_text(lm: Session, path: Path) -> tuple[list[int], dict[str, Any]]:
    """Put a saved text into the prefix cache. Slow: run it on a thread."""
    began, access = perf_counter(), page_access(lm.engine)
    try:
        adapter = lm.engine.adapters.number(lm.adapter)
        stored = StoredPages.read(path, lm.engine.page_identity(adapter), access)
        assert stored is not None
        lm.prompt_ids(stored.tokens)
    except FileNotFoundError:
        raise bad_request(f"there is no saved slot {path.name!r}", "filename") from None
    except (OSError, ValueError, KeyError, TypeError, UnspoolError) as error:
        raise bad_request(f"{path.name!r} cannot be restored: {error}", "filename") from None
    if access is None:  # its pages cannot be read on this device: compute them
        with lm.open_branch(stored.tokens) as branch:
            lm.engine.extend(branch)
    elif not insert_computed(lm.engine, [], stored, adapter=adapter):
        raise ApiError(503, "the KV cache has no room for the slot", code="overloaded")
    timings = {"restore_ms": 1000 * (perf_counter() - began)}
    return stored.tokens, {
        "n_restored": len(stored.tokens),
        "n_read": path.stat().st_size,
        "timings": timings,
    }
