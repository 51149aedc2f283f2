"""Random recurrent layers and steps, and what plain torch makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unspool.backends.cuda.recurrent import (
    RecurrentLayer,
    RecurrentScratch,
    StateRows,
    prefill_state_rows,
    recur,
)
from unspool.backends.step import ObserveRequest, StepBatch
from unspool.backends.torch.backend import RecurrentObserver, StateSlots, recurrent_chunks
from unspool.model.config import ModelConfig, Recurrence
from unspool.model.layers.recurrent import DeltaNet, Mamba2, Mixer, ShortConv

_MIXERS = {"conv": ShortConv, "delta": DeltaNet, "mamba2": Mamba2}
SLOTS = 12


def make_config(kind: str, width: int = 20, **changes: Any) -> ModelConfig:
    sizes = {
        "conv_kernel": 3, "key_heads": 2, "value_heads": 4, "key_width": 12, "value_width": 20,
    }  # fmt: skip
    return ModelConfig(
        family="test", vocab_size=8, width=width, layers=1, heads=1, kv_heads=1, head_width=4,
        ff_width=4, context=1 << 20, positions="none", mixers=(kind,),
        recurrence=Recurrence(**{**sizes, **changes}),
    )  # fmt: skip


def make_mixer(config: ModelConfig, seed: int = 0) -> Mixer:
    """A layer with random parameters, without its output projection."""
    torch.manual_seed(seed)
    mixer = _MIXERS[config.mixer(0)](config, 0)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name in ("a_log", "dt_bias", "conv.bias"):
                parameter.uniform_(-1.5, 1.0)
            elif name in ("d", "norm_weight"):
                parameter.uniform_(0.5, 1.5)
    mixer.out = nn.Identity()
    return mixer.requires_grad_(False)


def layer_of(mixer: Mixer, states: Tensor) -> RecurrentLayer:
    """Parameters of a plain torch layer, on the device of `states`."""

    def to_float(parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        return parameter.detach().to(states.device, torch.float32).contiguous()

    kind, rate, dt_bias, skip, gain, eps = "conv", None, None, None, None, 0.0
    if isinstance(mixer, DeltaNet | Mamba2):
        kind, eps = "delta" if isinstance(mixer, DeltaNet) else "mamba2", mixer.eps
        rate = to_float(-torch.exp(mixer.a_log.detach().double()))
        dt_bias, gain = to_float(mixer.dt_bias), to_float(mixer.norm_weight)
        skip = to_float(mixer.d) if isinstance(mixer, Mamba2) else None
    weight = to_float(mixer.conv.weight)
    assert weight is not None
    return RecurrentLayer(
        kind, mixer.recurrence, mixer.channels, weight, to_float(mixer.conv.bias), rate,
        dt_bias, skip, gain, eps, states,
    )  # fmt: skip


@dataclass
class RecurrentStep:
    """A step through one recurrent layer: its projections, its rows and its states."""

    config: ModelConfig
    mixer: Mixer
    projected: Tensor
    states: Tensor
    row_starts: Any
    state_slots: Any
    captures: Any = field(default_factory=lambda: np.empty((0, 2), np.int64))

    @property
    def layer(self) -> RecurrentLayer:
        return layer_of(self.mixer, self.states)

    def copy(self, **changes: Any) -> RecurrentStep:
        copied = replace(self, projected=self.projected.clone(), states=self.states.clone())
        return replace(copied, **changes)

    def rows(self, chunked: bool) -> StateRows:
        rows = prefill_state_rows(
            self.row_starts, self.state_slots, self.captures, self.states.device,
            self.projected.dtype,
        )  # fmt: skip
        return rows if chunked else replace(rows, chunks=None)

    def run(
        self, *, chunked: bool = False, rows: StateRows | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Output and states after the step by the kernels."""
        step, layer = self.copy(), self.layer
        layer = replace(layer, states=step.states)
        out = torch.zeros(
            len(self.projected), layer.out_width, dtype=self.projected.dtype,
            device=self.projected.device,
        )  # fmt: skip
        scratch = RecurrentScratch.for_tokens(len(self.projected), layer, self.projected.device)
        rows = rows or self.rows(chunked)
        options.setdefault("pdl", False)
        recur(step.projected, out, layer, rows, scratch=scratch, **options)
        return out, step.states

    def expected(self, stats: bool = False) -> tuple[Tensor, ...]:
        """Output, states and observed values by plain torch."""
        mixer, config, tokens = self.mixer, self.config, len(self.projected)
        batch = StepBatch(
            tokens=np.zeros(tokens, np.int64), positions=np.arange(tokens),
            visible_end=np.arange(1, tokens + 1), row_starts=self.row_starts,
            slots=np.arange(len(self.row_starts) - 1), state_slots=self.state_slots,
            state_captures=self.captures,
        )  # fmt: skip
        device = self.projected.device
        slots = StateSlots(config, len(self.states), [device])
        slots.pools[0].copy_(self.states)
        parts = split_columns(self.projected[None], self.layer)
        mixer.project = lambda x: parts
        observer = None
        if stats:
            observer = RecurrentObserver(config, ObserveRequest(attention=np.arange(tokens)))
        chunks = recurrent_chunks(batch, len(self.states))
        out = slots.mix(0, mixer, self.projected[None], chunks, observer)[0]
        if observer is None:
            return out, slots.pools[0]
        observed = np.stack([observer.stats[token][0] for token in range(tokens)])
        return out, slots.pools[0], torch.from_numpy(observed)


def split_columns(projected: Tensor, layer: RecurrentLayer) -> tuple[Tensor, ...]:
    """The parts that `Mixer.project` returns."""
    if layer.kind == "conv":
        b, c, x = projected.split(layer.channels, -1)
        return b * x, c
    shape = layer.recurrence
    gates = [shape.value_heads] * (2 if layer.kind == "delta" else 1)
    return projected.split([layer.channels, shape.value_dim, *gates], -1)


def make_step(
    kind: str,
    counts: list[int],
    *,
    slots: list[tuple[int, int]] | None = None,
    captures: list[tuple[int, int]] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    **changes: Any,
) -> RecurrentStep:
    """Random rows of `counts` tokens. By default each continues a state in place."""
    config = make_config(kind, **changes)
    mixer = make_mixer(config, seed).to(device)
    torch.manual_seed(seed + 1)
    states = torch.randn(SLOTS, config.state_floats(0)) * 0.5
    width = layer_of(mixer, states).projected_width
    projected = torch.randn(sum(counts), width)
    pairs = slots if slots is not None else [(row, row) for row in range(len(counts))]
    return RecurrentStep(
        config, mixer, projected.to(device, dtype), states.to(device),
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        np.array(pairs, np.int64).reshape(-1, 2), np.array(captures or [], np.int64).reshape(-1, 2),
    )  # fmt: skip
