"""Model size and hyperparameter rules: everything follows from the depth; FLOP counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unspool.errors import SettingsError
from unspool.model.config import ModelConfig, Recurrence, Rotary
from unspool.model.weights import parameter_count, weight_shapes

if TYPE_CHECKING:
    import torch

    from unspool.model.layers.transformer import Transformer
    from unspool.train.learning.optimizers import Rates


# -- Size and hyperparameter rules: everything follows from the depth of a model
#
#     shape = Shape.of(depth=12, vocab_size=32768)
#     shape.config, shape.batch_tokens, shape.rates, shape.tokens
#     model = new_model(shape.config, seed=0)
#
# Sources: Qwen3 (arXiv 2505.09388), Llama, LFM2 (arXiv 2511.23404) and Qwen3.5 with its gated
# DeltaNet (arXiv 2412.06464) for the layers; nanochat for width = 64 x depth and for the
# initialization; Chinchilla (arXiv 2203.15556) for 20 tokens per parameter; Moonlight (arXiv
# 2502.16982) and muP (arXiv 2203.03466) for learning rates that decrease with the width.

MAX_DEPTH = 128

# Families of new models; the last two have recurrent layers.
SHAPES = ("qwen3", "llama", "lfm2", "qwen3.5")
RECURRENT_SHAPES = ("lfm2", "qwen3.5")

# Defaults of `unspool train`: a model that learns something in four minutes on two CPU cores.
# Measured on a Neoverse N1 with 12 MB of speeches: 1.0M weights at 4,700 tokens/s reach fewer bits
# per byte in the same time than 2.2M weights at 2,500 tokens/s.
SMALLEST = {"depth": 4, "width": 128, "steps": 500, "batch_tokens": 2048}


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Config of a new model and the size of its training."""

    config: ModelConfig
    tokens: int  # to train on
    batch_tokens: int  # per step

    @classmethod
    def for_depth(
        cls, depth: int, vocab_size: int, context: int = 2048, family: str = "qwen3", **changes: Any
    ) -> ModelPlan:
        """Shape of a model of `depth` layers; `changes` override fields of the config."""
        return cls.for_config(new_config(depth, vocab_size, context, family, **changes))

    @classmethod
    def for_config(cls, config: ModelConfig) -> ModelPlan:
        """Shape for an existing config."""
        tokens = 20 * parameter_count(config)
        return cls(config, tokens, batch_tokens(tokens))

    @property
    def rates(self) -> Rates:
        return rates_for(self.config)


def new_config(
    depth: int, vocab_size: int, context: int, family: str = "qwen3", **changes: Any
) -> ModelConfig:
    """Config of a model of `depth` layers of a family; `changes` override its fields."""
    if not 1 <= depth <= MAX_DEPTH:
        raise SettingsError(f"depth must be from 1 to {MAX_DEPTH}, got {depth}")
    if family not in SHAPES:
        raise SettingsError(f"unknown shape {family!r}; choose from {', '.join(SHAPES)}")
    width = changes.get("width", 64 * depth)
    # Heads of 128 as in all of Qwen3, but at least four heads.
    head_width = changes.get("head_width", 128 if width >= 512 else max(16, width // 4))
    heads = changes.get("heads", max(1, width // head_width))
    values: dict[str, Any] = {
        "width": width,
        "head_width": head_width,
        "heads": heads,
        "kv_heads": _half(heads),  # two query heads share a key head, as in Qwen3-0.6B
        "ff_width": -(-3 * width // 64) * 64,  # three times the width, as in Qwen3-0.6B
        "tied": width <= 2560,  # as Qwen3 up to 4B
        "norm_eps": 1e-6,
        **changes,
    }
    rotary = Rotary(width=head_width, base=1e4 if context <= 4096 else 1e6)
    return ModelConfig(
        family=family, vocab_size=vocab_size, layers=depth, context=context,
        **{"rotary": rotary, **_family_fields(family, depth, head_width, heads, rotary), **values},
    )  # fmt: skip


def _family_fields(
    family: str, depth: int, head_width: int, heads: int, rotary: Rotary
) -> dict[str, Any]:
    """Config fields that are specific to a family."""
    if family == "llama":
        return {}
    if family == "qwen3":
        return {"qk_norm": "head"}
    # Every third layer of LFM2 has attention, every fourth of Qwen3.5; at least the last layer.
    recurrent, every = ("conv", 3) if family == "lfm2" else ("delta", 4)
    every = min(every, depth)
    mixers = tuple(recurrent if (n + 1) % every else "attention" for n in range(depth))
    if family == "lfm2":
        return {"qk_norm": "head", "mixers": mixers, "recurrence": Recurrence(conv_kernel=3)}
    # Two value heads per key head, as in Qwen3.5-4B; their number makes the matrices of a recurrent
    # layer as large as those of an attention layer.
    keys = max(1, heads // 2)
    recurrence = Recurrence(
        conv_kernel=4, key_heads=keys, value_heads=2 * keys, key_width=head_width,
        value_width=head_width,
    )  # fmt: skip
    return {
        "qk_norm": "head",
        "norm_plus_one": True,
        "attention_gate": True,
        "rotary": replace(rotary, width=max(2, head_width // 8 * 2)),  # RoPE on a quarter
        "mixers": mixers,
        "recurrence": recurrence,
    }


def config_like(config: ModelConfig, vocab_size: int, **changes: Any) -> ModelConfig:
    """The config of another model for a new vocabulary."""
    return replace(config, vocab_size=vocab_size, end_ids=(), **changes)


def _half(heads: int) -> int:
    """The largest divisor of `heads` that is at most half of it."""
    return next((n for n in range(heads // 2, 0, -1) if heads % n == 0), 1)


def vocabulary_for(depth: int) -> int:
    """Vocabulary size of a new model, chosen so that embeddings are not most of its weights."""
    return 2048 if depth <= 4 else 8192 if depth <= 8 else 32768


def batch_tokens(tokens: int) -> int:
    """Tokens per step, a power of two.

    524,288 at the 2.5 billion tokens of nanochat's d12, and proportional to tokens^(2/3) from there
    (close to arXiv 2401.02954).
    """
    return _power_of_two(2**19 * (tokens / 2.5e9) ** (2 / 3))


def batch_tokens_for_steps(steps: int) -> int:
    """Tokens per step by the same rule, given the number of steps (steps x batch = tokens)."""
    return _power_of_two(2**57 * (steps / 2.5e9) ** 2)


def micro_batch_tokens(config: ModelConfig, memory: int | None) -> int:
    """Tokens per forward pass on a GPU with `memory` bytes (None: a CPU).

    Larger batches hide launch overhead. Activations take about 48 bytes per layer and element of
    the width; a sixth of the memory is for them, so that several runs can share a GPU.
    """
    if memory is None:
        return 4096
    room = memory // 6 // (48 * config.layers * config.width)
    return int(2 ** math.floor(math.log2(min(2**17, max(2**11, room)))))


def _power_of_two(tokens: float) -> int:
    return int(2 ** round(math.log2(min(2**21, max(2**11, tokens)))))


def rates_for(config: ModelConfig) -> Rates:
    """Learning rates, inversely proportional to the square root of the width."""
    from unspool.train.learning.optimizers import Rates

    matrices = 0.1 / math.sqrt(config.width)
    return Rates(matrices=matrices, embedding=matrices, head=matrices, vectors=matrices)


# Matrices that write to the residual stream.
_RESIDUAL_OUTPUTS = (
    "attention.out.weight", "feed.down.weight", "feed.dense.down.weight",
    "feed.experts.down.weight", "token_input.out.weight", "mixer.out.weight",
    "feed.shared.down.weight",
)  # fmt: skip


def new_model(config: ModelConfig, seed: int = 0, *, mtp: bool = False) -> Transformer:
    """A randomly initialized model, with `mtp` with a multi-token prediction layer.

    Matrices preserve the scale of their input. Those that write to the residual stream start at
    zero: every layer starts as the identity, and the first steps are stable at any depth.
    Embeddings are small, because they may be tied to the head: all tokens start equally likely.
    """
    import torch

    from unspool.model.layers.mtp import MtpLayer
    from unspool.model.layers.transformer import Transformer

    rng = torch.Generator().manual_seed(seed)
    model = Transformer(config)
    if mtp:
        model.mtp = MtpLayer(config.mtp_layer_config())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".a_log"):  # from slow to fast decay, by head
                weight.uniform_(1.0, 16.0, generator=rng).log_()
            elif name.endswith(".dt_bias"):  # from 0.001 to 0.1 after the softplus, as in Mamba
                weight.uniform_(math.log(1e-3), math.log(0.1), generator=rng).exp_().expm1_().log_()
            elif name.endswith((".norm_weight", ".mixer.d")):
                weight.fill_(1.0)
            elif name.endswith("bias"):
                weight.zero_()
            elif weight.ndim == 1:
                weight.fill_(0.0 if config.norm_plus_one else 1.0)
            elif name.endswith(_RESIDUAL_OUTPUTS):
                weight.zero_()
            elif name.endswith(".conv.weight"):
                weight.uniform_(-(len(weight) ** -0.5), len(weight) ** -0.5, generator=rng)
            elif "embed" in name or name.startswith("head"):
                weight.normal_(0.0, 0.02, generator=rng)
            else:
                bound = math.sqrt(3 / weight.shape[-1])
                weight.uniform_(-bound, bound, generator=rng)
    return model


# Dense bf16 FLOP/s from the data sheets, by part of the device name.
_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "4090": 165e12,
    "3090": 71e12,
}

_LOOKUP_TABLES = ("embed.weight", "position_embed.weight", "token_inputs.embed.weight")


def compute_parameters(config: ModelConfig) -> int:
    """Parameters that a token is multiplied with: all matrices, the output head included.

    Embedding lookups cost nothing, and only the active experts count.
    """
    total = 0
    for name, shape in weight_shapes(config).items():
        if len(shape) == 3:  # the matrices of all experts
            total += math.prod(shape[1:]) * config.experts_per_token
        elif len(shape) == 2 and name not in _LOOKUP_TABLES:
            total += math.prod(shape)
    return total + config.vocab_size * config.width * config.tied


def attention_flops(config: ModelConfig, length: int, *, causal: bool = False) -> float:
    """Forward FLOPs of one token on average, in attention or in the update of recurrent state."""
    total = 0.0
    for layer in range(config.layers):
        if config.mixer(layer) != "attention":
            total += 7 * config.state_floats(layer)
            continue
        span = min(config.window(layer) or length, length)
        total += 4 * config.shape(layer).out_width * _visible_tokens(span, length, causal)
    return total


def _visible_tokens(span: int, length: int, causal: bool) -> float:
    """Average number of tokens that a query sees, with a window of `span`."""
    if not causal:
        return span
    return (span * (span + 1) / 2 + (length - span) * span) / length


def forward_flops(config: ModelConfig, length: int, *, causal: bool = False) -> float:
    """Forward FLOPs of one token, in a sequence of `length`."""
    return 2 * compute_parameters(config) + attention_flops(config, length, causal=causal)


def training_flops(config: ModelConfig, length: int, *, causal: bool = False) -> float:
    """Forward and backward FLOPs of one token: 6N and attention."""
    return 3 * forward_flops(config, length, causal=causal)


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device; None if it is not in the table."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def device_peak(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of a GPU of this machine; None for a CPU."""
    import torch

    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def mfu(config: ModelConfig, length: int, tokens_per_second: float, peak: float) -> float:
    """Model FLOPs utilization: the share of `peak` that the model's own arithmetic uses."""
    return training_flops(config, length) * tokens_per_second / peak
