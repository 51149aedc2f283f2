"""`features` of `/v1/tree`: the active features of a token, by a sparse autoencoder of the server.

`steer` clamps them. Autoencoders are loaded with `--sae` of the server, for its first model.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import Response

from unspool.engine.generation import Generation
from unspool.lens.activation_cache import activation_cache
from unspool.lens.sae import SparseAutoencoder, active_features
from unspool.server.http.errors import bad_request
from unspool.server.http.replies import JsonReply
from unspool.server.runtime.state import state_of
from unspool.server.tree.branch_json import branches_of, router
from unspool.server.tree.parts import attach
from unspool.server.tree.prompt import Place
from unspool.session import Session

MAX_FEATURES = 100  # of a token in one response


@router.get("/{identity}/features", summary="Features of a token, by a sparse autoencoder")
async def features_at(
    identity: str,
    request: Request,
    at: Annotated[Place | None, Query(description="position; by default, the last")] = None,
    sae: Annotated[
        str | None, Query(max_length=200, description="its name; by default, the first")
    ] = None,
    top: Annotated[int, Query(ge=1, le=MAX_FEATURES)] = 10,
) -> Response:
    """The strongest features of the token at a position of the whole text, and for each the places
    of other texts where it is strong, if the autoencoder's folder has `examples.json`."""
    branch = await branches_of(request).open(identity)
    copy = branch.generation.fork()  # the branch may be running
    async with state_of(request).call(request, branch.model) as call:
        lm = call.served.lm
        name, autoencoder = autoencoder_of(lm, sae)
        draft: Generation = await call.compute(attach, branch, copy, lm)
        result = await call.compute(_features_json, lm, draft, autoencoder, at, top)
    head = {"object": "tree.features", "branch": identity, "sae": name}
    return JsonReply({**head, "num_features": autoencoder.num_features, **result})


def autoencoder_of(lm: Session, name: str | None) -> tuple[str, SparseAutoencoder]:
    """A sparse autoencoder of the model by its name; None: the first."""
    autoencoders = lm.autoencoders
    if not autoencoders:
        raise bad_request(
            "there is no sparse autoencoder for this model; the server loads one with --sae FOLDER",
            "sae",
        )
    if name is None:
        name = next(iter(autoencoders))
    if name not in autoencoders:
        raise bad_request(
            f"there is no sparse autoencoder {name[:100]!r} (there are: {', '.join(autoencoders)})",
            "sae",
        )
    return name, autoencoders[name]


def _features_json(
    lm: Session, draft: Generation, sae: SparseAutoencoder, at: int | None, top: int
) -> dict[str, Any]:
    length = len(draft.prompt) + len(draft.steps)
    position = length - 1 if at is None else at % length if -length <= at < length else at
    if not 0 <= position < length:
        raise bad_request(f"at must be -{length} to {length - 1}, got {at}", "at")
    cache = activation_cache(lm, draft, sites=sae.site, layers=sae.reading, positions=position)
    (active,), (error,) = active_features(sae, cache, top=None)
    return {
        "at": position,
        "text": cache.texts[position],
        "num_active": len(active),
        "unexplained": error,
        "features": [
            {
                "feature": item.feature,
                "strength": item.strength,
                "examples": [example.to_dict() for example in sae.examples.get(item.feature, ())],
            }
            for item in active[:top]
        ],
    }
