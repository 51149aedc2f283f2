"""One dial: from the depth of a model follows everything else. All rules stand here.

    shape = Shape.of(depth=12, vocab_size=32768)
    shape.config, shape.batch_tokens, shape.rates, shape.tokens
    model = new_model(shape.config, seed=0)

Sources: Qwen3 (arXiv 2505.09388), Llama, LFM2 (arXiv 2511.23404) and Qwen3.5 with its gated
DeltaNet (arXiv 2412.06464) for what a layer is; nanochat for width = 64 x depth and for the
start values; Chinchilla (arXiv 2203.15556) for 20 tokens a parameter; Moonlight (arXiv 2502.16982)
and muP (arXiv 2203.03466) for learning rates that fall with the width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unspool.errors import SettingsError
from unspool.model.config import ModelConfig
from unspool.model.positions import Rotary
from unspool.model.recurrence import Recurrence
from unspool.model.weights import parameter_count

if TYPE_CHECKING:
    from unspool.model.transformer import Transformer
    from unspool.train.learning.optimizers import Rates

DEEPEST = 128

# The families whose layers a new model may have; the last two recur in most of them.
SHAPES = ("qwen3", "llama", "lfm2", "qwen3.5")
RECURRENT_SHAPES = ("lfm2", "qwen3.5")

# What `unspool train` makes with nothing said: what two CPU cores can teach something in four
# minutes. Measured on such a machine (Neoverse N1), on 12 MB of speeches: 1.0M weights at 4,700
# tokens a second come to fewer bits per byte in the same time than 2.2M weights at 2,500.
SMALLEST = {"depth": 4, "width": 128, "steps": 500, "batch_tokens": 2048}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model that is to be, and how it is to be trained."""

    config: ModelConfig
    tokens: int  # to see in training
    batch_tokens: int  # in a step

    @classmethod
    def of(
        cls, depth: int, vocab_size: int, context: int = 2048, family: str = "qwen3", **changes: Any
    ) -> Shape:
        """The shape of a depth; `changes` are settings of the config that are to be otherwise."""
        return cls.around(new_config(depth, vocab_size, context, family, **changes))

    @classmethod
    def around(cls, config: ModelConfig) -> Shape:
        """How a model of any family is trained."""
        tokens = 20 * parameter_count(config)
        return cls(config, tokens, batch_tokens(tokens))

    @property
    def rates(self) -> Rates:
        return rates_for(self.config)


def new_config(
    depth: int, vocab_size: int, context: int, family: str = "qwen3", **changes: Any
) -> ModelConfig:
    """A model of so many layers, each as in `family`; `changes` are what was said otherwise."""
    if not 1 <= depth <= DEEPEST:
        raise SettingsError(f"the depth is {depth}; it may be 1 to {DEEPEST} layers")
    if family not in SHAPES:
        raise SettingsError(f"there is no shape {family!r}; there are {', '.join(SHAPES)}")
    width = changes.get("width", 64 * depth)
    # 128 numbers a head as all of Qwen3 has them, but at least four heads.
    head_width = changes.get("head_width", 128 if width >= 512 else max(16, width // 4))
    heads = changes.get("heads", max(1, width // head_width))
    values: dict[str, Any] = {
        "width": width,
        "head_width": head_width,
        "heads": heads,
        "kv_heads": _half(heads),  # two query heads share a key head, as in Qwen3-0.6B
        "ff_width": -(-3 * width // 64) * 64,  # three times the width, as there
        "tied": width <= 2560,  # as Qwen3 up to 4B
        "norm_eps": 1e-6,
        **changes,
    }
    rotary = Rotary(width=head_width, base=1e4 if context <= 4096 else 1e6)
    return ModelConfig(
        family=family, vocab_size=vocab_size, layers=depth, context=context,
        **{"rotary": rotary, **_kind(family, depth, head_width, heads, rotary), **values},
    )  # fmt: skip


def _kind(family: str, depth: int, head_width: int, heads: int, rotary: Rotary) -> dict[str, Any]:
    """What the layers of a family have of their own."""
    if family == "llama":
        return {}
    if family == "qwen3":
        return {"qk_norm": "head"}
    # Every third layer of LFM2 has attention, every fourth of Qwen3.5; the last of a shallow one.
    recurring, every = ("conv", 3) if family == "lfm2" else ("delta", 4)
    every = min(every, depth)
    mixers = tuple(recurring if (n + 1) % every else "attention" for n in range(depth))
    if family == "lfm2":
        return {"qk_norm": "head", "mixers": mixers, "recurrence": Recurrence(conv_kernel=3)}
    # Two value heads for each key head, as in Qwen3.5-4B, and as many as make the matrices of a
    # recurrent layer as large as those of attention with all its heads.
    keys = max(1, heads // 2)
    recurrence = Recurrence(
        conv_kernel=4, key_heads=keys, value_heads=2 * keys, key_width=head_width,
        value_width=head_width,
    )  # fmt: skip
    return {
        "qk_norm": "head",
        "norm_plus_one": True,
        "attention_gate": True,
        "rotary": replace(rotary, width=max(2, head_width // 8 * 2)),  # a quarter is turned
        "mixers": mixers,
        "recurrence": recurrence,
    }


def like(config: ModelConfig, vocab_size: int, **changes: Any) -> ModelConfig:
    """Another model's shape for a vocabulary of one's own."""
    return replace(config, vocab_size=vocab_size, end_ids=(), **changes)


def _half(heads: int) -> int:
    """The largest divisor of the heads that is no more than half of them."""
    return next((n for n in range(heads // 2, 0, -1) if heads % n == 0), 1)


def vocabulary_for(depth: int) -> int:
    """Tokens of a vocabulary that is made for the model: a table that is not most of it."""
    return 2048 if depth <= 4 else 8192 if depth <= 8 else 32768


def batch_tokens(tokens: int) -> int:
    """Tokens in a step, to a power of two: 524,288 at the 2.5 billion tokens of nanochat's d12, and
    from there with the two thirds' power of all tokens (about what arXiv 2401.02954 finds)."""
    return _power_of_two(2**19 * (tokens / 2.5e9) ** (2 / 3))


def batch_tokens_of(steps: int) -> int:
    """The same rule where the number of steps is given: steps x batch are the tokens."""
    return _power_of_two(2**57 * (steps / 2.5e9) ** 2)


def tokens_at_once(config: ModelConfig, memory: int | None) -> int:
    """Tokens that go through the model together, on a GPU of so much memory (None: on a CPU).

    The more, the less a GPU waits for launches; what a token leaves behind for the way back is
    about 48 bytes for each number it carries, in each layer. A sixth of the memory is for that:
    runs may go side by side.
    """
    if memory is None:
        return 4096
    room = memory // 6 // (48 * config.layers * config.width)
    return int(2 ** math.floor(math.log2(min(2**17, max(2**11, room)))))


def _power_of_two(wanted: float) -> int:
    return int(2 ** round(math.log2(min(2**21, max(2**11, wanted)))))


def rates_for(config: ModelConfig) -> Rates:
    """Learning rates that fall with the root of the width, because the sum that a unit takes part
    in grows with it."""
    from unspool.train.learning.optimizers import Rates

    matrices = 0.1 / math.sqrt(config.width)
    return Rates(matrices=matrices, embedding=matrices, head=matrices, vectors=matrices)


# Matrices whose product is added to the residual.
_ADDING = (
    "attention.out.weight", "feed.down.weight", "feed.dense.down.weight",
    "feed.experts.down.weight", "token_input.out.weight", "mixer.out.weight",
    "feed.shared.down.weight",
)  # fmt: skip


def new_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model with start values.

    Matrices are drawn so that what comes out is as large as what goes in. Those that add to the
    residual begin at zero: every layer begins as nothing, and the first steps are stable at any
    depth. Embeddings are small, because they may be the head too: all tokens begin equally likely.
    """
    import torch

    from unspool.model.transformer import Transformer

    rng = torch.Generator().manual_seed(seed)
    model = Transformer(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".a_log"):  # heads that forget slowly, and others that do soon
                weight.uniform_(1.0, 16.0, generator=rng).log_()
            elif name.endswith(".dt_bias"):  # from 0.001 to 0.1 behind the softplus, as Mamba has
                weight.uniform_(math.log(1e-3), math.log(0.1), generator=rng).exp_().expm1_().log_()
            elif name.endswith((".norm_weight", ".mixer.d")):
                weight.fill_(1.0)
            elif name.endswith("bias"):
                weight.zero_()
            elif weight.ndim == 1:
                weight.fill_(0.0 if config.norm_plus_one else 1.0)
            elif name.endswith(_ADDING):
                weight.zero_()
            elif name.endswith(".conv.weight"):
                weight.uniform_(-(len(weight) ** -0.5), len(weight) ** -0.5, generator=rng)
            elif "embed" in name or name.startswith("head"):
                weight.normal_(0.0, 0.02, generator=rng)
            else:
                bound = math.sqrt(3 / weight.shape[-1])
                weight.uniform_(-bound, bound, generator=rng)
    return model
