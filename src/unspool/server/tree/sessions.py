"""`/v1/tree/sessions`: the library. A session is a text that a person works on: branches of the
tree, with a title, tags and the state of the page."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Query, Request
from pydantic import Field, StringConstraints
from starlette.responses import Response

from unspool.server.http.errors import bad_request
from unspool.server.http.replies import JsonReply, to_json
from unspool.server.runtime.schema import Strict
from unspool.server.tree.branch_json import branches_of, preview, router, summary
from unspool.server.tree.branches import TreeBranch, TreeSession, copy_branches
from unspool.server.tree.prompt import Name

MAX_VIEW = 256 << 10  # bytes of a view
MAX_LISTED = 1000
_TITLE = 60  # characters of a title that is made from the prompt

Tag = Annotated[str, StringConstraints(min_length=1, max_length=100)]


class SessionFields(Strict):
    """Title, tags and view of a session; those that are left out stay."""

    title: Name | None = Field(None, description="null: the first words of the first prompt")
    tags: list[Tag] | None = Field(None, max_length=100)
    view: dict[str, Any] | None = Field(
        None, description=f"state of the page, at most {MAX_VIEW >> 10} KB of JSON"
    )

    def apply(self, session: TreeSession) -> None:
        if self.view is not None:
            size = len(to_json(self.view))
            if size > MAX_VIEW:
                raise bad_request(f"view has {size:,} bytes; at most {MAX_VIEW:,}", "view")
            session.view = self.view
        if "title" in self.model_fields_set:
            session.title = self.title
        if self.tags is not None:
            session.tags = tuple(dict.fromkeys(self.tags))


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
        "preview": "" if newest is None else preview(newest.generation, 0),
    }


def title_of(session: TreeSession, branches: list[TreeBranch]) -> str:
    """The given title, or the first words of the first prompt."""
    if session.title is not None or not branches:
        return session.title or ""
    prompt = branches[0].prompt
    asked = [item for item in prompt.messages or () if item.get("role") == "user"]
    text = str(asked[0].get("content") or "") if asked else prompt.text
    words = " ".join(text.split())
    return words if len(words) <= _TITLE else words[: _TITLE - 1].rpartition(" ")[0] + "…"


def updated(session: TreeSession, branches: list[TreeBranch]) -> float:
    """When the session or one of its branches was last changed."""
    return max([session.updated, *(branch.updated for branch in branches)])


def _own_tokens(branch: TreeBranch) -> int:
    """Tokens that it does not share with its parent."""
    if branch.forked_at is None:
        return len(branch.prompt.ids) + len(branch.steps)
    return max(0, len(branch.steps) - branch.forked_at)


def _full_json(session: TreeSession, branches: list[TreeBranch]) -> dict[str, Any]:
    return {
        **session_json(session, branches),
        "branches": [summary(branch) for branch in branches],
        "view": session.view,
    }


def _matches(session: TreeSession, branches: list[TreeBranch], words: list[str]) -> bool:
    text = "\n".join(
        [title_of(session, branches), *session.tags]
        + [part for item in branches for part in (item.prompt.text, item.generation.text)]
    ).casefold()
    return all(word in text for word in words)


@router.get("/sessions", summary="Your sessions, newest first")
async def list_sessions(
    request: Request,
    query: Annotated[str, Query(max_length=1000)] = "",
    tag: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
    before: Annotated[str | None, Query(max_length=200)] = None,
) -> Response:
    """`query` searches titles, tags and texts for all of its words. `before` is the id of the last
    session of the previous page."""
    user = branches_of(request)
    grouped: dict[str, list[TreeBranch]] = {}
    for branch in user.all():
        grouped.setdefault(branch.session or "", []).append(branch)
    words = query.casefold().split()
    sessions = [
        (session, grouped.get(session.id, []))
        for session in user.sessions()
        if (tag is None or tag in session.tags)
        and _matches(session, grouped.get(session.id, []), words)
    ]
    sessions.sort(key=lambda item: (updated(*item), item[0].id), reverse=True)
    if before is not None:
        last = user.session(before, deleted=True)
        bound = (updated(last, grouped.get(last.id, [])), last.id)
        sessions = [item for item in sessions if (updated(*item), item[0].id) < bound]
    page = [session_json(*item) for item in sessions[:limit]]
    return JsonReply({"object": "list", "data": page, "has_more": len(sessions) > limit})


@router.post("/sessions", summary="A new session")
async def create_session(body: SessionFields, request: Request) -> Response:
    user = branches_of(request)
    session = TreeSession(user.user)
    body.apply(session)
    user.add_session(session)
    return JsonReply(_full_json(session, []))


@router.get("/sessions/{identity}", summary="One session: its branches and its view")
async def get_session(identity: str, request: Request) -> Response:
    user = branches_of(request)
    session = user.session(identity)
    return JsonReply(_full_json(session, user.in_session(session)))


@router.patch("/sessions/{identity}", summary="Change title, tags or view of a session")
async def update_session(identity: str, body: SessionFields, request: Request) -> Response:
    """A new view alone does not make the session the newest of the list."""
    user = branches_of(request)
    session = user.session(identity)
    body.apply(session)
    if body.model_fields_set - {"view"}:
        session.touch()
    return JsonReply(session_json(session, user.in_session(session)))


@router.delete("/sessions/{identity}", summary="Delete a session with its branches")
async def delete_session(identity: str, request: Request) -> Response:
    branches_of(request).delete_session(identity)
    return JsonReply({"id": identity, "object": "tree.session.deleted", "deleted": True})


@router.post("/sessions/{identity}/restore", summary="Bring back a session deleted within a day")
async def restore_session(identity: str, request: Request) -> Response:
    user = branches_of(request)
    session = user.restore_session(identity)
    return JsonReply(_full_json(session, user.in_session(session)))


@router.post("/sessions/{identity}/duplicate", summary="A copy of a session and its branches")
async def duplicate_session(identity: str, request: Request) -> Response:
    user = branches_of(request)
    session = user.session(identity)
    branches = user.in_session(session)
    copy = TreeSession(user.user, f"{title_of(session, branches)} (copy)", session.tags)
    copies = copy_branches(branches, copy.id)
    user.add_session(copy)
    user.add(*copies.values())
    names = {old: new.id for old, new in copies.items()}
    copy.view = json.loads(_replace_ids(json.dumps(session.view), names))
    return JsonReply(_full_json(copy, user.in_session(copy)))


def _replace_ids(text: str, names: dict[str, str]) -> str:
    """Replace the ids of branches in the view of a session by those of their copies."""
    for old, new in names.items():
        text = text.replace(old, new)
    return text
