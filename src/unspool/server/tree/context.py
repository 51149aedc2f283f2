"""`context` of `/v1/tree`: which parts enter the prompt, where, and how many tokens each."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from unspool.decoding.prompt_parts import PlacedParts
from unspool.server.http.replies import JsonReply
from unspool.server.runtime.state import state_of
from unspool.server.tree.branch_json import branches_of, router
from unspool.server.tree.parts import NAMES, ContextFields, place
from unspool.session import Session


@router.post("/{identity}/context", summary="What the model reads besides the text, and where")
async def show_context(identity: str, body: ContextFields, request: Request) -> Response:
    """Nothing is changed: with other parts in the request, what they would give. `parts` are in
    the order of the prompt; `at` is a position in the text, prompt included."""
    branch = await branches_of(request).open(identity)
    values = {name: branch.extra_settings.values.get(name) for name in NAMES} | body.part_values()
    prompt, copy = branch.prompt, branch.generation.fork()
    async with state_of(request).call(request, branch.model, places=0) as call:
        lm: Session = call.served.lm
        placement: PlacedParts = await call.compute(place, lm, prompt, copy, values)
    num_text = len(prompt.ids) + len(copy.steps)
    inserted = sum(map(len, (part.ids for part in placement.parts)))
    parts = [
        {
            "kind": part.kind,
            "name": part.name,
            "at": part.at,
            "tokens": len(part.ids),
            "text": part.text,
            "keys": list(part.matches),
            "entry": part.index,
        }
        for part in placement.parts
    ]
    return JsonReply(
        {
            "object": "tree.context",
            "branch": identity,
            **{name: values[name] for name in NAMES},
            "parts": parts,
            "left_out": list(placement.left_out),
            "text_tokens": num_text,
            "tokens": num_text + inserted,
            "context": lm.context,
        }
    )
