"""`doubt` and `revise` of `/v1/tree`: which steps are doubtful, and what would fit better."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.decoding.edit.doubt import Doubt, causal_surprise, masked_surprise
from unspool.decoding.edit.proposals import Unit, proposals, units
from unspool.decoding.fill.fill import drafting
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

# A person waits for them: fewer first tokens are weighed than in `lm.edit`.
_SINGLES, _DRAFTS, _CANDIDATES = 24, 2, 8
_REACH = 16  # tokens behind a word that are weighed
_TOLD = 5  # alternatives


class DoubtRequest(Strict):
    """Who doubts: the model's own surprise, a masked model that is served too, or both."""

    by: Literal["auto", "causal", "masked", "both"] = "auto"
    twin: str | None = Field(None, description="a masked model of this server")


class ReviseRequest(DoubtRequest):
    """How far to look for something better."""

    places: int = Field(24, ge=1, le=256, description="words looked at, the most doubtful first")
    least: float = Field(0.0, ge=0, le=1, description="tell proposals at least so probable")
    stream: bool = False


@router.post("/{identity}/doubt", summary="How doubtful each step is, in nats")
async def doubt(identity: str, body: DoubtRequest, request: Request) -> Response:
    branch = branches_of(request).get(identity)
    tokens, plain = branch.tokens, PlainText.of(branch)
    call = await state_of(request).enter(request, branch.model)
    twin = await _twin(call, body)
    levels = await call.thread(_levels, call, tokens, plain, body.by, twin)
    told = {"object": "tree.doubt", "branch": identity, "doubts": [round(x, 4) for x in levels]}
    return JsonReply(told)


@router.post("/{identity}/revise", summary="Proposals for doubtful words; nothing is changed")
async def revise(identity: str, body: ReviseRequest, request: Request) -> Response:
    """Each proposal is a change as `replace` takes it. With `stream` an event `proposal` comes as
    soon as one is found; `looked` counts the words that were looked at."""
    branch = branches_of(request).get(identity)
    _check_words(branch)
    tokens, plain = branch.tokens, PlainText.of(branch)
    call = await state_of(request).enter(request, branch.model)
    if call.served.lm.config.sight != "causal":
        raise bad_request("revisions are ranked by a causal model; this one fills masked places")
    twin = await _twin(call, body)
    found = await call.hold(Worker(_revised(call, tokens, plain, body, twin), call.run))
    if body.stream:
        return call.stream(writer_from(_events(identity, found)), error_event)
    return await call.reply(_whole(identity, found))


def _check_words(branch: TreeBranch) -> None:
    if not branch.generation.text.strip():
        raise bad_request("there is nothing to revise; write something first")


async def _twin(call: Call, body: DoubtRequest) -> MaskedModel | None:
    """The masked model that was named, held as long as the call is."""
    if body.twin is None:
        if body.by in ("masked", "both"):
            raise bad_request(f"by={body.by!r} asks a masked model; name one", "twin")
        return None
    served = await call.hold_model(body.twin)
    return masked_model(served.lm)


def _levels(
    call: Call, tokens: list[int], plain: PlainText, by: str, twin: MaskedModel | None
) -> list[float]:
    """Of each step. The causal model reads the branch as it is; a masked one its plain text."""
    count = len(plain.steps)
    if not count:
        return []
    lm = call.served.lm
    found = np.zeros(count)
    if by != "masked":
        if lm.config.sight != "causal":
            raise bad_request("doubt by surprise asks a causal model; name this one as a twin")
        own = causal_surprise(lm.score(tokens), len(tokens))
        found = np.maximum(own[len(tokens) - count :], 0.0)
    if twin is None or by == "causal":
        return [float(level) for level in found]
    masked = np.zeros(count)
    spans, levels = masked_surprise(twin, plain.text)
    for (start, end), level in zip(spans, levels, strict=True):
        first, last = plain.steps_of(start - len(plain.before), end - len(plain.before))
        if end > len(plain.before):
            masked[first:last] = np.maximum(masked[first:last], level)
    return [float(level) for level in (masked if by == "masked" else (found + masked) / 2)]


def _revised(
    call: Call, tokens: list[int], plain: PlainText, body: ReviseRequest, twin: MaskedModel | None
) -> Iterator[dict[str, Any] | None]:
    """A proposal or nothing for each word that is looked at."""
    levels = _levels(call, tokens, plain, body.by, twin)
    shift, text = len(plain.before), plain.text
    ends = [shift, *(shift + at for at in plain.ends)]
    doubts = [
        Doubt(step.token, step.text, ends[n], ends[n + 1], level)
        for n, (step, level) in enumerate(zip(plain.steps, levels, strict=True))
        if step.text
    ]
    how = drafting(call.served.lm, {}, candidates=_CANDIDATES, drafts=_DRAFTS)
    how = replace(how, singles=_SINGLES)
    inside = [unit for unit in units(text, doubts) if unit.start >= shift]
    for unit in inside[: body.places]:
        found = proposals(call.served.lm, text, unit, how, reach=_REACH, twin=twin)
        best = found[0]
        better = best.texts[0] != unit.text and best.probability >= body.least
        yield _proposal(plain, unit, found) if better else None


def _proposal(plain: PlainText, unit: Unit, found: Any) -> dict[str, Any]:
    start = unit.start - len(plain.before)
    now = next(filled for filled in found if filled.texts[0] == unit.text)
    new = found[0].texts[0]
    first, last, text = plain.instead(start, start + len(unit.text), new)
    return {
        "first": first,
        "last": last,
        "text": text,
        "old": unit.text,
        "new": new,
        "probability": found[0].probability,
        "gain": found[0].score - now.score,
        "doubt": unit.doubt,
        "alternatives": [[one.texts[0], one.probability] for one in found[:_TOLD]],
    }


async def _events(
    identity: str, found: Worker[dict[str, Any] | None]
) -> AsyncGenerator[bytes, None]:
    looked = proposed = 0
    async for one in found:
        looked += 1
        if one is None:
            yield event({"looked": looked}, "looked")
        else:
            proposed += 1
            yield event({"looked": looked, **one}, "proposal")
    yield event({"looked": looked, "proposals": proposed, "of": identity}, "done")


async def _whole(identity: str, found: Worker[dict[str, Any] | None]) -> dict[str, Any]:
    all_found = [one async for one in found]
    told = [one for one in all_found if one is not None]
    return {"object": "tree.revision", "branch": identity, "looked": len(all_found), "data": told}
