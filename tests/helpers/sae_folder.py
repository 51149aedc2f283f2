"""Folders of sparse autoencoders with random weights, as SAELens writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from unspool.lens.activation_files import write_safetensors

WIDTH, SIZE = 48, 20


def weights_of(architecture: str, width: int = WIDTH) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    names = {"W_enc": (width, SIZE), "W_dec": (SIZE, width), "b_dec": (width,)}
    if architecture == "gated":
        names |= {"b_gate": (SIZE,), "b_mag": (SIZE,), "r_mag": (SIZE,)}
    else:
        names |= {"b_enc": (SIZE,)}
    weights = {name: rng.standard_normal(shape) * 0.3 for name, shape in names.items()}
    if architecture == "jumprelu":
        weights["threshold"] = rng.uniform(0.2, 1.5, SIZE)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def write_saelens(
    folder: Path, architecture: str, /, *, width: int = WIDTH, **config: Any
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    weights = weights_of(architecture, width)
    write_safetensors(folder / "sae_weights.safetensors", weights)
    facts = {"architecture": architecture, "d_in": width, "d_sae": SIZE,
             "metadata": {"hook_name": "blocks.1.hook_resid_post"}, **config}  # fmt: skip
    (folder / "cfg.json").write_text(json.dumps(facts), encoding="utf-8")
    return weights
