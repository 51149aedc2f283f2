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
import os
import queue
import shutil
import sqlite3
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from unspool.engine.results import Step
from unspool.errors import StorageError, UnspoolError, count
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

    def __init__(
        self,
        path: Path,
        *,
        say: Callable[[str], None] = lambda _: None,
        is_readonly: bool = False,
    ) -> None:
        """Open or create the database.

        A damaged one is moved aside, and a new one is created with all that can still be read;
        `say` gets a message about it. With `is_readonly` a temporary copy is used: it can be
        changed, and is deleted when it is closed.

        Raises:
            UnspoolError: It was written by a newer version, or cannot be opened.
        """
        self.path, self.is_readonly = path, is_readonly
        try:
            if is_readonly:
                with contextlib.closing(Connection.open(path, readonly=True)) as source:
                    self._db = source.copy()
            else:
                self._db = Connection.open(path)
        except sqlite3.DatabaseError as error:
            is_damaged = not isinstance(error, sqlite3.OperationalError)
            if is_readonly or not (is_damaged or "not a database" in str(error)):
                raise UnspoolError(f"{path} cannot be opened: {error}") from error
            aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
            self._db = Connection.open(path)
            say(
                f"{path} is damaged ({error}); it was moved to {aside}, and a new one has what "
                f"could be read of it: {salvage(aside, self._db)}"
            )
        self._jobs: queue.SimpleQueue[tuple[Callable[[Connection], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="unspool-store", daemon=True)
        self._thread.start()

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
            jobs = [item for item in batch if item is not None]
            # A request that was cancelled meanwhile waits for nothing.
            self._run_batch([job for job in jobs if job[1].set_running_or_notify_cancel()])
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _run_batch(self, batch: list[tuple[Callable[[Connection], Any], Future[Any]]]) -> None:
        """Run jobs in one transaction; one that fails is undone alone."""
        outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
        if not batch:
            return
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


def _connect(name: str | Path) -> sqlite3.Connection:
    """Connect to a file, a URI, or ("") a temporary database."""
    return sqlite3.connect(
        name,
        uri=isinstance(name, str),
        isolation_level=None,
        check_same_thread=False,
        timeout=_BUSY_SECONDS,
    )


class Connection:
    """A connection, and the statements that jobs use."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of a temporary copy

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False) -> Connection:
        """Open a database; create it unless it is opened for reading only.

        A reader may be another process than the writer, and its folder may be read-only.
        """
        if readonly:
            self = cls._open_readonly(path)
        else:
            if not path.exists():
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # for its owner only
            self = cls(_connect(path))
        try:
            self._prepare(path, readonly=readonly)
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def _open_readonly(cls, path: Path) -> Connection:
        with contextlib.suppress(sqlite3.OperationalError):
            self = cls(_connect(f"{path.resolve().as_uri()}?mode=ro"))
            try:
                self.value("PRAGMA user_version")
                return self
            except sqlite3.Error:
                self.close()
                raise
        # SQLite reads a database with a write-ahead log only where it can create the log's index.
        folder = tempfile.TemporaryDirectory(prefix="unspool-")
        try:
            for file in (path, Path(f"{path}-wal")):
                if file.exists():
                    shutil.copyfile(file, Path(folder.name, file.name))
            self = cls(_connect(Path(folder.name, path.name)))
        except OSError as error:
            folder.cleanup()
            raise UnspoolError(f"{path} cannot be read: {error.strerror or error}") from error
        self._folder = folder
        return self

    def copy(self) -> Connection:
        """Return a temporary copy of the database, which is deleted when it is closed."""
        copied = Connection(_connect(""))
        try:
            self._db.backup(copied._db)
            copied._prepare(Path("the copy"), readonly=False)
        except BaseException:
            copied.close()
            raise
        return copied

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
        self.run("PRAGMA checkpoint_fullfsync=1")  # macOS: the disk's cache is written, too
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
        if self._folder is not None:
            self._folder.cleanup()

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
        for row in self.rows(
            "SELECT data, count FROM parts JOIN segments ON segment=id WHERE branch=? "
            "ORDER BY start",
            (branch,),
        ):
            parts += row
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


def salvage(damaged: Path, target: Connection) -> str:
    """Copy what can be read of a damaged database into a new one; return what it is, in words.

    A branch keeps its steps up to the first one that is lost.
    """
    try:
        source = Connection.open(damaged, readonly=True)
    except (sqlite3.Error, UnspoolError):
        return "nothing"
    with contextlib.closing(source):
        target.run("BEGIN IMMEDIATE")
        try:
            for table, is_whole in _SALVAGED.items():
                for row in _readable_rows(source, target, table):
                    with contextlib.suppress(
                        sqlite3.Error, zlib.error, ValueError, KeyError, TypeError, IndexError
                    ):
                        is_whole(row)
                        target.insert(table, row)
            target.run("DELETE FROM branches WHERE prompt NOT IN (SELECT hash FROM prompts)")
            target.run("DELETE FROM parts WHERE branch NOT IN (SELECT number FROM branches)")
            target.run("UPDATE branches SET indexed=0")
            _cut_gaps(target)
            target.run("COMMIT")
        except BaseException:
            target.run("ROLLBACK")
            raise
    sessions = target.value("SELECT count(*) FROM sessions")
    branches = target.value("SELECT count(*) FROM branches")
    return f"{count(sessions, 'session')} with {count(branches, 'text')}"


def _check_branch(row: dict[str, Any]) -> None:
    for name in ("settings", "state", "bookmarks"):
        json.loads(row[name])


# Tables and what raises an error for a row that is not whole.
_SALVAGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "vocabularies": lambda row: StoredVocabulary.from_bytes(row["data"]),
    "prompts": lambda row: json.loads(zlib.decompress(row["data"])),
    "segments": lambda row: decode_steps(row["data"]),
    "parts": lambda row: None,
    "branches": _check_branch,
    "sessions": lambda row: json.loads(row["view"]),
}


def _readable_rows(source: Connection, target: Connection, table: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table from both ends up to what cannot be read."""
    columns = [name for _, name, *_ in target.rows(f"PRAGMA table_info({table})")]
    key = "branch {0}, start {0}" if table == "parts" else "rowid {0}"
    for direction in ("ASC", "DESC"):
        try:
            order = key.format(direction)
            for row in source.run(f"SELECT {','.join(columns)} FROM {table} ORDER BY {order}"):
                yield dict(zip(columns, row, strict=True))
            return
        except sqlite3.Error:
            continue


def _cut_gaps(db: Connection) -> None:
    """Remove the parts of each branch after one that is lost."""
    segments = {number for (number,) in db.rows("SELECT id FROM segments")}
    ends: dict[int, int] = {}
    for branch, start, segment, length in db.rows("SELECT * FROM parts ORDER BY branch, start"):
        if start == ends.get(branch, 0) and segment in segments:
            ends[branch] = start + length
        else:
            db.run("DELETE FROM parts WHERE branch=? AND start=?", (branch, start))


def content_hash(*parts: bytes) -> str:
    """Return a name for content, by which equal content is stored once."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]
