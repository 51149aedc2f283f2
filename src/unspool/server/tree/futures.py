"""`futures` of `/v1/tree`: the most likely continuations of a branch, with their probabilities."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from unspool.decoding.search.futures import FutureGrowth, FutureNode
from unspool.server.http.events import error_event, event, writer_from
from unspool.server.runtime.schema import Strict
from unspool.server.runtime.state import Call, state_of
from unspool.server.runtime.threads import Worker
from unspool.server.tree.branch_json import branches_of, router
from unspool.server.tree.branches import TreeBranch
from unspool.server.tree.parts import attach
from unspool.server.tree.prompt import Place

MAX_NODES = 2000
MAX_SECONDS = 60


class FuturesRequest(Strict):
    """Where to start, and how far to grow the tree."""

    at: Place | None = Field(None, description="steps to keep; by default, all of them")
    mass: float = Field(
        0.01, ge=0, le=1, description="leave out continuations that are less likely than this"
    )
    depth: int = Field(8, ge=1, le=64, description="most tokens of a continuation")
    nodes: int = Field(200, ge=1, le=MAX_NODES, description="most tokens in the tree")
    width: int = Field(50, ge=1, le=500, description="most tokens after each other token")
    sampled: bool = Field(
        False, description="probabilities after the sampling stages, instead of the model's"
    )
    seconds: float = Field(20, gt=0, le=MAX_SECONDS, description="stop after this time")
    stream: bool = False


@router.post("/{identity}/futures", summary="The most likely continuations, as a tree")
async def futures(identity: str, body: FuturesRequest, request: Request) -> Response:
    """Nothing is sampled, and the branch stays unchanged: the likeliest continuations are extended
    first, several in one step, with exact probabilities. Each item has a `node`, its `children`
    (`node`, `token`, `text`, `p` after the text before it, `mass` from the start) and the
    probability of all other tokens, `rest`. With `stream`, event `grown` is an item, and `done`
    comes last. The tree ends when the client leaves."""
    branch = await branches_of(request).open(identity)
    at = branch.step_index(body.at, "at")
    call = await state_of(request).enter(request, branch.model)
    growth: FutureGrowth = await call.compute(_growth, call, branch, at, body)
    grown = await call.hold(Worker(_grow(growth), call.run))
    head = {"object": "tree.futures", "branch": identity, "at": at, "sampled": body.sampled}
    if body.stream:
        return call.stream(writer_from(_events(head, growth, grown)), error_event)
    return await call.reply(_complete(head, growth, grown))


def _growth(call: Call, branch: TreeBranch, at: int, body: FuturesRequest) -> FutureGrowth:
    copy = branch.generation.rewind(at)  # the branch may be running
    draft = attach(branch, copy, call.served.lm)
    options = body.model_dump(exclude={"at", "stream", "nodes"})
    return FutureGrowth(call.served.lm, draft, nodes=body.nodes + 1, **options)


def _grow(growth: FutureGrowth) -> Iterator[dict[str, Any]]:
    for node in growth.grow():
        yield {
            "node": node.number,
            "rest": node.rest,
            "children": [_child(child) for child in node.children],
        }


def _child(node: FutureNode) -> dict[str, Any]:
    return {
        "node": node.number,
        "token": node.token,
        "text": node.text,
        "p": node.probability,
        "mass": node.mass,
        **({"finished": True} if node.finished else {}),
    }


def _last(growth: FutureGrowth) -> dict[str, Any]:
    return {"nodes": growth.num_nodes - 1, "complete": growth.is_complete}


async def _events(
    head: dict[str, Any], growth: FutureGrowth, grown: Worker[dict[str, Any]]
) -> AsyncGenerator[bytes, None]:
    yield event(head, "start")
    async for item in grown:
        yield event(item, "grown")
    yield event(_last(growth), "done")


async def _complete(
    head: dict[str, Any], growth: FutureGrowth, grown: Worker[dict[str, Any]]
) -> dict[str, Any]:
    data = [item async for item in grown]
    return {**head, **_last(growth), "data": data}
