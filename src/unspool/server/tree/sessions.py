"""`/v1/tree/sessions`: the library. A session is a text that a person works on: branches of the
tree, with a title, tags and the state of the page."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

from fastapi import Query, Request
from pydantic import Field, StringConstraints
from starlette.responses import Response

from unspool.server.http.errors import bad_request
from unspool.server.http.replies import JsonReply, to_json
from unspool.server.runtime.schema import Strict
from unspool.server.tree.branch_json import branches_of, router, summary
from unspool.server.tree.branches import TreeBranch, copy_branches
from unspool.server.tree.library import TreeSession, UserBranches
from unspool.server.tree.prompt import MAX_NAME, Name

MAX_VIEW = 2 << 20  # bytes of a view
MAX_LISTED = 1000
MAX_WORDS = 16  # of a search

Tag = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\n]+$")]


class SessionFields(Strict):
    """Title, tags and view of a session; those that are left out stay."""

    title: Name | None = Field(None, description="null: the first words of the first prompt")
    tags: list[Tag] | None = Field(None, max_length=100)
    view: dict[str, Any] | None = Field(
        None, description=f"state of the page, at most {MAX_VIEW >> 10} KB of JSON"
    )

    def view_json(self) -> bytes | None:
        """The new view as JSON; None: there is none. Raises 400 if it is too large."""
        if self.view is None:
            return None
        content = to_json(self.view)
        if len(content) > MAX_VIEW:
            raise bad_request(f"view has {len(content):,} bytes; at most {MAX_VIEW:,}", "view")
        return content

    def changes(self) -> dict[str, Any]:
        """The columns of a session that change."""
        changes: dict[str, Any] = {}
        if "title" in self.model_fields_set:
            changes["title"] = self.title
        if self.tags is not None:
            changes["tags"] = "\n".join(dict.fromkeys(self.tags))
        return changes


def session_json(session: TreeSession, branches: list[TreeBranch]) -> dict[str, Any]:
    """A session in a list."""
    newest = max(branches, key=lambda branch: branch.updated, default=None)
    return {
        "id": session.id,
        "object": "tree.session",
        "title": title_of(session, branches),
        "tags": list(session.tags),
        "created": round(session.created, 3),
        "updated": round(updated(session, branches), 3),
        "model": None if newest is None else newest.model,
        "branches": len(branches),
        "tokens": sum(map(_own_tokens, branches)),
        "preview": "" if newest is None else newest.digest.preview,
    }


def title_of(session: TreeSession, branches: list[TreeBranch]) -> str:
    """The given title, or the first words of the first prompt."""
    if session.title is not None or not branches:
        return session.title or ""
    return branches[0].digest.title


def updated(session: TreeSession, branches: list[TreeBranch]) -> float:
    """When the session or one of its branches was last changed."""
    return max([session.updated, *(branch.updated for branch in branches)])


def _own_tokens(branch: TreeBranch) -> int:
    """Tokens that it does not share with its parent."""
    digest, at = branch.digest, branch.forked_at
    return digest.prompt_tokens + digest.length if at is None else max(0, digest.length - at)


def _full_json(session: TreeSession, branches: list[TreeBranch], view: bytes) -> dict[str, Any]:
    return {
        **session_json(session, branches),
        "branches": [summary(branch) for branch in branches],
        "view": json.loads(view),
    }


def _matches(
    session: TreeSession,
    branches: list[TreeBranch],
    words: list[str],
    stored: list[set[str]] | None,
) -> bool:
    """Whether all words occur in title, tags and texts; `stored`: the sessions whose texts have
    each word, if they were searched in the database."""
    if not words:
        return True
    text = "\n".join([title_of(session, branches), *session.tags])
    if stored is None:
        text += "".join(f"\n{item.prompt.text}\n{item.generation.text}" for item in branches)
    text = text.casefold()
    return all(
        word in text or (stored is not None and session.id in stored[index])
        for index, word in enumerate(words)
    )


@router.get("/sessions", summary="Your sessions, newest first")
async def list_sessions(
    request: Request,
    query: Annotated[str, Query(max_length=1000)] = "",
    tag: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
    before: Annotated[str | None, Query(max_length=200)] = None,
) -> Response:
    """`query` searches titles, tags and texts for all of its words. `before` is the id of the last
    session of the previous page. `is_saved` is false if the texts are lost with the server."""
    user = branches_of(request)
    grouped: dict[str, list[TreeBranch]] = {}
    for branch in user.all():
        grouped.setdefault(branch.session or "", []).append(branch)
    words = query.casefold().split()[:MAX_WORDS]
    stored = await user.search(words) if words else None
    sessions = [
        (session, grouped.get(session.id, []))
        for session in user.sessions()
        if (tag is None or tag in session.tags)
        and _matches(session, grouped.get(session.id, []), words, stored)
    ]
    sessions.sort(key=lambda item: (updated(*item), item[0].id), reverse=True)
    if before is not None:
        last = user.session(before, deleted=True)
        bound = (updated(last, grouped.get(last.id, [])), last.id)
        sessions = [item for item in sessions if (updated(*item), item[0].id) < bound]
    page = [session_json(*item) for item in sessions[:limit]]
    has_more, is_saved = len(sessions) > limit, user.store.is_saved
    return JsonReply({"object": "list", "data": page, "has_more": has_more, "is_saved": is_saved})


@router.post("/sessions", summary="A new session")
async def create_session(body: SessionFields, request: Request) -> Response:
    user = branches_of(request)
    tags = tuple(dict.fromkeys(body.tags or ()))
    view = body.view_json() or b"{}"
    session = TreeSession(user.user, body.title, tags, view)
    await user.add_session(session)
    return JsonReply(_full_json(session, [], view))


@router.get("/sessions/{session_id}", summary="One session: its branches and its view")
async def get_session(session_id: str, request: Request) -> Response:
    return await _session_reply(branches_of(request), session_id)


async def _session_reply(user: UserBranches, session_id: str) -> Response:
    session = user.session(session_id)
    view = await user.view(session)
    return JsonReply(_full_json(session, user.in_session(session), view))


@router.patch("/sessions/{session_id}", summary="Change title, tags or view of a session")
async def update_session(session_id: str, body: SessionFields, request: Request) -> Response:
    """A new view alone does not make the session the newest of the list."""
    user = branches_of(request)
    session = user.session(session_id)
    changes, view = body.changes(), body.view_json()
    if changes:
        changes["updated"] = time.time()
    await user.update_session(session, changes, view)
    return JsonReply(session_json(session, user.in_session(session)))


@router.delete("/sessions/{session_id}", summary="Delete a session with its branches")
async def delete_session(session_id: str, request: Request) -> Response:
    await branches_of(request).delete_session(session_id)
    return JsonReply({"id": session_id, "object": "tree.session.deleted", "deleted": True})


@router.post("/sessions/{session_id}/restore", summary="Bring back a session deleted within a day")
async def restore_session(session_id: str, request: Request) -> Response:
    user = branches_of(request)
    await user.restore_session(session_id)
    return await _session_reply(user, session_id)


@router.post("/sessions/{session_id}/duplicate", summary="A copy of a session and its branches")
async def duplicate_session(session_id: str, request: Request) -> Response:
    user = branches_of(request)
    session = user.session(session_id)
    originals = user.in_session(session)
    user.make_room(2 * len(originals))
    for branch in originals:
        await user.open(branch.id)
    title = f"{title_of(session, originals)} (copy)"
    copy = TreeSession(user.user, title[:MAX_NAME], session.tags)
    copies = copy_branches(originals, copy.id)
    user.store.name(*copies.values())
    view = (await user.view(session)).decode()
    for old, new in copies.items():  # the view names branches by their ids
        view = view.replace(old, new.id)
    copy.view = view.encode()
    await user.add_session(copy)
    for branch in copies.values():
        branch.session = copy.id
    await user.add(*copies.values())
    return await _session_reply(user, copy.id)
