"""A drafting head as a run: its parts for the trainer, and its files.

head.json             whose head it is: the model, the layers that are read, sizes
head.safetensors      its weights, in 16 bits, and the tokens that it can draft
"""

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
    DraftTwin,
    HeadShape,
    most_written,
)
from unspool.train.twins.head_files import WEIGHTS, open_head, save_head
from unspool.train.twins.mixture import Mixture
from unspool.train.twins.settings import Parts, TwinSettings
from unspool.train.twins.sources import Causal, judged_by, learned_from, most_of

_RATE = 7e-3


def head_parts(
    settings: TwinSettings, device: torch.device, tell: Callable[[int], object]
) -> Parts:
    causal = Causal.found(settings.model)
    train, held_out, told = learned_from(causal, settings, device, tell)
    clean = causal.frozen(device)
    config = clean.config
    torch.manual_seed(settings.seed)
    if settings.start:
        head = _begun(settings.start, config)
    else:
        source = train["written"] if "written" in train else next(iter(train.values()))
        ids = most_written(most_of(source[0]), config.vocab_size, settings.draft_tokens)
        head = DraftHead(config, HeadShape.of(config, len(ids)), ids)
        head.begin_as(clean.cpu())
    shape = head.shape
    head, clean = head.to(device), clean.to(device)
    if settings.compile:
        for layer in clean.layers:  # the trainer compiles the head's
            layer.compile(dynamic=False)
    objective = DraftTwin(clean, settings.draft_steps)
    cuda = device.type == "cuda"
    rows = settings.batch or (48 if cuda else 4)
    length = min(settings.length or (384 if cuda else 128), config.context)
    rate = settings.rate or _RATE

    # Of the weights as they are in the file: the same on every device.
    fingerprint = TorchModel(load_transformer(causal.checkpoint)).fingerprint()

    def save(weights: Mapping[str, Tensor], folder: Path) -> None:
        save_head(
            weights, shape, config, folder, base=Path(causal.base).name, fingerprint=fingerprint
        )

    return Parts(
        head,
        Mixture(train, rows, length, settings.seed),
        objective,
        save,
        judged_by(held_out, settings, rows, length, objective),
        None,
        Rates(rate, rate, rate, rate, weight_decay=settings.weight_decay),
        "adamw" if settings.optimizer == "adamw" else "muon",
        {"base": causal.base, "data": told, "head": list(shape.layers)},
    )


def _begun(name: str, config: ModelConfig) -> DraftHead:
    """A head that was trained before, to be trained further: a run, or a head's folder."""
    folder = resolve_run(find_run(name) or Path(name))
    if not (folder / WEIGHTS).is_file():
        raise SettingsError(f"{name} is neither a drafting head's folder nor a run with one")
    shape, weights = open_head(folder)
    head = DraftHead(config, shape, weights["ids"])
    try:
        head.load_state_dict(weights)
    except RuntimeError:
        raise SettingsError(f"{folder} is a drafting head of a model of another shape") from None
    return head
