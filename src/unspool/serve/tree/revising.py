"""`doubt` and `revise` of `/v1/tree`: score how doubtful steps are, and propose better words."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.decoding.edit.doubt import Doubt, causal_surprise, masked_surprise
from unspool.decoding.edit.proposals import EditUnit, propose_replacements, split_units
from unspool.decoding.fill.fill import draft_settings
from unspool.decoding.fill.masked import MaskedModel, masked_model
from unspool.serve.core.schema import Strict
from unspool.serve.core.state import Call, state_of
from unspool.serve.http.errors import bad_request
from unspool.serve.http.events import error_event, event, writer_from
from unspool.serve.http.routes import JsonReply
from unspool.serve.http.threads import Worker
from unspool.serve.tree.branch_json import branches_of, router
from unspool.serve.tree.branches import TreeBranch
from unspool.serve.tree.plain import PlainText

# Interactive: fewer candidates than in `lm.edit`.
_SINGLES, _DRAFTS, _CANDIDATES = 24, 2, 8
_REACH = 16  # tokens after a word that are scored
_NUM_ALTERNATIVES = 5  # reported


class DoubtRequest(Strict):
    """The source of doubt: the model's surprise, a served masked model, or both."""

    by: Literal["auto", "causal", "masked", "both"] = "auto"
    twin: str | None = Field(None, description="a masked model of this server")


class ReviseRequest(DoubtRequest):
    """How many words to revise."""

    places: int = Field(24, ge=1, le=256, description="words to check, the most doubtful first")
    least: float = Field(0.0, ge=0, le=1, description="lowest probability of a proposal")
    stream: bool = False


@router.post("/{identity}/doubt", summary="How doubtful each step is, in nats")
async def doubt(identity: str, body: DoubtRequest, request: Request) -> Response:
    branch = branches_of(request).get(identity)
    tokens, plain = branch.tokens, PlainText.from_branch(branch)
    call = await state_of(request).enter(request, branch.model)
    twin = await _hold_twin(call, body)
    levels = await call.compute(_levels, call, tokens, plain, body.by, twin)
    doubts = [round(level, 4) for level in levels]
    return JsonReply({"object": "tree.doubt", "branch": identity, "doubts": doubts})


@router.post("/{identity}/revise", summary="Proposals for doubtful words; nothing is changed")
async def revise(identity: str, body: ReviseRequest, request: Request) -> Response:
    """Each proposal is a change for `replace`. With `stream`, event `proposal` is sent as soon as
    there is one; `looked` counts the words checked so far."""
    branch = branches_of(request).get(identity)
    _check_words(branch)
    tokens, plain = branch.tokens, PlainText.from_branch(branch)
    call = await state_of(request).enter(request, branch.model)
    if call.served.lm.config.sight != "causal":
        raise bad_request("revise needs a causal model; this one is a masked model")
    twin = await _hold_twin(call, body)
    proposed = await call.hold(Worker(_revise(call, tokens, plain, body, twin), call.run))
    if body.stream:
        return call.stream(writer_from(_revision_events(identity, proposed)), error_event)
    return await call.reply(_revision_json(identity, proposed))


def _check_words(branch: TreeBranch) -> None:
    if not branch.generation.text.strip():
        raise bad_request("the branch has no text to revise")


async def _hold_twin(call: Call, body: DoubtRequest) -> MaskedModel | None:
    """The masked model of the request, held until the call ends."""
    if body.twin is None:
        if body.by in ("masked", "both"):
            raise bad_request(f"by={body.by!r} needs a masked model", "twin")
        return None
    served = await call.hold_model(body.twin)
    return masked_model(served.lm)


def _levels(
    call: Call, tokens: list[int], plain: PlainText, by: str, twin: MaskedModel | None
) -> list[float]:
    """The doubt of each step. A causal model reads the branch, a masked one its plain text."""
    count = len(plain.steps)
    if not count:
        return []
    lm = call.served.lm
    causal = np.zeros(count)
    if by != "masked":
        if lm.config.sight != "causal":
            raise bad_request("by=causal needs a causal model; use this one as twin")
        surprise = causal_surprise(lm.score(tokens), len(tokens))
        causal = np.maximum(surprise[len(tokens) - count :], 0.0)
    if twin is None or by == "causal":
        return [float(level) for level in causal]
    masked = np.zeros(count)
    spans, levels = masked_surprise(twin, plain.text)
    for (start, end), level in zip(spans, levels, strict=True):
        first, last = plain.steps_of(start - len(plain.before), end - len(plain.before))
        if end > len(plain.before):
            masked[first:last] = np.maximum(masked[first:last], level)
    return [float(level) for level in (masked if by == "masked" else (causal + masked) / 2)]


def _revise(
    call: Call, tokens: list[int], plain: PlainText, body: ReviseRequest, twin: MaskedModel | None
) -> Iterator[dict[str, Any] | None]:
    """Yield a proposal or None for each word."""
    levels = _levels(call, tokens, plain, body.by, twin)
    shift, text = len(plain.before), plain.text
    ends = [shift, *(shift + at for at in plain.ends)]
    doubts = [
        Doubt(step.token, step.text, ends[n], ends[n + 1], level)
        for n, (step, level) in enumerate(zip(plain.steps, levels, strict=True))
        if step.text
    ]
    options = draft_settings(call.served.lm, {}, candidates=_CANDIDATES, drafts=_DRAFTS)
    options = replace(options, singles=_SINGLES)
    inside = [unit for unit in split_units(text, doubts) if unit.start >= shift]
    for unit in inside[: body.places]:
        ranked = propose_replacements(call.served.lm, text, unit, options, reach=_REACH, twin=twin)
        best = ranked[0]
        is_better = best.texts[0] != unit.text and best.probability >= body.least
        yield _proposal_json(plain, unit, ranked) if is_better else None


def _proposal_json(plain: PlainText, unit: EditUnit, ranked: Any) -> dict[str, Any]:
    start = unit.start - len(plain.before)
    current = next(filled for filled in ranked if filled.texts[0] == unit.text)
    new = ranked[0].texts[0]
    first, last, text = plain.replacement(start, start + len(unit.text), new)
    return {
        "first": first,
        "last": last,
        "text": text,
        "old": unit.text,
        "new": new,
        "probability": ranked[0].probability,
        "gain": ranked[0].score - current.score,
        "doubt": unit.doubt,
        "alternatives": [
            [filled.texts[0], filled.probability] for filled in ranked[:_NUM_ALTERNATIVES]
        ],
    }


async def _revision_events(
    identity: str, proposed: Worker[dict[str, Any] | None]
) -> AsyncGenerator[bytes, None]:
    looked = num_proposals = 0
    async for proposal in proposed:
        looked += 1
        if proposal is None:
            yield event({"looked": looked}, "looked")
        else:
            num_proposals += 1
            yield event({"looked": looked, **proposal}, "proposal")
    yield event({"looked": looked, "proposals": num_proposals, "of": identity}, "done")


async def _revision_json(identity: str, proposed: Worker[dict[str, Any] | None]) -> dict[str, Any]:
    results = [proposal async for proposal in proposed]
    data = [proposal for proposal in results if proposal is not None]
    return {"object": "tree.revision", "branch": identity, "looked": len(results), "data": data}
