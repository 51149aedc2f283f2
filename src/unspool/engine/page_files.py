"""KV-cache pages and recurrent states in files: a text continues after a restart without prefill.

    files = PageFiles(folder, identity, limit_bytes=10 << 30)
    files.save(engine, tokens)        # what is computed of a text at rest; on any thread
    files.restore(engine, tokens)     # back into the prefix cache, before the text continues

A text is saved in chunks of 256 tokens. The name of a chunk has the hash of all tokens before it,
so texts that start alike share files, and a text that has grown adds one.

A file is used only if everything in it is as expected: the model, the backend, the format of the
KV cache, the tokens, the checksums. Else it is removed, and the text is computed again.

    unspool kv 3                       a line
    length of the header               8 bytes, little-endian
    header                             JSON: identity, tokens, adapter, checksum of what follows
    checksum of the header             16 bytes
    pages, then recurrent states
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
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from unspool.engine.states import MARK
from unspool.engine.tree import Branch, OutOfPagesError, PageNode
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from unspool.engine.engine import Engine

Bytes = npt.NDArray[np.uint8]
CHUNK = 256  # tokens of a file
MAX_AGE_NS = 30 * 86_400 * 10**9  # unused files are removed after this time
_MAGIC = b"unspool kv 3\n"
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

    def page_rows(self, pages: Sequence[int]) -> Sequence[Bytes]:
        """Return the memory of pages that no step uses. Only backends whose pages are in host
        memory, each in one piece, have this method."""

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
    pages: Sequence[Bytes] | Bytes  # [n, page_bytes]
    states: dict[int, Bytes] = field(default_factory=dict)  # by number of tokens of the whole text
    following: list[int] = field(default_factory=list)  # tokens after them that are not computed
    adapter: str | None = None  # name of the LoRA adapter that computed them
    places: list[int] = field(default_factory=list)  # pages of the KV cache that hold them already

    def write(self, path: Path, identity: str, *, is_durable: bool = False) -> None:
        """Write a file, atomically; with `is_durable` it is on the disk when this returns."""
        digest = _new_digest()
        for row in (*self.pages, *self.states.values()):
            _hash_row(digest, row)
        header = {
            "identity": identity,
            "tokens": self.tokens,
            "following": self.following,
            "adapter": self.adapter,
            "page_bytes": len(self.pages[0]) if len(self.pages) else 0,
            "states": list(self.states),
            "checksum": digest.hexdigest(),
        }
        data = json.dumps(header, separators=(",", ":")).encode()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            with temporary.open("wb") as file:
                file.write(_MAGIC + len(data).to_bytes(8, "little") + data + _header_digest(data))
                for row in (*self.pages, *self.states.values()):
                    file.write(np.ascontiguousarray(row).data)
                if is_durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
            if is_durable:
                _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(
        cls,
        path: Path,
        identity: str,
        access: PageAccess | None,
        expected: Sequence[int] | None = None,
        allocate: Callable[[int], Sequence[Bytes]] | None = None,
    ) -> StoredPages | None:
        """Read a file; without `access`, only its tokens.

        `allocate` returns memory for a number of pages.

        Returns None, without reading the pages, if `expected` are tokens of which it has none.

        Raises:
            ValueError: The file is damaged, or of another model or format.
        """
        with path.open("rb") as file:
            header = _read_header(file)
            page_bytes = 0 if access is None else access.page_bytes
            if header["identity"] != identity or header["page_bytes"] != page_bytes:
                raise ValueError("it was written with another model, backend or KV-cache format")
            tokens = [int(token) for token in header["tokens"]]
            if expected is not None and not num_common(tokens, expected):
                return None
            num_pages = -(-len(tokens) // CHUNK_PAGE) if page_bytes else 0
            pages: Sequence[Bytes] | Bytes = np.empty((0, page_bytes), np.uint8)
            if allocate is not None:
                pages = allocate(num_pages)
            elif num_pages:
                pages = np.empty((num_pages, page_bytes), np.uint8)
            digest = _new_digest()
            for page in pages:  # hashed while it is in the processor's cache
                _read_row(file, page, digest)
            states: dict[int, Bytes] = {}
            for at in header["states"]:
                states[int(at)] = np.empty(0 if access is None else access.state_bytes, np.uint8)
                _read_row(file, states[int(at)], digest)
            if file.read(1):
                raise ValueError("it is too long")
        if header["checksum"] != digest.hexdigest():
            raise ValueError("its checksum is wrong")
        return cls(tokens, pages, states, [int(token) for token in header["following"]])


def is_page_file(path: Path) -> bool:
    """Return whether a file starts as one of saved pages does."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_tokens(path: Path) -> tuple[list[int], str | None]:
    """Return all tokens of a file of any model, and the name of its LoRA adapter.

    Raises:
        ValueError: The header is damaged.
    """
    with path.open("rb") as file:
        header = _read_header(file)
    tokens = [int(token) for token in (*header["tokens"], *header["following"])]
    return tokens, None if header["adapter"] is None else str(header["adapter"])


def remove_unfinished(folder: Path) -> None:
    """Remove the files that a killed process was writing. No other process may use the folder."""
    for path in folder.glob("*/.*.part"):
        with contextlib.suppress(OSError):
            path.unlink()


CHUNK_PAGE = 16  # tokens of a page in files; a backend with other pages has none


def _read_header(file: IO[bytes]) -> dict[str, Any]:
    """Read up to the pages. Raises ValueError."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is no file of KV-cache pages")
    size = int.from_bytes(file.read(8), "little")
    data = file.read(size) if size <= _MAX_HEADER else b""
    if file.read(16) != _header_digest(data):
        raise ValueError("its header is damaged")
    header: dict[str, Any] = json.loads(data)
    return header


def _header_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _sync_folder(folder: Path) -> None:
    """Make a rename in a folder durable, where the system can."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _read_row(file: Any, row: Bytes, digest: Any) -> None:
    """Fill a row from a file, and add it to the checksum."""
    if file.readinto(row.data) != len(row):
        raise ValueError("it is too short")
    _hash_row(digest, row)


def _new_digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _hash_row(digest: Any, row: Bytes) -> None:
    """Add the sums of all rows and columns of words: as fast as memory, and damage changes it."""
    row = np.ascontiguousarray(row)
    num_bytes = len(row) // _ROW_BYTES * _ROW_BYTES
    words = row[:num_bytes].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
    for part in (words.sum(0), words.sum(1), row[num_bytes:]):
        digest.update(part.data)


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


def read_computed(engine: Engine, tokens: Sequence[int], adapter: int = 0) -> StoredPages | None:
    """Copy what is computed of a text. None: nothing.

    Args:
        engine: The engine that has computed it.
        tokens: The text.
        adapter: The number of the LoRA adapter that it was computed with; 0: none.
    """
    chunks = list(computed_chunks(engine, tokens, adapter=adapter))
    if not chunks:
        return None
    states = {at: state for chunk in chunks for at, state in chunk.states.items()}
    all_tokens = [token for chunk in chunks for token in chunk.tokens]
    return StoredPages(all_tokens, np.concatenate([chunk.pages for chunk in chunks]), states)


def computed_chunks(
    engine: Engine, tokens: Sequence[int], first: int = 0, adapter: int = 0
) -> Generator[StoredPages, None, None]:
    """Yield copies of what is computed of a text from token `first` (a page border) on.

    The engine's thread copies one chunk between two steps. Arguments as in `read_computed`.
    """
    access = page_access(engine)
    if access is None or engine.backend.page_size != CHUNK_PAGE:
        return

    def open_cached() -> Branch | None:
        is_loaded = engine.adapters.fingerprint(adapter) is not None
        return engine.tree.open(tokens, adapter=adapter) if is_loaded else None

    with contextlib.ExitStack() as stack:
        branch = engine.loop.call(open_cached, at_rest=False)
        if branch is None:
            return
        stack.callback(engine.release, branch)
        length = 0 if branch.private_id else branch.num_computed
        for start in range(first, length, CHUNK):
            end = min(start + CHUNK, length)
            pages, states = engine.loop.call(
                lambda start=start, end=end: _copy_chunk(access, branch, start, end),  # type: ignore[misc]
                at_rest=False,
            )
            yield StoredPages(list(tokens[start:end]), pages, states)


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
    engine: Engine,
    before: Sequence[int],
    stored: StoredPages,
    length: int | None = None,
    adapter: int = 0,
) -> bool:
    """Put pages into the prefix cache after the cached text `before`; False: there is no room.

    `length`: how many of the tokens are used. `adapter`: as in `read_computed`.
    """
    access = page_access(engine)
    assert access is not None
    length = len(stored.tokens) if length is None else length

    def insert(first: int, until: int) -> bool:
        tree = engine.tree
        index = tree.index
        if engine.adapters.fingerprint(adapter) is None:
            return False  # unloaded meanwhile
        base = [*before, *stored.tokens[:first]]
        node, partial, matched = index.match(base, index.root(adapter))
        if partial is not None or matched != len(base):
            return False  # evicted meanwhile
        index.attach(node)  # it must not be evicted for the pages after it
        try:
            starts = range(first, until, CHUNK_PAGE)
            pages, stored.places = stored.places[: len(starts)], stored.places[len(starts) :]
            if not pages:
                pages = _allocate_pages(engine, len(starts))
                row = first // CHUNK_PAGE
                access.write_pages(pages, stored.pages[row : row + len(pages)])  # type: ignore[arg-type]
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
        except OutOfPagesError:
            return False
        finally:
            index.detach(node)

    for first in range(0, length, CHUNK):
        until = min(first + CHUNK, length)
        if not engine.loop.call(lambda a=first, b=until: insert(a, b), at_rest=False):  # type: ignore[misc]
            return False
    return True


def _allocate_pages(engine: Engine, count: int) -> list[int]:
    """Take pages of the KV cache, on the engine's thread. Raises OutOfPagesError."""
    tree, pages = engine.tree, list[int]()
    if tree.pool.free < count:
        tree.index.evict(count - tree.pool.free)
    try:
        for _ in range(count):
            pages.append(tree.pool.allocate(excluded=tree.copies.values()))
    except OutOfPagesError:
        tree.pool.release(pages)
        raise
    return pages


def _release_pages(engine: Engine, stored: StoredPages | None) -> None:
    """Free pages that were filled from a file and are not in the prefix cache."""
    if stored is not None and stored.places:
        pages, stored.places = stored.places, []
        engine.loop.clean_up(lambda: engine.tree.pool.release(pages), at_rest=False)


class PageFiles:
    """The page files of one model in a folder that several models share. Thread-safe."""

    def __init__(self, folder: Path, identity: str, limit_bytes: int) -> None:
        """`identity` describes all that the bits of a page depend on, besides a LoRA adapter."""
        self.identity, self._limit = identity, limit_bytes
        self.folder = folder / chain_hash(identity, ())
        self._shared = folder
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._restoring = threading.Lock()
        self._names: dict[str, set[str]] = {}  # of files, by the hash of the text before them
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.folder.glob("*.kv"):
            self._names.setdefault(path.name.partition("-")[0], set()).add(path.name)

    def save(self, engine: Engine, tokens: Sequence[int], adapter: int = 0) -> int:
        """Save what is computed of a text; return how many tokens. Nothing is raised for a full
        disk: the text is then computed again after a restart."""
        with self._saving:
            try:
                return self._save(engine, list(tokens), adapter)
            except (OSError, UnspoolError):
                return 0

    def _identity(self, engine: Engine, adapter: int) -> str | None:
        """Return what the pages of texts with an adapter depend on; None: it was unloaded."""
        fingerprint = engine.adapters.fingerprint(adapter)
        return None if fingerprint is None else self.identity + fingerprint

    def _save(self, engine: Engine, tokens: list[int], adapter: int) -> int:
        identity = self._identity(engine, adapter)
        if identity is None or len(tokens) < _MIN_TOKENS or self._limit <= 0:
            return 0
        if self._num_free_bytes() < _MIN_FREE_BYTES:
            self._evict()
            if self._num_free_bytes() < _MIN_FREE_BYTES:
                return 0
        files: list[str] = []
        parent, at = chain_hash(identity, ()), 0
        while at + CHUNK <= len(tokens):  # what is saved already
            chunk = tokens[at : at + CHUNK]
            name = _file_name(parent, chunk)
            if not (self.folder / name).exists():  # it may have been evicted for another model
                break
            files.append(name)
            parent, at = chain_hash(parent, chunk), at + CHUNK
        with contextlib.closing(computed_chunks(engine, tokens, at, adapter)) as chunks:
            for stored in chunks:
                name = _file_name(parent, stored.tokens)
                if not (self.folder / name).exists():
                    stored.write(self.folder / name, identity)
                    self._drop_starts(parent, stored.tokens)
                    with self._lock:
                        self._names.setdefault(parent, set()).add(name)
                files.append(name)
                parent, at = chain_hash(parent, stored.tokens), at + len(stored.tokens)
        self._touch(files)
        self._evict()
        return at

    def _num_free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _touch(self, names: Sequence[str]) -> None:
        """Note that the files of a text are used now: the first ones are evicted last, as the
        others are useless without them."""
        now = time.time_ns()
        for index, name in enumerate(names):
            with contextlib.suppress(OSError):  # removed meanwhile, or it can only be read
                os.utime(self.folder / name, ns=(now - index, now - index))

    def _drop_starts(self, parent: str, chunk: list[int]) -> None:
        """Remove the files of the same text when it was shorter."""
        for name in list(self._names.get(parent, ())):
            count = int(name.split("-")[1])
            if count < len(chunk) and name == _file_name(parent, chunk[:count]):
                self._remove(parent, name)

    def restore(self, engine: Engine, tokens: Sequence[int], adapter: int = 0) -> int:
        """Put the saved pages of a text into the prefix cache; return how many tokens it has then.

        Only what is not cached is read. Files are read ahead on a few threads.
        """
        identity = self._identity(engine, adapter)
        if not self._names or page_access(engine) is None or identity is None:
            return 0
        tokens = list(tokens)
        limit = len(tokens) - 1  # the last token is always computed, for its logits
        plan = self._plan(identity, tokens[:limit])
        if not plan:
            return 0
        index = engine.tree.index
        _, _, cached = engine.loop.call(
            lambda: index.match(tokens[:limit], index.root(adapter)), at_rest=False
        )
        self._touch([part[1] for part in plan])
        plan = [part for part in plan if part[2] + part[3] > cached]
        with (
            self._restoring,
            contextlib.closing(self._read_ahead(engine, identity, plan, tokens[:limit])) as files,
        ):
            for (_, _, at, _), stored in zip(plan, files, strict=False):
                common = 0 if stored is None else num_common(stored.tokens, tokens[at:limit])
                is_used = stored is not None and common > 0
                if is_used and stored is not None:
                    is_used = insert_computed(engine, tokens[:at], stored, common, adapter)
                _release_pages(engine, stored)
                if not is_used:
                    return max(at, cached)
                cached = max(cached, at + common)
        return cached

    def restore_latest(self, engine: Engine) -> int:
        """Restore the text that was used last, before it is asked for; return its tokens."""
        newest: dict[str, tuple[int, str]] = {}  # the file used last after each text
        for path in self.folder.glob("*.kv"):
            with contextlib.suppress(OSError):
                parent, file = path.name.partition("-")[0], (path.stat().st_mtime_ns, path.name)
                newest[parent] = max(file, newest.get(parent, file))
        tokens: list[int] = []
        parent = chain_hash(self.identity, ())
        try:
            while parent in newest:
                name = newest.pop(parent)[1]
                tokens += read_tokens(self.folder / name)[0]
                parent = name.removesuffix(".kv").rpartition("-")[2]
            if tokens:
                return self.restore(engine, [*tokens, tokens[-1]])
        except (OSError, ValueError, KeyError, TypeError, UnspoolError):
            pass  # damaged, or the model is being unloaded: nothing waits for it
        return 0

    def _read_ahead(
        self, engine: Engine, identity: str, plan: Sequence[_PlannedFile], tokens: list[int]
    ) -> Generator[StoredPages | None, None, None]:
        """Yield the content of each file."""
        reads: deque[Future[StoredPages | None]] = deque()
        with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="unspool-pages") as pool:
            try:
                for part in plan:
                    reads.append(pool.submit(self._read, engine, identity, part, tokens))
                    if len(reads) > _NUM_READERS:
                        yield reads.popleft().result()
                while reads:
                    yield reads.popleft().result()
            finally:
                for read in reads:
                    _release_pages(engine, read.result())

    def _plan(self, identity: str, tokens: list[int]) -> list[_PlannedFile]:
        """Return the files of a text."""
        plan: list[_PlannedFile] = []
        parent, at = chain_hash(identity, ()), 0
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
                    common = num_common(_read_header(file)["tokens"], chunk)
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if common and (best is None or common > best[1]):
                best = name, common
        return best

    def _read(
        self,
        engine: Engine,
        identity: str,
        part: _PlannedFile,
        tokens: list[int],
    ) -> StoredPages | None:
        """Read a file: into pages of the KV cache, if the backend has them in memory."""
        parent, name, at, _ = part
        path, access = self.folder / name, page_access(engine)
        assert access is not None
        target = StoredPages([], [])

        def allocate(count: int) -> Sequence[Bytes]:
            target.places = engine.loop.call(lambda: _allocate_pages(engine, count), at_rest=False)
            return access.page_rows(target.places)

        is_direct = hasattr(access, "page_rows")
        try:
            stored = StoredPages.read(
                path, identity, access, tokens[at:], allocate if is_direct else None
            )
            if stored is not None:
                stored.places, target.places = target.places, []
            return stored
        except OutOfPagesError:
            pass
        except FileNotFoundError:
            self._remove(parent, name)
        except OSError:
            pass
        except (ValueError, KeyError, TypeError):  # damaged, or foreign
            self._remove(parent, name)
        finally:
            _release_pages(engine, target)
        return None

    def _remove(self, parent: str, name: str) -> None:
        with self._lock:
            self._names.get(parent, set()).discard(name)
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def _evict(self) -> None:
        """Remove the files of all models that were not used for the longest time, up to the limit
        or so far that the disk has room for texts."""
        files: list[tuple[int, int, Path]] = []
        for path in self._shared.glob("*/*.kv"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                files.append((stat.st_mtime_ns, stat.st_size, path))
        total, oldest = sum(size for _, size, _ in files), time.time_ns() - MAX_AGE_NS
        limit = min(self._limit, total - (_MIN_FREE_BYTES - self._num_free_bytes()))
        for used, size, path in sorted(files):
            if total <= limit and used >= oldest:
                break
            total -= size
            if path.parent == self.folder:
                self._remove(path.name.partition("-")[0], path.name)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()


_MAX_TRIED = 16  # files whose tokens are compared
_NUM_READERS = 2  # threads: hashing takes longer than reading
# The hash of the text before, the name, where it starts, and its tokens at most: a text may part
# from it.
_PlannedFile = tuple[str, str, int, int]


def _file_name(parent: str, chunk: Sequence[int]) -> str:
    return f"{parent}-{len(chunk)}-{chain_hash(parent, chunk)}.kv"
