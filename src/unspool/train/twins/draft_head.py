"""Train a drafting head: the module, its objective, its files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.backends.torch.backend import TorchModel
from unspool.errors import ModelFileError, SettingsError
from unspool.model.config import ModelConfig, Rotary
from unspool.model.files.checkpoint import load_transformer
from unspool.model.files.stored import FileTensor
from unspool.model.hub.find import find_run, resolve_run
from unspool.model.layers.parts import activate, apply_rope
from unspool.model.layers.transformer import Transformer
from unspool.train.data.batches import TrainingBatch
from unspool.train.learning.objectives import Loss
from unspool.train.learning.optimizers import Rates
from unspool.train.twins.data import CausalModel, Mixture, evaluator, load_sources, target_tokens
from unspool.train.twins.objectives import (
    CleanNoisyPasses,
    cached_halves,
    document_ids,
    document_starts,
)
from unspool.train.twins.settings import TwinParts, TwinSettings

# -- Draft head for speculative decoding: predicts next tokens from a causal model's hidden states
#
# One layer, after EAGLE (arXiv 2401.15077). The inputs of a few layers of the causal model are
# fused into one vector f. Keys and values of the text come from f. A drafted token is
#
#     state = layer(linear[f of the token before, or the last state; the token's embedding])
#
# and its successor is predicted from the state, corrected by the last four tokens, among the most
# frequent tokens. Drafted tokens add no keys: one draft costs one row of one layer.
#
# Training unrolls several drafts after every token, and compares each with the distribution of the
# causal model at the sampling temperature.

RECENT = 4  # last tokens that correct a prediction
AHEAD = 64  # maximum number of drafted tokens
_CHUNK_TOKENS = 8192  # whose logits are computed together


def feature_layers(layers: int) -> tuple[int, ...]:
    """Layers whose input the head reads, from early to late: 2, 11, 20 and 27 of 30."""
    indices = (round(layers * share) for share in (0.0667, 0.3667, 0.6667, 0.9))
    return tuple(sorted({min(layers - 1, index) for index in indices}))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a draft head, besides those of its model."""

    layers: tuple[int, ...]  # whose inputs are read
    tokens: int  # size of the draft vocabulary
    inner: int  # width of the correction
    recent: int  # features of each of the last tokens

    @classmethod
    def for_model(cls, config: ModelConfig, tokens: int) -> HeadShape:
        """512 and 256 for a width of 576, proportional for others."""
        inner, recent = config.width * 8 // 9, config.width * 4 // 9
        layers = feature_layers(config.layers)
        return cls(layers, tokens, max(16, inner // 32 * 32), max(16, recent // 16 * 16))


def rotation(config: ModelConfig) -> Rotary:
    """RoPE of a draft head: the plain variant, also if the model has scaled RoPE."""
    return Rotary(width=config.head_width, base=config.rotary.base if config.rotary else 10000.0)


@cache
def _tables(
    rotary: Rotary, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    cosine, sine = rotary.tables(np.arange(length), length)
    return (torch.from_numpy(cosine).to(device, dtype), torch.from_numpy(sine).to(device, dtype))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def linear(rows: int, columns: int, deviation: float = 0.02) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(layer.weight, 0.0, deviation)
    return layer


class DraftLayer(nn.Module):
    """Transformer layer with external keys and values."""

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
        query = apply_rope(query.transpose(1, 2), *angles)
        attended = functional.scaled_dot_product_attention(
            query, key, value, mask, scale=config.scale, enable_gqa=config.heads != config.kv_heads
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = rms(x, self.feed_norm, config.norm_eps)
        output: Tensor = x + self.down(
            activate(config.activation, self.gate(normed)) * self.up(normed)
        )
        return output


class DraftHead(nn.Module):
    """Draft head of a causal model; `config` is that of the model."""

    ids: Tensor

    def __init__(self, config: ModelConfig, shape: HeadShape, ids: Tensor) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        width, features = config.width, len(shape.layers)
        self.register_buffer("ids", ids)  # the draft vocabulary, sorted
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
        self.change = linear(width, shape.inner, 0.0)  # starts without a correction
        self.norm = nn.Parameter(torch.ones(width))

    def init_from(self, model: Transformer) -> None:
        """Initialize from the model: the layer is one of its last, f mostly the last input."""
        width, features = self.config.width, len(self.shape.layers)
        source: Any = model.layers[max(0, self.config.layers - 4)]
        layer: Any = self.layers[0]
        with torch.no_grad():
            for number in range(features):
                share = 0.6 if number == features - 1 else 0.3
                block = self.fuse.weight[:, number * width : (number + 1) * width]
                block += torch.eye(width) * share
            for target, weight in (
                (layer.q.weight, source.attention.q.weight),
                (self.k.weight, source.attention.k.weight),
                (self.v.weight, source.attention.v.weight),
                (layer.out.weight, source.attention.out.weight),
            ):
                target.copy_(weight)
            if getattr(source.feed, "gate", None) is not None and not self.config.experts:
                for name in ("gate", "up", "down"):
                    getattr(layer, name).weight.copy_(getattr(source.feed, name).weight)
            for target, norm in (
                (layer.norm, source.attention_norm), (self.context_norm, source.attention_norm),
                (layer.feed_norm, source.feed_norm), (self.norm, model.norm),
            ):  # fmt: skip
                if hasattr(norm, "weight"):
                    target.copy_(norm.weight + float(self.config.norm_plus_one))

    # -- one draft ----------------------------------------------------------------------------

    def fuse_features(self, features: Tensor) -> Tensor:
        """f, from the layer inputs [..., features, width]."""
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
        return apply_rope(key, *angles), value

    def join_inputs(self, before: Tensor, embedded: Tensor) -> Tensor:
        eps = self.config.norm_eps
        parts = rms(before, self.state_norm, eps), rms(embedded, self.token_norm, eps)
        joined: Tensor = self.join(torch.cat(parts, -1))
        return joined

    def recent_part(self, embedded: Tensor) -> Tensor:
        """Features of the last four tokens, at every position of rows [B, T, width]."""
        features = self.recent(rms(embedded, self.recent_norm, self.config.norm_eps))
        shifted = [part.roll(back, 1) for back, part in enumerate(features.chunk(RECENT, -1))]
        result: Tensor = self.from_recent(torch.cat(shifted, -1))
        return result

    def output_state(self, state: Tensor, recent: Tensor) -> Tensor:
        """The output state, whose products with the embeddings are the logits."""
        eps = self.config.norm_eps
        gate, up = (recent + self.from_state(rms(state, self.change_norm, eps))).chunk(2, -1)
        return rms(state + self.change(functional.silu(gate) * up), self.norm, eps)


def most_frequent_tokens(ids: np.ndarray[Any, Any], vocabulary: int, count: int) -> Tensor:
    """The `count` most frequent tokens, sorted by id."""
    frequency = np.bincount(np.asarray(ids, np.int64), minlength=vocabulary)
    top = np.argsort(-frequency, kind="stable")[: min(count, vocabulary)]
    return torch.from_numpy(np.sort(top))


@dataclass(eq=False)
class DraftHeadObjective:
    """Cross-entropy of drafts after every token of an answer."""

    clean: Transformer = field(repr=False)
    steps: int = 6
    temperature: float = 0.8
    fading: float = 4.0  # a draft i tokens ahead has weight exp(-i / fading)
    _halves: dict[tuple[int, int], CleanNoisyPasses] = field(default_factory=dict, repr=False)

    def __call__(self, head: DraftHead, batch: TrainingBatch, rng: torch.Generator) -> Loss:
        drafts = UnrolledDrafts(self.clean, head, batch, self._halves, self.temperature)
        loss_mask = answer_mask(batch)
        total = torch.zeros((), device=batch.ids.device)
        weights = [math.exp(-ahead / self.fading) for ahead in range(self.steps)]
        statistics: dict[str, float] = {}
        for ahead, weight in enumerate(weights):
            states = drafts.step(ahead)
            mask = loss_mask & drafts.inside(ahead)
            mean = self._cross_entropy(drafts, states, mask, ahead)
            total = total + mean * (weight / sum(weights))
            if ahead in (0, self.steps - 1):
                statistics[f"ahead_{ahead + 1}"] = float(mean.detach())
        return Loss(total, loss_mask.sum().clamp(min=1), statistics)

    def _cross_entropy(
        self, drafts: UnrolledDrafts, states: Tensor, mask: Tensor, ahead: int
    ) -> Tensor:
        """Cross-entropy to the causal model's distribution: the KL divergence plus a constant."""
        chunk_loss = _compiled_chunk() if states.is_cuda else _chunk_cross_entropy
        parts = (
            states.flatten(0, 1),
            drafts.logits.roll(-ahead, 1).flatten(0, 1),
            drafts.log_normalizer.roll(-ahead, 1).flatten(),
            mask.flatten().float(),
        )
        total = torch.zeros((), device=states.device)
        chunks = zip(*(part.split(_CHUNK_TOKENS) for part in parts), strict=True)
        for chunk_states, target, log_normalizer, weight in chunks:
            total = total + chunk_loss(
                drafts.table, chunk_states, target, log_normalizer, weight, 1 / self.temperature
            )
        return total / mask.sum().clamp(min=1)


def _chunk_cross_entropy(
    table: Tensor, states: Tensor, target: Tensor, log_normalizer: Tensor, weight: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    probabilities = torch.exp(target.float() * scale - log_normalizer[:, None])
    logprobs = functional.log_softmax(functional.linear(states, table).float() * scale, -1)
    return -((probabilities * logprobs).sum(-1) * weight).sum()


@cache
def _compiled_chunk() -> Any:
    return torch.compile(_chunk_cross_entropy, dynamic=False)


class UnrolledDrafts:
    """Drafts after every token of a batch, one token further ahead at each step."""

    def __init__(
        self, clean: Transformer, head: DraftHead, batch: TrainingBatch,
        cache: dict[tuple[int, int], CleanNoisyPasses], temperature: float = 0.8,
    ) -> None:  # fmt: skip
        tokens = batch.inputs
        self.head, self.tokens, self.documents = head, tokens, document_ids(batch)
        starts = document_starts(self.documents)
        halves = cached_halves(cache, clean, tokens)
        halves.set_starts(starts)
        with torch.no_grad():
            features, vectors = halves.layer_inputs(clean, tokens, head.shape.layers)
            self.embedded = clean.embed(tokens).to(features.dtype)
            self.table = head_table(clean)[head.ids]
            self.logits, self.log_normalizer = _teacher_logits(
                clean, vectors, head.ids, temperature
            )
        places = torch.arange(tokens.shape[1], device=tokens.device)
        f = head.fuse_features(features)
        self._angles = _tables(rotation(head.config), tokens.shape[1] + AHEAD, f.dtype, f.device)
        key, value = head.keys_and_values(f, self._angles_at(0))
        # A token attends to the tokens before it and to an empty first position.
        self._key, self._value = _shift_right(key), _shift_right(value)
        before = places[None] - 1
        self.mask = ((places[None, None] <= places[:, None]) & (
            (places[None, None] - 1 >= starts[:, :, None]) | (places[None, None] == 0)
        ))[:, None]  # fmt: skip
        self.before = torch.where((before >= starts)[..., None], f.roll(1, 1), 0.0)
        self.recent = head.recent_part(self.embedded)

    def _angles_at(self, ahead: int) -> tuple[Tensor, Tensor]:
        """RoPE angles of all positions, shifted by `ahead` tokens."""
        cosine, sine = self._angles
        length = self.tokens.shape[1]
        return cosine[ahead : ahead + length], sine[ahead : ahead + length]

    def step(self, ahead: int) -> Tensor:
        """At each position, the output state that predicts the token `ahead` + 1 positions later.

        The tokens in between are those of the text. Steps must be called in order.
        """
        head = self.head
        x = head.join_inputs(self.before, self.embedded.roll(-ahead, 1))
        layer = head.layers[0]
        state = layer(x, self._angles_at(ahead), self._key, self._value, self.mask)
        self.before = state
        return head.output_state(state, self.recent.roll(-ahead, 1))

    def inside(self, ahead: int) -> Tensor:
        """Where the drafted token is in the document of the position."""
        length = self.tokens.shape[1]
        places = torch.arange(length, device=self.tokens.device)[None]
        later = self.documents.roll(-(ahead + 1), 1)
        return (places + ahead + 1 < length) & (later == self.documents) & (self.documents >= 0)


def _teacher_logits(
    model: Transformer, vectors: Tensor, ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The causal model's logits of the draft vocabulary, and the log-normalizer of all tokens."""
    logits, log_normalizers = [], []
    for part in vectors.flatten(0, 1).split(_CHUNK_TOKENS):
        all_logits = model.logits(part)
        logits.append(all_logits[:, ids])
        log_normalizers.append((all_logits.float() / temperature).logsumexp(-1))
    shape = vectors.shape[:2]
    return torch.cat(logits).view(*shape, -1), torch.cat(log_normalizers).view(shape)


def _shift_right(x: Tensor) -> Tensor:
    """Shift by one position, with zeros in the first."""
    return torch.cat((torch.zeros_like(x[:, :, :1]), x[:, :, :-1]), 2)


def head_table(model: Transformer) -> Tensor:
    return model.head.weight if model.head is not None else model.embed.weight


def answer_mask(batch: TrainingBatch) -> Tensor:
    """Inputs whose next token is in the loss."""
    if batch.loss_mask is None:
        return torch.ones_like(batch.inputs, dtype=torch.bool)
    return batch.loss_mask


# -- Files of a draft head, as `speculate="head:FOLDER"` reads them

CONFIG, WEIGHTS = "config.json", "head.safetensors"
_FORMAT = {"format": "unspool-draft-head", "version": 1}
_NORMS = {
    "context.norm": "context_norm", "join.state.norm": "state_norm",
    "join.word.norm": "token_norm", "attention.norm": "layers.0.norm",
    "feed.norm": "layers.0.feed_norm", "words.norm": "recent_norm", "mix.norm": "change_norm",
    "final.norm": "norm",
}  # fmt: skip
_MATRICES = {
    "features.fuse": "fuse", "attention.query": "layers.0.q", "attention.out": "layers.0.out",
    "feed.down": "layers.0.down", "words.project": "recent", "mix.state": "from_state",
    "mix.out": "change",
}  # fmt: skip


def save_head(
    weights: Mapping[str, Tensor], shape: HeadShape, config: ModelConfig, folder: Path, *,
    base: str, fingerprint: str, type: str = "F16",
) -> None:  # fmt: skip
    """Write a draft head; `type` is F16, or quantized: Q8_0, Q4_1."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    floats = {name: value.detach().float().cpu() for name, value in weights.items()}
    tensors = {name: _pack(matrix, type) for name, matrix in _matrices(floats, shape).items()}
    tensors |= {name: floats[source].numpy() for name, source in _NORMS.items()}
    for number, norm in enumerate(floats["feature_norm"].view(len(shape.layers), -1)):
        tensors[f"features.norm.{number}"] = norm.numpy()
    tensors["ids"] = weights["ids"].cpu().numpy().astype(np.int32)
    part = folder / f"{WEIGHTS}.part"
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, part)
    part.replace(folder / WEIGHTS)
    content = {
        **_FORMAT, "name": folder.name, "base": base, "fingerprint": fingerprint,
        "layers": list(shape.layers), "width": config.width, "heads": config.heads,
        "kv_heads": config.kv_heads, "head_width": config.head_width, "ff_width": config.ff_width,
        "words": RECENT, "word_width": shape.recent, "mix_width": shape.inner,
        "rope_theta": rotation(config).base, "norm_eps": config.norm_eps,
        "weights": type,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _matrices(weights: Mapping[str, Tensor], shape: HeadShape) -> dict[str, Tensor]:
    join, recent = weights["join.weight"], weights["from_recent.weight"]
    width = join.shape[0]
    gate, up = weights["layers.0.gate.weight"], weights["layers.0.up.weight"]
    return {
        **{name: weights[f"{source}.weight"] for name, source in _MATRICES.items()},
        "context.keys_values": torch.cat((weights["k.weight"], weights["v.weight"])),
        "join.state": join[:, :width],
        "join.word": join[:, width:],
        "feed.gate_up": torch.cat((gate, up)),
        "mix.last_word": recent[:, : shape.recent],
        "mix.earlier_words": recent[:, shape.recent :],
    }


def _pack(matrix: Tensor, type: str) -> Any:
    numbers = np.ascontiguousarray(matrix.numpy())
    if type == "F16":
        return numbers.astype(np.float16)
    if numbers.shape[1] % 32:
        raise ModelFileError(f"a matrix of {numbers.shape[1]} columns cannot be quantized: use F16")
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return quantize(numbers, GGMLQuantizationType[type])


def open_head(folder: Path) -> tuple[HeadShape, dict[str, Tensor]]:
    """Read a draft head; returns its shape and its state dict for training."""
    from safetensors.numpy import load_file

    config = json.loads((folder / CONFIG).read_text("utf-8"))
    tensors = load_file(folder / WEIGHTS)

    def numbers(name: str) -> Tensor:
        array = tensors[name]
        if array.dtype == np.uint8:
            quantized = FileTensor(
                config["weights"], array, _unpacked_shape(array, config["weights"])
            )
            array = quantized.float32()
        return torch.from_numpy(array.astype(np.float32))

    keys, values = numbers("context.keys_values").chunk(2)
    gate, up = numbers("feed.gate_up").chunk(2)
    features = [numbers(f"features.norm.{n}") for n in range(len(config["layers"]))]
    joined = [numbers(name) for name in ("join.state", "join.word")]
    recent = [numbers(name) for name in ("mix.last_word", "mix.earlier_words")]
    weights = {
        **{target: numbers(name) for name, target in _NORMS.items()},
        **{f"{target}.weight": numbers(name) for name, target in _MATRICES.items()},
        "feature_norm": torch.cat(features),
        "k.weight": keys,
        "v.weight": values,
        "layers.0.gate.weight": gate,
        "layers.0.up.weight": up,
        "join.weight": torch.cat(joined, 1),
        "from_recent.weight": torch.cat(recent, 1),
        "ids": torch.from_numpy(tensors["ids"].astype(np.int64)),
    }
    shape = HeadShape(
        tuple(config["layers"]), len(weights["ids"]), config["mix_width"], config["word_width"]
    )
    return shape, weights


def _unpacked_shape(array: np.ndarray[Any, Any], type: str) -> tuple[int, int]:
    rows, size = array.shape
    return rows, size // {"Q4_1": 20, "Q8_0": 34}[type] * 32


# -- Training of a draft head: model, data and objective

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
