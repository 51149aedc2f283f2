"""FP8 experts stacked in one tensor, with scales per matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import tiny
from unspool.errors import ModelFileError
from unspool.model.files.checkpoint import load_transformer, open_checkpoint

BLOCK = 16
EXPERTS = "model.layers.{}.mlp.experts."


def fused(folder: Path, kind: str) -> dict[str, Any]:
    """A tiny Qwen3 with experts so written; gives the numbers that are meant."""
    reference = tiny.save("qwen3-moe", folder)
    state, expected = load_file(folder / "model.safetensors"), {}
    for layer in (0, 2, 3):
        at = EXPERTS.format(layer)
        block = reference.model.layers[layer].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            values = getattr(block, name).detach()
            scale, wide = scales(values, kind)
            numbers = (values / wide).to(torch.float8_e4m3fn)
            state[at + name] = numbers
            state[f"{at}{name}_scale{'_inv' * (kind == 'block')}"] = scale
            expected[f"{layer}.{name}"] = (numbers.float() * wide).numpy()
        for old in [key for key in state if key.startswith(at) and key.endswith(".weight")]:
            del state[old]
    save_file(state, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    output = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": output}))
    return expected


def scales(values: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As a file has them, and one for each number."""
    count, rows, columns = values.shape
    sizes = torch.rand(count, -(-rows // BLOCK), -(-columns // BLOCK)) / 100 + 0.01
    if kind == "block":
        wide = sizes.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        return sizes, wide[:, :rows, :columns]
    if kind == "row":
        item = torch.rand(count, rows, 1) / 100 + 0.01
        return item, item.expand_as(values)
    single = sizes[:, 0, 0].clone() if kind == "matrix" else sizes[0, 0, 0].reshape(1)
    return single, single[:, None, None].expand_as(values)


@pytest.mark.parametrize("kind", ["block", "row", "matrix", "all"])
def test_every_number_is_the_one_that_was_meant(kind: str, tmp_path: Path):
    expected = fused(tmp_path, kind)
    model = load_transformer(open_checkpoint(tmp_path))
    for layer in (0, 2, 3):
        feed = model.layers[layer].feed
        sides = torch.cat((feed.gate.weight, feed.up.weight), 1)
        for name, result in (("gate_up_proj", sides), ("down_proj", feed.down.weight)):
            assert np.allclose(
                result.detach().float().numpy(), expected[f"{layer}.{name}"], rtol=5e-3
            )


def test_scales_of_another_number_of_experts_are_refused(tmp_path: Path):
    fused(tmp_path, "block")
    state = load_file(tmp_path / "model.safetensors")
    name = EXPERTS.format(0) + "down_proj_scale_inv"
    state[name] = state[name][:-1].contiguous()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="scales"):
        load_transformer(open_checkpoint(tmp_path))
