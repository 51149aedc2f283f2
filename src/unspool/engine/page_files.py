"""KV-cache pages and recurrent states in files: a text continues after a restart without prefill.

    files = PageFiles(folder, identity, limit_bytes=10 << 30)
    files.save(engine, tokens)        # what is computed of a text at rest; on any thread
    files.restore(engine, tokens)     # back into the prefix cache, before the text continues

A text is saved in chunks of 256 tokens. The name of a chunk has the hash of all tokens before it,
so texts that start alike share files, and a text that has grown adds one.

A file is used only if everything in it is as expected: the model, the backend, the format of the
KV cache, the tokens, the checksum. Else it is removed, and the text is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from unspool.engine.states import MARK
from unspool.engine.tree import OutOfPagesError, PageNode
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from unspool.engine.engine import Engine

Bytes = npt.NDArray[np.uint8]
CHUNK = 256  # tokens of a file
MAX_AGE_S = 30 * 86_400.0  # unused files are removed after this time
_MAGIC = b"unspool kv 1\n"
_MIN_FREE_BYTES = 1 << 30  # of the disk; the texts themselves have priority
_MIN_TOKENS = 16  # a shorter text is computed again
_MAX_HEADER = 1 << 24
_ROW_BYTES = 8192  # of the checksum


class PageAccess(Protocol):
    """A backend whose pages and states can be read and written between two steps."""

    page_bytes: int
    state_bytes: int

    def read_pages(self, pages: Sequence[int]) -> Bytes:
        """Return the content of pages, [n, page_bytes]."""

    def write_pages(self, pages: Sequence[int], content: Bytes) -> None: ...

    def read_state(self, slot: int) -> Bytes: ...

    def write_state(self, slot: int, content: Bytes) -> None: ...


def page_access(engine: Engine) -> PageAccess | None:
    """Return the backend of an engine if its pages can be saved."""
    backend: Any = engine.backend
    return cast(PageAccess, backend) if hasattr(backend, "read_pages") else None


@dataclass(slots=True)
class StoredPages:
    """Computed tokens of a text: pages with keys and values, and recurrent states."""

    tokens: list[int]  # from a page border on; the last page may be incomplete
    pages: Bytes  # [n, page_bytes]
    states: dict[int, Bytes] = field(default_factory=dict)  # by number of tokens of the whole text
    following: list[int] = field(default_factory=list)  # tokens after them that are not computed

    def write(self, path: Path, identity: str) -> None:
        """Write a file, atomically."""
        header = {
            "identity": identity,
            "tokens": self.tokens,
            "following": self.following,
            "page_bytes": int(self.pages.shape[1]),
            "states": list(self.states),
            "checksums": [_checksum(self.pages), *map(_checksum, self.states.values())],
        }
        data = json.dumps(header, separators=(",", ":")).encode()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            with temporary.open("wb") as file:
                file.write(_MAGIC + len(data).to_bytes(8, "little") + data)
                file.write(np.ascontiguousarray(self.pages).data)
                for state in self.states.values():
                    file.write(np.ascontiguousarray(state).data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(
        cls,
        path: Path,
        identity: str,
        access: PageAccess | None,
        expected: Sequence[int] | None = None,
        buffer: Bytes | None = None,
    ) -> StoredPages | None:
        """Read a file; without `access`, only its tokens.

        With a `buffer`, the pages are in it if they fit: new memory costs more than reading.

        Returns None, without reading the pages, if `expected` are tokens of which it has none.

        Raises:
            ValueError: The file is damaged, or of another model or format.
        """
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError("it is no file of KV-cache pages")
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER:
                raise ValueError("its header is damaged")
            header = json.loads(file.read(size))
            page_bytes = 0 if access is None else access.page_bytes
            if header["identity"] != identity or header["page_bytes"] != page_bytes:
                raise ValueError("it was written with another model, backend or KV-cache format")
            tokens = [int(token) for token in header["tokens"]]
            if expected is not None and not num_common(tokens, expected):
                return None
            rows = -(-len(tokens) // CHUNK_PAGE) if page_bytes else 0
            pages = _read_array(file, rows * page_bytes, buffer).reshape(rows, page_bytes)
            state_bytes = 0 if access is None else access.state_bytes
            states = {int(at): _read_array(file, state_bytes) for at in header["states"]}
            if file.read(1):
                raise ValueError("it is too long")
        if header["checksums"] != [_checksum(pages), *map(_checksum, states.values())]:
            raise ValueError("its checksum is wrong")
        return cls(tokens, pages, states, [int(token) for token in header["following"]])


def is_page_file(path: Path) -> bool:
    """Return whether a file starts as one of saved pages does."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_tokens(path: Path) -> list[int]:
    """Return all tokens of a file of any model. Raises ValueError if its header is damaged."""
    with path.open("rb") as file:
        file.read(len(_MAGIC))
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, _MAX_HEADER)))
        return [int(token) for token in (*header["tokens"], *header["following"])]


CHUNK_PAGE = 16  # tokens of a page in files; a backend with other pages has none


def _read_array(file: Any, size: int, buffer: Bytes | None = None) -> Bytes:
    fits = buffer is not None and size <= len(buffer)
    content = buffer[:size] if fits and buffer is not None else np.empty(size, np.uint8)
    if file.readinto(content.data) != size:
        raise ValueError("it is too short")
    return content


def _checksum(content: Bytes) -> str:
    """Hash the sums of all rows and columns: as fast as memory, and any damage changes it."""
    flat = np.ascontiguousarray(content).reshape(-1)
    num_bytes = len(flat) // _ROW_BYTES * _ROW_BYTES
    words = flat[:num_bytes].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
    digest = hashlib.blake2b(digest_size=16)
    for part in (words.sum(0), words.sum(1), flat[num_bytes:]):
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def num_common(stored: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many first tokens are the same."""
    limit = min(len(stored), len(tokens))
    if stored[:limit] == tokens[:limit]:
        return limit
    return next(i for i in range(limit) if stored[i] != tokens[i])


def chain_hash(before: str, tokens: Sequence[int]) -> str:
    """Return the hash of a text from the hash of what is before its last tokens."""
    content = before.encode() + array("q", tokens).tobytes()
    return hashlib.blake2b(content, digest_size=12).hexdigest()


# -- between files and the prefix cache of an engine


def read_computed(engine: Engine, tokens: Sequence[int], first: int = 0) -> StoredPages | None:
    """Copy what is computed of a text from token `first` (a page border) on.

    The engine's thread copies at most one chunk between two steps. None: nothing is computed there.
    """
    access = page_access(engine)
    if access is None or engine.backend.page_size != CHUNK_PAGE:
        return None
    with contextlib.ExitStack() as stack:
        branch = engine.open(tokens)
        stack.callback(engine.release, branch)
        length = branch.num_computed
        if length <= first or branch.private_id:
            return None
        parts: list[Bytes] = []
        states: dict[int, Bytes] = {}
        for start in range(first, length, CHUNK):
            pages, page_states = engine.loop.call(
                lambda start=start: _copy_chunk(  # type: ignore[misc]
                    access, branch, start, min(start + CHUNK, length)
                ),
                at_rest=False,
            )
            parts.append(pages)
            states |= page_states
        return StoredPages(list(tokens[first:length]), np.concatenate(parts), states)


def _copy_chunk(
    access: PageAccess, branch: Any, start: int, end: int
) -> tuple[Bytes, dict[int, Bytes]]:
    """Copy the pages of a branch from `start` to `end`, and the last state in them."""
    nodes: list[PageNode] = []
    node = branch.node
    while node.parent is not None and node.depth * CHUNK_PAGE > start:
        if (node.depth - 1) * CHUNK_PAGE < end:
            nodes.append(node)
        node = node.parent
    nodes.reverse()
    if end > branch.start and branch.shared_tail is not None:
        nodes.append(branch.shared_tail)
    states = [state for node in nodes for state in node.states.values() if state.length <= end]
    last = max(states, key=lambda state: state.length, default=None)
    page_states = {} if last is None else {last.length: access.read_state(last.slot)}
    return access.read_pages([node.page for node in nodes]), page_states


def insert_computed(
    engine: Engine, before: Sequence[int], stored: StoredPages, length: int | None = None
) -> bool:
    """Put pages into the prefix cache after the cached text `before`; False: there is no room.

    `length`: how many of the tokens are used.
    """
    access = page_access(engine)
    assert access is not None
    length = len(stored.tokens) if length is None else length

    def insert(first: int, until: int) -> bool:
        tree = engine.tree
        index, pool = tree.index, tree.pool
        base = [*before, *stored.tokens[:first]]
        node, partial, matched = index.match(base, index.root())
        if partial is not None or matched != len(base):
            return False  # evicted meanwhile
        index.attach(node)  # it must not be evicted for the pages after it
        try:
            starts = range(first, until, CHUNK_PAGE)
            if pool.free < len(starts):
                index.evict(len(starts) - pool.free)
            pages: list[int] = []
            try:
                for _ in starts:
                    pages.append(pool.allocate(excluded=tree.copies.values()))
            except OutOfPagesError:
                pool.release(pages)
                return False
            row = first // CHUNK_PAGE
            access.write_pages(pages, stored.pages[row : row + len(pages)])
            for start, page in zip(starts, pages, strict=True):
                chunk = tuple(stored.tokens[start : min(start + CHUNK_PAGE, until)])
                child = index.insert(node, chunk, page)
                index.attach(child)
                index.detach(node)
                node = child
                if tree.states is not None:
                    begin = len(before) + start
                    for at, content in stored.states.items():
                        if begin < at <= begin + len(chunk):
                            slot = tree.states.restore(node, at, MARK)
                            if slot is not None:
                                access.write_state(slot, content)
            return True
        finally:
            index.detach(node)

    for first in range(0, length, CHUNK):
        until = min(first + CHUNK, length)
        if not engine.loop.call(lambda a=first, b=until: insert(a, b), at_rest=False):  # type: ignore[misc]
            return False
    return True


class PageFiles:
    """The page files of one model in a folder that several models share. Thread-safe."""

    def __init__(self, folder: Path, identity: str, limit_bytes: int) -> None:
        """`identity` describes all that the bits of a page depend on."""
        self.identity, self._limit = identity, limit_bytes
        self._root = chain_hash(identity, ())
        self.folder = folder / self._root
        self._shared = folder
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._restoring = threading.Lock()
        self._buffer = np.empty(0, np.uint8)  # for the pages of one file
        self._names: dict[str, set[str]] = {}  # of files, by the hash of the text before them
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.folder.glob("*.kv"):
            self._names.setdefault(path.name.partition("-")[0], set()).add(path.name)

    def save(self, engine: Engine, tokens: Sequence[int]) -> int:
        """Save what is computed of a text; return how many tokens. Nothing is raised for a full
        disk: the text is then computed again after a restart."""
        with self._saving:
            try:
                return self._save(engine, list(tokens))
            except (OSError, UnspoolError):
                return 0

    def _save(self, engine: Engine, tokens: list[int]) -> int:
        if len(tokens) < _MIN_TOKENS or self._limit <= 0:
            return 0
        if shutil.disk_usage(self.folder).free < _MIN_FREE_BYTES:
            return 0
        parent, at = self._root, 0
        while at + CHUNK <= len(tokens):  # what is saved already
            chunk = tokens[at : at + CHUNK]
            name = _file_name(parent, chunk)
            if name not in self._names.get(parent, ()):
                break
            parent, at = chain_hash(parent, chunk), at + CHUNK
        stored = read_computed(engine, tokens, at)
        if stored is None:
            return at
        num_old = at
        for first in range(0, len(stored.tokens), CHUNK):
            chunk = stored.tokens[first : first + CHUNK]
            until = num_old + first + len(chunk)
            states = {n: s for n, s in stored.states.items() if num_old + first < n <= until}
            rows = stored.pages[first // CHUNK_PAGE :][: -(-len(chunk) // CHUNK_PAGE)]
            name = _file_name(parent, chunk)
            with self._lock:
                exists = name in self._names.get(parent, ())
            if not exists:
                StoredPages(chunk, rows, states).write(self.folder / name, self.identity)
                self._drop_starts(parent, chunk)
                with self._lock:
                    self._names.setdefault(parent, set()).add(name)
            parent, at = chain_hash(parent, chunk), at + len(chunk)
        self._evict()
        return at

    def _drop_starts(self, parent: str, chunk: list[int]) -> None:
        """Remove the files of the same text when it was shorter."""
        for name in list(self._names.get(parent, ())):
            count = int(name.split("-")[1])
            if count < len(chunk) and name == _file_name(parent, chunk[:count]):
                self._remove(parent, name)

    def restore(self, engine: Engine, tokens: Sequence[int]) -> int:
        """Put the saved pages of a text into the prefix cache; return how many tokens it has then.

        Only what is not cached is read.
        """
        if not self._names or page_access(engine) is None:
            return 0
        tokens = list(tokens)
        limit = len(tokens) - 1  # the last token is always computed, for its logits
        plan = self._plan(tokens[:limit])
        if not plan:
            return 0
        index = engine.tree.index
        _, _, cached = engine.loop.call(
            lambda: index.match(tokens[:limit], index.root()), at_rest=False
        )
        with self._restoring:
            for parent, name, at, count in plan:
                if at + count <= cached:
                    continue
                stored = self._read(engine, parent, name, tokens[at:limit])
                if stored is None:
                    return max(at, cached)
                common = num_common(stored.tokens, tokens[at:limit])
                if not common or not insert_computed(engine, tokens[:at], stored, common):
                    return max(at, cached)
                cached = max(cached, at + common)
        return cached

    def _plan(self, tokens: list[int]) -> list[tuple[str, str, int, int]]:
        """Return the files of a text: the hash before, the name, where it starts, and its tokens
        (at most: a text may part from it)."""
        plan: list[tuple[str, str, int, int]] = []
        parent, at = self._root, 0
        while at < len(tokens):
            with self._lock:
                names = sorted(self._names.get(parent, ()))
            if not names:
                break
            chunk = tokens[at : at + CHUNK]
            name = _file_name(parent, chunk)
            if name in names and len(chunk) == CHUNK:
                plan.append((parent, name, at, CHUNK))
                parent, at = chain_hash(parent, chunk), at + CHUNK
                continue
            counts = sorted({int(name.split("-")[1]) for name in names}, reverse=True)
            exact = [
                candidate
                for count in counts
                if count <= len(chunk) and (candidate := _file_name(parent, chunk[:count])) in names
            ]
            others = [name for name in names if name not in exact][:_MAX_TRIED]
            best = self._longest(others, chunk)
            if exact and (best is None or best[1] <= int(exact[0].split("-")[1])):
                best = exact[0], int(exact[0].split("-")[1])
            if best is not None:
                plan.append((parent, best[0], at, best[1]))
            break
        return plan

    def _longest(self, names: Sequence[str], chunk: list[int]) -> tuple[str, int] | None:
        """Return the file with the most tokens of a text that has other ones later."""
        best: tuple[str, int] | None = None
        for name in names:
            try:
                with (self.folder / name).open("rb") as file:
                    file.read(len(_MAGIC))
                    size = min(int.from_bytes(file.read(8), "little"), _MAX_HEADER)
                    common = num_common(json.loads(file.read(size))["tokens"], chunk)
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if common and (best is None or common > best[1]):
                best = name, common
        return best

    def _read(
        self, engine: Engine, parent: str, name: str, tokens: list[int]
    ) -> StoredPages | None:
        access, path = page_access(engine), self.folder / name
        assert access is not None
        try:
            size = CHUNK // CHUNK_PAGE * access.page_bytes
            if len(self._buffer) != size:
                self._buffer = np.empty(size, np.uint8)
            stored = StoredPages.read(path, self.identity, access, tokens, self._buffer)
            os.utime(path)  # used now
            return stored
        except FileNotFoundError:
            self._remove(parent, name)
        except OSError:
            pass
        except (ValueError, KeyError, TypeError):  # damaged, or foreign
            self._remove(parent, name)
        return None

    def _remove(self, parent: str, name: str) -> None:
        with self._lock:
            self._names.get(parent, set()).discard(name)
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def _evict(self) -> None:
        """Remove the files of all models that were not used for the longest time."""
        files: list[tuple[float, int, Path]] = []
        for path in self._shared.glob("*/*.kv"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
        total, oldest = sum(size for _, size, _ in files), time.time() - MAX_AGE_S
        for used, size, path in sorted(files):
            if total <= self._limit and used >= oldest:
                break
            total -= size
            if path.parent == self.folder:
                self._remove(path.name.partition("-")[0], path.name)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()


_MAX_TRIED = 16  # files whose tokens are compared


def _file_name(parent: str, chunk: Sequence[int]) -> str:
    return f"{parent}-{len(chunk)}-{chain_hash(parent, chunk)}.kv"
