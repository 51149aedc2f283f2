"""The database of sessions and branches: SQLite, written by one thread.

    database = Database(folder / "texts.db")
    await asyncio.wrap_future(database.submit(lambda db: db.execute("UPDATE ...")))

A change is stored when its future is done: it is in the write-ahead log, and the log is on the disk
(`synchronous=FULL`). That survives `kill -9` and, as far as the disk keeps its word, a power cut.
Changes that arrive while others are being written share the next transaction. If one fails (a full
disk), it alone is undone and its future has the error; the database stays as it was.

The steps of a branch are in segments, which never change. A branch is a list of parts, each the
first steps of a segment, so a fork copies no steps and a rewind deletes none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from unspool.engine.results import Step
from unspool.errors import StorageError, UnspoolError
from unspool.store.steps import decode_steps, encode_steps

VERSION = 1
_APPLICATION_ID = 0x756E7370  # "unsp"
_MAX_JOBS = 256  # in one transaction
_STEPS_PER_SEGMENT = 256  # when segments are merged
_BUSY_SECONDS = 5.0  # for a reader of another process
_SCHEMA = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL,
    deleted REAL, title TEXT, tags TEXT NOT NULL, view TEXT NOT NULL);
CREATE TABLE branches (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, session TEXT,
    model TEXT NOT NULL, name TEXT, origin TEXT, origin_at INTEGER, created REAL NOT NULL,
    deleted REAL, bookmarks TEXT NOT NULL, prompt TEXT NOT NULL, settings TEXT NOT NULL,
    state TEXT NOT NULL, indexed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE prompts (hash TEXT PRIMARY KEY, vocabulary TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE vocabularies (hash TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE segments (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE parts (
    branch INTEGER NOT NULL, start INTEGER NOT NULL, segment INTEGER NOT NULL,
    count INTEGER NOT NULL, PRIMARY KEY (branch, start)) WITHOUT ROWID;
CREATE INDEX parts_of_segment ON parts (segment);
"""

Result = TypeVar("Result")


def describe_error(error: sqlite3.Error) -> StorageError:
    """Return the error of a failed change for users."""
    text = str(error)
    if "full" in text:
        text = "the disk is full; free some space and try again"
    elif "malformed" in text or "not a database" in text:
        text = "the database is damaged; restart the server, which then moves it aside"
    return StorageError(f"the change was not stored: {text}")


class TokenTexts(Protocol):
    """The texts of tokens: a tokenizer, or the vocabulary that is stored with a text."""

    def __len__(self) -> int: ...
    def token_bytes(self, token: int) -> bytes: ...


_VOCABULARY_HASHES: WeakKeyDictionary[TokenTexts, str] = WeakKeyDictionary()


def vocabulary_hash(tokenizer: TokenTexts) -> str:
    """Return a name for a vocabulary; slow when it is first called for a tokenizer."""
    name = _VOCABULARY_HASHES.get(tokenizer)
    if name is None:
        name = content_hash(*map(tokenizer.token_bytes, range(len(tokenizer))))
        _VOCABULARY_HASHES[tokenizer] = name
    return name


@dataclass(frozen=True, eq=False)
class StoredVocabulary:
    """The bytes of all tokens of a tokenizer: enough to show stored texts without their model."""

    tokens: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def token_bytes(self, token: int) -> bytes:
        return self.tokens[token]

    def to_bytes(self) -> bytes:
        lengths = json.dumps([len(token) for token in self.tokens], separators=(",", ":"))
        return zlib.compress(lengths.encode() + b"\n" + b"".join(self.tokens), 6)

    @classmethod
    def from_bytes(cls, data: bytes) -> StoredVocabulary:
        lengths, _, content = zlib.decompress(data).partition(b"\n")
        tokens, at = [], 0
        for length in json.loads(lengths):
            tokens.append(content[at : at + length])
            at += length
        return cls(tuple(tokens))


class Database:
    """A SQLite database and the thread that owns it."""

    def __init__(self, path: Path, *, say: Callable[[str], None] = lambda _: None) -> None:
        """Open or create the database.

        A damaged one is moved aside, and a new one is created; `say` gets a message about it.

        Raises:
            UnspoolError: It was written by a newer version, or cannot be opened.
        """
        self.path = path
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "not a database" not in str(error):
                raise UnspoolError(f"{path} cannot be opened: {error}") from error
            aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
            say(f"{path} is damaged ({error}); it was moved to {aside}, and a new one is used")
            self._db = self._open()
        self._jobs: queue.SimpleQueue[tuple[Callable[[Connection], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="unspool-store", daemon=True)
        self._thread.start()

    def _open(self) -> Connection:
        return Connection.open(self.path)

    def submit(self, job: Callable[[Connection], Result]) -> Future[Result]:
        """Run a job in the next transaction. Its future is done when the change is on the disk."""
        future: Future[Result] = Future()
        with self._closing:
            if self._closed:
                raise StorageError("the change was not stored: the server is stopping")
            self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Finish all jobs and close the database. Safe to call twice."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._jobs.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < _MAX_JOBS:
                    batch.append(self._jobs.get_nowait())
            is_open = None not in batch
            self._run_batch([item for item in batch if item is not None])
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _run_batch(self, batch: list[tuple[Callable[[Connection], Any], Future[Any]]]) -> None:
        """Run jobs in one transaction; one that fails is undone alone."""
        outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            self._db.run("BEGIN IMMEDIATE")
            for job, future in batch:
                if len(batch) == 1:
                    outcomes.append((future, job(self._db), None))
                    break
                self._db.run("SAVEPOINT job")
                try:
                    outcomes.append((future, job(self._db), None))
                except BaseException as error:
                    if not self._db.in_transaction:  # a full disk may have ended it
                        raise
                    self._db.run("ROLLBACK TO job")
                    outcomes.append((future, None, error))
                self._db.run("RELEASE job")
            self._db.run("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.run("ROLLBACK")
            outcomes = [(future, None, error) for _, future in batch]
        for future, result, failure in outcomes:
            if failure is None:
                future.set_result(result)
            else:
                is_sql = isinstance(failure, sqlite3.Error)
                future.set_exception(describe_error(failure) if is_sql else failure)  # type: ignore[arg-type]


class Connection:
    """A connection, and the statements that jobs use."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False) -> Connection:
        """Open a database; create it unless it is opened for reading only.

        A reader may be another process than the writer.
        """
        if readonly:
            uri = f"{path.resolve().as_uri()}?mode=ro"
            db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS)
        else:
            db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=_BUSY_SECONDS
            )
        self = cls(db)
        try:
            self._prepare(path, readonly=readonly)
        except BaseException:
            db.close()
            raise
        return self

    def _prepare(self, path: Path, *, readonly: bool) -> None:
        version = self.value("PRAGMA user_version")
        if version > VERSION:
            raise UnspoolError(
                f"{path} was written by a newer Unspool (schema {version}; this one reads up to "
                f"{VERSION}); update Unspool, or use another folder: --state DIR"
            )
        if readonly:
            return
        if self.value("PRAGMA quick_check(1)") != "ok":
            raise sqlite3.DatabaseError("its content is malformed")
        self.run("PRAGMA journal_mode=WAL")
        self.run("PRAGMA synchronous=FULL")
        self.run("PRAGMA temp_store=MEMORY")
        if version == 0:
            self.run("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";")[:-1]:
                self.run(statement)
            self.run(_search_table(self._db))
            self.run(f"PRAGMA application_id={_APPLICATION_ID}")
            self.run(f"PRAGMA user_version={VERSION}")
            self.run("COMMIT")

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction

    def close(self) -> None:
        self._db.close()

    def run(self, statement: str, values: Sequence[Any] | dict[str, Any] = ()) -> sqlite3.Cursor:
        return self._db.execute(statement, values)

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._db.execute(statement, values).fetchall()

    def value(self, statement: str, values: Sequence[Any] = ()) -> Any:
        row = self._db.execute(statement, values).fetchone()
        return None if row is None else row[0]

    def insert(self, table: str, row: dict[str, Any]) -> int:
        """Insert a row, and return its number."""
        places = ",".join("?" * len(row))
        cursor = self.run(f"INSERT INTO {table} ({','.join(row)}) VALUES ({places})", _clean(row))
        return cursor.lastrowid or 0

    def update(self, table: str, identity: str, row: dict[str, Any]) -> None:
        fields = ",".join(f"{name}=?" for name in row)
        self.run(f"UPDATE {table} SET {fields} WHERE id=?", [*_clean(row), identity])

    # -- the steps of a branch --------------------------------------------------------------------

    def num_steps(self, branch: int) -> int:
        """Return how many steps of a branch are stored."""
        last = "SELECT start+count FROM parts WHERE branch=? ORDER BY start DESC LIMIT 1"
        return int(self.value(last, (branch,)) or 0)

    def cut_steps(self, branch: int, length: int) -> None:
        """Keep the first `length` steps of a branch."""
        self.run("DELETE FROM parts WHERE branch=? AND start>=?", (branch, length))
        self.run(
            "UPDATE parts SET count=?-start WHERE branch=? AND start+count>?",
            (length, branch, length),
        )

    def append_steps(self, branch: int, steps: Sequence[Step], *, live: bool = False) -> None:
        """Append steps. `live`: they are being generated, and may retract earlier ones."""
        start = self.num_steps(branch)
        run: list[Step] = []
        for step in steps:
            if live and step.retracts:
                length = start + len(run) - step.retracts
                if length < start:
                    self.cut_steps(branch, length)
                    start = length
                del run[length - start :]
            run.append(step)
        for first in range(0, len(run), _STEPS_PER_SEGMENT):
            part = run[first : first + _STEPS_PER_SEGMENT]
            self._add_part(branch, start + first, part)

    def _add_part(self, branch: int, start: int, steps: Sequence[Step]) -> None:
        segment = self.run("INSERT INTO segments (data) VALUES (?)", (encode_steps(steps),))
        self.run(
            "INSERT INTO parts VALUES (?,?,?,?)", (branch, start, segment.lastrowid, len(steps))
        )

    def copy_steps(self, source: int, target: int, length: int) -> int:
        """Give a branch without steps the first ones of another; return how many it has then."""
        self.run(
            "INSERT INTO parts SELECT ?, start, segment, count FROM parts "
            "WHERE branch=? AND start<?",
            (target, source, length),
        )
        self.cut_steps(target, length)
        return self.num_steps(target)

    def read_steps(self, branch: int) -> list[bytes | int]:
        """Return a branch's segments, each followed by how many of its steps are the branch's."""
        parts: list[bytes | int] = []
        for data, count in self.rows(
            "SELECT data, count FROM parts JOIN segments ON segment=id WHERE branch=? "
            "ORDER BY start",
            (branch,),
        ):
            parts += [data, count]
        return parts

    def merge_segments(self, branch: int) -> None:
        """Write the small segments at the end of a branch, one for each few tokens, as larger
        ones."""
        rows = self.rows(
            "SELECT start, count, data FROM parts JOIN segments ON segment=id WHERE branch=? "
            "ORDER BY start DESC",
            (branch,),
        )
        small: list[tuple[int, int, bytes]] = []
        for row in rows:
            if row[1] >= _STEPS_PER_SEGMENT // 2:
                break
            small.append(row)
        if len(small) < 2:
            return
        start = small[-1][0]
        steps = join_steps([item for _, count, data in reversed(small) for item in (data, count)])
        self.cut_steps(branch, start)
        for first in range(0, len(steps), _STEPS_PER_SEGMENT):
            self._add_part(branch, start + first, steps[first : first + _STEPS_PER_SEGMENT])

    def drop_unused(self) -> None:
        """Delete what no branch has: segments, prompts, vocabularies."""
        self.run("DELETE FROM segments WHERE id NOT IN (SELECT segment FROM parts)")
        self.run("DELETE FROM prompts WHERE hash NOT IN (SELECT prompt FROM branches)")
        self.run("DELETE FROM vocabularies WHERE hash NOT IN (SELECT vocabulary FROM prompts)")

    def delete_branch(self, number: int) -> None:
        """Delete a branch for good. Its forks keep the steps that they share."""
        self.run("DELETE FROM branches WHERE number=?", (number,))
        self.run("DELETE FROM parts WHERE branch=?", (number,))
        self.run("DELETE FROM search WHERE rowid=?", (number,))

    # -- search -----------------------------------------------------------------------------------

    def index_text(self, branch: int, text: str) -> None:
        """Make the text of a branch searchable."""
        self.run("DELETE FROM search WHERE rowid=?", (branch,))
        clean = text.encode("utf-8", "replace").decode().replace("\0", " ")
        self.run("INSERT INTO search (rowid, text) VALUES (?,?)", (branch, clean))
        self.run("UPDATE branches SET indexed=1 WHERE number=?", (branch,))

    def search(self, word: str) -> set[int]:
        """Return the numbers of the branches whose text contains a word, in any case."""
        word = word.encode("utf-8", "replace").decode().replace("\0", " ")
        if len(word) >= 3 and self.has_full_text:  # the index has groups of three characters
            phrase = '"' + word.replace('"', '""') + '"'
            rows = self.rows("SELECT rowid FROM search WHERE search MATCH ?", (phrase,))
        else:
            pattern = "%" + "".join(f"\\{c}" if c in "%_\\" else c for c in word) + "%"
            rows = self.rows("SELECT rowid FROM search WHERE text LIKE ? ESCAPE '\\'", (pattern,))
        return {number for (number,) in rows}

    @property
    def has_full_text(self) -> bool:
        table = self.value("SELECT sql FROM sqlite_master WHERE name='search'") or ""
        return "fts5" in table


def _clean(row: dict[str, Any]) -> list[Any]:
    """The values of a row, without lone surrogates, which SQLite cannot store."""
    return [
        value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for value in row.values()
    ]


def _search_table(db: sqlite3.Connection) -> str:
    """The statement that creates the table of texts: a full-text index, if SQLite has it."""
    create = "CREATE VIRTUAL TABLE search USING fts5(text, tokenize='trigram')"
    with contextlib.closing(sqlite3.connect(":memory:")) as trial:
        try:
            trial.execute(create)
        except sqlite3.OperationalError:
            return "CREATE TABLE search (text TEXT)"
    return create


def join_steps(parts: Iterable[bytes | int]) -> list[Step]:
    """Return the steps of `Connection.read_steps`. Slow for long texts: run it on a thread."""
    steps: list[Step] = []
    items = iter(parts)
    for data in items:
        count = next(items)
        assert isinstance(data, bytes) and isinstance(count, int)
        steps += decode_steps(data)[:count]
    return steps


def content_hash(*parts: bytes) -> str:
    """Return a name for content, by which equal content is stored once."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]
