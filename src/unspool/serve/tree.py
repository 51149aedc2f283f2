"""`/v1/tree`: texts as branches of a tree that can be taken back, changed and gone on with.

A branch is a prompt and the steps behind it, and stays until it is deleted. Places are counted in
steps: step 0 is the first token behind the prompt. Only `look` counts positions in the whole text,
prompt included. Whoever changes a branch that is being written is told so (409); reading one,
forking it and choosing into a fork are always possible.

The verbs are here; `resume` and whoever watches in `tree_resume.py`, looking inside in
`tree_look.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from unspool.engine.generation import Generation
from unspool.lm import LanguageModel
from unspool.serve import tree_look, tree_resume, tree_try  # noqa: F401  they put their routes in
from unspool.serve.branch_told import summary
from unspool.serve.branches import TreeBranch
from unspool.serve.chat import message_of
from unspool.serve.faults import refused
from unspool.serve.house import Call, house_of
from unspool.serve.json_reply import JsonReply
from unspool.serve.schemas.tree import Added, Chosen, Forked, NewBranch, Renamed, Rewound
from unspool.serve.tree_prompt import new_branch, turn
from unspool.serve.tree_shared import branches_of, reply, router

__all__ = ["router"]
_JUDGED_AT_ONCE = 64  # tokens: each needs a row of logits over the whole vocabulary


# -- branches ------------------------------------------------------------------------------------


@router.post("", summary="A new branch from a prompt; nothing is computed yet")
async def create(body: NewBranch, request: Request) -> Response:
    branches = branches_of(request)
    branches.make_room()
    async with house_of(request).visit(request, body.model) as call:
        branch: TreeBranch = await call.thread(new_branch, call, body)
    return await reply(branches.add(branch), 0, prompt=True)


@router.get("", summary="All branches, the newest first, with whom they were forked from")
async def list_branches(request: Request) -> Response:
    found = [summary(branch) for branch in reversed(branches_of(request).all.values())]
    return JsonReply({"object": "list", "data": found})


@router.get("/{identity}", summary="One branch: its prompt, its steps, how it went")
async def get(
    identity: str,
    request: Request,
    steps: bool = True,
    prompt: bool = True,
    since: Annotated[int, Query(ge=0, lt=1 << 31)] = 0,
) -> Response:
    branch = branches_of(request).get(identity)
    return await reply(branch, since if steps else None, prompt=prompt)


@router.patch("/{identity}", summary="Give it a name, or its writing another pace")
async def rename(identity: str, body: Renamed, request: Request) -> Response:
    branch = branches_of(request).get(identity)
    if "name" in body.model_fields_set:
        branch.name = body.name
        branch.changed()
    if "pace" in body.model_fields_set and branch.writing is not None:
        branch.writing.set_pace(body.pace)
    return await reply(branch, None)


@router.delete("/{identity}", summary="Let a branch go; its children stay")
async def delete(identity: str, request: Request) -> Response:
    branches = branches_of(request)
    branches.delete(branches.get(identity))
    return JsonReply({"id": identity, "object": "tree.branch.deleted", "deleted": True})


# -- the verbs -----------------------------------------------------------------------------------


@router.post("/{identity}/append", summary="Put a person's own words at the end")
async def append(identity: str, body: Added, request: Request) -> Response:
    branch = branches_of(request).get(identity)
    with branch.claimed():
        since = len(branch.steps)
        async with house_of(request).visit(request, branch.model) as call:
            draft, tokens = branch.at_hand(call.served.lm), body.tokens
            if body.message is not None:
                if tokens is not None:
                    raise refused("give either a message or the ids of tokens", "message")
                tokens = await call.thread(turn, call, branch, message_of(body.message))
            made = await call.thread(_chosen, call, draft, body.text, tokens)
        since = min(since, _put(branch, made, "append"))
    return await reply(branch, since)


@router.post("/{identity}/fork", summary="A new branch that shares the first steps")
async def fork(identity: str, body: Forked, request: Request) -> Response:
    branches = branches_of(request)
    branch = branches.get(identity)
    at = branch.place(body.at, "at")
    forked = branches.fork(branch, branch.generation.rewind(at), at, body.name)
    return await reply(forked, at)


@router.post("/{identity}/rewind", summary="Take steps back")
async def rewind(identity: str, body: Rewound, request: Request) -> Response:
    branch = branches_of(request).get(identity)
    branch.check_free()
    to = branch.place(body.to, "to")
    branch.put(branch.generation.rewind(to), to, "rewind")
    return await reply(branch, to)


@router.post("/{identity}/choose", summary="Put another token, or other words, at one place")
async def choose(identity: str, body: Chosen, request: Request) -> Response:
    branches = branches_of(request)
    branch = branches.get(identity)
    at = branch.place(body.at, "at")
    if body.fork:
        branches.make_room()
    with nullcontext() if body.fork else branch.claimed():
        tokens = None if body.token is None else [body.token]
        draft = branch.generation.rewind(at)  # as it stands now: others may go on writing it
        async with house_of(request).visit(request, branch.model) as call:
            draft.source = call.served.lm
            made = await call.thread(_chosen, call, draft, body.text, tokens)
        if body.fork:
            branch = branches.fork(branch, made, at, body.name)
        else:
            at = min(at, _put(branch, made, "choose"))
    return await reply(branch, at)


def _put(branch: TreeBranch, made: Generation, verb: str) -> int:
    """A changed text into its branch; gives from where on it differs."""
    pairs = zip(branch.steps, made.steps, strict=False)
    same = [old.token == new.token and old.text == new.text for old, new in pairs]
    kept = same.index(False) if False in same else len(same)
    branch.put(made, kept, verb)
    return kept


def _chosen(
    call: Call, draft: Generation, text: str | None, tokens: list[int] | None
) -> Generation:
    """The draft with these words at its end, as the model judges them."""
    if (text is None) == (tokens is None):
        raise refused("give either text or the ids of tokens", "text")
    lm: LanguageModel = call.served.lm
    if text is not None:
        call.check_text(text)
        tokens = lm.tokenizer.encode(text)
    assert tokens is not None
    lm.prompt_ids([*draft.prompt, *draft.tokens, *tokens])
    for start in range(0, len(tokens), _JUDGED_AT_ONCE):
        draft = draft.choose(tokens[start : start + _JUDGED_AT_ONCE])
    return draft
