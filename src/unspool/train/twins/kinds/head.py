"""Training of a draft head: model, data and objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from unspool.backends.torch.loaded import TorchModel
from unspool.errors import SettingsError
from unspool.model.checkpoint import load_transformer
from unspool.model.config import ModelConfig
from unspool.model.run_folder import find_run, resolve_run
from unspool.train.learning.optimizers import Rates
from unspool.train.twins.draft import (
    DraftHead,
    DraftHeadObjective,
    HeadShape,
    most_frequent_tokens,
)
from unspool.train.twins.head_files import WEIGHTS, open_head, save_head
from unspool.train.twins.mixture import Mixture
from unspool.train.twins.settings import TwinParts, TwinSettings
from unspool.train.twins.sources import CausalModel, evaluator, load_sources, target_tokens

_HEAD_RATE = 7e-3


def head_parts(
    settings: TwinSettings, device: torch.device, on_text: Callable[[int], object]
) -> TwinParts:
    causal = CausalModel.open(settings.model)
    train, held_out, facts = load_sources(causal, settings, device, on_text)
    clean = causal.frozen(device)
    config = clean.config
    torch.manual_seed(settings.seed)
    if settings.start:
        head = _load_head(settings.start, config)
    else:
        source = train["written"] if "written" in train else next(iter(train.values()))
        targets = target_tokens(source[0])
        ids = most_frequent_tokens(targets, config.vocab_size, settings.draft_tokens)
        head = DraftHead(config, HeadShape.for_model(config, len(ids)), ids)
        head.init_from(clean.cpu())
    shape = head.shape
    head, clean = head.to(device), clean.to(device)
    if settings.compile:
        for layer in clean.layers:  # the trainer compiles those of the head
            layer.compile(dynamic=False)
    objective = DraftHeadObjective(clean, settings.draft_steps)
    cuda = device.type == "cuda"
    rows = settings.batch or (48 if cuda else 4)
    length = min(settings.length or (384 if cuda else 128), config.context)
    rate = settings.rate or _HEAD_RATE

    # Of the weights in the file: the same on every device.
    fingerprint = TorchModel(load_transformer(causal.checkpoint)).fingerprint()

    def save(weights: Mapping[str, Tensor], folder: Path) -> None:
        save_head(
            weights, shape, config, folder, base=Path(causal.base).name, fingerprint=fingerprint
        )

    return TwinParts(
        head,
        Mixture(train, rows, length, settings.seed),
        objective,
        save,
        evaluator(held_out, settings, rows, length, objective),
        None,
        Rates(rate, rate, rate, rate, weight_decay=settings.weight_decay),
        "adamw" if settings.optimizer == "adamw" else "muon",
        {"base": causal.base, "data": facts, "head": list(shape.layers)},
    )


def _load_head(name: str, config: ModelConfig) -> DraftHead:
    """Load a trained draft head from a run or its folder."""
    folder = resolve_run(find_run(name) or Path(name))
    if not (folder / WEIGHTS).is_file():
        raise SettingsError(f"{name} is neither a draft head nor a run of one")
    shape, weights = open_head(folder)
    head = DraftHead(config, shape, weights["ids"])
    try:
        head.load_state_dict(weights)
    except RuntimeError:
        raise SettingsError(f"{folder} is a draft head of a model of another shape") from None
    return head
