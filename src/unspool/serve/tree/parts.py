"""`fill` and `replace` of `/v1/tree`: what else could stand in a part of a text, and putting it
there while the rest stays."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import pairwise
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.decoding.fill.fill import fill
from unspool.decoding.fill.gaps import Gap
from unspool.engine.generation import Generation
from unspool.serve.core.schema import Strict
from unspool.serve.core.state import Call, state_of
from unspool.serve.core.step_json import finite
from unspool.serve.http.errors import bad_request
from unspool.serve.http.routes import JsonReply
from unspool.serve.tree.branch_json import branches_of, reply, router
from unspool.serve.tree.branches import TreeBranch, fork_branch
from unspool.serve.tree.plain import PlainText, checked_range
from unspool.serve.tree.schema import Name, Place

MAX_CANDIDATES = 32
MAX_CHANGES = 256
_JUDGED_AT_ONCE = 64
_LONGER = 2  # tokens that a candidate may have more than what it replaces
_LONGEST = 24


class FillRequest(Strict):
    """A part of a branch, as steps, for which others are wanted."""

    first: Place
    last: Place = Field(description="the step behind the part")
    candidates: int = Field(8, ge=1, le=MAX_CANDIDATES)
    least: int = Field(1, ge=1, le=_LONGEST, description="tokens of a candidate, at least ...")
    most: int | None = Field(
        None, ge=1, le=_LONGEST, description=f"... and at most (the part's, and {_LONGER} more)"
    )


class Replacement(Strict):
    """Other words for a part."""

    first: Place
    last: Place
    text: str


class ReplaceRequest(Strict):
    """Changes to a branch. What stands behind each stays, and is judged anew."""

    changes: Annotated[list[Replacement], Field(min_length=1, max_length=MAX_CHANGES)]
    fork: bool = Field(True, description="into a new branch, so that nothing is lost")
    name: Name | None = None


@router.post("/{identity}/fill", summary="What else could stand in a part, ranked with both sides")
async def fill_part(identity: str, body: FillRequest, request: Request) -> Response:
    """By FIM tokens or masks where the model has them, else by drafts from the left that are ranked
    by how likely they make what follows. What stands there now is among them. Nothing changes."""
    branch = branches_of(request).get(identity)
    first, last = checked_range(branch, body.first, body.last)
    plain = PlainText.of(branch)
    async with state_of(request).call(request, branch.model) as call:
        found: dict[str, Any] = await call.thread(_filled, call, plain, first, last, body)
    return JsonReply({"object": "tree.fill", "branch": identity, **found})


def _filled(
    call: Call, plain: PlainText, first: int, last: int, body: FillRequest
) -> dict[str, Any]:
    lm = call.served.lm
    start, end = plain.span(first, last)
    part = plain.written[start:end]
    core = part.strip()
    if not core:
        raise bad_request("the part has no words; choose some", "first")
    start += part.index(core)
    end = start + len(core)
    left, right = plain.before + plain.written[:start], plain.written[end:]
    call.check_text(left, core, right)
    most = body.most if body.most is not None else min(last - first + _LONGER, _LONGEST)
    parts = (left, Gap(min(body.least, most), most), right)
    made = fill(lm, parts, candidates=body.candidates)
    scores = {one.texts[0]: one.score for one in made.candidates if one.texts[0].strip("_ \n")}
    if made.by == "ranking" and core not in scores:
        now = fill(lm, parts, choices=[core], by="ranking").candidates[0]
        scores[core] = now.score
    best = max(scores.values(), default=0.0)
    total = math.fsum(math.exp(score - best) for score in scores.values()) or 1.0
    ranked = sorted(scores.items(), key=lambda each: -each[1])
    told = [
        {
            **_change(plain, start, end, words),
            "score": finite(score),
            "probability": math.exp(score - best) / total,
            "now": words == core,
        }
        for words, score in ranked
    ]
    return {"by": made.by, "old": core, "candidates": told}


def _change(plain: PlainText, start: int, end: int, words: str) -> dict[str, Any]:
    """A change as `replace` takes it, and its words alone."""
    first, last, text = plain.instead(start, end, words)
    return {"new": words, "first": first, "last": last, "text": text}


@router.post("/{identity}/replace", summary="Other words for parts of the text; the rest stays")
async def replace_parts(identity: str, body: ReplaceRequest, request: Request) -> Response:
    branches = branches_of(request)
    branch = branches.get(identity)
    changes = _in_order(branch, body.changes)
    at = changes[0][0]
    branches.make_room(1 if body.fork else 0)
    with nullcontext() if body.fork else branch.locked():
        draft = branch.generation.fork()  # as it stands now: others may go on writing it
        async with state_of(request).call(request, branch.model) as call:
            draft.source = call.served.lm
            changed: Generation = await call.thread(_replaced, call, draft, changes)
        if body.fork:
            branch = fork_branch(branch, changed, at, body.name)
            branches.add(branch)
        else:
            at = min(at, branch.put_text(changed, "replace"))
    return await reply(branch, at)


def _in_order(branch: TreeBranch, given: list[Replacement]) -> list[tuple[int, int, str]]:
    found = sorted((*checked_range(branch, one.first, one.last), one.text) for one in given)
    for (_, end, _), (start, _, _) in pairwise(found):
        if start < end:
            raise bad_request("two of the changes are about the same steps", "changes")
    return found


def _replaced(call: Call, draft: Generation, changes: list[tuple[int, int, str]]) -> Generation:
    lm, old = call.served.lm, draft.tokens
    call.check_text(*(text for _, _, text in changes))
    tokens, at = list[int](), changes[0][0]
    for first, last, text in changes:
        tokens += [*old[at:first], *lm.tokenizer.encode(text)]
        at = last
    tokens += old[at:]
    made = draft.rewind(changes[0][0])
    lm.prompt_ids([*made.prompt, *made.tokens, *tokens])
    for start in range(0, len(tokens), _JUDGED_AT_ONCE):
        made = made.choose(tokens[start : start + _JUDGED_AT_ONCE])
    return made
