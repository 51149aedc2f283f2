"""Branches and sessions as rows of the database (`store/database.py`).

Each method returns a job: what to run on the database's thread. It has a copy of what it writes, so
the event loop does not wait.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar, cast

from unspool.backends.interventions import as_interventions
from unspool.engine.generation import Generation
from unspool.engine.request import Limits, Request
from unspool.engine.results import Step
from unspool.errors import UnspoolError
from unspool.lens.trace import from_json_value, to_json_value
from unspool.sampling import SamplingSettings
from unspool.server.tree.branches import (
    Bookmark,
    Digest,
    ExtraSettings,
    MessageSpan,
    TreeBranch,
    TreePrompt,
)
from unspool.server.tree.turns import find_turns
from unspool.store.database import (
    Connection,
    Database,
    StoredVocabulary,
    TokenTexts,
    content_hash,
    join_steps,
    vocabulary_hash,
)
from unspool.text.tokenizer.tokenizer import Tokenizer

Result = TypeVar("Result")
Job = Callable[[Connection], Any]


@dataclass(frozen=True, slots=True)
class StoredContent:
    """The content of a branch as it was read from the database."""

    prompt: dict[str, Any]
    vocabulary: TokenTexts
    settings: dict[str, Any]
    state: dict[str, Any]
    parts: list[bytes | int]

    def decode(self) -> tuple[TreePrompt, Generation, ExtraSettings]:
        """Prompt, text and settings. Slow for long texts: run it on a thread."""
        prompt = _prompt_from(self.prompt, self.vocabulary)
        settings, state = self.settings, self.state
        request = Request(
            prompt=prompt.ids,
            settings=from_json_value(SamplingSettings, settings["sampling"]),
            limits=from_json_value(Limits, settings["limits"]),
            priority=settings["priority"],
            cached=settings["cached"],
            interventions=as_interventions(settings.get("interventions")),
        )
        steps = join_steps(self.parts)
        for index, step in enumerate(steps):  # an earlier resume may have ended there
            is_end = index == len(steps) - 1 and state["finish_reason"] is not None
            if step.finish_reason is not None and not is_end:
                steps[index] = replace(step, finish_reason=None)
        generation = Generation(
            request, steps, state["empty_reason"], None, state["notes"], state["reused"]
        )
        return prompt, generation, ExtraSettings(settings["extra"])


class TreeStorage:
    """The branches and sessions in one database."""

    def __init__(
        self, database: Database, tokenizers: Callable[[], Iterable[Tokenizer]] = tuple
    ) -> None:
        self.database = database
        self._tokenizers = tokenizers  # of the loaded models
        self._vocabularies: dict[str, StoredVocabulary] = {}  # that were read

    async def run(self, job: Callable[[Connection], Result]) -> Result:
        """Run a job, and wait until its change is on the disk."""
        return await asyncio.wrap_future(self.database.submit(job))

    # -- reading ---------------------------------------------------------------------------------

    def read_branches(self) -> list[TreeBranch]:
        """All branches, without their content, in the order of creation."""
        rows, lengths = self.database.submit(_read_heads).result()
        branches: dict[str, TreeBranch] = {}
        origins: dict[str, str] = {}
        nothing: Any = None
        for row in rows:
            (number, identity, owner, session, model, name, origin, origin_at, created, deleted,
             bookmarks, state_json) = row  # fmt: skip
            state = json.loads(state_json)
            branches[identity] = TreeBranch(
                model, nothing, nothing, nothing, state["max_tokens"], owner, name,
                origin_at=origin_at, session=session, id=identity, created=created,
                updated=state["updated"], finish_reason=state["finish_reason"],
                last=state["last"], deleted=deleted, number=number,
                bookmarks=tuple(Bookmark(at, label) for at, label in json.loads(bookmarks)),
                unloaded=Digest(
                    lengths.get(number, 0), state["prompt_tokens"], state["preview"],
                    state["title"],
                ),
            )  # fmt: skip
            if origin is not None:
                origins[identity] = origin
        for identity, origin in origins.items():
            branches[identity].origin = branches.get(origin)
        return list(branches.values())

    def read_sessions(self) -> list[dict[str, Any]]:
        """The fields of all sessions, in the order of creation."""
        names = ("id", "owner", "created", "updated", "deleted", "title", "tags")
        rows = self.database.submit(
            lambda db: db.rows(f"SELECT {','.join(names)} FROM sessions ORDER BY rowid")
        ).result()
        sessions = [dict(zip(names, row, strict=True)) for row in rows]
        for session in sessions:
            session["tags"] = tuple(session["tags"].split("\n")) if session["tags"] else ()
        return sessions

    def reading(self, branch: TreeBranch) -> Callable[[Connection], StoredContent]:
        number = branch.number
        assert number is not None

        def job(db: Connection) -> StoredContent:
            ((settings, state, prompt, vocabulary),) = db.rows(
                "SELECT settings, state, data, vocabulary FROM branches "
                "JOIN prompts ON prompt=hash WHERE number=?",
                (number,),
            )
            return StoredContent(
                json.loads(zlib.decompress(prompt)),
                self._vocabulary(db, vocabulary),
                json.loads(settings),
                json.loads(state),
                db.read_steps(number),
            )

        return job

    def _vocabulary(self, db: Connection, name: str) -> TokenTexts:
        """The tokenizer of a loaded model, which also knows the chat template, or the tokens."""
        for tokenizer in self._tokenizers():
            if vocabulary_hash(tokenizer) == name:
                return tokenizer
        if name not in self._vocabularies:
            data = db.value("SELECT data FROM vocabularies WHERE hash=?", (name,))
            if data is None:
                raise UnspoolError(
                    "the vocabulary of this text was lost with a damaged database; load the model "
                    "that wrote it"
                )
            self._vocabularies[name] = StoredVocabulary.from_bytes(data)
        return self._vocabularies[name]

    def view(self, session: str) -> Callable[[Connection], bytes]:
        def job(db: Connection) -> bytes:
            view: str = db.value("SELECT view FROM sessions WHERE id=?", (session,)) or "{}"
            return view.encode()

        return job

    def search(self, words: Sequence[str]) -> Callable[[Connection], list[set[int]]]:
        return lambda db: [db.search(word) for word in words]

    # -- writing ---------------------------------------------------------------------------------

    def insertion(self, branches: Sequence[TreeBranch]) -> Job:
        """Insert new branches with their steps; those that a stored branch has are not copied."""
        inserts = [self._insertion(branch) for branch in branches]

        def job(db: Connection) -> None:
            for branch, insert in zip(branches, inserts, strict=True):
                branch.number = insert(db)

        return job

    def _insertion(self, branch: TreeBranch) -> Callable[[Connection], int]:
        steps, source, source_number, common = list(branch.steps), branch.source, None, 0
        if (
            source is not None
            and source.number is not None
            and not source.num_text_writes
            and source.unloaded is None
        ):
            source_number, common = source.number, source.num_common(steps)
        origin = branch.origin
        row = {
            "id": branch.id,
            "owner": branch.owner,
            "session": branch.session,
            "model": branch.model,
            "name": branch.name,
            "origin": None if origin is None else origin.id,
            "origin_at": branch.origin_at,
            "created": branch.created,
            "bookmarks": _bookmarks_json(branch.bookmarks),
            "settings": _settings_json(branch.generation, branch.extra_settings),
            "state": _state_json(branch),
        }
        prompt = branch.prompt

        def insert(db: Connection) -> int:
            row["prompt"] = self._store_prompt(db, prompt)
            number = db.insert("branches", row)
            stored = 0
            if source_number is not None and common:
                stored = db.copy_steps(source_number, number, common)
            db.append_steps(number, steps[stored:])
            return number

        return insert

    def _store_prompt(self, db: Connection, prompt: TreePrompt) -> str:
        vocabulary = self._store_vocabulary(db, prompt.tokenizer)
        data = json.dumps(_prompt_json(prompt), separators=(",", ":")).encode()
        name = content_hash(vocabulary.encode(), data)
        if db.value("SELECT 1 FROM prompts WHERE hash=?", (name,)) is None:
            row = {"hash": name, "vocabulary": vocabulary, "data": zlib.compress(data, 1)}
            db.insert("prompts", row)
        return name

    def _store_vocabulary(self, db: Connection, tokenizer: TokenTexts) -> str:
        name = vocabulary_hash(tokenizer)
        if db.value("SELECT 1 FROM vocabularies WHERE hash=?", (name,)) is None:
            tokens = map(tokenizer.token_bytes, range(len(tokenizer)))
            data = StoredVocabulary(tuple(tokens)).to_bytes()
            db.insert("vocabularies", {"hash": name, "data": data})
        return name

    def replacement(
        self,
        branch: TreeBranch,
        generation: Generation,
        updated: float,
        prompt: TreePrompt | None = None,
    ) -> Job:
        """Replace the text of a branch, and its prompt; steps that stay are not written again."""
        common, number = branch.num_common(generation.steps), branch.number
        steps = list(generation.steps[common:])
        changed = replace(branch, generation=generation, finish_reason=None, updated=updated)
        row = {
            "settings": _settings_json(generation, branch.extra_settings),
            "state": _state_json(changed),
            "indexed": 0,
        }
        assert number is not None

        def job(db: Connection) -> None:
            db.cut_steps(number, common)
            db.append_steps(number, steps)
            if prompt is not None:
                row["prompt"] = self._store_prompt(db, prompt)
            db.update("branches", branch.id, row)

        return job

    def rewriting(self, branch: TreeBranch) -> Job:
        """Replace prompt and text of a stored branch."""
        steps, number, prompt = list(branch.steps), branch.number, branch.prompt
        row = {
            "settings": _settings_json(branch.generation, branch.extra_settings),
            "state": _state_json(branch),
            "indexed": 0,
        }
        assert number is not None

        def job(db: Connection) -> None:
            db.cut_steps(number, 0)
            db.append_steps(number, steps)
            db.update("branches", branch.id, {**row, "prompt": self._store_prompt(db, prompt)})

        return job

    def addition(self, news: Sequence[tuple[TreeBranch, Sequence[Step]]]) -> Job:
        """Append generated steps."""
        pairs = [
            (branch.number, list(steps)) for branch, steps in news if branch.number is not None
        ]

        def job(db: Connection) -> None:
            for number, steps in pairs:
                db.append_steps(number, steps, live=True)

        return job

    def ending(self, branch: TreeBranch, last: dict[str, Any]) -> Job:
        """Store how a resume ended, and its settings."""
        state = json.loads(_state_json(branch)) | last
        settings = _settings_json(branch.generation, branch.extra_settings)
        row = {"state": json.dumps(state), "settings": settings}
        return lambda db: db.update("branches", branch.id, row)

    def labels(
        self,
        branch: TreeBranch,
        name: str | None,
        bookmarks: Sequence[Bookmark],
        session: str | None,
        updated: float,
    ) -> Job:
        row = {"name": name, "bookmarks": _bookmarks_json(bookmarks), "session": session}

        def job(db: Connection) -> None:
            db.update("branches", branch.id, row | _changed_state(db, branch, updated=updated))

        return job

    def settings(self, branch: TreeBranch, settings: ExtraSettings, max_tokens: int | None) -> Job:
        row = {"settings": _settings_json(branch.generation, settings)}

        def job(db: Connection) -> None:
            state = _changed_state(db, branch, max_tokens=max_tokens)
            db.update("branches", branch.id, row | state)

        return job

    def deletion(
        self, branches: Sequence[str], when: float | None, session: str | None = None
    ) -> Job:
        """Mark branches and a session as deleted, or not."""

        def job(db: Connection) -> None:
            for identity in branches:
                db.update("branches", identity, {"deleted": when})
            if session is not None:
                db.update("sessions", session, {"deleted": when})

        return job

    def session(self, row: dict[str, Any], view: bytes | None) -> Job:
        """Insert or update a session; its view stays if there is no new one."""

        def job(db: Connection) -> None:
            if db.value("SELECT 1 FROM sessions WHERE id=?", (row["id"],)) is None:
                db.insert("sessions", {**row, "view": (view or b"{}").decode()})
            else:
                # Whether it is deleted is set by `deletion` alone.
                fields = {name: row[name] for name in ("title", "tags", "updated")}
                db.update(
                    "sessions",
                    row["id"],
                    fields if view is None else {**fields, "view": view.decode()},
                )

        return job

    # -- work that nothing waits for: if it fails, it is done after the next start ---------------

    def tidy(self, branch: TreeBranch) -> None:
        """Merge the small segments of a branch at rest, make its text searchable, and note which
        of its steps are messages of others than the model."""
        number, text = branch.number, f"{branch.prompt.text}\n{branch.generation.text}"
        steps, tokenizer = list(branch.steps), branch.prompt.tokenizer
        is_chat = branch.prompt.messages is not None and isinstance(tokenizer, Tokenizer)
        assert number is not None

        def job(db: Connection) -> None:
            if db.value("SELECT 1 FROM branches WHERE number=?", (number,)) is None:
                return
            db.merge_segments(number)
            db.index_text(number, text)
            if is_chat and db.num_steps(number) == len(steps):
                turns = [_turn_json(turn) for turn in find_turns(cast(Tokenizer, tokenizer), steps)]
                db.update("branches", branch.id, _changed_state(db, branch, turns=turns))

        self._submit(job)

    def index_remaining(self) -> None:
        """Make texts searchable that were changed just before the last process ended."""

        def job(db: Connection) -> None:
            for number, data in db.rows(
                "SELECT number, data FROM branches JOIN prompts ON prompt=hash WHERE NOT indexed"
            ):
                prompt = json.loads(zlib.decompress(data))["text"]
                steps = join_steps(db.read_steps(number))
                db.index_text(number, prompt + "\n" + "".join(step.text for step in steps))
            db.drop_unused()

        self._submit(job)

    def forget(self, branch: TreeBranch, children: Sequence[TreeBranch]) -> None:
        """Delete a branch for good; its children have another origin."""
        number = branch.number
        rows = [
            (None if child.origin is None else child.origin.id, child.origin_at, child.id)
            for child in children
        ]

        def job(db: Connection) -> None:
            for origin, at, identity in rows:
                db.update("branches", identity, {"origin": origin, "origin_at": at})
            if number is not None:
                db.delete_branch(number)

        self._submit(job)

    def forget_session(self, identity: str) -> None:
        self._submit(lambda db: db.run("DELETE FROM sessions WHERE id=?", (identity,)))

    def _submit(self, job: Job) -> None:
        self.database.submit(job).add_done_callback(lambda future: future.exception())


def _read_heads(db: Connection) -> tuple[list[tuple[Any, ...]], dict[int, int]]:
    rows = db.rows(
        "SELECT number, id, owner, session, model, name, origin, origin_at, created, deleted, "
        "bookmarks, state FROM branches ORDER BY number"
    )
    lengths = dict(db.rows("SELECT branch, max(start+count) FROM parts GROUP BY branch"))
    return rows, cast(dict[int, int], lengths)


def _changed_state(db: Connection, branch: TreeBranch, **changes: Any) -> dict[str, str]:
    """The column `state` of a branch with some changes."""
    state = json.loads(db.value("SELECT state FROM branches WHERE id=?", (branch.id,)))
    return {"state": json.dumps(state | changes)}


def _turn_json(turn: MessageSpan) -> list[Any]:
    return [turn.role, turn.start, turn.end, *(turn.content or (turn.start, turn.start))]


def _bookmarks_json(bookmarks: Sequence[Bookmark]) -> str:
    return json.dumps([(mark.at, mark.label) for mark in bookmarks])


def _settings_json(generation: Generation, extra: ExtraSettings) -> str:
    request = generation.request
    return json.dumps(
        {
            "extra": extra.values,
            "sampling": to_json_value(request.settings),
            "limits": to_json_value(request.limits),
            "priority": request.priority,
            "cached": request.cached,
            "interventions": [item.to_dict() for item in request.interventions],
        }
    )


def _state_json(branch: TreeBranch) -> str:
    generation, digest = branch.generation, branch.digest
    return json.dumps(
        {
            "updated": branch.updated,
            "finish_reason": branch.finish_reason,
            "last": branch.last,
            "max_tokens": branch.max_tokens,
            "empty_reason": generation.empty_reason,
            "notes": list(generation.notes),
            "reused": generation.reused,
            "prompt_tokens": digest.prompt_tokens,
            "preview": digest.preview,
            "title": digest.title,
        }
    )


def _prompt_json(prompt: TreePrompt) -> dict[str, Any]:
    return {
        "ids": list(prompt.ids),
        "text": prompt.text,
        "added": sorted(prompt.added),
        "messages": prompt.messages,
        "spans": [asdict(span) for span in prompt.spans],
        "stops": list(prompt.stops),
    }


def _prompt_from(data: dict[str, Any], vocabulary: TokenTexts) -> TreePrompt:
    spans = [
        MessageSpan(
            span["role"],
            span["start"],
            span["end"],
            None if span["content"] is None else (span["content"][0], span["content"][1]),
        )
        for span in data["spans"]
    ]
    return TreePrompt(
        tuple(data["ids"]),
        data["text"],
        vocabulary,
        frozenset(data["added"]),
        data["messages"],
        tuple(spans),
        tuple(data["stops"]),
    )
