"""Hidden states of the texts of a request: `unspool.return.hidden_states`.

They are read when the texts have ended, from the engine that wrote them, with the adapter and the
interventions of each text. Arrays are base64 of little-endian floats.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from unspool.backends.interventions import check_readable, hook_name
from unspool.engine.generation import Generation
from unspool.lens.activation_cache import Reading, activation_caches, check_positions
from unspool.server.http.errors import bad_request
from unspool.server.runtime.schema import HiddenStates
from unspool.session import Session

MAX_NUMBERS = 1 << 22  # of the arrays of one response
PARAMETER = "unspool.return.hidden_states"
_DTYPES: dict[str, Any] = {"float32": "<f4", "float16": "<f2"}

Text = Generation | list[int]


def check_hidden_states(lm: Session, spec: HiddenStates, texts: Sequence[list[int]]) -> None:
    """Raise if the model has no such site or layer, or if the arrays of the prompts alone are too
    large."""
    reading = Reading.parse(lm, spec.sites, spec.layers)
    for site, _ in reading.observed:
        check_readable(site, lm.engine.backend.sites)
    _check_size(lm, reading, [(len(ids), _least_positions(spec, len(ids))) for ids in texts])


def read_hidden_states(
    lm: Session, spec: HiddenStates, texts: Sequence[Text]
) -> list[dict[str, Any]]:
    """Read the hidden states of texts as JSON; slow, so run it on a thread."""
    reading = Reading.parse(lm, spec.sites, spec.layers)
    lengths = [_length(text) for text in texts]
    positions = [check_positions(length, prompt, spec.positions) for prompt, length in lengths]
    sizes = [(length, len(at)) for (_, length), at in zip(lengths, positions, strict=True)]
    _check_size(lm, reading, sizes)
    results = []
    for text, at in zip(texts, positions, strict=True):
        arrays = {}
        if at:
            (cache,) = activation_caches(
                lm, [text], sites=spec.sites, layers=spec.layers, positions=at
            )
            arrays = cache.arrays
        results.append(
            {
                "positions": list(at),
                "arrays": {
                    site: _array_json(site, array, reading.layers.get(site), spec.dtype)
                    for site, array in arrays.items()
                },
            }
        )
    return results


def _length(text: Text) -> tuple[int, int]:
    """Tokens of the prompt, and of the whole text."""
    if isinstance(text, Generation):
        return len(text.prompt), len(text.prompt) + len(text.tokens)
    return len(text), len(text)


def _least_positions(spec: HiddenStates, prompt: int) -> int:
    if isinstance(spec.positions, str):
        return {"all": prompt, "last": 1, "generated": 0}[spec.positions]
    return len(spec.positions)


def _check_size(lm: Session, reading: Reading, sizes: Sequence[tuple[int, int]]) -> None:
    size = sum(reading.floats_per_token(lm, length) * count for length, count in sizes)
    if size > MAX_NUMBERS:
        raise bad_request(
            f"the hidden states of this response have at least {size:,} numbers, and at most "
            f"{MAX_NUMBERS:,} are allowed: request fewer sites, layers or positions",
            PARAMETER,
        )


def _array_json(site: str, array: Any, layers: Sequence[int] | None, dtype: str) -> dict[str, Any]:
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(array, _DTYPES[dtype])
    if not np.isfinite(values).all() and np.isfinite(array).all():
        raise bad_request(
            f"{site} has a number that {dtype} cannot hold; use float32", f"{PARAMETER}.dtype"
        )
    names = [hook_name(site)] if layers is None else [hook_name(site, layer) for layer in layers]
    return {
        "names": names,
        "layers": None if layers is None else list(layers),
        "shape": list(values.shape),
        "dtype": dtype,
        "data": base64.b64encode(values.data).decode("ascii"),
    }
