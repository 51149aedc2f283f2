"""`try` of `/v1/tree`: one step with other settings. Changes nothing."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.engine.generation import Generation
from unspool.serve.core.state import state_of
from unspool.serve.core.step_json import step_json
from unspool.serve.http.routes import JsonReply
from unspool.serve.tree.branch_json import branches_of, router
from unspool.serve.tree.schema import Place, WriteOptions


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
    branch = branches_of(request).get(identity)
    at = branch.step_index(body.at, "at")
    draft = branch.generation.rewind(at)  # a copy: the branch may be running
    one_step = {"max_tokens": 1, "stop": (), "guard": None, "speculate": None, "explain": True}
    async with state_of(request).call(request, branch.model) as call:
        draft.source = call.served.lm
        generation: Generation = await call.compute(draft.resume, **{**body.settings(), **one_step})
    step = generation.steps[at] if len(generation.steps) > at else None  # None: the context is full
    reply: dict[str, Any] = {"object": "tree.try", "branch": identity, "at": at}
    reply["step"] = step and step_json(step, len(branch.prompt.ids), branch.prompt.readable)
    return JsonReply(reply)
