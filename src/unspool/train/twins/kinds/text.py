"""Twins that fill text: by blocks beside the causal model, or seeing the whole of it.

With all weights the twin is a model folder; as an adapter it is PEFT's, with twin.json beside it,
which says how far it looks and which token is its mask.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unspool.errors import SettingsError
from unspool.model.adapters import TWIN, Adapter, LowRank, write_adapter
from unspool.model.checkpoint import load_transformer, open_checkpoint, save_weights
from unspool.model.config import ModelConfig
from unspool.model.config_hf import read_json
from unspool.model.hub import find_model
from unspool.model.transformer import Transformer
from unspool.train.learning.lora import Lora, add_lora
from unspool.train.learning.objectives import Objective
from unspool.train.learning.optimizers import Rates
from unspool.train.twins.block import BlockTwin
from unspool.train.twins.fill import FillTwin
from unspool.train.twins.mask_token import mask_token, own_mask_vector, with_mask
from unspool.train.twins.mixture import Mixture
from unspool.train.twins.settings import Parts, TwinSettings
from unspool.train.twins.sources import Causal, judged_by, learned_from

_SIGHT = ("sight", "block", "mask_id", "shifted")
_RATES = {"block": 4e-4, "fill": 3e-4}  # of all weights
_LORA_RATE = 1e-3


def text_parts(
    settings: TwinSettings, device: torch.device, tell: Callable[[int], object]
) -> Parts:
    causal = Causal.found(settings.model)
    train, held_out, told = learned_from(causal, settings, device, tell)
    mask = settings.mask if settings.mask is not None else None
    mask = mask_token(causal.checkpoint.config, causal.tokenizer) if mask is None else mask
    config = _twin_config(causal.checkpoint.config, settings, mask)
    clean = causal.frozen(device)
    model = _model(causal, settings, mask, device, clean)
    objective = _objective(settings, mask, None if settings.lora else clean)
    cuda = device.type == "cuda"
    rows, length = settings.batch or (48 if cuda else 4), _length(settings, config, cuda)
    if settings.compile and not settings.lora:
        for layer in clean.layers:  # the trainer compiles the twin's
            layer.compile(dynamic=False)
    rate = settings.rate or (_LORA_RATE if settings.lora else _RATES[settings.kind])
    return Parts(
        model,
        Mixture(train, rows, length, settings.seed),
        objective,
        _saver(config, causal, settings, mask),
        judged_by(held_out, settings, rows, length, objective),
        None,
        Rates(rate, rate, rate, rate, weight_decay=settings.weight_decay),
        "muon" if settings.optimizer == "muon" else "adamw",
        {"base": causal.base, "adapter": bool(settings.lora), "data": told,
         "config": config.to_dict()},
    )  # fmt: skip


def _length(settings: TwinSettings, config: ModelConfig, cuda: bool) -> int:
    return min(settings.length or (640 if cuda else 128), config.context)


def _twin_config(config: ModelConfig, settings: TwinSettings, mask: int) -> ModelConfig:
    block = settings.kind == "block"
    return replace(
        config, sight="block" if block else "whole", block=settings.block if block else 0,
        mask_id=mask, shifted=True,
    )  # fmt: skip


def _objective(settings: TwinSettings, mask: int, clean: Transformer | None) -> Objective:
    return BlockTwin(mask, clean) if settings.kind == "block" else FillTwin(mask, clean)


def _model(
    causal: Causal, settings: TwinSettings, mask: int, device: torch.device, clean: Transformer
) -> Transformer:
    """What is trained: the causal model with an adapter, or a copy of it (or of another twin) with
    a vector for the mask, whose embeddings and head stay."""
    if settings.lora:
        if settings.start:
            raise SettingsError("an adapter begins as nothing; leave --from or --lora out")
        add_lora(clean, Lora(rank=settings.lora, alpha=settings.alpha), seed=settings.seed)
        return clean
    first = causal.checkpoint
    if settings.start:
        first = open_checkpoint(find_model(settings.start, progress=False))
        same = first.config.vocab_size == causal.checkpoint.config.vocab_size
        if not same or _mask_of(first.path) != mask:
            raise SettingsError(f"{settings.start} is no twin of this model with the same mask")
    model = load_transformer(first, device=str(device)).requires_grad_(True)
    model.embed.requires_grad_(False)
    if model.head is not None:
        model.head.requires_grad_(False)
    own_mask_vector(model, mask, fresh=settings.start is None)
    return model


def _mask_of(folder: Path) -> int | None:
    """The mask of another twin."""
    file = folder / TWIN
    return None if not file.is_file() else read_json(file).get("mask_id")


def _saver(
    config: ModelConfig, causal: Causal, settings: TwinSettings, mask: int
) -> Callable[[Mapping[str, Tensor], Path], None]:
    lora = Lora(rank=settings.lora or 1, alpha=settings.alpha)

    def save_adapter(weights: Mapping[str, Tensor], folder: Path) -> None:
        parts = {
            f"{name}.weight": LowRank(
                _numbers(weights[f"{name}.down"]), _numbers(weights[f"{name}.up"]), lora.scale
            )
            for name in (n.removesuffix(".down") for n in weights if n.endswith(".down"))
        }
        write_adapter(Adapter(parts, causal.base), folder, causal.checkpoint.config)
        (folder / TWIN).write_text(json.dumps(_told(config, causal), indent=2) + "\n")

    def save_whole(weights: Mapping[str, Tensor], folder: Path) -> None:
        save_weights(config, with_mask(weights, mask), folder)
        causal.tokenizer.save(folder)
        (folder / TWIN).write_text(json.dumps(_told(config, causal), indent=2) + "\n")

    return save_adapter if settings.lora else save_whole


def _told(config: ModelConfig, causal: Causal) -> dict[str, Any]:
    return {"base": causal.base, **{name: getattr(config, name) for name in _SIGHT}}


def _numbers(tensor: Tensor) -> Any:
    return tensor.detach().float().cpu().numpy()
