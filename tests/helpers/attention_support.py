"""Texts in pages of random numbers, and attention over them in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda import attention
from unspool.backends.cuda.attention import PAGE_SIZE, AttentionLayer, AttentionScratch, DecodeRows

if TYPE_CHECKING:
    import pytest


def a_layer(
    heads: int = 4,
    kv_heads: int = 2,
    head_width: int = 16,
    rotary: int | None = None,
    norm: bool = False,
    sinks: bool = False,
    context: int = 4096,
    **options: Any,
) -> AttentionLayer:
    rotary = head_width if rotary is None else rotary
    generator = torch.Generator().manual_seed(heads)
    angles = torch.arange(context)[:, None] / 50 ** torch.linspace(0, 1, max(rotary // 2, 1))

    def gain() -> Tensor | None:
        return torch.rand(head_width, generator=generator) + 0.5 if norm else None

    settings: dict[str, Any] = {"scale": head_width**-0.5, "softcap": 0.0, "window": 0} | options
    return AttentionLayer(
        heads=heads, kv_heads=kv_heads, head_width=head_width, norm_eps=1e-5,
        q_norm=gain(), k_norm=gain(),
        cosine=angles.cos() if rotary else None, sine=angles.sin() if rotary else None,
        sinks=torch.randn(heads, generator=generator) if sinks else None, **settings,
    )  # fmt: skip


def cut_small(patch: pytest.MonkeyPatch, pieces: int = 4) -> None:
    """Small tiles, few pieces: short texts are cut as long ones are."""
    patch.setattr(attention, "TILE", 16)
    patch.setattr(attention, "PIECES", pieces)
    patch.setattr(attention, "MOST_PIECES", pieces + 1)


@dataclass
class Texts:
    """Several texts, each with new tokens at its end."""

    layer: AttentionLayer
    keys: Tensor
    values: Tensor
    table: Tensor
    qkv: Tensor
    starts: np.ndarray
    lines: DecodeRows

    def copy(self) -> Texts:
        return Texts(
            self.layer, self.keys.clone(), self.values.clone(), self.table, self.qkv.clone(),
            self.starts, self.lines,
        )  # fmt: skip

    @property
    def out(self) -> Tensor:
        layer = self.layer
        return torch.full_like(self.qkv[:, : layer.heads * layer.head_width], math.nan)

    @property
    def scratch(self) -> AttentionScratch:
        return AttentionScratch.for_rows(len(self.lines), [self.layer], self.qkv.device)


def some_texts(
    layer: AttentionLayer,
    lengths: list[int],
    counts: list[int],
    ends: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Texts:
    """Texts of these lengths, the last `counts` tokens new (their keys not yet in the pages)."""
    rng = np.random.default_rng(seed)
    columns = -(-max(lengths) // PAGE_SIZE) + 1
    used = len(lengths) * columns
    table = rng.permutation(used).reshape(len(lengths), columns)
    rows = rng.permutation(len(lengths))  # a text's line of the table is not its number
    generator = torch.Generator().manual_seed(seed)
    shape = (used * PAGE_SIZE, layer.kv_heads, layer.head_width)
    keys = torch.randn(shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator).to(dtype)
    n = sum(counts)
    width = (layer.heads + 2 * layer.kv_heads) * layer.head_width
    positions = np.concatenate(
        [np.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
    )

    def on(array: Any) -> Tensor:
        return torch.from_numpy(np.asarray(array, np.int32)).to(device)

    tensors = {"cosine", "sine", "q_norm", "k_norm", "sinks"}
    for name in tensors:
        tensor = getattr(layer, name)
        if tensor is not None and str(tensor.device) != device:
            object.__setattr__(layer, name, tensor.to(device))
    lines = DecodeRows(
        on(table[np.argsort(rows)]),
        on(np.repeat(rows, counts)),
        on(positions),
        on(positions + 1 if ends is None else ends),
    )
    qkv = torch.randn((n, width), generator=generator).to(dtype)
    return Texts(
        layer, keys.to(device), values.to(device), on(table), qkv.to(device),
        np.concatenate(([0], np.cumsum(counts))), lines,
    )  # fmt: skip


def expected(texts: Texts) -> tuple[Tensor, Tensor, Tensor]:
    """What each line gathers [n, heads * head_width], and the pages with the new keys and values;
    rounded where the kernels round, to the type of the weights."""
    layer, dtype = texts.layer, texts.qkv.dtype
    query, key, value = texts.qkv.unflatten(1, (-1, layer.head_width)).split(
        (layer.heads, layer.kv_heads, layer.kv_heads), 1
    )
    query, key = (
        _prepared(part.float(), gain, texts, dtype)
        for part, gain in ((query, layer.q_norm), (key, layer.k_norm))
    )
    keys, values, slots = texts.keys.clone(), texts.values.clone(), _slots(texts)
    new_slots = slots[torch.arange(len(texts.lines)), texts.lines.positions.long()]
    keys[new_slots], values[new_slots] = key, value
    out = torch.stack([_mixed(texts, n, query[n], keys[slots[n]], values[slots[n]])
                       for n in range(len(texts.lines))])  # fmt: skip
    return out.to(dtype), keys, values


def _prepared(x: Tensor, gain: Tensor | None, texts: Texts, dtype: torch.dtype) -> Tensor:
    layer, positions = texts.layer, texts.lines.positions.long()
    if gain is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + layer.norm_eps) * gain
        x = x.to(dtype).float()
    if layer.cosine is not None and layer.sine is not None:
        cosine, sine = layer.cosine[positions][:, None], layer.sine[positions][:, None]
        half = layer.rotary_width // 2
        a, b, unrotated = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        x = torch.cat((a * cosine - b * sine, b * cosine + a * sine, unrotated), -1)
    return x.to(dtype)


def _slots(texts: Texts) -> Tensor:
    """[n, positions]: where each line's text has its keys."""
    pages = texts.lines.table[texts.lines.table_rows.long()].long()
    inside = torch.arange(PAGE_SIZE, device=pages.device)
    return (pages[:, :, None] * PAGE_SIZE + inside).flatten(1)


def _mixed(texts: Texts, n: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    layer = texts.layer
    position, end = int(texts.lines.positions[n]), int(texts.lines.ends[n])
    first = max(0, position + 1 - layer.window) if layer.window else 0
    group = layer.heads // layer.kv_heads
    key, value = (
        part[first:end].float().repeat_interleave(group, 1).transpose(0, 1)
        for part in (keys, values)
    )
    scores = (query.float()[:, None] @ key.transpose(1, 2))[:, 0] * layer.scale
    if layer.softcap:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if layer.sinks is not None:
        scores = torch.cat((scores, layer.sinks[:, None]), 1)
        value = torch.cat((value, torch.zeros_like(value[:, :1])), 1)
    return (scores.softmax(-1)[:, None] @ value)[:, 0].flatten()
