"""`/v1/tree`: texts as branches of a tree that can be rewound, edited, forked and resumed.

A branch is a prompt and the steps after it, and is stored until it is deleted. Indices count
steps: step 0 is the first token after the prompt. Only `look` counts positions in the whole text,
prompt included. Changing a branch that is running fails with 409; reading it, forking it and
choosing into a fork are always possible.
"""

from __future__ import annotations

from contextlib import nullcontext
from heapq import nlargest
from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from unspool.engine.generation import Generation
from unspool.server.dialects.chat_prompt import template_message
from unspool.server.http.errors import bad_request
from unspool.server.http.replies import JsonReply
from unspool.server.runtime.state import Call, state_of
from unspool.server.tree import (  # noqa: F401  endpoints
    context,
    edit,
    edit_text,
    features,
    futures,
    look,
    patch,
    sessions,
    steer,
    writing,
)
from unspool.server.tree.branch_json import branches_of, reply, router, summary
from unspool.server.tree.branches import Bookmark, TreeBranch, fork_branch
from unspool.server.tree.parts import attach
from unspool.server.tree.prompt import (
    AppendRequest,
    BranchUpdate,
    ChooseRequest,
    CreateRequest,
    ForkRequest,
    RewindRequest,
    encode_turn,
    new_branch,
    with_part_values,
)
from unspool.session import Session

__all__ = ["router"]
MAX_LISTED = 1000
_SCORED_TOKENS = 64  # in one call: each needs a row of logits


@router.post("", summary="A new branch from a prompt; nothing is computed yet")
async def create(body: CreateRequest, request: Request) -> Response:
    branches = branches_of(request)
    branches.make_room()
    if body.session is not None:
        branches.session(body.session)
    async with state_of(request).call(request, body.model, places=0) as call:
        branch: TreeBranch = await call.compute(new_branch, call, body)
    if body.session is not None:
        branches.session(body.session)  # again: it may have been deleted meanwhile
    await branches.add(branch)
    return await reply(branch, 0, prompt=True)


@router.get("", summary="Your branches, newest first, with their parents")
async def list_branches(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
    cursor: Annotated[str | None, Query(max_length=200, pattern=r"^[0-9.]+:.+$")] = None,
    identity: Annotated[list[str] | None, Query(alias="id", max_length=MAX_LISTED)] = None,
) -> Response:
    """`cursor` is the `next` of the previous page; null is the end. With `id`, which may be
    repeated, only these are listed; ids that do not exist are left out."""
    branches = branches_of(request).all()
    if identity is not None:
        names = set(identity)
        branches = [branch for branch in branches if branch.id in names]
    if cursor is not None:
        created, _, last = cursor.partition(":")
        bound = (_parse_time(created), last)
        branches = [branch for branch in branches if _list_position(branch) < bound]
    page = nlargest(limit, branches, key=_list_position)
    has_more = len(branches) > len(page)
    after = "{}:{}".format(*_list_position(page[-1])) if has_more else None
    return JsonReply({"object": "list", "data": list(map(summary, page)), "next": after})


def _list_position(branch: TreeBranch) -> tuple[float, str]:
    """What a list is sorted by; the same on all replicas of a server."""
    return round(branch.created, 6), branch.id


def _parse_time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise bad_request("cursor must be the next of a previous page", "cursor") from None


@router.get("/{identity}", summary="One branch: its prompt, steps and statistics")
async def get(
    identity: str,
    request: Request,
    steps: bool = True,
    prompt: bool = True,
    since: Annotated[int, Query(ge=0, lt=1 << 31)] = 0,
) -> Response:
    branch = await branches_of(request).open(identity)
    return await reply(branch, since if steps else None, prompt=prompt)


@router.patch("/{identity}", summary="Change name, bookmarks or context of a branch, or the pace")
async def update(identity: str, body: BranchUpdate, request: Request) -> Response:
    branches = branches_of(request)
    branch = await branches.open(identity)
    if body.model_fields_set & {"name", "bookmarks", "session"}:
        marks = branch.bookmarks
        if body.bookmarks is not None:
            marks = tuple(Bookmark(mark.at, mark.label) for mark in body.bookmarks)
        name = body.name if "name" in body.model_fields_set else branch.name
        session = branch.session if body.session is None else branches.session(body.session).id
        await branches.store.update(branch, name=name, bookmarks=marks, session=session)
    settings = with_part_values(branch.extra_settings, body)
    if settings is not branch.extra_settings:
        await branches.store.set_settings(branch, settings, branch.max_tokens)
    if "pace" in body.model_fields_set and branch.writing is not None:
        branch.writing.set_pace(body.pace)
    return await reply(branch, None)


@router.delete("/{identity}", summary="Delete a branch; its children stay")
async def delete(identity: str, request: Request) -> Response:
    branches = branches_of(request)
    await branches.delete(branches.get(identity))
    return JsonReply({"id": identity, "object": "tree.branch.deleted", "deleted": True})


@router.post("/{identity}/restore", summary="Bring back a branch deleted within a day")
async def restore(identity: str, request: Request) -> Response:
    return await reply(await branches_of(request).restore(identity), 0, prompt=True)


@router.post("/{identity}/append", summary="Append text, tokens or a message")
async def append(identity: str, body: AppendRequest, request: Request) -> Response:
    branches = branches_of(request)
    branch = await branches.open(identity)
    branches.make_room(0, branch)
    with branch.locked():
        since = len(branch.steps)
        async with state_of(request).call(request, branch.model) as call:
            draft = await call.compute(attach, branch, branch.generation.fork(), call.served.lm)
            tokens = body.tokens
            if body.message is not None:
                if tokens is not None:
                    raise bad_request("give either message or tokens", "message")
                tokens = await call.compute(
                    encode_turn, call, branch, template_message(body.message)
                )
            changed = await call.compute(_append_scored, call, draft, body.text, tokens)
        since = min(since, await branches.store.set_text(branch, changed, "append"))
    return await reply(branch, since)


@router.post("/{identity}/fork", summary="Fork a branch at a step")
async def fork(identity: str, body: ForkRequest, request: Request) -> Response:
    branches = branches_of(request)
    branch = await branches.open(identity)
    at = branch.step_index(body.at, "at")
    forked = fork_branch(branch, branch.generation.rewind(at), at, body.name)
    await branches.add(forked)
    return await reply(forked, at)


@router.post("/{identity}/rewind", summary="Rewind to a step")
async def rewind(identity: str, body: RewindRequest, request: Request) -> Response:
    branches = branches_of(request)
    branch = await branches.open(identity)
    with branch.locked():
        to = branch.step_index(body.to, "to")
        rewound = branch.generation.rewind(to)
        await branches.store.replace_text(branch, rewound, to, "rewind")
    return await reply(branch, to)


@router.post("/{identity}/choose", summary="Replace the token at a step")
async def choose(identity: str, body: ChooseRequest, request: Request) -> Response:
    branches = branches_of(request)
    branch = await branches.open(identity)
    at = branch.step_index(body.at, "at")
    branches.make_room(1 if body.fork else 0, branch)
    with nullcontext() if body.fork else branch.locked():
        tokens = None if body.token is None else [body.token]
        copy = branch.generation.rewind(at)  # the branch may be running
        async with state_of(request).call(request, branch.model) as call:
            draft = await call.compute(attach, branch, copy, call.served.lm)
            changed = await call.compute(_append_scored, call, draft, body.text, tokens)
        if body.fork:
            branch = fork_branch(branch, changed, at, body.name)
            await branches.add(branch)
        else:
            at = min(at, await branches.store.set_text(branch, changed, "choose"))
    return await reply(branch, at)


def _append_scored(
    call: Call, draft: Generation, text: str | None, tokens: list[int] | None
) -> Generation:
    """Append text or tokens to a draft, with the model's scores."""
    if (text is None) == (tokens is None):
        raise bad_request("give either text or tokens", "text")
    lm: Session = call.served.lm
    if text is not None:
        call.check_text(text)
        tokens = lm.tokenizer.encode(text)
    assert tokens is not None
    lm.prompt_ids([*draft.prompt, *draft.tokens, *tokens])
    for start in range(0, len(tokens), _SCORED_TOKENS):
        draft = draft.choose(tokens[start : start + _SCORED_TOKENS])
    return draft
