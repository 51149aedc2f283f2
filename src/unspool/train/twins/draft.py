"""C: a head that reads a causal model's inner vectors and drafts its next tokens.

One layer, after EAGLE (arXiv 2401.15077). The vectors that go into a few layers of the causal model
are joined to one, f. Keys and values of the text come from f. A drafted token is

    state = layer(linear[f of the token before, or the last state; the token's embedding])

and its successor is guessed from the state, changed a little by the last four tokens, among the
tokens that are written most. Drafted tokens leave no keys: one draft costs a row of one layer.

Training unrolls several drafts behind every token, and compares each with what the causal model
itself says there, at the temperature that texts are written with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.config import ModelConfig
from unspool.model.layers.parts import activate, turn
from unspool.model.positions import Rotary
from unspool.model.transformer import Transformer
from unspool.train.data.batches import Batch
from unspool.train.learning.objectives import Loss
from unspool.train.twins.block import documents_of, kept_halves
from unspool.train.twins.halves import Halves, document_starts

RECENT = 4  # last tokens that change a guess
AHEAD = 64  # the most tokens that are ever drafted
_AT_ONCE = 8192  # tokens that get logits together


def feature_layers(layers: int) -> tuple[int, ...]:
    """The layers whose input is read: near the beginning, on the way, and near the end; 2, 11, 20
    and 27 of 30."""
    wanted = (round(layers * share) for share in (0.0667, 0.3667, 0.6667, 0.9))
    return tuple(sorted({min(layers - 1, each) for each in wanted}))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a head's sizes are, beside those of its model."""

    layers: tuple[int, ...]  # whose inputs are read
    tokens: int  # that can be drafted
    inner: int  # width of the change by the last tokens
    recent: int  # numbers that each of those brings

    @classmethod
    def of(cls, config: ModelConfig, tokens: int) -> HeadShape:
        """512 and 256 beside a width of 576, others in proportion."""
        inner, recent = config.width * 8 // 9, config.width * 4 // 9
        layers = feature_layers(config.layers)
        return cls(layers, tokens, max(16, inner // 32 * 32), max(16, recent // 16 * 16))


def rotation(config: ModelConfig) -> Rotary:
    """How a head turns its queries and keys: plainly, whatever its model does."""
    return Rotary(width=config.head_width, base=config.rotary.base if config.rotary else 10000.0)


@cache
def _tables(
    rotary: Rotary, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    cosine, sine = rotary.tables(np.arange(length), length)
    return (
        torch.from_numpy(cosine).to(device, dtype),
        torch.from_numpy(sine).to(device, dtype),
    )


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def linear(rows: int, columns: int, deviation: float = 0.02) -> nn.Linear:
    made = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(made.weight, 0.0, deviation)
    return made


class DraftLayer(nn.Module):
    """One layer whose keys and values come from elsewhere."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, out = config.width, config.heads * config.head_width
        self.norm = nn.Parameter(torch.ones(width))
        self.q = linear(out, width)
        self.out = linear(width, out)
        self.feed_norm = nn.Parameter(torch.ones(width))
        self.gate = linear(config.ff_width, width)
        self.up = linear(config.ff_width, width)
        self.down = linear(width, config.ff_width)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], key: Tensor, value: Tensor,
        mask: Tensor,
    ) -> Tensor:  # fmt: skip
        config = self.config
        query = self.q(rms(x, self.norm, config.norm_eps)).unflatten(-1, (-1, config.head_width))
        query = turn(query.transpose(1, 2), *angles)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, mask, scale=config.scale, enable_gqa=config.heads != config.kv_heads
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        fed = rms(x, self.feed_norm, config.norm_eps)
        fed = self.down(activate(config.activation, self.gate(fed)) * self.up(fed))
        summed: Tensor = x + fed
        return summed


class DraftHead(nn.Module):
    """The head of one causal model; `config` is that model's."""

    ids: Tensor

    def __init__(self, config: ModelConfig, shape: HeadShape, ids: Tensor) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        width, features = config.width, len(shape.layers)
        self.register_buffer("ids", ids)  # the tokens that can be drafted, in order
        self.feature_norm = nn.Parameter(torch.ones(features * width))
        self.fuse = linear(width, features * width, 0.005)
        self.context_norm = nn.Parameter(torch.ones(width))
        self.k = linear(config.kv_width, width)
        self.v = linear(config.kv_width, width)
        self.state_norm = nn.Parameter(torch.ones(width))
        self.token_norm = nn.Parameter(torch.ones(width))
        self.join = linear(width, 2 * width)
        self.layers = nn.ModuleList([DraftLayer(config)])
        self.change_norm = nn.Parameter(torch.ones(width))
        self.recent_norm = nn.Parameter(torch.ones(width))
        self.recent = linear(RECENT * shape.recent, width, 0.04)
        self.from_recent = linear(2 * shape.inner, RECENT * shape.recent, 0.03)
        self.from_state = linear(2 * shape.inner, width, 0.03)
        self.change = linear(width, shape.inner, 0.0)  # at first there is none
        self.norm = nn.Parameter(torch.ones(width))

    def begin_as(self, model: Transformer) -> None:
        """Begin with the model's own numbers where there are such: the layer is one of its last,
        and the joined vector mostly the last of those that are read."""
        width, features = self.config.width, len(self.shape.layers)
        source: Any = model.layers[max(0, self.config.layers - 4)]
        layer: Any = self.layers[0]
        with torch.no_grad():
            for number in range(features):
                share = 0.6 if number == features - 1 else 0.3
                own = self.fuse.weight[:, number * width : (number + 1) * width]
                own += torch.eye(width) * share
            for mine, theirs in (
                (layer.q.weight, source.attention.q.weight),
                (self.k.weight, source.attention.k.weight),
                (self.v.weight, source.attention.v.weight),
                (layer.out.weight, source.attention.out.weight),
            ):
                mine.copy_(theirs)
            if getattr(source.feed, "gate", None) is not None and not self.config.experts:
                for name in ("gate", "up", "down"):
                    getattr(layer, name).weight.copy_(getattr(source.feed, name).weight)
            for mine, norm in (
                (layer.norm, source.attention_norm), (self.context_norm, source.attention_norm),
                (layer.feed_norm, source.feed_norm), (self.norm, model.norm),
            ):  # fmt: skip
                if hasattr(norm, "weight"):
                    mine.copy_(norm.weight + float(self.config.norm_plus_one))

    # -- one draft ----------------------------------------------------------------------------

    def fused(self, features: Tensor) -> Tensor:
        """f, from the inputs of the layers that are read: [..., features, width]."""
        eps, width = self.config.norm_eps, self.config.width
        weight = self.feature_norm.view(-1, width)
        normed: Tensor = self.fuse(rms(features, weight, eps).flatten(-2))
        return normed

    def keys_and_values(self, f: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = rms(f, self.context_norm, self.config.norm_eps)
        key, value = (
            part(x).unflatten(-1, (-1, self.config.head_width)).transpose(1, 2)
            for part in (self.k, self.v)
        )
        return turn(key, *angles), value

    def joined(self, before: Tensor, embedded: Tensor) -> Tensor:
        eps = self.config.norm_eps
        parts = rms(before, self.state_norm, eps), rms(embedded, self.token_norm, eps)
        joined: Tensor = self.join(torch.cat(parts, -1))
        return joined

    def recent_part(self, embedded: Tensor) -> Tensor:
        """What the last four tokens say, at every place of whole rows [B, T, width]."""
        each = self.recent(rms(embedded, self.recent_norm, self.config.norm_eps))
        shifted = [part.roll(back, 1) for back, part in enumerate(each.chunk(RECENT, -1))]
        said: Tensor = self.from_recent(torch.cat(shifted, -1))
        return said

    def guess(self, state: Tensor, recent: Tensor) -> Tensor:
        """The vector whose products with the embeddings are the logits."""
        eps = self.config.norm_eps
        gate, up = (recent + self.from_state(rms(state, self.change_norm, eps))).chunk(2, -1)
        return rms(state + self.change(functional.silu(gate) * up), self.norm, eps)


def most_written(ids: np.ndarray[Any, Any], vocabulary: int, count: int) -> Tensor:
    """The tokens that a text has most of, in the order of their numbers."""
    frequency = np.bincount(np.asarray(ids, np.int64), minlength=vocabulary)
    top = np.argsort(-frequency, kind="stable")[: min(count, vocabulary)]
    return torch.from_numpy(np.sort(top))


@dataclass(eq=False)
class DraftTwin:
    """Drafts behind every token of an answer, as an objective of the trainer."""

    clean: Transformer = field(repr=False)
    steps: int = 6
    temperature: float = 0.8
    fading: float = 4.0  # a draft i tokens ahead counts exp(-i / fading)
    _halves: dict[tuple[int, int], Halves] = field(default_factory=dict, repr=False)

    def __call__(self, head: DraftHead, batch: Batch, rng: torch.Generator) -> Loss:
        drafts = Drafts(self.clean, head, batch, self._halves, self.temperature)
        counted = answers_ahead(batch)
        total = torch.zeros((), device=batch.ids.device)
        weights = [math.exp(-ahead / self.fading) for ahead in range(self.steps)]
        told: dict[str, float] = {}
        for ahead, weight in enumerate(weights):
            guess = drafts.step(ahead)
            here = counted & drafts.inside(ahead)
            mean = self._compared(drafts, guess, here, ahead)
            total = total + mean * (weight / sum(weights))
            if ahead in (0, self.steps - 1):
                told[f"ahead_{ahead + 1}"] = float(mean.detach())
        return Loss(total, counted.sum().clamp(min=1), told)

    def _compared(self, drafts: Drafts, guess: Tensor, here: Tensor, ahead: int) -> Tensor:
        """Cross-entropy to the causal model's distribution, which is KL but for a constant."""
        compare = _compiled_piece() if guess.is_cuda else _piece
        parts = (
            guess.flatten(0, 1),
            drafts.logits.roll(-ahead, 1).flatten(0, 1),
            drafts.whole.roll(-ahead, 1).flatten(),
            here.flatten().float(),
        )
        total = torch.zeros((), device=guess.device)
        pieces = zip(*(part.split(_AT_ONCE) for part in parts), strict=True)
        for ours, wanted, whole, weight in pieces:
            scale = 1 / self.temperature
            total = total + compare(drafts.table, ours, wanted, whole, weight, scale)
        return total / here.sum().clamp(min=1)


def _piece(
    table: Tensor, guess: Tensor, wanted: Tensor, whole: Tensor, weight: Tensor, scale: float
) -> Tensor:
    chances = torch.exp(wanted.float() * scale - whole[:, None])
    said = functional.log_softmax(functional.linear(guess, table).float() * scale, -1)
    return -((chances * said).sum(-1) * weight).sum()


@cache
def _compiled_piece() -> Any:
    return torch.compile(_piece, dynamic=False)


class Drafts:
    """Drafts behind every token of a batch, one further ahead at each step."""

    def __init__(
        self, clean: Transformer, head: DraftHead, batch: Batch,
        made: dict[tuple[int, int], Halves], temperature: float = 0.8,
    ) -> None:  # fmt: skip
        tokens = batch.inputs
        self.head, self.tokens, self.documents = head, tokens, documents_of(batch)
        starts = document_starts(self.documents)
        halves = kept_halves(made, clean, tokens)
        halves.place(starts)
        with torch.no_grad():
            features, vectors = halves.inner(clean, tokens, head.shape.layers)
            self.embedded = clean.embed(tokens).to(features.dtype)
            self.table = head_table(clean)[head.ids]
            self.logits, self.whole = _said(clean, vectors, head.ids, temperature)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        f = head.fused(features)
        self._angles = _tables(rotation(head.config), tokens.shape[1] + AHEAD, f.dtype, f.device)
        key, value = head.keys_and_values(f, self._turned(0))
        # A token sees what stands before it, and a place with nothing in it.
        self._key, self._value = _behind(key), _behind(value)
        before = places[None] - 1
        self.mask = ((places[None, None] <= places[:, None]) & (
            (places[None, None] - 1 >= starts[:, :, None]) | (places[None, None] == 0)
        ))[:, None]  # fmt: skip
        self.before = torch.where((before >= starts)[..., None], f.roll(1, 1), 0.0)
        self.recent = head.recent_part(self.embedded)

    def _turned(self, ahead: int) -> tuple[Tensor, Tensor]:
        """The angles of all places, so many tokens further on."""
        cosine, sine = self._angles
        length = self.tokens.shape[1]
        return cosine[ahead : ahead + length], sine[ahead : ahead + length]

    def step(self, ahead: int) -> Tensor:
        """At each place the guess of the token `ahead` + 1 behind it, where all the tokens between
        are the text's own."""
        head = self.head
        x = head.joined(self.before, self.embedded.roll(-ahead, 1))
        layer = head.layers[0]
        state = layer(x, self._turned(ahead), self._key, self._value, self.mask)
        self.before = state
        return head.guess(state, self.recent.roll(-ahead, 1))

    def inside(self, ahead: int) -> Tensor:
        """Where the drafted token and the one it is drafted behind are of one document."""
        length = self.tokens.shape[1]
        places = torch.arange(length, device=self.tokens.device)[None]
        later = self.documents.roll(-(ahead + 1), 1)
        return (places + ahead + 1 < length) & (later == self.documents) & (self.documents >= 0)


def _said(
    model: Transformer, vectors: Tensor, ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The causal model's logits of the tokens that can be drafted, and at this temperature what the
    logits of all tokens come to."""
    logits, whole = [], []
    for part in vectors.flatten(0, 1).split(_AT_ONCE):
        said = model.logits(part)
        logits.append(said[:, ids])
        whole.append((said.float() / temperature).logsumexp(-1))
    shape = vectors.shape[:2]
    return torch.cat(logits).view(*shape, -1), torch.cat(whole).view(shape)


def _behind(x: Tensor) -> Tensor:
    """Moved one place on, with nothing in the first."""
    return torch.cat((torch.zeros_like(x[:, :, :1]), x[:, :, :-1]), 2)


def head_table(model: Transformer) -> Tensor:
    return model.head.weight if model.head is not None else model.embed.weight


def answers_ahead(batch: Batch) -> Tensor:
    """The inputs whose successor counts."""
    if batch.counted is None:
        return torch.ones_like(batch.inputs, dtype=torch.bool)
    return batch.counted
