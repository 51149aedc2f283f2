"""Interventions: changes to the values inside a running model, for each request.

    from unspool import Add, Intervention

    happy = Intervention("resid_post", Add(vector, scale=1.5), layers=range(8, 12))
    lm.generate("The sea", interventions=[happy])

An intervention names a site of the model (`SITES`), layers, token positions, and an operation. It
is immutable and compared by content: `digest` covers everything that changes the computation.

A request has a tuple of them, which `resolve` turns into the `BranchInterventions` of its branch:
the positions that each one touches. A step of several branches carries them as `StepInterventions`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from unspool.errors import SettingsError

if TYPE_CHECKING:
    from unspool.model.config import ModelConfig

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

# -- Sites, and TransformerLens' names for them

SITES = {
    "embedding": "the input vector of each token, with its position embedding",
    "resid_pre": "the residual stream before a layer",
    "resid_mid": "the residual stream between a layer's two parts",
    "resid_post": "the residual stream after a layer",
    "attn_out": "what attention adds to the residual stream",
    "head_out": "the heads' outputs, concatenated, before the output projection",
    "mlp_out": "what the feed-forward adds to the residual stream",
    "recurrent_out": "what a recurrent layer adds to the residual stream",
    "final_norm": "the output of the last norm, before the output head",
    "logits": "the logits",
    "q": "the queries of all heads, concatenated, before RoPE",
    "k": "the keys of all heads, concatenated, before RoPE",
    "v": "the values of all heads, concatenated",
    "pattern": "the attention weights",
    "mlp_hidden": "the inner activations of a dense feed-forward, after the activation function",
}
_UNLAYERED = frozenset({"embedding", "final_norm", "logits"})
_HEAD_SITES = frozenset({"head_out", "q", "k", "v", "pattern"})
OUTPUT_SITES = ("final_norm", "logits")  # computed only for tokens whose logits are needed
NATIVE_SITES = frozenset(SITES) - {"q", "k", "v", "pattern", "mlp_hidden"}

_HOOKS = {
    "hook_embed": "embedding",
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "attn.hook_z": "head_out",
    "hook_z": "head_out",
    "hook_mlp_out": "mlp_out",
    "attn.hook_q": "q",
    "attn.hook_k": "k",
    "attn.hook_v": "v",
    "attn.hook_pattern": "pattern",
    "mlp.hook_post": "mlp_hidden",
    "ln_final.hook_normalized": "final_norm",
    "hook_logits": "logits",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def parse_hook_name(name: str) -> tuple[str, int | None]:
    """Return the site and the layer that a name means; a site without layers has None.

    Args:
        name: TransformerLens' name of a hook (`blocks.5.hook_resid_post`), or a site's name with
            its layer (`resid_post.5`, `logits`).
    """
    match = _BLOCK.fullmatch(name)
    site = _HOOKS.get(match[2] if match else name)
    if site is not None and (match is None) == (site in _UNLAYERED):
        return site, int(match[1]) if match else None
    site, _, layer = name.partition(".")
    if site in _UNLAYERED and not layer:
        return site, None
    if site in SITES and site not in _UNLAYERED and layer.isdecimal():
        return site, int(layer)
    raise SettingsError(
        f"no hook is called {name!r}; allowed: blocks.LAYER.HOOK with HOOK among "
        f"{', '.join(hook for hook, site in _HOOKS.items() if site not in _UNLAYERED)}; "
        "hook_embed, ln_final.hook_normalized, hook_logits; or SITE.LAYER, such as resid_post.5"
    )


def hook_name(site: str, layer: int | None = None) -> str:
    """Return TransformerLens' name of a site, the inverse of `parse_hook_name`."""
    hook = next((hook for hook, name in _HOOKS.items() if name == site), f"hook_{site}")
    return hook if layer is None else f"blocks.{layer}.{hook}"


def place_of(site: str, layer: int) -> tuple[str, int]:
    """Return the place of a site in a layer: after a layer is before the next one."""
    names = {"resid_pre": ("resid", layer), "resid_post": ("resid", layer + 1)}
    return names.get(site, (site, layer))


def check_site(site: Any) -> str:
    """Return a site's name; raise SettingsError for an unknown one."""
    if not isinstance(site, str) or site not in SITES:
        raise SettingsError(f"site must be one of {', '.join(SITES)}, got {site!r}")
    return site


def site_width(config: ModelConfig, site: str, layer: int = 0) -> int:
    """Return the length of a site's vector in a layer; 0: the layer does not have this site."""
    if site == "logits":
        return config.vocab_size
    shape, mixer = config.shape(layer), config.mixer(layer)
    is_attention, has_own_kv = mixer == "attention", config.kv_source(layer) == layer
    has_dense_feed = config.has_feed(layer) and not config.has_experts(layer)
    widths = {
        "attn_out": config.width * is_attention,
        "recurrent_out": config.width * (mixer not in ("attention", "none")),
        "mlp_out": config.width * config.has_feed(layer),
        "head_out": shape.out_width * is_attention,
        "q": shape.out_width * is_attention,
        "k": shape.kv_width * (is_attention and has_own_kv),
        "v": shape.kv_width * (is_attention and has_own_kv and config.has_values(layer)),
        "pattern": shape.heads * is_attention,  # no vector: the number of keys differs
        "mlp_hidden": shape.ff_width * has_dense_feed,
    }
    return widths.get(site, config.width)


def site_layers(config: ModelConfig, site: str) -> tuple[int, ...]:
    """Return the layers that have a site; (0,) for a site without layers."""
    if site in _UNLAYERED:
        return (0,)
    return tuple(layer for layer in range(config.layers) if site_width(config, site, layer))


def _head_width(config: ModelConfig, site: str, layer: int) -> int:
    return 1 if site == "pattern" else config.shape(layer).head_width


# -- Operations


def _vector(name: str, value: Any, axes: int) -> Floats:
    """Return an immutable float32 copy of an array with 1 to `axes` axes."""
    try:
        array = np.array(value, np.float32, order="C")
    except (TypeError, ValueError):
        raise SettingsError(f"{name} must be an array of numbers, got {value!r:.80}") from None
    if not 1 <= array.ndim <= axes or not array.size:
        shapes = ["[width]", "[layers, width]", "[layers, tokens, width]"][:axes]
        raise SettingsError(
            f"{name} must have the shape {' or '.join(shapes)}, got {list(array.shape)}"
        )
    if not np.isfinite(array).all():
        raise SettingsError(f"{name} has a value that is NaN or infinite")
    array.flags.writeable = False
    return array


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise SettingsError(f"{name} must be a number, got {value!r:.80}")
    number = float(value)
    if not math.isfinite(number):
        raise SettingsError(f"{name} must be finite, got {number}")
    return number


class _ArrayOp:
    """Common part of the operations: fields are numbers, or float32 arrays ([width], [layers,
    width], of `Replace` also [layers, tokens, width])."""

    kind: ClassVar[str]  # its name in JSON
    max_axes: ClassVar[int] = 2  # of its arrays
    needs_vector: ClassVar[bool] = True  # the site must have vectors

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value, name = getattr(self, item.name), f"{item.name} of {self.kind}"
            is_array = item.type == "Floats"
            checked = _vector(name, value, self.max_axes) if is_array else _number(name, value)
            object.__setattr__(self, item.name, checked)

    @property
    def arrays(self) -> dict[str, Floats]:
        """The arrays, by the name of their field."""
        items = ((item.name, getattr(self, item.name)) for item in fields(self))  # type: ignore[arg-type]
        return {name: value for name, value in items if isinstance(value, np.ndarray)}

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers, by the name of their field."""
        items = ((item.name, getattr(self, item.name)) for item in fields(self))  # type: ignore[arg-type]
        return {name: value for name, value in items if not isinstance(value, np.ndarray)}


@dataclass(frozen=True, eq=False)
class Add(_ArrayOp):
    """Add a vector, times `scale` (a steering vector)."""

    kind = "add"
    vector: Floats  # [width] or [layers, width]
    scale: float = 1.0  # its factor


@dataclass(frozen=True, eq=False)
class ProjectOut(_ArrayOp):
    """Remove the component along a direction; its length does not matter."""

    kind = "project_out"
    direction: Floats  # [width] or [layers, width]; stored with length 1

    def __post_init__(self) -> None:
        super().__post_init__()
        norm = np.linalg.norm(self.direction.astype(np.float64), axis=-1, keepdims=True)
        if not norm.all():
            raise SettingsError("direction of project_out must not be zero")
        unit = (self.direction / norm).astype(np.float32)
        unit.flags.writeable = False
        object.__setattr__(self, "direction", unit)


@dataclass(frozen=True, eq=False)
class Replace(_ArrayOp):
    """Replace the values, for example with those of another run (activation patching)."""

    kind = "replace"
    max_axes = 3
    values: Floats  # [layers, tokens, width]: one vector for each position of a bounded range


@dataclass(frozen=True, eq=False)
class MeanAblate(_ArrayOp):
    """Replace the values by their mean over other texts."""

    kind = "mean_ablate"
    mean: Floats  # [width] or [layers, width]


@dataclass(frozen=True, eq=False)
class Scale(_ArrayOp):
    """Multiply the values; 0 removes a head or a part (zero ablation)."""

    kind = "scale"
    needs_vector = False
    factor: float = 0.0  # of the values


@dataclass(frozen=True, eq=False)
class ClampFeature(_ArrayOp):
    """Set a feature of a sparse autoencoder to `value`: x += (value - feature) * decoder.

    The feature is encoder · x + bias where that is above the threshold, else 0 (ReLU: threshold 0).
    """

    kind = "clamp_feature"
    encoder: Floats  # [width] or [layers, width]
    decoder: Floats  # the same shape
    bias: float = 0.0  # of the encoder
    threshold: float = 0.0  # above which the feature is active
    value: float = 0.0  # what the feature is set to


@dataclass(frozen=True, eq=False)
class Function:
    """Replace the values by those of a Python function (torch backend only).

    The function gets a float32 tensor [tokens, width], or [tokens, heads, head_width] if the
    intervention names heads, or [heads, keys] for one token's attention weights, and returns one of
    the same shape. It must be pure: tokens in the prefix cache are not computed again.
    """

    kind: ClassVar[str] = "function"  # it has no JSON
    needs_vector: ClassVar[bool] = False  # also for attention weights
    function: Callable[[Any], Any]  # from tensor to tensor
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)  # two functions are never equal

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SettingsError(f"function must be callable, got {self.function!r:.80}")

    @property
    def arrays(self) -> dict[str, Floats]:
        """None."""
        return {}

    @property
    def numbers(self) -> dict[str, float]:
        """None."""
        return {}


Op: TypeAlias = Add | ProjectOut | Replace | MeanAblate | Scale | ClampFeature | Function
_OPS: dict[str, type[Any]] = {
    op.kind: op for op in (Add, ProjectOut, Replace, MeanAblate, Scale, ClampFeature)
}

# -- Interventions

Positions: TypeAlias = "str | int | range | slice"
_POSITION_WORDS = ("all", "generated", "last")
_POSITIONS = (
    "positions must be 'all', 'generated' (what follows the prompt), 'last' (the last token of the "
    "prompt), a position, range(a, b), or slice(a, None) for all from a on, got {!r}"
)


def _check_positions(value: Any) -> Positions:
    """Return positions in their simplest form: a word, a position, or a range; slice(a, None)."""
    if isinstance(value, str) and value in _POSITION_WORDS:
        return value
    if isinstance(value, slice) and value.step in (None, 1):
        first, end = value.start or 0, value.stop
        if _is_position(first) and end is None:
            return slice(int(first), None) if first else "all"
        value = range(first, end) if _is_position(first) and _is_position(end) else value
    if isinstance(value, range) and value.step == 1 and 0 <= value.start < value.stop:
        return int(value.start) if len(value) == 1 else value
    if _is_position(value):
        return int(value)
    raise SettingsError(_POSITIONS.format(value))


def _is_position(value: Any) -> bool:
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_int and 0 <= value < 1 << 40


def _check_indices(name: str, value: Any) -> tuple[int, ...] | None:
    """Return layers or heads as a tuple; None: all."""
    if value is None:
        return None
    items = (value,) if isinstance(value, int | np.integer) else value
    try:
        indices = tuple(int(item) for item in items if not isinstance(item, bool | float | str))
        is_valid = 0 < len(indices) == len(items) == len(set(indices))
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid or isinstance(items, str):
        raise SettingsError(
            f"{name} must be an integer or several different ones, or None for all, got {value!r}"
        )
    return indices


@dataclass(frozen=True, eq=False)
class Intervention:
    """A change to the values at a site of some layers and positions.

    Attributes:
        site: Where; see `SITES`.
        op: What is done. Arrays of the operation are [width], or [layers, width] with one vector
            for each layer of `layers`.
        layers: One or several; negative numbers count from the last layer; None: all that have the
            site.
        positions: Token positions of prompt and text: "all", "generated" (what follows the prompt),
            "last" (the last token of the prompt), one position, `range(a, b)`, or `slice(a, None)`.
        heads: The heads that are changed, each alone with a vector of the head's width. None: all
            heads, as one concatenated vector.
        model: Fingerprint of the model that the vectors were made for; another model refuses them.
        label: A name for people, such as that of the vector. It changes nothing.
    """

    site: str
    op: Op
    layers: tuple[int, ...] | None = None
    positions: Positions = "all"
    heads: tuple[int, ...] | None = None
    model: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        check_site(self.site)
        if self.label is not None and not (isinstance(self.label, str) and len(self.label) <= 200):
            raise SettingsError(
                f"label must be a text of at most 200 characters, got {self.label!r:.80}"
            )
        if not isinstance(self.op, _ArrayOp | Function):
            raise SettingsError(
                f"op must be one of {', '.join(op.__name__ for op in _OPS.values())}, Function, "
                f"got {self.op!r:.80}"
            )
        for name in ("layers", "heads"):
            object.__setattr__(self, name, _check_indices(name, getattr(self, name)))
        object.__setattr__(self, "positions", _check_positions(self.positions))
        if self.layers is not None and self.site in _UNLAYERED:
            raise SettingsError(f"{self.site} has no layers, got layers {list(self.layers)}")
        if self.heads is not None and self.site not in _HEAD_SITES:
            raise SettingsError(
                f"{self.site} has no heads; {', '.join(sorted(_HEAD_SITES))} have, got heads "
                f"{list(self.heads)}"
            )
        if self.heads is not None and min(self.heads) < 0:
            raise SettingsError(f"heads must be >= 0, got {list(self.heads)}")
        if self.site == "pattern" and not isinstance(self.op, Scale | Function):
            raise SettingsError(f"pattern takes Scale or Function, got {self.op.kind}")
        self._check_tokens()

    def _check_tokens(self) -> None:
        num_tokens = self.num_tokens
        if not num_tokens:
            return
        is_single = isinstance(self.positions, int) or self.positions == "last"
        num_positions = 1 if is_single else 0
        if isinstance(self.positions, range):
            num_positions = len(self.positions)
        if num_tokens != num_positions:
            raise SettingsError(
                f"values of replace has vectors for {num_tokens} tokens, so positions must be a "
                f"range of as many, got {self.positions!r}"
            )

    @property
    def num_tokens(self) -> int:
        """Positions that have a vector of their own; 0: all positions have the same."""
        is_by_token = isinstance(self.op, Replace) and self.op.values.ndim == 3
        return self.op.arrays["values"].shape[1] if is_by_token else 0

    @cached_property
    def digest(self) -> str:
        """Hash of all that changes the computation."""
        content = hashlib.sha256()
        op = self.op
        parts = (self.site, self.layers, repr(self.positions), self.heads, op.kind, op.numbers)
        content.update(repr(parts).encode())
        if isinstance(op, Function):
            content.update(op.identity.encode())
        for name, array in op.arrays.items():
            content.update(f"{name}{array.shape}".encode())
            content.update(np.ascontiguousarray(array).data)
        return content.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervention) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        where = self.site if self.layers is None else f"{self.site} of layers {list(self.layers)}"
        heads = "" if self.heads is None else f", heads {list(self.heads)}"
        return f"<Intervention {self.op.kind} at {where}{heads}, positions {self.positions!r}>"

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.op.arrays.values())

    def resolve_layers(self, config: ModelConfig) -> list[tuple[int, int]]:
        """Return (index into per-layer arrays, layer) for each layer that is changed."""
        layers = range(config.layers) if self.layers is None else self.layers
        if self.site in _UNLAYERED:
            return [(0, 0)]
        numbered = [(n, layer % config.layers) for n, layer in enumerate(layers)]
        return [(n, layer) for n, layer in numbered if site_width(config, self.site, layer)]

    def layer_arrays(self, index: int) -> dict[str, Floats]:
        """Return the arrays of one layer, by the index of `resolve_layers`: [width], or [tokens,
        width] of a `Replace` with a vector for each position."""
        arrays = self.op.arrays
        return {name: a if a.ndim == 1 else a[min(index, len(a) - 1)] for name, a in arrays.items()}

    def slices(self, config: ModelConfig, layer: int) -> list[slice]:
        """Return the parts of the site's vector that are changed, each alone."""
        if self.heads is None:
            return [slice(0, site_width(config, self.site, layer))]
        width = _head_width(config, self.site, layer)
        return [slice(head * width, (head + 1) * width) for head in self.heads]

    # -- JSON ----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the intervention as JSON values; arrays are base64 of little-endian float32."""
        if isinstance(self.op, Function):
            raise SettingsError("an intervention with a Python function cannot be stored or sent")
        op: dict[str, Any] = {"kind": self.op.kind, **self.op.numbers}
        for name, array in self.op.arrays.items():
            data = base64.b64encode(array.astype("<f4").tobytes()).decode()
            op[name] = {"shape": list(array.shape), "data": data}
        positions = self.positions
        if isinstance(positions, range | slice):
            positions = [positions.start, positions.stop]  # type: ignore[assignment]
        names = ("layers", "heads", "model", "label")
        values = {name: getattr(self, name) for name in names}
        as_lists = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
        given = {name: value for name, value in as_lists.items() if value is not None}
        return {"site": self.site, "op": op, "positions": positions, **given}

    def summary(self) -> dict[str, Any]:
        """Return what the intervention does as JSON values, without its arrays."""
        if isinstance(self.op, Function):
            return {"site": self.site, "op": {"kind": self.op.kind}, "digest": self.digest}
        values = self.to_dict()
        arrays = {name: {"shape": list(array.shape)} for name, array in self.op.arrays.items()}
        return {**values, "op": {**values["op"], **arrays}, "digest": self.digest}

    @staticmethod
    def from_dict(value: Any) -> Intervention:
        """Build an intervention from `to_dict`'s form; arrays may also be lists of numbers, `hook`
        may name site and layer (`blocks.5.hook_resid_post`), and positions may be [first, end]."""
        if not isinstance(value, Mapping):
            raise SettingsError(f"an intervention must be an object, got {value!r:.80}")
        values = dict(value)
        if "hook" in values:
            values["site"], layer = parse_hook_name(str(values.pop("hook")))
            values.setdefault("layers", layer)
        unknown = values.keys() - {item.name for item in fields(Intervention)}
        if unknown or "site" not in values or "op" not in values:
            problem = (
                f"unknown: {sorted(map(str, unknown))}" if unknown else "site or op is missing"
            )
            raise SettingsError(
                "an intervention needs site (or hook) and op, and takes layers, positions, heads, "
                "model and label; "
                f"{problem}"
            )
        values["op"] = _parse_op(values["op"])
        positions = values.get("positions", "all")
        if isinstance(positions, list) and len(positions) == 2 and _is_position(positions[0]):
            first, end = positions
            values["positions"] = slice(first, None) if end is None else slice(first, end)
        if not isinstance(values.get("model"), str | None):
            raise SettingsError(f"model must be a fingerprint, got {values['model']!r:.80}")
        return Intervention(**values)


def _parse_op(value: Any) -> Op:
    kind = value.get("kind") if isinstance(value, Mapping) else None
    op_class = _OPS.get(kind) if isinstance(kind, str) else None
    if op_class is None:
        raise SettingsError(
            f"op must be an object with kind among {', '.join(_OPS)}, got {value!r:.80}"
        )
    names = [item.name for item in fields(op_class)]
    settings = {name: item for name, item in value.items() if name != "kind"}
    if settings.keys() - set(names):
        raise SettingsError(f"{kind} has {', '.join(names)}, got {', '.join(map(str, settings))}")
    try:
        op: Op = op_class(**{name: _parse_array(item) for name, item in settings.items()})
    except TypeError:
        raise SettingsError(
            f"{kind} needs {', '.join(names)}, got {', '.join(settings) or 'none'}"
        ) from None
    return op


def _parse_array(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    try:
        flat = np.frombuffer(base64.b64decode(value["data"], validate=True), "<f4")
        return flat.reshape([int(size) for size in value["shape"]])
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise SettingsError(
            "an array must be a list of numbers, or {shape: [...], data: base64 of float32}, got "
            f"{value!r:.80}"
        ) from None


def as_interventions(value: Any) -> tuple[Intervention, ...]:
    """Return the interventions of an option: one, several, or their JSON form; None: none."""
    if value is None:
        return ()
    if isinstance(value, Intervention | Mapping):
        value = (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SettingsError(f"interventions must be a list of Intervention, got {value!r:.80}")
    return tuple(
        item if isinstance(item, Intervention) else Intervention.from_dict(item) for item in value
    )


# -- Checks that need the model


def check_interventions(
    interventions: Sequence[Intervention],
    config: ModelConfig,
    sites: Collection[str],
    fingerprint: Callable[[], str] = lambda: "",
) -> None:
    """Raise SettingsError if a model or its backend cannot apply the interventions.

    Args:
        interventions: What to check.
        config: Of the model.
        sites: Sites that the backend supports.
        fingerprint: Returns the model's fingerprint; called only if an intervention names one.
    """
    for intervention in interventions:
        check_supported(intervention.site, sites)
        if isinstance(intervention.op, Function) and "q" not in sites:
            raise SettingsError("Function needs the torch backend (backend='torch')")
        if intervention.model is not None and intervention.model != fingerprint():
            raise SettingsError(
                f"the vectors were made for the model with fingerprint {intervention.model[:16]}, "
                f"and this one has {fingerprint()[:16]}"
            )
        _check_layers(intervention, config)
        for index, layer in intervention.resolve_layers(config):
            _check_widths(intervention, config, index, layer)


def check_supported(site: str, sites: Collection[str]) -> None:
    """Raise SettingsError if the backend does not support a site."""
    if not sites:
        raise SettingsError(
            "this backend has no interventions and reads no sites; the CPU backend "
            "(device='cpu') and the torch backend (backend='torch') do"
        )
    if site not in sites:
        raise SettingsError(
            f"{site} needs the torch backend (backend='torch'); this backend has "
            f"{', '.join(name for name in SITES if name in sites)}"
        )


def check_readable(site: str, sites: Collection[str]) -> None:
    """Raise SettingsError if the values of a site cannot be read."""
    check_supported(check_site(site), sites)
    if site == "pattern":
        raise SettingsError("attention weights are read as attentions, not as the site pattern")


def check_layer(config: ModelConfig, site: str, layer: int) -> int:
    """Return the layer's number from 0 on; raise SettingsError if it is not there, or has no such
    site."""
    if not -config.layers <= layer < config.layers:
        raise SettingsError(
            f"layer must be from 0 to {config.layers - 1} (or -{config.layers} to -1), got {layer}"
        )
    layer %= config.layers
    if site not in _UNLAYERED and not site_width(config, site, layer):
        having = site_layers(config, site)
        raise SettingsError(
            f"layer {layer} of this model has no {site}"
            + (f"; layers {_format_layers(having)} have" if having else ", and neither has another")
        )
    return layer


def _format_layers(layers: Sequence[int]) -> str:
    text = ", ".join(map(str, layers[:12]))
    return text + ", ..." if len(layers) > 12 else text


def _check_layers(intervention: Intervention, config: ModelConfig) -> None:
    layers, site = intervention.layers, intervention.site
    if layers is None:
        if not site_layers(config, site):
            raise SettingsError(f"no layer of this model has {site}")
    else:
        resolved = [check_layer(config, site, layer) for layer in layers]
        if len(set(resolved)) < len(resolved):
            raise SettingsError(f"layers names a layer twice, got {list(layers)}")
    num_layers = config.layers if layers is None else len(layers)
    for name, array in intervention.op.arrays.items():
        if array.ndim > 1 and site in _UNLAYERED and len(array) != 1:
            raise SettingsError(f"{site} has no layers, so {name} must be one vector")
        if array.ndim > 1 and site not in _UNLAYERED and len(array) != num_layers:
            raise SettingsError(
                f"{name} has vectors for {len(array)} layers, and the intervention has {num_layers}"
            )


def _check_widths(intervention: Intervention, config: ModelConfig, index: int, layer: int) -> None:
    site, heads = intervention.site, intervention.heads
    width = site_width(config, site, layer)
    if heads is not None:
        head_width = _head_width(config, site, layer)
        num_heads = width // head_width
        if max(heads) >= num_heads:
            raise SettingsError(
                f"heads of {site} in layer {layer} must be from 0 to {num_heads - 1}, got "
                f"{max(heads)}"
            )
        width = head_width
    for name, array in intervention.layer_arrays(index).items():
        if array.shape[-1] != width:
            part = "a head of " if heads is not None else ""
            of_layer = "" if site in _UNLAYERED else f" in layer {layer}"
            raise SettingsError(
                f"{name} has width {array.shape[-1]}, and {part}{site}{of_layer} has {width}"
            )


# -- Interventions of a branch: which positions they touch


@dataclass(frozen=True, slots=True)
class TouchedRange:
    """Positions [start, end) of a branch that an intervention touches."""

    index: int  # of the intervention
    start: int
    end: int
    offset: int = 0  # of `start` in the values of an intervention with one vector per position


_FOREVER = 1 << 62
_KEY_BITS = 32  # of a token id in a key


class BranchInterventions:
    """The interventions of a branch, with the positions that they touch. Immutable."""

    def __init__(
        self, interventions: tuple[Intervention, ...], spans: tuple[TouchedRange, ...]
    ) -> None:
        self.interventions, self.spans = interventions, spans
        self.digest = hashlib.sha256("".join(i.digest for i in interventions).encode()).hexdigest()
        # What happens after the last layer changes no keys and values.
        self._key_spans = [
            span for span in spans if interventions[span.index].site not in OUTPUT_SITES
        ]
        self._salts: dict[tuple[tuple[int, int], ...], int] = {}

    def keys(self, tokens: Sequence[int], start: int) -> list[int]:
        """Return what the prefix cache finds tokens from position `start` on by.

        An untouched token is its own key. The key of a touched one includes a hash of the
        interventions, in its upper bits: so no other text finds its keys and values, or those of
        the tokens after it.
        """
        end = start + len(tokens)
        keys = list(tokens)
        borders = {start, end}
        for span in self._key_spans:
            borders.update(at for at in (span.start, span.end) if start < at < end)
        ordered = sorted(borders)
        for first, last in pairwise(ordered):
            active = [s for s in self._key_spans if s.start <= first < s.end]
            if not active:
                continue
            for position in range(first, last):
                parts = tuple(
                    (s.index, s.offset + position - s.start)
                    if self.interventions[s.index].num_tokens
                    else (s.index, 0)
                    for s in active
                )
                keys[position - start] |= self._salt(parts) << _KEY_BITS
        return keys

    def _salt(self, parts: tuple[tuple[int, int], ...]) -> int:
        salt = self._salts.get(parts)
        if salt is None:
            content = "".join(f"{value_digest(self.interventions[n])}{at}," for n, at in parts)
            salt = int.from_bytes(hashlib.sha256(content.encode()).digest()[:16], "little")
            if len(self._salts) < _MAX_SALTS:
                self._salts[parts] = salt
        return salt


_MAX_SALTS = 4096


def value_digest(intervention: Intervention) -> str:
    """Hash of what an intervention does to a token that it touches, wherever that is."""
    return (
        Intervention(
            intervention.site, intervention.op, intervention.layers, "all", intervention.heads
        ).digest
        if not intervention.num_tokens
        else intervention.digest
    )


def token_of_key(key: int) -> int:
    """Return the token id of a key (`BranchInterventions.keys`)."""
    return key & ((1 << _KEY_BITS) - 1)


def resolve(
    interventions: tuple[Intervention, ...], prompt_length: int, num_kept: int = 0, dropped: int = 0
) -> BranchInterventions | None:
    """Return the interventions of a branch; None if there are none.

    Args:
        interventions: What the request names; their positions are those of the whole text.
        prompt_length: Tokens of the prompt.
        num_kept: First tokens of a text that outgrew the context ...
        dropped: ... and tokens after them that are not in the branch.
    """
    spans: list[TouchedRange] = []
    for index, intervention in enumerate(interventions):
        positions = intervention.positions
        first, end = 0, _FOREVER
        if positions == "generated":
            first = prompt_length
        elif positions == "last":
            first, end = prompt_length - 1, prompt_length
        elif isinstance(positions, int):
            first, end = positions, positions + 1
        elif isinstance(positions, range | slice):
            first = positions.start
            end = _FOREVER if positions.stop is None else positions.stop
        first = max(0, first)
        if not dropped:
            pieces = [(first, end, 0)]
        else:
            recent = num_kept + dropped
            pieces = [
                (first, min(end, num_kept), 0),
                (max(first, recent) - dropped, end - dropped, max(0, recent - first)),
            ]
        spans += [TouchedRange(index, a, b, offset) for a, b, offset in pieces if a < b]
    return BranchInterventions(interventions, tuple(spans)) if spans else None


# -- Interventions of a step


_FEW_SPANS = 32


@dataclass(frozen=True, slots=True)
class StepInterventions:
    """The interventions of a step's tokens: a flat table, and which tokens each entry touches.

    Several entries that touch a token are applied in the order of the table.
    """

    table: tuple[Intervention, ...]
    # [n, 4]: the first token (an index into the batch) and the end; the number in the table; the
    # offset of the first token in the values of an intervention with one vector per position.
    spans: Ints

    def by_token(self, num_tokens: int) -> tuple[Ints, Ints, Ints]:
        """Return the spans token by token, as compressed rows: for token t, the entries
        `starts[t]:starts[t + 1]` of (numbers in the table, offsets), in the order of the table."""
        if len(self.spans) <= _FEW_SPANS and (self.spans[:, 1] - self.spans[:, 0]).max() == 1:
            # Decode rows: a few Python objects take less time than ten numpy calls.
            entries = sorted((first, n, offset) for first, _, n, offset in self.spans.tolist())
            touched = np.array(entries, np.int64)
            starts = np.searchsorted(touched[:, 0], np.arange(num_tokens + 1))
            return starts, touched[:, 1], touched[:, 2]
        firsts, ends, numbers, offsets = self.spans.T
        counts = ends - firsts
        repeated = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(repeated)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = firsts[repeated] + within
        order = np.lexsort((numbers[repeated], tokens))
        starts = np.searchsorted(tokens[order], np.arange(num_tokens + 1))
        return starts, numbers[repeated][order], (offsets[repeated] + within)[order]


class SpanCollector:
    """Collects the interventions of a step, row by row."""

    def __init__(self) -> None:
        self._bases: dict[str, int] = {}  # index of a branch's first intervention in the table
        self._table: list[Intervention] = []
        self._spans: list[tuple[int, int, int, int]] = []

    def add(self, branch: BranchInterventions, first: int, until: int, index: int) -> None:
        """Add a row that computes positions [first, until), the first as token `index`."""
        for span in branch.spans:
            start, end = max(span.start, first), min(span.end, until)
            if start >= end:
                continue
            base = self._bases.get(branch.digest)
            if base is None:
                base = self._bases[branch.digest] = len(self._table)
                self._table += branch.interventions
            shift = index - first
            has_offset = branch.interventions[span.index].num_tokens > 0
            offset = span.offset + start - span.start if has_offset else 0
            self._spans.append((start + shift, end + shift, base + span.index, offset))

    def build(self) -> StepInterventions | None:
        """Return the step's interventions; None if no token is touched."""
        if not self._spans:
            return None
        return StepInterventions(tuple(self._table), np.array(self._spans, np.int64))
