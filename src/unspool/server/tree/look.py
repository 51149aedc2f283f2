"""`alternatives` and `look` of `/v1/tree`: candidate tokens at a step, and model internals.

Both run on a thread, on a copy of the branch's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
from fastapi import Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from unspool.backends.interventions import BranchInterventions
from unspool.engine.generation import Generation
from unspool.lens.activations import Activations, TextLike, get_activations, to_numpy
from unspool.lens.attribution import attribution
from unspool.lens.embeddings import neighbours
from unspool.sampling import log_softmax, score
from unspool.server.http.errors import bad_request
from unspool.server.http.replies import JsonReply
from unspool.server.runtime.state import state_of
from unspool.server.runtime.texts import finite, step_json
from unspool.server.tree.branch_json import branches_of, router, sampling_json
from unspool.server.tree.parts import attach
from unspool.server.tree.prompt import Place, WriteOptions
from unspool.session import Session

if TYPE_CHECKING:
    from unspool.lm import LanguageModel

MAX_ALTERNATIVES = 500
MAX_NUMBERS = 2_000_000  # of attention in one answer
MAX_CELLS = 18_000  # of vectors in one answer: 31 rows of 576 numbers, about 60 KB
MAX_CELL = 999  # a cell is an integer from -MAX_CELL to MAX_CELL
MAX_DIALS = 8
INCLUDES = ("attention", "lens", "attribution", "neighbours", "vectors")
_TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.7, 2.0, 3.0, 5.0)


@router.get("/{identity}/alternatives", summary="Candidate tokens at a step")
async def alternatives_at(
    identity: str,
    request: Request,
    at: Annotated[Place | None, Query(description="a step; negative: from the end")] = None,
    top: Annotated[int, Query(ge=0, le=MAX_ALTERNATIVES)] = 10,
) -> Response:
    """The most likely tokens of the model, before any sampling stage: enough for a client to apply
    other settings. `rest` sums up all other tokens; its `log_sums` have, for several temperatures
    T, the logarithm of the sum of exp(logprob / T) over them."""
    branch = await branches_of(request).open(identity)
    at = branch.step_index(at, "at")
    copy, position = branch.generation.rewind(at), len(branch.prompt.ids) + at
    picked = branch.steps[at].token if at < len(branch.steps) else None
    head = {"object": "tree.alternatives", "branch": identity, "at": at}
    settings = sampling_json(branch.generation.settings)
    async with state_of(request).call(request, branch.model) as call:
        lm = call.served.lm
        draft: Generation = await call.compute(attach, branch, copy, lm)
        tokens, interventions = draft.context_tokens(), draft.request.branch_interventions()
        result = await call.compute(alternatives, lm, tokens, picked, top, interventions)
    return JsonReply({**head, "position": position, **result, "settings": settings})


class LookOptions(BaseModel):
    """What to return, and for which position."""

    at: Place | None = Field(None, description="a position of the whole text")
    step: Place | None = Field(None, description="how this step was picked")
    include: str | None = Field(None, max_length=200, description=", ".join(INCLUDES))
    heads: bool = False
    layer: Place | None = Field(None, description="from 1")
    head: Place | None = Field(None, description="from 1")
    top: int = Field(5, ge=0, le=50)
    token: int | None = Field(None, ge=0, lt=1 << 31)
    against: str | None = Field(None, pattern=r"^(mean|\d{1,9})$")
    lens: str = Field("logit", max_length=100, description="one of `lenses`: logit, tuned, ...")

    def included(self) -> frozenset[str]:
        """The parts named in `include`, such as `attention,lens`; all by default."""
        if self.include is None:
            return frozenset(INCLUDES)
        names = [name.strip() for name in self.include.split(",") if name.strip()]
        for name in names:
            if name not in INCLUDES:
                allowed = ", ".join(INCLUDES)
                raise bad_request(f"include must be of {allowed}, got {name[:40]!r}", "include")
        return frozenset(names)

    def baseline(self) -> int | Literal["mean"] | None:
        """The baseline of the attribution."""
        if self.against is None or self.against == "mean":
            return "mean" if self.against else None
        return int(self.against)


@router.get("/{identity}/look", summary="Inside the model at one position")
async def look_at(
    identity: str, request: Request, options: Annotated[LookOptions, Query()]
) -> Response:
    """`at` is the position of the input token, prompt included, negative ones from the end; the
    model's prediction there is for the next token. So `step=N`, how the token of step N was picked,
    equals `at` = prompt_tokens + N - 1. Without either: the last position."""
    branch = await branches_of(request).open(identity)
    if options.at is not None and options.step is not None:
        raise bad_request("give either at or step", "at")
    position = -1 if options.at is None else options.at
    if options.step is not None:
        position = len(branch.prompt.ids) + branch.step_index(options.step, "step") - 1
    options.included()
    text = branch.generation.fork()  # the branch may be running
    head = {"object": "tree.look", "branch": identity, "prompt_tokens": len(branch.prompt.ids)}
    async with state_of(request).call(request, branch.model) as call:
        reply: Response = await call.compute(
            lambda: JsonReply({**head, **look_json(call.served.lm, text, position, options)})
        )
    return reply


def alternatives(
    lm: Session,
    tokens: Sequence[int],
    picked: int | None,
    top: int,
    interventions: BranchInterventions | None = None,
) -> dict[str, Any]:
    """The most likely next tokens of the model, and the sum of all others."""
    lm.prompt_ids(tokens)
    with lm.open_branch(tokens, interventions=interventions) as branch:
        logits = lm.engine.extend(branch)[-1:]
    scores = score(logits, [picked or 0], top)
    ids, logprobs = scores.top_tokens[0], scores.top_logprobs[0]
    partial_utf8 = lm.partial_utf8(tokens)
    candidates = [
        {
            "token": int(token),
            "text": lm.readable(int(token), partial_utf8),
            "logprob": finite(float(logprob)),
            "probability": math.exp(logprob),
        }
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    others = np.delete(to_numpy(log_softmax(logits))[0].astype(np.float64), ids)
    return {
        "entropy": max(0.0, float(scores.entropies[0])),
        "candidates": candidates,
        "picked": None
        if picked is None
        else {
            "token": picked,
            "text": lm.readable(picked, partial_utf8),
            "logprob": finite(float(scores.logprobs[0])),
            "rank": int(scores.ranks[0]),
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


def look_json(lm: Session, text: TextLike, position: int, options: LookOptions) -> dict[str, Any]:
    """Model internals at this position."""
    internals, parts = get_activations(lm, text, position), options.included()
    partial_utf8 = lm.partial_utf8(internals.tokens)
    layers = _indices(options.layer, len(internals.attention), "layer")
    heads = _indices(options.head, internals.attention.shape[1], "head")
    reply: dict[str, Any] = {
        "position": internals.position,
        "token": {"id": internals.tokens[-1], "text": internals.texts[-1]},
        "picked": None if internals.picked is None else _token(lm, internals.picked, partial_utf8),
        "likeliest": _token(lm, internals.most_likely, partial_utf8),
        "layers": len(internals.attention),
        "heads": internals.attention.shape[1],
        "norms": _numbers(internals.norms),
        "part_norms": _numbers(internals.part_norms),
    }
    if internals.states:  # layers that have no attention
        reply["states"] = internals.states
    if "attention" in parts:
        reply["tokens"] = [
            {"id": token, "text": text}
            for token, text in zip(internals.tokens, internals.texts, strict=True)
        ]
        reply["attention"] = _attention(internals, options, layers, heads)
    if "lens" in parts:
        model = cast("LanguageModel", lm)
        lens = model.logit_lens(internals, top=options.top, token=options.token, lens=options.lens)
        reply["lens"] = lens.to_dict()
        reply["lenses"] = ["logit", *model.lenses]
    if "attribution" in parts:
        shares = attribution(lm, internals, token=options.token, against=options.baseline())
        reply["attribution"] = shares.to_dict()
    if "neighbours" in parts:
        near = neighbours(lm, internals.tokens[-1], options.top)
        reply["neighbours"] = [neighbour.to_dict() for neighbour in near]
    if "vectors" in parts:
        reply["vectors"] = _vectors(internals)
        reply["position_told"] = _position_json(lm, internals.position)
        reply["head"] = _head(lm, internals, options.top)
    return reply


def _vectors(internals: Activations) -> dict[str, Any]:
    """The residual stream before the first layer and after each, quantized for a picture.

    A number is its cell times the scale of the row. Of a wide vector, each run of `every` numbers
    is represented by the one with the largest magnitude.
    """
    rows = internals.residuals.astype(np.float64)
    width = rows.shape[1]
    every = -(-width * len(rows) // MAX_CELLS)
    if every > 1:
        runs = np.pad(rows, ((0, 0), (0, -width % every))).reshape(len(rows), -1, every)
        largest = np.abs(runs).argmax(-1)[..., None]
        rows = np.take_along_axis(runs, largest, -1)[..., 0]
    scales = np.abs(rows).max(1) / MAX_CELL
    cells = np.round(rows / np.where(scales > 0, scales, 1.0)[:, None])
    return {
        "width": width,
        "every": every,
        "scales": [float(f"{scale:.6g}") for scale in scales],
        "cells": cells.astype(int).tolist(),
    }


def _position_json(lm: Session, position: int) -> dict[str, Any]:
    """How the model encodes the position; `dials` are RoPE angles, fast pairs first."""
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


def _head(lm: Session, internals: Activations, top: int) -> dict[str, Any]:
    """The norm of the vector after the final norm, and the logits of the output head."""
    followed = internals.most_likely if internals.picked is None else internals.picked
    scores = score(internals.logits[None], [followed], top)
    normed = lm.model.normed(internals.residuals[-1:])[0].astype(np.float64)

    partial_utf8 = lm.partial_utf8(internals.tokens)

    def candidate(token: int, logprob: float) -> dict[str, Any]:
        return {
            **_token(lm, token, partial_utf8),
            "logit": round(float(internals.logits[token]), 6),
            "probability": math.exp(logprob),
        }

    best = zip(scores.top_tokens[0], scores.top_logprobs[0], strict=True)
    return {
        "norm": round(float(np.linalg.norm(normed)), 6),
        "vocabulary": len(internals.logits),
        "candidates": [candidate(int(token), float(logprob)) for token, logprob in best],
        "followed": {
            **candidate(followed, float(scores.logprobs[0])),
            "rank": int(scores.ranks[0]),
        },
    }


def _attention(
    internals: Activations, options: LookOptions, layers: list[int], heads: list[int]
) -> dict[str, Any]:
    """Attention weights over the tokens up to the position."""
    past = internals.attention.shape[-1]
    rows = 1 + len(layers) * (1 + (len(heads) if options.heads else 0))
    if rows * past > MAX_NUMBERS:
        raise bad_request(
            f"that would be {rows * past:,} numbers, and an answer may have {MAX_NUMBERS:,}; "
            "set layer or head, or omit heads",
            "layer",
        )
    part = internals.attention[layers][:, heads]
    reply: dict[str, Any] = {
        "layers": [layer + 1 for layer in layers],
        "heads": [head + 1 for head in heads],
        "mean": _numbers(_mean(internals, layers, heads)),
        "by_layer": _numbers(part.mean(1, dtype=np.float64)),
        "map": _map(part),
        # Many heads use the first token as an attention sink: the map without it.
        "map_without_first": None,
    }
    if past > 1:
        others = part[..., 1:].astype(np.float64)
        sums = np.maximum(others.sum(-1, keepdims=True), 1e-30)
        reply["map_without_first"] = _map(others / sums, first=1)
    if options.heads:
        reply["by_head"] = _numbers(part)
    return reply


def _mean(internals: Activations, layers: list[int], heads: list[int]) -> Any:
    """Mean over heads and layers with attention; recurrent layers are skipped if possible."""
    attending = [layer for layer in layers if layer in internals.attention_layers] or layers
    return internals.attention[attending][:, heads].mean((0, 1), dtype=np.float64)


def _map(rows: Any, first: int = 0) -> dict[str, Any]:
    """For each head: the position with the largest weight, that weight, and the entropy."""
    return {
        "place": (rows.argmax(-1) + first).tolist(),
        "weight": _numbers(rows.max(-1)),
        "entropy": _numbers(_entropies(rows)),
    }


def _entropies(rows: Any) -> Any:
    doubles = rows.astype(np.float64)
    return -(doubles * np.log(np.maximum(doubles, 1e-30))).sum(-1)


def _indices(number: int | None, count: int, name: str) -> list[int]:
    if number is None:
        return list(range(count))
    if not 1 <= number <= count:
        raise bad_request(f"{name} must be 1 to {count}, got {number}", name)
    return [number - 1]


def _token(lm: Session, token: int, partial_utf8: bytes) -> dict[str, Any]:
    return {"id": token, "text": lm.readable(token, partial_utf8)}


def _numbers(values: Any) -> Any:
    return np.round(np.asarray(values, np.float64), 6).tolist()


class TryRequest(WriteOptions):
    """A step of the branch, and settings to try; others are those of the branch."""

    at: Place | None = Field(None, description="the step; by default, the one after the last")


@router.post(
    "/{identity}/try", summary="Try one step with other settings; the branch stays unchanged"
)
async def try_step(identity: str, body: TryRequest, request: Request) -> Response:
    """Run the sampling chain on the logits of this step, with the branch's seed: what each stage
    kept, and which token is sampled. `max_tokens`, stop strings, guards and drafts have no
    effect."""
    branch = await branches_of(request).open(identity)
    at = branch.step_index(body.at, "at")
    copy = branch.generation.rewind(at)  # the branch may be running
    one_step = {"max_tokens": 1, "stop": (), "guard": None, "speculate": None, "explain": True}
    async with state_of(request).call(request, branch.model) as call:
        draft = await call.compute(attach, branch, copy, call.served.lm)
        generation: Generation = await call.compute(draft.resume, **{**body.settings(), **one_step})
    step = generation.steps[at] if len(generation.steps) > at else None  # None: the context is full
    reply: dict[str, Any] = {"object": "tree.try", "branch": identity, "at": at}
    reply["step"] = step and step_json(step, len(branch.prompt.ids), branch.prompt.readable)
    return JsonReply(reply)
