"""One description of a model, whatever file it came from.

A `ModelConfig` says everything that decides which numbers a transformer computes, in our words.
`families.py` reads it from a config.json or from GGUF metadata; backends and trainer only ever
see this. It checks itself, so a nonsensical file is refused before anything is allocated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.positions import SCALINGS, Rotary
from unspool.model.recurrence import Recurrence, check_mixers

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
        """Numbers of all queries of a token, and of what their heads gather."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and the settings of one transformer."""

    family: str
    vocab_size: int
    width: int  # numbers in the vector that each token carries through the layers
    layers: int
    heads: int
    kv_heads: int  # fewer than `heads`: several query heads share keys and values
    head_width: int
    ff_width: int
    context: int  # the longest text, in tokens
    shapes: tuple[LayerShape, ...] = ()  # one a layer, where layers differ; the above: the largest

    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_plus_one: bool = False  # the stored weight w means 1 + w
    norm_bias: bool = True  # a norm of kind "layer" adds a bias
    norm_before: bool = True  # normalize what goes into attention and feed-forward
    norm_after: bool = False  # normalize what comes out of them
    norm_sums: bool = False  # normalize x itself once it has been added (BERT)
    embedding_norm: bool = False  # normalize x before the layers; the first attention reads it so
    parallel: bool = False  # attention and feed-forward both read the layer's input

    positions: Literal["rotary", "learned", "sinusoidal", "none"] = "rotary"
    rotary: Rotary | None = None
    local_rotary: Rotary | None = None  # for layers with a window, where it differs
    unrotated_layers: tuple[int, ...] = ()  # layers that see no positions at all

    # Per layer, how many last tokens it sees (and as many ahead, where sight is "whole"); 0: all.
    windows: tuple[int, ...] = ()
    # So many last layers have no keys and values: they read those of the last layer before them
    # that has a window, or none, like them.
    kv_shared: int = 0
    keys_as_values: tuple[int, ...] = ()  # layers whose values are their keys, not yet turned
    value_norm: bool = False  # values are normalized by head, without a weight
    # Queries grow with the position p by 1 + growth * ln(1 + floor(p / query_span)).
    query_growth: float = 0.0
    query_span: int = 0
    qk_norm: Literal["none", "head", "whole"] = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    attention_scale: float = 0.0  # 0: one over the root of head_width
    attention_scales: tuple[float, ...] = ()  # one a layer, where they differ (GPT-2)
    attention_softcap: float = 0.0
    sinks: bool = False  # each head has one more term in its softmax, without a value (gpt-oss)
    attention_gate: bool = False  # what the heads found is multiplied with a sigmoid of the input

    # What mixes tokens in each layer: "attention", a recurrence or "none"; empty: attention in all.
    mixers: tuple[str, ...] = ()
    feedless_layers: tuple[int, ...] = ()  # layers without a feed-forward
    recurrence: Recurrence | None = None
    logit_softcap: float = 0.0

    # relu2: the square of relu
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"] = "silu"
    activation_limit: float = 0.0  # swiglu_clamped: how large gate and up may be
    gated: bool = True
    ff_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalize_experts: bool = True  # the weights of the chosen experts sum to one
    router_bias: bool = False
    expert_bias: bool = False
    dense_layers: tuple[int, ...] = ()  # layers without experts in a model that has them
    router: Literal["softmax", "sigmoid"] = "softmax"  # what makes weights of the router's scores
    selection_bias: bool = False  # added to the weights where experts are chosen, and only there
    experts_scale: float = 1.0  # what the weights of the chosen experts are multiplied with
    shared_width: int = 0  # of a feed-forward beside the experts; 0: there is none
    shared_gated: bool = True  # ... which has a gate for all it says
    dense_beside_experts: bool = False  # layers with experts have a feed-forward as well

    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # what attention and feed-forward add is multiplied by this
    logit_scale: float = 1.0
    layer_scale: bool = False  # each layer's outcome is multiplied by one number of its own
    token_width: int = 0  # each layer gets so many numbers of the token itself; 0: none
    tied: bool = False  # the output head is the embedding table
    headless: bool = False  # the checkpoint has no output head: hidden states, but no logits
    head_bias: bool = False
    head_transform: bool = False  # a matrix and the activation before the last norm (BERT)
    head_transform_bias: bool = False
    end_ids: tuple[int, ...] = ()  # tokens that end a text, as far as the file says

    sight: Literal["causal", "whole", "block"] = "causal"  # back; the whole text; its block's end
    block: int = 0  # tokens of a block, where sight is "block"; a request may choose another
    mask_id: int | None = None  # the token that stands for "not known yet"; None: it has none
    canvas_length: int = 0  # places of a canvas, if the model always fills so many; 0: any number
    shifted: bool = False  # the vector at place p guesses the token at p + 1, also in a canvas

    def __post_init__(self) -> None:
        for name, largest in LARGEST_SIZES.items():
            self._need(_is_size(getattr(self, name), largest), name, f"1 to {largest:,}")
        self._need(self.heads % self.kv_heads == 0, "kv_heads", f"a divisor of {self.heads}")
        self._need(self.activation in ACTIVATIONS, "activation", ", ".join(ACTIVATIONS))
        self._need(0 < self.norm_eps < 1, "norm_eps", "between 0 and 1")
        if self.activation == "swiglu_clamped":
            limited = self.gated and 0 < self.activation_limit < math.inf
            self._need(limited, "activation_limit", "more than 0, and the model gated")
        for name in _FINITE:
            self._need(0 <= getattr(self, name) < math.inf, name, "a finite number of at least 0")
        once = self.norm_sums + self.norm_after + self.parallel <= 1
        self._need(once, "norm_sums", "False where norm_after or parallel is True")
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
        halves = bool(self.feedless_layers) or "none" in self.mixers
        whole = self.norm_after or self.norm_sums or self.parallel or self.dense_beside_experts
        self._need(not (halves and whole), "feedless_layers", "empty for such layers")
        forward = self.sight == "causal" or not self.state_bytes
        self._need(forward, "sight", "causal for a model with recurrent layers")
        if self.positions == "rotary":
            self._need(self.rotary is not None, "rotary", "given for rotary positions")
        for rotary in (self.rotary, self.local_rotary):
            if rotary is not None:
                self._check_rotary(rotary)
        for layer in range(self.layers if self.shapes else 0):
            turned = self.layer_rotary(layer)
            fits = turned is None or turned.width <= self.shape(layer).head_width
            self._need(fits, "shapes", "heads as wide as what is turned of them")
        if self.experts:
            limit = min(self.experts, 1024)
            self._need(_is_size(self.experts, 4096), "experts", "0 to 4,096")
            self._need(
                _is_size(self.experts_per_token, limit), "experts_per_token", f"1 to {limit}"
            )
            self._need(_is_size(self.expert_width, 10_000_000), "expert_width", "1 to 10,000,000")
            self._need(self.router in ("softmax", "sigmoid"), "router", "softmax or sigmoid")
            self._need(0 < self.experts_scale < math.inf, "experts_scale", "more than 0")
            shared = self.shared_width == 0 or _is_size(self.shared_width, 10_000_000)
            self._need(shared, "shared_width", "0 to 10,000,000")

    def _check_shapes(self) -> None:
        self._need(len(self.shapes) in (0, self.layers), "shapes", "one for each layer")
        for name in ("heads", "kv_heads", "head_width", "ff_width"):
            sizes = [getattr(shape, name) for shape in self.shapes]
            fit = all(_is_size(size, getattr(self, name)) for size in sizes)
            self._need(fit, "shapes", f"sizes from 1 to {name}, which is {getattr(self, name)}")
        shared = all(shape.heads % shape.kv_heads == 0 for shape in self.shapes)
        self._need(shared, "shapes", "heads that key heads divide")
        alike = len({shape.head_width for shape in self.shapes}) <= 1
        self._need(
            alike or self.attention_scale > 0, "attention_scale", "given, as head widths differ"
        )
        known = isinstance(self.kv_shared, int) and 0 <= self.kv_shared < self.layers
        self._need(known, "kv_shared", f"0 to {self.layers - 1}")
        last = self.layers - self.kv_shared
        has = {self.window(layer) > 0 for layer in range(last)}
        found = all((self.window(layer) > 0) in has for layer in range(last, self.layers))
        self._need(found, "kv_shared", "fewer, so that a layer of each kind is left to read from")
        alike = all(
            self.kv_shape(layer) == self.kv_shape(self.kv_source(layer))
            for layer in range(last, self.layers)
        )
        self._need(alike, "kv_shared", "0, as layers that share have other keys")

    def _check_sight(self) -> None:
        self._need(self.sight in SIGHTS, "sight", ", ".join(SIGHTS))
        blocked = _is_size(self.block, self.context) or (self.block == 0 and self.sight != "block")
        self._need(blocked, "block", f"1 to {self.context:,} for a model that looks block by block")
        known = self.mask_id in (None, 0) or _is_size(self.mask_id, self.vocab_size - 1)
        self._need(known, "mask_id", f"a token of the {self.vocab_size:,} there are")

    def _check_rotary(self, rotary: Rotary) -> None:
        fits = _is_size(rotary.width, self.head_width) and rotary.width % 2 == 0
        self._need(fits, "rotary.width", f"an even number up to {self.head_width}")
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
            known = rotary.original_context > 0
            self._need(known, "rotary.original_context", f"given for {rotary.scaling} scaling")

    def _need(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            owner = self.rotary if name.startswith("rotary.") else self
            value = getattr(owner, name.removeprefix("rotary."), None)
            raise ModelFileError(
                f"the model's settings make no sense: {name} is {value!r}, and must be {wanted}"
            )

    def check_left_to_right(self) -> None:
        """Refuse to write or read token by token with a model whose tokens look ahead."""
        if self.sight == "causal":
            return
        far = "over the whole text" if self.sight == "whole" else f"over {self.block} at a time"
        use = "lm.diffuse(prompt) writes with it, and lm.fill(before, gap, after) fills gaps"
        if self.mask_id is None:
            use = "it has no mask token either, so it cannot write; its logits can be computed"
        raise UnspoolError(
            f"this {self.family} model does not go from left to right, because its tokens look "
            f"both ways, {far}: {use}"
        )

    def check_head(self) -> None:
        """Refuse to compute logits with a checkpoint that has no output head."""
        if self.headless:
            raise UnspoolError(
                f"this {self.family} checkpoint has no output head (lm_head.weight), and its "
                "settings do not tie the head to the embedding, so it cannot write or score text. "
                "It can embed text, and as a sequence-classification checkpoint it can be a "
                "reward model (--judge reward:MODEL). Load the ...ForCausalLM checkpoint to write"
            )

    # -- what a layer needs to know ---------------------------------------------------------

    def window(self, layer: int) -> int:
        """How many last tokens this layer sees; 0 means all."""
        return self.windows[layer] if self.windows else 0

    def mixer(self, layer: int) -> str:
        """What brings tokens together in this layer: attention, a kind of recurrence, or "none"."""
        return self.mixers[layer] if self.mixers else "attention"

    def state_floats(self, layer: int) -> int:
        """Numbers that this layer carries from token to token; 0: it has no recurrence."""
        if self.recurrence is None:
            return 0
        return self.recurrence.state_floats(self.mixer(layer), self.width)

    @property
    def state_starts(self) -> tuple[int, ...]:
        """Where in a text's state that of each layer begins; at the end, where all end."""
        floats = (self.state_floats(layer) for layer in range(self.layers))
        return tuple(accumulate(floats, initial=0))

    @property
    def state_bytes(self) -> int:
        """One whole state of a text; 0: the model has no recurrent layers."""
        return 4 * self.state_starts[-1] if self.recurrence else 0

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
        """How many key heads this layer has, and how wide they are."""
        shape = self.shape(layer)
        return shape.kv_heads, shape.head_width

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values this one reads: mostly its own."""
        last = self.layers - self.kv_shared
        if layer < last:
            return layer
        kind = self.window(layer) > 0
        return next(n for n in range(last - 1, -1, -1) if (self.window(n) > 0) == kind)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values."""
        own = (layer for layer in range(self.layers) if self.kv_source(layer) == layer)
        return tuple(layer for layer in own if self.mixer(layer) == "attention")

    @property
    def kv_numbers(self) -> int:
        """How many numbers a token leaves in the keys and values of all layers."""
        return sum(2 * self.shape(layer).kv_width for layer in self.kv_layers)

    def has_values(self, layer: int) -> bool:
        """Whether this layer makes values, rather than take keys for them."""
        return layer not in self.keys_as_values

    def normed_attention(self, layer: int) -> bool:
        """Whether this layer normalizes what goes into its attention."""
        mixes = self.mixer(layer) != "none"
        return mixes and self.norm_before and not (self.embedding_norm and layer == 0)

    def normed_feed(self, layer: int) -> bool:
        """Whether this layer normalizes what goes into its feed-forward, as a whole."""
        return self.has_feed(layer) and self.norm_before and not self.has_both(layer)

    def visible_end(self, position: int, length: int) -> int:
        """A token of a finished text of `length` tokens sees the positions before this one."""
        if self.sight == "whole":
            return length
        if self.sight == "block":
            return min(length, (position // self.block + 1) * self.block)
        return position + 1

    def layer_rotary(self, layer: int) -> Rotary | None:
        """How this layer turns its queries and keys, or None if it does not."""
        if self.positions != "rotary" or layer in self.unrotated_layers:
            return None
        if self.local_rotary is not None and self.window(layer):
            return self.local_rotary
        return self.rotary

    def has_feed(self, layer: int) -> bool:
        return layer not in self.feedless_layers

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and self.has_feed(layer) and layer not in self.dense_layers

    def has_both(self, layer: int) -> bool:
        """Whether this layer has a feed-forward and experts, side by side."""
        return self.dense_beside_experts and self.has_experts(layer)

    @property
    def default_context(self) -> int:
        """The longest text, in tokens, where no context is asked for.

        A LongRoPE model has two sets of rotary factors, and short texts are as good as
        transformers' only with those for short ones: a longer context must be asked for.
        """
        two_ranges = [r for r in (self.rotary, self.local_rotary) if r and r.has_two_ranges]
        return min([self.context, *(r.original_context or self.context for r in two_ranges)])

    @property
    def scale(self) -> float:
        """What query times key is multiplied by in every layer, unless layers differ."""
        return self.attention_scale or self.head_width**-0.5

    def score_scale(self, layer: int) -> float:
        """What query times key is multiplied by in this layer."""
        return self.attention_scales[layer] if self.attention_scales else self.scale

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    # -- our own files ----------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelConfig:
        known = {field.name for field in dataclasses.fields(cls)}
        values = _tuples(fields)
        unknown = sorted(values.keys() - known)
        if unknown:
            raise ModelFileError(f"unknown setting {unknown[0]!r} in the model's config.json")
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
    """A dataclass from JSON, each value of the type that its field has."""
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
        return any(_has_type(value, one) for one in inner)
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
