"""`ModelConfig`: the architecture and hyperparameters of a model, independent of its file format.

It is read from config.json or from GGUF metadata; backends and trainer use only this class. It
validates itself, so an invalid file is refused before any memory is allocated.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError, UnspoolError

# -- Position encodings: sinusoidal vectors, and RoPE with its context-extension scalings

Floats = npt.NDArray[np.float32]
Scaling = Literal["none", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
SCALINGS: tuple[str, ...] = get_args(Scaling)


def sinusoidal(positions: npt.NDArray[np.int64], width: int) -> Floats:
    """Position vectors of the original transformer: sine at even indices, cosine at odd ones."""
    waves = 1.0 / _powers(10000.0, np.arange(0, width, 2) / width)
    sine, cosine = _sine_and_cosine(positions[:, None] * waves[None, :])
    table = np.zeros((len(positions), width), np.float32)
    table[:, 0::2] = sine
    table[:, 1::2] = cosine[:, : width // 2]
    return table


# numpy's functions differ in the last bit between processors: these do not, so that a text is the
# same on all of them.


def _powers(base: float, exponents: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """base ** exponent for each exponent, rounded correctly."""
    return np.array([_power(float(base), exponent) for exponent in exponents.tolist()])


@functools.lru_cache(4096)
def _power(base: float, exponent: float) -> float:
    with decimal.localcontext(prec=24):
        return float(decimal.Decimal(base) ** decimal.Decimal(exponent))


# Pi / 2 in three parts: the products of the first two with an integer up to 2^20 are exact.
_HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_ROWS_AT_ONCE = 4096  # limits the memory of intermediate results


def _sine_and_cosine(angles: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Sine and cosine of a matrix, from operations that are exact to the last bit everywhere."""
    results = np.empty((2, *angles.shape), np.float32)
    for start in range(0, len(angles), _ROWS_AT_ONCE):
        x = angles[start : start + _ROWS_AT_ONCE].astype(np.float64)
        turns = np.rint(x * (2 / math.pi))  # quarter turns
        for part in _HALF_PI:
            x -= turns * part
        square = x * x
        sine, cosine = np.ones_like(x), np.ones_like(x)
        for n in range(16, 0, -2):  # Taylor series, up to x^17 and x^16
            sine = 1 - sine * square / (n * (n + 1))
            cosine = 1 - cosine * square / (n * (n - 1))
        sine *= x
        quarter = turns.astype(np.int64) & 3
        swapped = quarter % 2 == 1
        rows = slice(start, start + _ROWS_AT_ONCE)
        results[0, rows] = np.where(swapped, cosine, sine) * np.where(quarter >= 2, -1, 1)
        results[1, rows] = np.where(swapped, sine, cosine) * np.where(quarter % 3 > 0, -1, 1)
    return results[0], results[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """RoPE settings. Field names are written to config.json."""

    width: int  # rotated dimensions of a head; the others pass through
    base: float = 10000.0  # rope_theta
    scaling: Scaling = "none"
    factor: float = 1.0  # context extension over `original_context`
    original_context: int = 0  # context length of the original training
    attention_factor: float = 1.0  # multiplies cosine and sine
    low_frequency: float = 1.0  # llama3: wavelengths above original / low are scaled fully
    high_frequency: float = 4.0  # llama3: wavelengths below original / high are not scaled
    beta_fast: float = 32.0  # yarn: dimensions with more rotations than this are not scaled
    beta_slow: float = 1.0  # yarn: dimensions with fewer rotations than this are scaled fully
    whole_dimensions: bool = True  # yarn: round the two borders to integer dimensions
    short_factors: tuple[float, ...] = ()  # longrope, or explicit factors of a file
    long_factors: tuple[float, ...] = ()  # longrope: used beyond the original context
    share: float = 1.0  # proportional: fraction of the pairs that are rotated; the fastest ones

    def __post_init__(self) -> None:
        if self.scaling == "dynamic" and self.width <= 2:
            raise ModelFileError(
                f"dynamic RoPE scaling needs more than 2 rotated dimensions, got {self.width}"
            )

    @property
    def has_two_ranges(self) -> bool:
        """Whether sequences beyond the original context use other factors than shorter ones."""
        return self.scaling == "longrope" and self.short_factors != self.long_factors

    def frequencies(self, length: int) -> Floats:
        """Radians per position, for each pair of dimensions.

        Args:
            length: The maximum sequence length; only `dynamic` and `longrope` depend on it. In an
                engine it is the configured context, the same for all sequences, not the current
                length: otherwise cached keys would differ from those of a fresh run, and sequences
                with a common prefix could not share them.
        """
        exponents = np.arange(0, self.width, 2, dtype=np.float32) / np.float32(self.width)
        if self.scaling == "dynamic":
            return 1.0 / _powers(float(self._stretched_base(length)), exponents).astype(np.float32)
        plain = 1.0 / _powers(float(np.float32(self.base)), exponents).astype(np.float32)
        if self.scaling == "linear":
            return (plain / np.float32(self.factor)).astype(np.float32)
        if self.scaling == "yarn":
            return self._yarn(plain)
        if self.scaling == "llama3":
            return self._llama3(plain)
        if self.scaling == "longrope":
            beyond = self.original_context and length > self.original_context
            factors = self.long_factors if beyond else self.short_factors
            return (plain / np.array(factors, np.float32)).astype(np.float32)
        if self.scaling == "proportional":
            plain[int(self.share * self.width // 2) :] = 0
            return (plain / np.float32(self.factor)).astype(np.float32)
        return plain

    def tables(self, positions: npt.NDArray[np.int64], length: int) -> tuple[Floats, Floats]:
        """Cosine and sine for each position, `width / 2` numbers each."""
        angles = positions.astype(np.float32)[:, None] * self.frequencies(length)[None, :]
        scale = np.float32(self.attention_factor)
        sine, cosine = _sine_and_cosine(angles)
        return cosine * scale, sine * scale

    def _stretched_base(self, length: int) -> np.float32:
        """NTK scaling: a larger base lowers the low frequencies and keeps the high ones."""
        beyond = max(length, self.original_context) / self.original_context
        stretch = (self.factor * beyond - (self.factor - 1)) ** (self.width / (self.width - 2))
        return np.float32(self.base * stretch)

    def _yarn(self, plain: Floats) -> Floats:
        """Blend between two dimensions, from unscaled to divided by the factor."""

        def dimension_of(rotations: float) -> float:
            wavelength = self.original_context / (rotations * 2 * math.pi)
            return self.width * math.log(wavelength) / (2 * math.log(self.base))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.whole_dimensions:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.width - 1)
        if low == high:
            high += 0.001
        dimensions = np.arange(len(plain), dtype=np.float32)
        slowed = np.clip((dimensions - low) / (high - low), 0, 1)
        blended: Floats = (plain / self.factor * slowed + plain * (1 - slowed)).astype(np.float32)
        return blended

    def _llama3(self, plain: Floats) -> Floats:
        """Llama 3.1: scale long wavelengths, keep short ones, blend in between."""
        waves = 2 * math.pi / plain
        keep = (self.original_context / waves - self.low_frequency) / (
            self.high_frequency - self.low_frequency
        )
        keep = np.clip(keep, 0, 1)
        return ((1 - keep) * plain / self.factor + keep * plain).astype(np.float32)


# -- Settings of recurrent layers

STATELESS = ("attention", "none")
MIXERS = (*STATELESS, "conv", "delta", "mamba2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Sizes of a model's recurrent layers, the same in all of them."""

    conv_kernel: int  # kernel size of the convolution in tokens, the current one included
    conv_bias: bool = False
    # Gated DeltaNet has keys, queries and values as attention does. Mamba-2's B, C and x are called
    # keys, queries and values here, its groups key heads.
    key_heads: int = 0
    value_heads: int = 0  # several of them may share a key head
    key_width: int = 0
    value_width: int = 0
    # Which value heads share a key head: every `key_heads`-th one (the order of GGUF files), or
    # adjacent ones (the order of transformers).
    tiled: bool = False
    norm_groups: int = 1  # Mamba-2: number of groups of its gated norm

    @property
    def key_dim(self) -> int:
        return self.key_heads * self.key_width

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.value_width

    def channels(self, mixer: str, width: int) -> int:
        """Number of convolution channels."""
        return width if mixer == "conv" else 2 * self.key_dim + self.value_dim

    def conv_floats(self, mixer: str, width: int) -> int:
        return (self.conv_kernel - 1) * self.channels(mixer, width)

    def state_floats(self, mixer: str, width: int) -> int:
        """Floats of one layer's state: the convolution's last inputs, then the heads' matrices."""
        if mixer in STATELESS:
            return 0
        matrices = self.value_heads * self.key_width * self.value_width
        return self.conv_floats(mixer, width) + (matrices if mixer != "conv" else 0)

    def key_head(self, value_head: int) -> int:
        """The key head that a value head uses."""
        if self.tiled:
            return value_head % self.key_heads
        return value_head // (self.value_heads // self.key_heads)


def check_mixers(mixers: tuple[str, ...], recurrence: Recurrence | None, layers: int) -> None:
    """Raise if mixers and recurrence are invalid or do not fit together."""

    def need(condition: bool, problem: str) -> None:
        if not condition:
            raise ModelFileError(f"invalid model settings: {problem}")

    need(len(mixers) in (0, layers), f"mixers has {len(mixers)} entries for {layers} layers")
    unknown = sorted(set(mixers) - set(MIXERS))
    need(not unknown, f"mixers must be {', '.join(MIXERS)}, got {', '.join(unknown)}")
    if not set(mixers) - set(STATELESS):
        return
    if recurrence is None:
        raise ModelFileError("invalid model settings: recurrence is missing")
    need(2 <= recurrence.conv_kernel <= 64, "conv_kernel must be 2 to 64")
    if {"delta", "mamba2"} & set(mixers):
        sizes = (
            recurrence.key_heads, recurrence.value_heads,
            recurrence.key_width, recurrence.value_width,
        )  # fmt: skip
        need(all(1 <= size <= 100_000 for size in sizes), "heads and widths must be 1 to 100,000")
        divides = recurrence.value_heads % recurrence.key_heads == 0
        need(divides, "value_heads must be a multiple of key_heads")
        groups = recurrence.norm_groups
        need(
            groups >= 1 and recurrence.value_dim % groups == 0, "norm_groups must divide the values"
        )


T = TypeVar("T")
SIGHTS = ("causal", "whole", "block")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped")

# Sizes beyond these are not models but damaged files.
LARGEST_SIZES = {
    "vocab_size": 10_000_000,
    "width": 1_000_000,
    "layers": 10_000,
    "heads": 100_000,
    "kv_heads": 100_000,
    "head_width": 100_000,
    "ff_width": 10_000_000,
    "context": 1_000_000_000,
}
_FINITE = (
    "attention_scale", "attention_softcap", "logit_softcap", "embedding_scale", "residual_scale",
    "logit_scale", "query_growth",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The sizes of one layer."""

    heads: int
    kv_heads: int
    head_width: int
    ff_width: int

    @property
    def out_width(self) -> int:
        """Width of all query heads together, and of the attention output before projection."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The hyperparameters of one transformer. Field names are written to config.json."""

    family: str
    vocab_size: int
    width: int  # hidden size
    layers: int
    heads: int
    kv_heads: int  # fewer than `heads`: grouped-query attention
    head_width: int
    ff_width: int
    context: int  # maximum sequence length, in tokens
    shapes: tuple[LayerShape, ...] = ()  # per layer, if layers differ; the sizes above are maxima

    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_plus_one: bool = False  # norms multiply by 1 + weight
    norm_bias: bool = True  # a norm of kind "layer" adds a bias
    norm_before: bool = True  # normalize the inputs of attention and feed-forward (pre-norm)
    norm_after: bool = False  # normalize their outputs before the residual addition
    norm_sums: bool = False  # normalize after the residual addition (post-norm, BERT)
    embedding_norm: bool = False  # normalize the embeddings; the first layer has no attention norm
    parallel: bool = False  # attention and feed-forward both read the layer's input

    positions: Literal["rotary", "learned", "sinusoidal", "none"] = "rotary"
    rotary: Rotary | None = None
    local_rotary: Rotary | None = None  # of sliding-window layers, if different
    unrotated_layers: tuple[int, ...] = ()  # layers without position encoding (NoPE)

    # Sliding window of each layer in tokens (in both directions if sight is "whole"); 0: no window.
    windows: tuple[int, ...] = ()
    # The last `kv_shared` layers have no keys and values of their own. Each reads those of the last
    # earlier layer of its kind: with a sliding window or without.
    kv_shared: int = 0
    keys_as_values: tuple[int, ...] = ()  # layers whose values are their keys before RoPE
    value_norm: bool = False  # RMS-normalize values per head, without a weight
    # Queries are scaled with the position p by 1 + growth * ln(1 + floor(p / query_span)).
    query_growth: float = 0.0
    query_span: int = 0
    qk_norm: Literal["none", "head", "whole"] = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    attention_scale: float = 0.0  # 0: head_width ** -0.5
    attention_scales: tuple[float, ...] = ()  # per layer, if they differ (GPT-2)
    attention_softcap: float = 0.0
    sinks: bool = False  # attention sinks: a learned logit per head in the softmax (gpt-oss)
    attention_gate: bool = False  # multiply the heads' output by a sigmoid of a projected input

    # Token mixer of each layer: "attention", a recurrence or "none"; empty: attention everywhere.
    mixers: tuple[str, ...] = ()
    feedless_layers: tuple[int, ...] = ()  # layers without a feed-forward
    recurrence: Recurrence | None = None
    logit_softcap: float = 0.0

    # relu2: the square of relu
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"] = "silu"
    activation_limit: float = 0.0  # swiglu_clamped: the clamp of gate and up
    gated: bool = True
    ff_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalize_experts: bool = True  # the weights of the selected experts sum to one
    router_bias: bool = False
    expert_bias: bool = False
    dense_layers: tuple[int, ...] = ()  # layers without experts in a mixture-of-experts model
    router: Literal["softmax", "sigmoid"] = "softmax"  # turns router scores into weights
    selection_bias: bool = False  # added to the weights for the selection of experts only
    experts_scale: float = 1.0  # multiplies the weights of the selected experts
    shared_width: int = 0  # inner width of the shared expert; 0: none
    shared_gated: bool = True  # the shared expert's output has a sigmoid gate
    dense_beside_experts: bool = False  # MoE layers have a dense feed-forward in parallel

    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies the outputs of attention and feed-forward
    logit_scale: float = 1.0
    layer_scale: bool = False  # each layer's output is multiplied by a learned scalar
    token_width: int = 0  # width of the per-layer embeddings (Gemma 4); 0: none
    tied: bool = False  # the output head is the embedding table
    headless: bool = False  # the checkpoint has no output head: hidden states, but no logits
    head_bias: bool = False
    head_transform: bool = False  # a dense layer with activation before the last norm (BERT)
    head_transform_bias: bool = False
    end_ids: tuple[int, ...] = ()  # end-of-sequence tokens, as far as the file lists them

    # The attention mask: causal; bidirectional; or bidirectional up to the end of the token's block
    sight: Literal["causal", "whole", "block"] = "causal"
    block: int = 0  # tokens of a block if sight is "block"; a request may set another size
    mask_id: int | None = None  # the mask token of a diffusion model; None: none
    canvas_length: int = 0  # canvas positions, if the model always fills this many; 0: any number
    shifted: bool = False  # logits at position p predict the token at p + 1, also in a canvas

    def __post_init__(self) -> None:
        for name, largest in LARGEST_SIZES.items():
            self._need(_is_size(getattr(self, name), largest), name, f"1 to {largest:,}")
        self._need(self.heads % self.kv_heads == 0, "kv_heads", f"a divisor of {self.heads}")
        self._need(self.activation in ACTIVATIONS, "activation", ", ".join(ACTIVATIONS))
        self._need(0 < self.norm_eps < 1, "norm_eps", "between 0 and 1")
        if self.activation == "swiglu_clamped":
            is_limited = self.gated and 0 < self.activation_limit < math.inf
            self._need(is_limited, "activation_limit", "more than 0 in a gated model")
        for name in _FINITE:
            self._need(0 <= getattr(self, name) < math.inf, name, "a finite number of at least 0")
        at_most_one = self.norm_sums + self.norm_after + self.parallel <= 1
        self._need(at_most_one, "norm_sums", "False if norm_after or parallel is True")
        self._need(len(self.windows) in (0, self.layers), "windows", "one for each layer")
        self._need(all(w >= 0 for w in self.windows), "windows", "numbers of at least 0")
        self._need(
            len(self.attention_scales) in (0, self.layers), "attention_scales", "one a layer"
        )
        self._need(all(0 < s < math.inf for s in self.attention_scales), "attention_scales", "> 0")
        self._need(self.query_growth == 0 or self.query_span > 0, "query_span", "at least 1")
        self._check_shapes()
        self._check_sight()
        check_mixers(self.mixers, self.recurrence, self.layers)
        has_partial_layers = bool(self.feedless_layers) or "none" in self.mixers
        needs_both_parts = (
            self.norm_after or self.norm_sums or self.parallel or self.dense_beside_experts
        )
        self._need(
            not (has_partial_layers and needs_both_parts),
            "feedless_layers",
            "empty for such layers",
        )
        is_causal_or_stateless = self.sight == "causal" or not self.state_bytes
        self._need(is_causal_or_stateless, "sight", "causal for a model with recurrent layers")
        if self.positions == "rotary":
            self._need(self.rotary is not None, "rotary", "set for rotary positions")
        for rotary in (self.rotary, self.local_rotary):
            if rotary is not None:
                self._check_rotary(rotary)
        for layer in range(self.layers if self.shapes else 0):
            rotary_of_layer = self.layer_rope(layer)
            fits = rotary_of_layer is None or rotary_of_layer.width <= self.shape(layer).head_width
            self._need(fits, "shapes", "heads at least as wide as their rotary width")
        if self.experts:
            limit = min(self.experts, 1024)
            self._need(_is_size(self.experts, 4096), "experts", "0 to 4,096")
            self._need(
                _is_size(self.experts_per_token, limit), "experts_per_token", f"1 to {limit}"
            )
            self._need(_is_size(self.expert_width, 10_000_000), "expert_width", "1 to 10,000,000")
            self._need(self.router in ("softmax", "sigmoid"), "router", "softmax or sigmoid")
            self._need(0 < self.experts_scale < math.inf, "experts_scale", "more than 0")
            is_shared_width = self.shared_width == 0 or _is_size(self.shared_width, 10_000_000)
            self._need(is_shared_width, "shared_width", "0 to 10,000,000")

    def _check_shapes(self) -> None:
        self._need(len(self.shapes) in (0, self.layers), "shapes", "one for each layer")
        for name in ("heads", "kv_heads", "head_width", "ff_width"):
            sizes = [getattr(shape, name) for shape in self.shapes]
            fit = all(_is_size(size, getattr(self, name)) for size in sizes)
            self._need(fit, "shapes", f"sizes from 1 to {name}, which is {getattr(self, name)}")
        divides = all(shape.heads % shape.kv_heads == 0 for shape in self.shapes)
        self._need(divides, "shapes", "heads that are multiples of kv_heads")
        same_shape = len({shape.head_width for shape in self.shapes}) <= 1
        self._need(
            same_shape or self.attention_scale > 0, "attention_scale", "set if head widths differ"
        )
        is_valid = isinstance(self.kv_shared, int) and 0 <= self.kv_shared < self.layers
        self._need(is_valid, "kv_shared", f"0 to {self.layers - 1}")
        num_own = self.layers - self.kv_shared
        window_kinds = {self.window(layer) > 0 for layer in range(num_own)}
        has_source = all(
            (self.window(layer) > 0) in window_kinds for layer in range(num_own, self.layers)
        )
        self._need(has_source, "kv_shared", "smaller: one layer of each kind must have its own")
        same_shape = all(
            self.kv_shape(layer) == self.kv_shape(self.kv_source(layer))
            for layer in range(num_own, self.layers)
        )
        self._need(same_shape, "kv_shared", "0: the sharing layers have other KV shapes")

    def _check_sight(self) -> None:
        self._need(self.sight in SIGHTS, "sight", ", ".join(SIGHTS))
        is_valid_block = _is_size(self.block, self.context) or (
            self.block == 0 and self.sight != "block"
        )
        self._need(is_valid_block, "block", f"1 to {self.context:,} for a block attention mask")
        is_token = self.mask_id in (None, 0) or _is_size(self.mask_id, self.vocab_size - 1)
        self._need(is_token, "mask_id", f"a token id below {self.vocab_size:,}")

    def _check_rotary(self, rotary: Rotary) -> None:
        is_even_width = _is_size(rotary.width, self.head_width) and rotary.width % 2 == 0
        self._need(is_even_width, "rotary.width", f"an even number up to {self.head_width}")
        self._need(1 < rotary.base < math.inf, "rotary.base", "more than 1")
        self._need(rotary.scaling in SCALINGS, "rotary.scaling", ", ".join(SCALINGS))
        self._need(0 < rotary.factor < math.inf, "rotary.factor", "more than 0")
        pairs = rotary.width // 2
        if rotary.scaling == "longrope":
            sizes = {len(rotary.short_factors), len(rotary.long_factors)}
            self._need(sizes == {pairs}, "rotary factors", f"{pairs} numbers each")
            positive = all(f > 0 for f in rotary.short_factors + rotary.long_factors)
            self._need(positive, "rotary factors", "more than 0")
        if rotary.scaling in ("dynamic", "yarn", "llama3"):
            is_known = rotary.original_context > 0
            self._need(is_known, "rotary.original_context", f"set for {rotary.scaling} scaling")

    def _need(self, condition: bool, name: str, allowed: str) -> None:
        if not condition:
            owner = self.rotary if name.startswith("rotary.") else self
            value = getattr(owner, name.removeprefix("rotary."), None)
            raise ModelFileError(f"invalid model settings: {name} must be {allowed}, got {value!r}")

    def mtp_layer_config(self, *, dense: bool = False) -> ModelConfig:
        """Config of a multi-token prediction layer: one layer with full attention.

        Args:
            dense: Whether it has a dense feed-forward in a mixture-of-experts model.
        """
        return dataclasses.replace(
            self, layers=1, shapes=self.shapes[-1:], windows=(), mixers=(), recurrence=None,
            feedless_layers=(), unrotated_layers=(), local_rotary=None, kv_shared=0,
            keys_as_values=(), attention_scales=self.attention_scales[-1:], token_width=0,
            dense_layers=(0,) if dense else (), tied=True, head_bias=False, embedding_norm=False,
        )  # fmt: skip

    def require_causal(self) -> None:
        """Raise if the model is not causal and cannot be decoded token by token."""
        if self.sight == "causal":
            return
        blocks = "" if self.sight == "whole" else f" in blocks of {self.block} tokens"
        advice = "use lm.diffuse(prompt), or lm.fill(before, gap, after) for gaps"
        if self.mask_id is None:
            advice = "it has no mask token either, so it can only compute logits"
        raise UnspoolError(
            f"this {self.family} model cannot generate from left to right, because its attention "
            f"is bidirectional{blocks}: {advice}"
        )

    def require_head(self) -> None:
        """Raise if the checkpoint has no output head to compute logits with."""
        if self.headless:
            raise UnspoolError(
                f"this {self.family} checkpoint has no output head (lm_head.weight), and its "
                "settings do not tie the head to the embedding, so it cannot write or score text. "
                "It can embed text, and as a sequence-classification checkpoint it can be a "
                "reward model (--judge reward:MODEL). Load the ...ForCausalLM checkpoint to write"
            )

    # -- per layer --------------------------------------------------------------------------

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens; 0: no window."""
        return self.windows[layer] if self.windows else 0

    def mixer(self, layer: int) -> str:
        """Token mixer of a layer: "attention", a kind of recurrence, or "none"."""
        return self.mixers[layer] if self.mixers else "attention"

    def state_floats(self, layer: int) -> int:
        """Size of a layer's recurrent state in floats; 0: the layer has none."""
        if self.recurrence is None:
            return 0
        return self.recurrence.state_floats(self.mixer(layer), self.width)

    @property
    def state_offsets(self) -> tuple[int, ...]:
        """Offset of each layer's state in the sequence's state, and the total at the end."""
        floats = (self.state_floats(layer) for layer in range(self.layers))
        return tuple(accumulate(floats, initial=0))

    @property
    def state_bytes(self) -> int:
        """Size of a sequence's recurrent state; 0: the model has no recurrent layers."""
        return 4 * self.state_offsets[-1] if self.recurrence else 0

    def shape(self, layer: int) -> LayerShape:
        """The sizes of this layer."""
        if self.shapes:
            return self.shapes[layer]
        return LayerShape(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            ff_width=self.ff_width,
        )

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Number of KV heads of a layer, and their width."""
        shape = self.shape(layer)
        return shape.kv_heads, shape.head_width

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values this layer reads: usually itself."""
        num_own = self.layers - self.kv_shared
        if layer < num_own:
            return layer
        has_window = self.window(layer) > 0
        return next(n for n in range(num_own - 1, -1, -1) if (self.window(n) > 0) == has_window)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that have a KV cache."""
        own_kv = (layer for layer in range(self.layers) if self.kv_source(layer) == layer)
        return tuple(layer for layer in own_kv if self.mixer(layer) == "attention")

    @property
    def kv_floats_per_token(self) -> int:
        """Numbers a token takes in the KV cache, all layers together."""
        return sum(2 * self.shape(layer).kv_width for layer in self.kv_layers)

    def has_values(self, layer: int) -> bool:
        """Whether a layer has a value projection, rather than use keys as values."""
        return layer not in self.keys_as_values

    def has_attention_norm(self, layer: int) -> bool:
        """Whether a layer normalizes the input of its attention."""
        mixes = self.mixer(layer) != "none"
        return mixes and self.norm_before and not (self.embedding_norm and layer == 0)

    def has_feed_norm(self, layer: int) -> bool:
        """Whether a layer has one norm for the input of its feed-forward."""
        return self.has_feed(layer) and self.norm_before and not self.has_dense_and_experts(layer)

    def visible_end(self, position: int, length: int) -> int:
        """End (exclusive) of the positions that `position` attends to in `length` tokens."""
        if self.sight == "whole":
            return length
        if self.sight == "block":
            return min(length, (position // self.block + 1) * self.block)
        return position + 1

    def layer_rope(self, layer: int) -> Rotary | None:
        """The RoPE settings of a layer; None: it has no RoPE."""
        if self.positions != "rotary" or layer in self.unrotated_layers:
            return None
        if self.local_rotary is not None and self.window(layer):
            return self.local_rotary
        return self.rotary

    def has_feed(self, layer: int) -> bool:
        return layer not in self.feedless_layers

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and self.has_feed(layer) and layer not in self.dense_layers

    def has_dense_and_experts(self, layer: int) -> bool:
        """Whether a layer has a dense feed-forward and experts in parallel."""
        return self.dense_beside_experts and self.has_experts(layer)

    @property
    def default_context(self) -> int:
        """Context length in tokens unless a request sets another.

        A LongRoPE model has two sets of rotary factors. Short texts match transformers only with
        the short set, so a context beyond the original one must be requested.
        """
        two_ranges = [r for r in (self.rotary, self.local_rotary) if r and r.has_two_ranges]
        return min([self.context, *(r.original_context or self.context for r in two_ranges)])

    @property
    def scale(self) -> float:
        """Scale of the attention scores, unless layers differ."""
        return self.attention_scale or self.head_width**-0.5

    def score_scale(self, layer: int) -> float:
        """Scale of a layer's attention scores."""
        return self.attention_scales[layer] if self.attention_scales else self.scale

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    # -- JSON -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelConfig:
        field_names = {field.name for field in dataclasses.fields(cls)}
        values = _tuples(fields)
        unknown = sorted(values.keys() - field_names)
        if unknown:
            raise ModelFileError(f"config.json: unknown setting {unknown[0]!r}")
        try:
            for name in ("rotary", "local_rotary"):
                if values.get(name) is not None:
                    values[name] = _build(Rotary, name, values[name])
            if values.get("recurrence") is not None:
                values["recurrence"] = _build(Recurrence, "recurrence", values["recurrence"])
            shapes = values.get("shapes") or ()
            values["shapes"] = tuple(_build(LayerShape, "shapes", shape) for shape in shapes)
            return _build(cls, "settings", values)
        except TypeError as error:
            raise ModelFileError(f"the model's config.json is not usable: {error}") from error


def _build(cls: type[T], where: str, fields: object) -> T:
    """Build a dataclass from a JSON object, checking the type of each value."""
    if not isinstance(fields, dict):
        raise ModelFileError(f"config.json: {where} must be an object, got {fields!r:.60}")
    values, types = _tuples(fields), _field_types(cast(Any, cls))
    for name, value in values.items():
        if name in types and not _has_type(value, types[name]):
            type_ = str(getattr(types[name], "__name__", types[name])).replace("typing.", "")
            raise ModelFileError(f"config.json: {name} must be {type_}, got {value!r:.60}")
    return cls(**values)


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _has_type(value: object, type_: Any) -> bool:
    origin, inner = get_origin(type_), get_args(type_)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(item, inner[0]) for item in value)
    if inner:  # a union
        return any(_has_type(value, option) for option in inner)
    if type_ in (int, float):
        fits = isinstance(value, int | float if type_ is float else int)
        return fits and not isinstance(value, bool) and abs(cast(float, value)) < 1e15
    return isinstance(value, type_)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
    }


def _is_size(value: object, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest
