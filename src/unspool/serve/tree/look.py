"""`alternatives` and `look` of `/v1/tree`: what could stand at a place, and what goes on inside.

All of it runs on a thread, on tokens that were taken from the branch when it was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from unspool.lens.attribution import attribution
from unspool.lens.logit_lens import logit_lens
from unspool.lens.look import Look, look
from unspool.lens.neighbours import neighbours
from unspool.lens.weights import host
from unspool.sampling import log_softmax, score
from unspool.serve.core.state import state_of
from unspool.serve.core.step_json import finite
from unspool.serve.http.errors import bad_request
from unspool.serve.http.routes import JsonReply
from unspool.serve.tree.branch_json import branches_of, router, sampling
from unspool.serve.tree.schema import Place
from unspool.session import Session

MAX_ALTERNATIVES = 500
MAX_NUMBERS = 2_000_000  # of attention in one answer
MAX_CELLS = 18_000  # of vectors in one answer: 31 rows of 576 numbers, about 60 KB
FINEST = 999  # a cell is a whole number from -FINEST to FINEST
MAX_DIALS = 8
INCLUDES = ("attention", "lens", "attribution", "neighbours", "vectors")
_TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.7, 2.0, 3.0, 5.0)


@router.get("/{identity}/alternatives", summary="What could stand at a place")
async def alternatives_at(
    identity: str,
    request: Request,
    at: Annotated[Place | None, Query(description="a step; negative: counted from behind")] = None,
    top: Annotated[int, Query(ge=0, le=MAX_ALTERNATIVES)] = 10,
) -> Response:
    """The likeliest tokens by the model alone, before any sampling stage: enough to work out other
    settings elsewhere. `rest` sums up all others; its `log_sums` tell, for several temperatures T,
    the logarithm of the sum of exp(logprob / T) over them."""
    branch = branches_of(request).get(identity)
    at = branch.place(at, "at")
    ids = [*branch.prompt.ids, *branch.generation.tokens[:at]]
    picked = branch.steps[at].token if at < len(branch.steps) else None
    head = {"object": "tree.alternatives", "branch": identity, "at": at}
    settings = sampling(branch.generation.settings)
    async with state_of(request).call(request, branch.model) as call:
        found = await call.thread(alternatives, call.served.lm, ids, picked, top)
    return JsonReply({**head, **found, "settings": settings})


class LookOptions(BaseModel):
    """What somebody wants to see."""

    at: Place | None = Field(None, description="a position of the whole text")
    step: Place | None = Field(None, description="how this step was picked")
    include: str | None = Field(None, max_length=200, description=", ".join(INCLUDES))
    heads: bool = False
    layer: Place | None = Field(None, description="from 1")
    head: Place | None = Field(None, description="from 1")
    top: int = Field(5, ge=0, le=50)
    token: int | None = Field(None, ge=0, lt=1 << 31)
    against: str | None = Field(None, pattern=r"^(mean|\d{1,9})$")

    def included(self) -> frozenset[str]:
        """From `attention,lens`; without anything, all there is."""
        if self.include is None:
            return frozenset(INCLUDES)
        names = [name.strip() for name in self.include.split(",") if name.strip()]
        for name in names:
            if name not in INCLUDES:
                known = ", ".join(INCLUDES)
                raise bad_request(f"include names {name[:40]!r}; there is {known}", "include")
        return frozenset(names)

    def baseline(self) -> int | Literal["mean"] | None:
        """What an attribution is measured against."""
        if self.against is None or self.against == "mean":
            return "mean" if self.against else None
        return int(self.against)


@router.get("/{identity}/look", summary="Inside the model at one position")
async def look_at(
    identity: str, request: Request, options: Annotated[LookOptions, Query()]
) -> Response:
    """A position is that of the token being read, prompt included, negative ones counted from
    behind; what the model says there is about the token after it. So `step=N`, how the token of
    step N came to be picked, is the same as `at` = prompt_tokens + N - 1. Without either, the
    last position: what comes next."""
    branch = branches_of(request).get(identity)
    if options.at is not None and options.step is not None:
        raise bad_request("give either at or step", "at")
    position = -1 if options.at is None else options.at
    if options.step is not None:
        position = len(branch.prompt.ids) + branch.place(options.step, "step") - 1
    options.included()
    tokens = branch.tokens
    head = {"object": "tree.look", "branch": identity, "prompt_tokens": len(branch.prompt.ids)}
    async with state_of(request).call(request, branch.model) as call:
        reply: Response = await call.thread(
            lambda: JsonReply({**head, **look_json(call.served.lm, tokens, position, options)})
        )
    return reply


def alternatives(
    lm: Session, tokens: Sequence[int], picked: int | None, top: int
) -> dict[str, Any]:
    """The likeliest tokens behind these, by the model alone, and the sum of all others."""
    lm.prompt_ids(tokens)
    with lm.opened(tokens) as branch:
        logits = lm.engine.extend(branch)[-1:]
    found = score(logits, [picked or 0], top)
    ids, logprobs = found.top_tokens[0], found.top_logprobs[0]
    begun = lm.begun(tokens)
    candidates = [
        {
            "token": int(token),
            "text": lm.readable(int(token), begun),
            "logprob": finite(float(logprob)),
            "probability": math.exp(logprob),
        }
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    others = np.delete(host(log_softmax(logits))[0].astype(np.float64), ids)
    return {
        "position": len(tokens),
        "entropy": max(0.0, float(found.entropies[0])),
        "candidates": candidates,
        "picked": None
        if picked is None
        else {
            "token": picked,
            "text": lm.readable(picked, begun),
            "logprob": finite(float(found.logprobs[0])),
            "rank": int(found.ranks[0]),
        },
        "rest": {
            "tokens": others.size,
            "mass": float(np.exp(others).sum()) if others.size else 0.0,
            "log_sums": [[t, _log_sum(others / t)] for t in _TEMPERATURES],
        },
    }


def _log_sum(levels: Any) -> float | None:
    if not levels.size:
        return None
    peak = float(levels.max())
    return finite(peak + math.log(float(np.exp(levels - peak).sum()))) if peak > -math.inf else None


def look_json(
    lm: Session, tokens: Sequence[int], position: int, options: LookOptions
) -> dict[str, Any]:
    """Inside the model as it read the token at this position."""
    seen, parts = look(lm, tokens, position), options.included()
    begun = lm.begun(seen.tokens)
    layers = _picked(options.layer, len(seen.attention), "layer")
    heads = _picked(options.head, seen.attention.shape[1], "head")
    found: dict[str, Any] = {
        "position": seen.position,
        "token": {"id": seen.tokens[-1], "text": seen.texts[-1]},
        "picked": None if seen.picked is None else _token(lm, seen.picked, begun),
        "likeliest": _token(lm, seen.likeliest, begun),
        "layers": len(seen.attention),
        "heads": seen.attention.shape[1],
        "norms": _numbers(seen.norms),
        "part_norms": _numbers(seen.part_norms),
    }
    if seen.states:  # layers that have no attention
        found["states"] = seen.states
    if "attention" in parts:
        found["tokens"] = [
            {"id": token, "text": text} for token, text in zip(seen.tokens, seen.texts, strict=True)
        ]
        found["attention"] = _attention(seen, options, layers, heads)
    if "lens" in parts:
        found["lens"] = logit_lens(lm, seen, top=options.top, token=options.token).to_dict()
    if "attribution" in parts:
        shares = attribution(lm, seen, token=options.token, against=options.baseline())
        found["attribution"] = shares.to_dict()
    if "neighbours" in parts:
        near = neighbours(lm, seen.tokens[-1], options.top)
        found["neighbours"] = [each.to_dict() for each in near]
    if "vectors" in parts:
        found["vectors"] = _vectors(seen)
        found["position_told"] = _position_json(lm, seen.position)
        found["head"] = _head(lm, seen, options.top)
    return found


def _vectors(seen: Look) -> dict[str, Any]:
    """The vector before the first layer and after each, coarse enough for a picture.

    A number is its cell times the row's scale. A wide vector is told by the number furthest from
    zero of each run of `every` neighbours: fewer numbers, and none that is not there.
    """
    rows = seen.residuals.astype(np.float64)
    width = rows.shape[1]
    every = -(-width * len(rows) // MAX_CELLS)
    if every > 1:
        runs = np.pad(rows, ((0, 0), (0, -width % every))).reshape(len(rows), -1, every)
        furthest = np.abs(runs).argmax(-1)[..., None]
        rows = np.take_along_axis(runs, furthest, -1)[..., 0]
    scales = np.abs(rows).max(1) / FINEST
    cells = np.round(rows / np.where(scales > 0, scales, 1.0)[:, None])
    return {
        "width": width,
        "every": every,
        "scales": [float(f"{scale:.6g}") for scale in scales],
        "cells": cells.astype(int).tolist(),
    }


def _position_json(lm: Session, position: int) -> dict[str, Any]:
    """How the model is told where the token stands; `dials` are angles, fast pairs first."""
    rotary = lm.config.rotary
    if lm.config.positions != "rotary" or rotary is None:
        return {"way": lm.config.positions, "pairs": 0, "dials": []}
    turns = rotary.frequencies(lm.context).astype(np.float64)
    picked = np.unique(np.linspace(0, len(turns) - 1, min(MAX_DIALS, len(turns))).round())
    dials = [
        {"pair": int(pair) + 1, "angle": round(float(position * turns[int(pair)]), 6)}
        for pair in picked
    ]
    return {"way": "rotary", "pairs": len(turns), "dials": dials}


def _head(lm: Session, seen: Look, top: int) -> dict[str, Any]:
    """The end of the way: the length behind the final norm, and what the head makes of it."""
    followed = seen.likeliest if seen.picked is None else seen.picked
    found = score(seen.logits[None], [followed], top)
    normed = lm.model.normed(seen.residuals[-1:])[0].astype(np.float64)

    begun = lm.begun(seen.tokens)

    def candidate(token: int, logprob: float) -> dict[str, Any]:
        return {
            **_token(lm, token, begun),
            "logit": round(float(seen.logits[token]), 6),
            "probability": math.exp(logprob),
        }

    best = zip(found.top_tokens[0], found.top_logprobs[0], strict=True)
    return {
        "norm": round(float(np.linalg.norm(normed)), 6),
        "vocabulary": len(seen.logits),
        "candidates": [candidate(int(token), float(logprob)) for token, logprob in best],
        "followed": {**candidate(followed, float(found.logprobs[0])), "rank": int(found.ranks[0])},
    }


def _attention(
    seen: Look, options: LookOptions, layers: list[int], heads: list[int]
) -> dict[str, Any]:
    """Rows over the tokens so far; nothing beyond the position is there to be seen."""
    past = seen.attention.shape[-1]
    rows = 1 + len(layers) * (1 + (len(heads) if options.heads else 0))
    if rows * past > MAX_NUMBERS:
        raise bad_request(
            f"that would be {rows * past:,} numbers, and an answer has at most {MAX_NUMBERS:,}; "
            "name a layer, or a head, or leave heads out",
            "layer",
        )
    part = seen.attention[layers][:, heads]
    found: dict[str, Any] = {
        "layers": [layer + 1 for layer in layers],
        "heads": [head + 1 for head in heads],
        "mean": _numbers(_mean(seen, layers, heads)),
        "by_layer": _numbers(part.mean(1, dtype=np.float64)),
        "map": _map(part),
        # Many heads rest on the first token when they have nothing to say: the map of the others.
        "map_without_first": None,
    }
    if past > 1:
        others = part[..., 1:].astype(np.float64)
        sums = np.maximum(others.sum(-1, keepdims=True), 1e-30)
        found["map_without_first"] = _map(others / sums, first=1)
    if options.heads:
        found["by_head"] = _numbers(part)
    return found


def _mean(seen: Look, layers: list[int], heads: list[int]) -> Any:
    """Over heads and the layers that have attention; of a recurrent one alone there is none."""
    attending = [layer for layer in layers if layer in seen.attending] or layers
    return seen.attention[attending][:, heads].mean((0, 1), dtype=np.float64)


def _map(rows: Any, first: int = 0) -> dict[str, Any]:
    """A small map of the heads: where each looks most, how much, and how widely."""
    return {
        "place": (rows.argmax(-1) + first).tolist(),
        "weight": _numbers(rows.max(-1)),
        "entropy": _numbers(_entropies(rows)),
    }


def _entropies(rows: Any) -> Any:
    doubles = rows.astype(np.float64)
    return -(doubles * np.log(np.maximum(doubles, 1e-30))).sum(-1)


def _picked(number: int | None, count: int, name: str) -> list[int]:
    if number is None:
        return list(range(count))
    if not 1 <= number <= count:
        raise bad_request(f"{name} is {number}; the model has 1 to {count}", name)
    return [number - 1]


def _token(lm: Session, token: int, begun: bytes) -> dict[str, Any]:
    return {"id": token, "text": lm.readable(token, begun)}


def _numbers(values: Any) -> Any:
    return np.round(np.asarray(values, np.float64), 6).tolist()
