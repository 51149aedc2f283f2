"""`steer` of `/v1/tree`: change what happens inside the model from a token on, and see the text.

A preview changes nothing: it is the text that the branch would have had, with the branch's seed and
settings. With `keep` it becomes a new branch that carries the changes, as do its forks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

import numpy as np
from fastapi import Query, Request
from pydantic import Field
from starlette.responses import Response

from unspool.backends.interventions import Add, Intervention, Scale, site_layers
from unspool.backends.step import Floats
from unspool.engine.generation import Generation
from unspool.engine.results import Step
from unspool.lens.activation_cache import activation_cache
from unspool.lens.activations import final_norm, head_row
from unspool.lens.steering import SteeringVector
from unspool.server.http.errors import bad_request
from unspool.server.http.events import error_event, event, writer_from
from unspool.server.http.replies import JsonReply
from unspool.server.runtime.schema import MAX_INTERVENTIONS, Strict
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.texts import step_json
from unspool.server.runtime.threads import Worker, in_thread
from unspool.server.tree.branch_json import branches_of, reply, router
from unspool.server.tree.branches import TreeBranch, fork_branch
from unspool.server.tree.features import autoencoder_of
from unspool.server.tree.parts import attach
from unspool.server.tree.prompt import Name, Place
from unspool.session import Session

MAX_TOKENS = 256
MAX_CHANGES = 8
MAX_STRENGTH = 1000.0
Part = Literal["resid_post", "attn_out", "head_out", "mlp_out", "recurrent_out"]
Indices = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 16)]], Field(min_length=1)]


class SteerChange(Strict):
    """One change: add a steering vector, add the direction of a token, scale a part, or set a
    feature of a sparse autoencoder."""

    vector: str | None = Field(None, max_length=200, description="name of a steering vector")
    token: str | int | None = Field(
        None, description="id, or text that is one token: its row of the output head is added"
    )
    scale: bool = Field(False, description="multiply the values by `strength`; 0 removes them")
    feature: int | None = Field(
        None, ge=0, lt=1 << 31, description="number of a feature, which is set to `strength`"
    )
    sae: str | None = Field(
        None, max_length=200, description="of `feature`: the sparse autoencoder; null: the first"
    )
    strength: float = Field(
        1.0,
        ge=-MAX_STRENGTH,
        le=MAX_STRENGTH,
        allow_inf_nan=False,
        description="times the vector; of a token: in lengths of the residual stream there",
    )
    site: Part = "resid_post"
    layers: Indices | None = Field(
        None, description="from 0; null: all, or those of the steering vector"
    )
    heads: Indices | None = Field(None, description="of `head_out`, from 0; null: all")


class SteerRequest(Strict):
    """Changes, and the step from which on the text is written again."""

    changes: list[SteerChange] = Field(
        max_length=MAX_CHANGES, description="empty: the text without"
    )
    at: Place | None = Field(None, description="steps to keep; by default, all of them")
    first: Place | None = Field(
        None,
        description="first position whose values change; by default, the one that predicts the "
        "first new token",
    )
    max_tokens: int = Field(40, ge=1, le=MAX_TOKENS)
    keep: bool = Field(False, description="as a new branch; else nothing is stored")
    name: Name | None = None
    stream: bool = False


@router.get("/{identity}/steer", summary="What can be changed inside the model")
async def steerable(identity: str, request: Request) -> Response:
    """The parts, each with its layers (from 0) and their numbers of heads; the steering vectors and
    the sparse autoencoders of the model."""
    branch = await branches_of(request).open(identity)
    async with state_of(request).call(request, branch.model, places=0) as call:
        offers = await in_thread(_steerable, call.served.lm)
    return JsonReply({"object": "tree.steerable", "branch": identity, **offers})


@router.post("/{identity}/steer", summary="The text from a step on with changes inside the model")
async def steer(identity: str, body: SteerRequest, request: Request) -> Response:
    """With the branch's seed and settings: so a difference has no other cause than the changes.
    They are added to the interventions that the branch has. Without `keep` the branch stays
    unchanged and nothing is stored. With `stream`, event `step` is a step, and `done` comes last;
    the text ends when the client leaves."""
    branches, state = branches_of(request), state_of(request)
    branch = await branches.open(identity)
    at = branch.step_index(body.at, "at")
    if body.keep and (body.stream or not body.changes):
        raise bad_request("keep needs changes, and does not stream", "keep")
    if body.keep:
        branches.make_room(1, branch)
    copy = branch.generation.rewind(at)  # the branch may be running
    if not body.keep:
        call = await state.enter(request, branch.model)
        draft = await call.compute(_changed_draft, call, branch, copy, body)
        steps = await call.hold(Worker(_write(draft, _limit(call, draft, body)), call.run))
        json = _steps_json(branch, draft, steps)
        if body.stream:
            return call.stream(writer_from(_events(json)), error_event)
        return await call.reply(_complete(identity, at, draft, json))
    async with state.call(request, branch.model) as call:
        draft = await call.compute(_changed_draft, call, branch, copy, body)
        written = await call.compute(draft.resume, max_tokens=_limit(call, draft, body))
    fork = fork_branch(branch, written, at, body.name)
    fork.finish_reason = written.finish_reason
    await branches.add(fork)
    return await reply(fork, at)


@router.get("/{identity}/interventions", summary="The interventions of a branch, with arrays")
async def interventions_of(identity: str, request: Request) -> Response:
    """As requests and files have them; `settings.interventions` of a branch has no arrays."""
    branch = await branches_of(request).open(identity)
    items = branch.generation.request.interventions
    data = await in_thread(lambda: [item.to_dict() for item in items])
    return JsonReply({"object": "list", "data": data})


@router.delete(
    "/{identity}/interventions", summary="End the interventions of a branch at its last token"
)
async def end_interventions(
    identity: str,
    request: Request,
    index: Annotated[int | None, Query(ge=0, lt=1 << 31, description="of one; else all")] = None,
) -> Response:
    """The text stays, and so does what the interventions changed in it: only what follows is
    computed without them. One that has changed nothing yet is removed."""
    branches = branches_of(request)
    branch = await branches.open(identity)
    with branch.locked():
        interventions = branch.generation.request.interventions
        if index is not None and index >= len(interventions):
            raise bad_request(
                f"index must be less than {len(interventions)}, the interventions of the branch, "
                f"got {index}",
                "index",
            )
        ended: list[Intervention] = []
        for number, item in enumerate(interventions):
            ended += _ended(item, branch) if index in (None, number) else [item]
        generation = branch.generation.fork()
        generation.request = replace(generation.request, interventions=tuple(ended))
        ending = branch.finish_reason
        await branches.store.replace_text(branch, generation, len(branch.steps), "steer")
        branch.finish_reason = ending
    return await reply(branch, None)


def _ended(item: Intervention, branch: TreeBranch) -> list[Intervention]:
    """The intervention up to the last token, whose values predict the next one; none if empty."""
    first, positions = 0, item.positions
    end = len(branch.tokens) - 1
    if isinstance(positions, int | range) or positions == "last" or item.num_tokens:
        return [item]  # it has an end
    if isinstance(positions, slice):
        first = positions.start
    elif positions == "generated":
        first = len(branch.prompt.ids)
    return [replace(item, positions=range(first, end))] if first < end else []


def _steerable(lm: Session) -> dict[str, list[dict[str, Any]]]:
    """The parts that can be changed, the steering vectors and the sparse autoencoders."""
    config, sites = lm.config, lm.engine.backend.sites
    parts = []
    for site in get_args(Part):
        layers = site_layers(config, site) if site in sites else ()
        if layers:
            heads = [config.shape(layer).heads if site == "head_out" else 0 for layer in layers]
            parts.append({"site": site, "layers": list(layers), "heads": heads})
    vectors = [{"name": name, "layers": list(v.layers)} for name, v in _vectors(lm).items()]
    autoencoders = [
        {"name": name, "site": sae.site, "layer": sae.reading, "num_features": sae.num_features}
        for name, sae in lm.autoencoders.items()
        if sae.site in sites
    ]
    return {"parts": parts, "vectors": vectors, "autoencoders": autoencoders}


def _vectors(lm: Session) -> dict[str, SteeringVector]:
    vectors: dict[str, SteeringVector] = getattr(lm, "steering_vectors", {})
    return {
        name: vector
        for name, vector in sorted(vectors.items())
        if vector.width == lm.config.width and vector.layers[-1] < lm.config.layers
    }


def _changed_draft(
    call: Call, branch: TreeBranch, copy: Generation, body: SteerRequest
) -> Generation:
    """The kept text, to be continued with the changes. Slow: run it on a thread."""
    lm = call.served.lm
    draft = attach(branch, copy, lm)
    length = len(draft.prompt) + len(draft.steps)
    first = length - 1 if body.first is None else body.first
    if not 0 <= first < length:
        raise bad_request(f"first must be 0 to {length - 1}, got {first}", "first")
    interventions = draft.request.interventions
    for change in body.changes:
        interventions += (_intervention(lm, draft, change, first),)
    if len(interventions) > MAX_INTERVENTIONS:
        raise bad_request(
            f"a branch may have at most {MAX_INTERVENTIONS} interventions, got "
            f"{len(interventions)}",
            "changes",
        )
    lm.check_interventions(interventions)
    return replace(draft, request=replace(draft.request, interventions=interventions))


def _intervention(lm: Session, draft: Generation, change: SteerChange, first: int) -> Intervention:
    is_feature = change.feature is not None
    kinds = (change.vector is not None, change.token is not None, change.scale, is_feature)
    if sum(kinds) != 1:
        raise bad_request("a change has exactly one of vector, token, scale and feature", "changes")
    if change.sae is not None and not is_feature:
        raise bad_request("sae is for a change with feature", "changes")
    if change.feature is not None:
        _, sae = autoencoder_of(lm, change.sae)
        clamp = sae.clamp(change.feature, change.strength)
        return replace(clamp, positions=slice(first, None), label=f"feature {change.feature}")
    layers = None if change.layers is None else tuple(change.layers)
    if change.scale:
        heads = None if change.heads is None else tuple(change.heads)
        return Intervention(change.site, Scale(change.strength), layers, slice(first, None), heads)
    if change.site == "head_out":
        raise bad_request("head_out can be scaled; vectors have the residual width", "changes")
    if change.heads is not None:
        raise bad_request(f"{change.site} has no heads", "changes")
    if change.vector is not None:
        vector = _vectors(lm).get(change.vector)
        if vector is None:
            names = ", ".join(_vectors(lm)) or "none"
            raise bad_request(
                f"there is no steering vector {change.vector[:100]!r} for this model (there are: "
                f"{names})",
                "changes",
            )
        chosen = vector if layers is None else vector.at(layers)
        op = Add(np.stack(list(chosen.directions.values())), change.strength)
        return Intervention(change.site, op, chosen.layers, slice(first, None), label=change.vector)
    assert change.token is not None
    token = lm.single_token(change.token) if isinstance(change.token, str) else change.token
    layers = layers or site_layers(lm.config, change.site)
    op = Add(_token_directions(lm, draft, token, layers, first), change.strength)
    label = lm.readable(token) or f"token {token}"
    return Intervention(change.site, op, layers, slice(first, None), label=label[:200])


def _token_directions(
    lm: Session, draft: Generation, token: int, layers: tuple[int, ...], first: int
) -> Floats:
    """The direction that raises a token's logit most; in each layer as long as the residual stream
    is there at the first changed position."""
    size = lm.config.vocab_size
    if not 0 <= token < size:
        raise bad_request(f"token must be 0 to {size - 1}, got {token}", "changes")
    direction = head_row(lm, token)[0] * final_norm(lm).weight
    direction /= np.linalg.norm(direction) or 1.0
    cache = activation_cache(lm, draft, sites="resid_post", layers=layers, positions=first)
    norms = np.linalg.norm(cache["resid_post"][:, 0].astype(np.float64), axis=-1)
    return np.asarray(norms[:, None] * direction, np.float32)


def _limit(call: Call, draft: Generation, body: SteerRequest) -> int:
    length = len(draft.prompt) + len(draft.steps)
    return call.token_limit(body.max_tokens, length)


def _write(draft: Generation, max_tokens: int) -> Iterator[Step]:
    """The new steps; closing the iterator cancels them."""
    generation, stream = draft.start_resume(max_tokens=max_tokens, explain=False, top=0)
    try:
        yield from generation.extend(stream)
    finally:
        stream.close()


async def _steps_json(
    branch: TreeBranch, draft: Generation, steps: Worker[Step]
) -> AsyncGenerator[dict[str, Any], None]:
    """Each step, and how many before it a guard took back (`retracts`)."""
    async for step in steps:
        yield step_json(step, len(draft.prompt), branch.prompt.readable)


async def _events(steps: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async for step in steps:
        yield event(step, "step")
    yield event({}, "done")


async def _complete(
    identity: str, at: int, draft: Generation, steps: AsyncGenerator[dict[str, Any], None]
) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    async for step in steps:
        del data[len(data) - step["retracts"] :]
        data.append(step)
    interventions = [item.summary() for item in draft.request.interventions]
    head = {"object": "tree.steer", "branch": identity, "at": at}
    return {**head, "interventions": interventions, "steps": data}
