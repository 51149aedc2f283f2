"""`try` of `/v1/tree`: what other settings would have made of one step. Nothing is changed."""

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
    """A step of the branch, and settings to try on it; those not named are the branch's own."""

    at: Place | None = Field(None, description="the step; by default, the one behind the last")


@router.post("/{identity}/try", summary="One step with other settings; the branch stays as it is")
async def try_step(identity: str, body: TryRequest, request: Request) -> Response:
    """The real chain on the real numbers of this place, with the branch's seed: what each stage
    kept, and what would have been picked. `max_tokens` and what only matters to longer texts
    (stop strings, guards, drafts) have no effect."""
    branch = branches_of(request).get(identity)
    at = branch.place(body.at, "at")
    draft = branch.generation.rewind(at)  # as it stands now: others may go on writing it
    one_step = {"max_tokens": 1, "stop": (), "guard": None, "speculate": None, "explain": True}
    async with state_of(request).call(request, branch.model) as call:
        draft.source = call.served.lm
        made: Generation = await call.thread(draft.resume, **{**body.settings(), **one_step})
    step = made.steps[at] if len(made.steps) > at else None  # None: the context is full
    found: dict[str, Any] = {"object": "tree.try", "branch": identity, "at": at}
    found["step"] = step and step_json(step, len(branch.prompt.ids), branch.prompt.readable)
    return JsonReply(found)
