"""`fill` and `replace` of `/v1/tree`: propose other words for a part of a text, and replace it."""

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
_SCORED_IN_A_CALL = 64  # tokens
_EXTRA_TOKENS = 2  # that a candidate may have more than the part it replaces
_MAX_CANDIDATE_TOKENS = 24


class FillRequest(Strict):
    """A range of steps to propose replacements for."""

    first: Place
    last: Place = Field(description="the step after the part")
    candidates: int = Field(8, ge=1, le=MAX_CANDIDATES)
    least: int = Field(
        1, ge=1, le=_MAX_CANDIDATE_TOKENS, description="fewest tokens of a candidate"
    )
    most: int | None = Field(
        None,
        ge=1,
        le=_MAX_CANDIDATE_TOKENS,
        description=f"most tokens of a candidate (those of the part, and {_EXTRA_TOKENS} more)",
    )


class Replacement(Strict):
    """A new text for a range of steps."""

    first: Place
    last: Place
    text: str


class ReplaceRequest(Strict):
    """Changes to a branch. The text after each stays, and is scored again."""

    changes: Annotated[list[Replacement], Field(min_length=1, max_length=MAX_CHANGES)]
    fork: bool = Field(True, description="into a new branch; the old one stays")
    name: Name | None = None


@router.post("/{identity}/fill", summary="Propose replacements for a part, ranked by both sides")
async def fill_part(identity: str, body: FillRequest, request: Request) -> Response:
    """With FIM tokens or masks where the model has them, else with drafts from the left that are
    ranked by how likely they make the following text. Includes the current text."""
    branch = branches_of(request).get(identity)
    first, last = checked_range(branch, body.first, body.last)
    plain = PlainText.from_branch(branch)
    async with state_of(request).call(request, branch.model) as call:
        filled: dict[str, Any] = await call.compute(_propose, call, plain, first, last, body)
    return JsonReply({"object": "tree.fill", "branch": identity, **filled})


def _propose(
    call: Call, plain: PlainText, first: int, last: int, body: FillRequest
) -> dict[str, Any]:
    lm = call.served.lm
    start, end = plain.span(first, last)
    part = plain.written[start:end]
    core = part.strip()
    if not core:
        raise bad_request("the part has no words", "first")
    start += part.index(core)
    end = start + len(core)
    prefix, suffix = plain.before + plain.written[:start], plain.written[end:]
    call.check_text(prefix, core, suffix)
    most = body.most
    if most is None:
        most = min(last - first + _EXTRA_TOKENS, _MAX_CANDIDATE_TOKENS)
    parts = (prefix, Gap(min(body.least, most), most), suffix)
    filling = fill(lm, parts, candidates=body.candidates)
    candidates = [(filled.texts[0], filled.score) for filled in filling.candidates]
    scores = {text: score for text, score in candidates if text.strip("_ \n")}
    if filling.by == "ranking" and core not in scores:
        now = fill(lm, parts, choices=[core], by="ranking").candidates[0]
        scores[core] = now.score
    best = max(scores.values(), default=0.0)
    total = math.fsum(math.exp(score - best) for score in scores.values()) or 1.0
    ranked = sorted(scores.items(), key=lambda item: -item[1])
    proposals = [
        {
            **_change_json(plain, start, end, words),
            "score": finite(score),
            "probability": math.exp(score - best) / total,
            "now": words == core,
        }
        for words, score in ranked
    ]
    return {"by": filling.by, "old": core, "candidates": proposals}


def _change_json(plain: PlainText, start: int, end: int, words: str) -> dict[str, Any]:
    """A change for `replace`, and its new words."""
    first, last, text = plain.replacement(start, end, words)
    return {"new": words, "first": first, "last": last, "text": text}


@router.post("/{identity}/replace", summary="Replace parts of the text; the rest stays")
async def replace_parts(identity: str, body: ReplaceRequest, request: Request) -> Response:
    branches = branches_of(request)
    branch = branches.get(identity)
    changes = _sort_changes(branch, body.changes)
    at = changes[0][0]
    branches.make_room(1 if body.fork else 0)
    with nullcontext() if body.fork else branch.locked():
        draft = branch.generation.fork()  # a copy: the branch may be running
        async with state_of(request).call(request, branch.model) as call:
            draft.source = call.served.lm
            changed: Generation = await call.compute(_replace_parts, call, draft, changes)
        if body.fork:
            branch = fork_branch(branch, changed, at, body.name)
            branches.add(branch)
        else:
            at = min(at, branch.set_text(changed, "replace"))
    return await reply(branch, at)


def _sort_changes(
    branch: TreeBranch, replacements: list[Replacement]
) -> list[tuple[int, int, str]]:
    changes = sorted(
        (*checked_range(branch, change.first, change.last), change.text) for change in replacements
    )
    for (_, end, _), (start, _, _) in pairwise(changes):
        if start < end:
            raise bad_request("changes must not overlap", "changes")
    return changes


def _replace_parts(
    call: Call, draft: Generation, changes: list[tuple[int, int, str]]
) -> Generation:
    lm, old = call.served.lm, draft.tokens
    call.check_text(*(text for _, _, text in changes))
    tokens, at = list[int](), changes[0][0]
    for first, last, text in changes:
        tokens += [*old[at:first], *lm.tokenizer.encode(text)]
        at = last
    tokens += old[at:]
    changed = draft.rewind(changes[0][0])
    lm.prompt_ids([*changed.prompt, *changed.tokens, *tokens])
    for start in range(0, len(tokens), _SCORED_IN_A_CALL):
        changed = changed.choose(tokens[start : start + _SCORED_IN_A_CALL])
    return changed
