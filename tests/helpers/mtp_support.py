"""Tiny checkpoints with random MTP layers, under the names of Qwen3.5, of GLM and of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from unspool.model.layers.mtp import MtpLayer
from unspool.model.layers.transformer import Transformer
from unspool.train.learning.model_size import new_config

# Tensor of Qwen3.5 -> tensor of a GLM-like layer after the last one.
_GLM = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}


def random_model(family: str = "qwen3", seed: int = 0, **changes: Any) -> Transformer:
    """A random model with an MTP layer; norms differ from one."""
    config = new_config(4, 259, 256, family, **{"width": 48, "head_width": 16, **changes})
    torch.manual_seed(seed)
    model = Transformer(config)
    model.mtp = MtpLayer(config.mtp_layer_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def rename_to_glm(folder: Path, layers: int) -> None:
    """Give the MTP tensors of a folder the names of GLM: one more layer."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if module in _GLM:
            name = f"model.layers.{layers}.{_GLM[module]}.{kind}"
        tensors[name.replace("mtp.layers.0.", f"model.layers.{layers}.")] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def expected_logits(model: Transformer, tokens: list[int], chain: list[int]) -> np.ndarray:
    """Logits after the text and after each token of a chain: the whole sequence anew each time."""
    assert isinstance(model.mtp, MtpLayer)
    mtp, positions = model.mtp, np.arange(len(tokens))
    states: list[torch.Tensor] = []
    hook = model.norm.register_forward_hook(lambda module, inputs, out: states.append(out))
    model(torch.tensor([tokens[:-1]]))
    hook.remove()
    hidden, following, results = states[0], list(tokens[1:]), []
    for step in range(len(chain) + 1):
        positions = np.arange(len(following))
        rotary = mtp.config.rotary
        assert rotary is not None
        cosine, sine = (torch.from_numpy(t) for t in rotary.tables(positions, 256))
        embedded = model.embed(torch.tensor([following]))
        from unspool.model.layers.transformer import RopeTables
        from unspool.train.learning.forward import AttentionMask

        mask = AttentionMask.build(mtp.config, torch.tensor([following]))
        out = mtp(embedded, hidden, RopeTables(cosine, sine), mask)
        results.append(model.head_logits(out)[0, -1].numpy())
        if step < len(chain):
            hidden = torch.cat((hidden, out[:, -1:]), 1)
            following.append(chain[step])
    return np.stack(results)
