"""Conversations of `unspool chat` in the state folder: stored after every answer, and continued.

A conversation is a session with one branch, as the page makes them: the turns before the last
answer are its prompt, and the answer is its steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from unspool.cli.output import say
from unspool.conversation import Conversation, Exchange
from unspool.engine.generation import Generation
from unspool.errors import UnspoolError
from unspool.server.tree.branches import ExtraSettings, TreeBranch, TreePrompt
from unspool.server.tree.library import TreeSession
from unspool.server.tree.prompt import message_spans
from unspool.server.tree.storage import TreeStorage
from unspool.session import Session
from unspool.store.database import Database
from unspool.store.folder import StateFolder
from unspool.store.formats import PortableText
from unspool.store.library import find_session
from unspool.store.looms import num_common


class StoredChat:
    """The session of one conversation; holds the lock of its folder until it is closed."""

    def __init__(self, folder: Path, lm: Session, *, allow_readonly: bool = False) -> None:
        """With `allow_readonly`, conversations of a folder that can only be read can be continued;
        they are not stored then.

        Raises FolderInUseError if another process uses the folder.
        """
        self._folder = StateFolder(folder, allow_readonly=allow_readonly)
        self.readonly_note = self._folder.readonly_note if self._folder.is_readonly else None
        try:
            self._database = Database(
                self._folder.database, say=say, is_readonly=self._folder.is_readonly
            )
        except BaseException:
            self._folder.close()
            raise
        self._storage = TreeStorage(self._database)
        self._lm = lm
        self._session: TreeSession | None = None
        self._branch: TreeBranch | None = None

    def close(self) -> None:
        self._database.close()
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, texts: Sequence[PortableText]) -> str:
        """Store versions of a text as the branches of a new session; return its id.

        The generated part of a conversation is its last answer; that of a plain text is what
        comes after what all versions have in common.
        """
        lm, stored = self._lm, list[TreeBranch]()
        self._session = TreeSession("", texts[0].title)
        start = num_common([text.text for text in texts])
        for text in texts:
            messages, prompt, answer = text.messages, text.text, ""
            if start:
                prompt, answer = prompt[:start], prompt[start:]
            if messages is not None and messages[-1]["role"] == "assistant" and len(messages) > 1:
                answer, messages = messages[-1]["content"], messages[:-1]
            ids = lm.prompt_ids(prompt) if messages is None else lm.chat_prompt(messages).ids
            generation, _ = lm.begin(ids, max_tokens=0)
            if answer:
                generation = generation.choose(answer)
            self._branch = None
            tree_prompt = self._prompt(generation.prompt, messages)
            stored.append(self._store(tree_prompt, generation, stored))
        return self._session.id

    def resume(self, name: str | None, conversation: Conversation) -> str:
        """Fill a conversation with a stored one, the newest if `name` is None; return its title."""
        matching = self._database.submit(lambda db: find_session(db, name)).result()
        branches = [b for b in self._storage.read_branches() if b.session == matching.id]
        branches = [branch for branch in branches if branch.deleted is None]
        if not branches:
            raise UnspoolError(f"session {matching.id} has no text to continue")
        branch = max(branches, key=lambda item: item.updated)
        content = self._database.submit(self._storage.reading(branch)).result()
        branch.prompt, branch.generation, branch.extra_settings = content.decode()
        branch.unloaded = None
        if branch.prompt.messages is None:
            raise UnspoolError(f"session {matching.id} is no conversation; open it on the page")
        self._branch, self._session = branch, TreeSession("", matching.title, id=matching.id)
        lm = self._lm
        generation = lm.reattach(branch.generation.fork(), thoughts=True)
        conversation.ids = branch.tokens
        messages = list(branch.prompt.messages)
        if messages and messages[0].get("role") == "system":
            conversation.system = str(messages.pop(0).get("content"))
        conversation.exchanges = _exchanges(messages, branch.prompt, generation)
        return matching.title

    def save(self, conversation: Conversation, generation: Generation) -> None:
        """Store the conversation after an answer; done when it is on the disk."""
        if self._session is None:
            self._session = TreeSession("")
        self._store(self._prompt(generation.prompt, conversation.messages[:-1]), generation)

    def _store(
        self, prompt: TreePrompt, generation: Generation, others: Sequence[TreeBranch] = ()
    ) -> TreeBranch:
        """Write the branch of the session, and the session if it is new. It is a fork of the one
        of `others` with the most common steps."""
        assert self._session is not None
        others = [other for other in others if other.prompt.ids == prompt.ids]
        origin = max(others, key=lambda o: o.num_common(generation.steps), default=None)
        old = self._branch
        if old is None:
            row = self._session.row()
            self._database.submit(self._storage.session(row, None)).result()
        stored = TreeBranch(
            self._lm.path.stem if self._lm.path is not None else self._lm.config.family,
            prompt,
            generation,
            ExtraSettings(),
            None,
            origin=origin,
            origin_at=None if origin is None else origin.num_common(generation.steps),
            session=self._session.id,
            finish_reason=generation.finish_reason,
            updated=time.time(),
        )
        if old is not None:
            stored.id, stored.number, stored.created = old.id, old.number, old.created
            self._database.submit(self._storage.rewriting(stored)).result()
        else:
            self._database.submit(self._storage.insertion([stored])).result()
        self._branch = stored
        self._storage.tidy(stored)
        return stored

    def _prompt(
        self, ids: tuple[int, ...], messages: Sequence[dict[str, str]] | None
    ) -> TreePrompt:
        lm, text = self._lm, self._lm.tokenizer.decode(ids)
        if messages is None:
            is_start = bool(ids) and ids[0] == lm.tokenizer.bos_id
            return TreePrompt(ids, text, lm.tokenizer, frozenset({0} if is_start else ()))
        chat = lm.chat_prompt(messages)
        spans = message_spans(lm.tokenizer, chat, messages) if tuple(chat.ids) == ids else ()
        content = {at for span in spans if span.content for at in range(*span.content)}
        added = frozenset(range(len(ids))) - content if spans else frozenset[int]()
        stops = lm.chat_template.stops
        return TreePrompt(ids, text, lm.tokenizer, added, list(messages), spans, stops)


def _exchanges(
    messages: list[dict[str, object]], prompt: TreePrompt, generation: Generation
) -> list[Exchange]:
    """The turns of a stored conversation. One whose tokens are unknown cannot be undone."""
    starts = [span.start for span in prompt.spans if span.role == "user"]
    questions = [index for index, item in enumerate(messages) if item.get("role") == "user"]
    if len(starts) != len(questions):
        starts = [-1] * len(questions)
    exchanges = []
    for start, index in zip(starts, questions, strict=True):
        reply = messages[index + 1] if index + 1 < len(messages) else {}
        answer = str(reply.get("content") or "")
        reasoning = str(reply.get("reasoning_content") or "")
        if index == questions[-1]:
            answer, reasoning = generation.answer, generation.reasoning
        exchanges.append(Exchange(str(messages[index].get("content")), start, answer, reasoning))
    return exchanges
