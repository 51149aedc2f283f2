"""The execution plan of the native backend: a flat list of operations built from a ModelConfig.

    plan = build_plan(config)
    print(plan)                  # also: unspool models plan

An operation reads and writes numbered buffers, one row per token. A Llama layer has six:

    linear     qkv     = q, k, v * norm(x)          rope    qkv, keys and values to pages
    attention  mixed   = heads over pages           linear  x += out * mixed
    linear     hidden  = gate, up * norm(x)         linear  x += down * activation(hidden)

`native/plan.h` uses the same names.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from unspool.backends.cpu.structures import (
    ACTIVATIONS,
    ADD,
    BIDIRECTIONAL,
    CENTRED,
    DIFFERENCE,
    GATED,
    GROUP_WEIGHTS,
    KEYS_AS_VALUES,
    KINDS,
    NORM_VALUES,
    NORMALIZE,
    PREPARE,
    QUERIES_ONLY,
    ROWS,
    SIGMOID_ROUTER,
    TILED_HEADS,
    OpStruct,
)
from unspool.backends.interventions import place_of
from unspool.errors import ModelFileError
from unspool.model.config import ModelConfig, Rotary
from unspool.model.files.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation on named weights and buffers; `ExecutionPlan.encode` numbers them."""

    kind: str
    source: str = ""
    target: str = ""
    rows: str = "tokens"
    matrices: tuple[str, ...] = ()  # all have the same input; "name[e]" for expert e
    offset: int = 0
    width: int = 0
    heads: int = 0  # query heads; for a norm: groups that are normalized separately
    vector: str = ""
    second_vector: str = ""
    third_vector: str = ""
    layer: int = 0
    window: int = 0
    bidirectional: bool = False  # the window extends ahead as far as back
    rotary: int = -1
    prepare: str = "none"  # applied to the input of a product: none, norm or activation
    activation: str = "silu"
    add: bool = False
    gated: bool = False
    centred: bool = False
    normalize: bool = False
    queries_only: bool = False
    keys_as_values: bool = False
    norm_values: bool = False
    sigmoid_router: bool = False
    second_source: str = ""
    state_offset: int = 0  # offset of this operation's state in a state slot, in floats
    key_heads: int = 0
    value_width: int = 0
    tiled_heads: bool = False
    difference: bool = False  # a site works on what was added since its stash
    group_weights: bool = False  # each group of a norm has separate weights, concatenated
    experts: int = 0
    experts_per_token: int = 0
    scale: float = 1.0
    cap: float = 0.0
    epsilon: float = 0.0

    def __str__(self) -> str:
        words = [f"{self.kind:<9}"]
        if self.target:
            words.append(f"{self.target:<8} {'+=' if self.add else ' ='}")
        if self.matrices:
            names = ", ".join(name.removesuffix(".weight") for name in self.matrices[:4])
            words.append(names + (", ..." if len(self.matrices) > 4 else "") + " *")
        words.append(f"{self.prepare}({self.source})" if self.prepare != "none" else self.source)
        if self.kind == "scale":
            words.append(f"* {self.vector or format(self.scale, '.4g')}")
        if self.kind == "rope" and not self.queries_only:
            words.append(f"-> pages of layer {self.layer}")
        if self.window:
            words.append(f"(last {self.window:,}{' and next' * self.bidirectional})")
        if self.cap:
            words.append(f"(capped at {self.cap:g})")
        return " ".join(word for word in words if word)


@dataclass(slots=True)
class ExecutionPlan:
    """Operations, and the buffers and weights they use."""

    config: ModelConfig
    operations: list[Operation] = field(default_factory=list)
    buffers: dict[str, tuple[int, str]] = field(default_factory=dict)  # name: width, rows
    rotary: list[Rotary] = field(default_factory=list)
    # Numbers of the places where values are changed and read, by (site, layer) as in
    # `backends/interventions.py`; the residual stream before layer n is ("resid", n).
    sites: dict[tuple[str, int], int] = field(default_factory=dict)

    def site_number(self, site: str, layer: int) -> int:
        """Number of the place of a site; two names of the residual stream have the same."""
        return self.sites[place_of(site, layer)]

    @property
    def vectors(self) -> list[str]:
        """Names of the weights that are not matrices, in the order of their first use."""
        ordered: dict[str, None] = {}
        for operation in self.operations:
            names = [operation.vector, operation.second_vector, operation.third_vector]
            names += [_bias_of(self.config, name) for name in operation.matrices]
            ordered.update(dict.fromkeys(name for name in names if name))
        return list(ordered)

    @property
    def head(self) -> int:
        """Index of the first operation of the head, which turns vectors into logits."""
        return next(n for n, o in enumerate(self.operations) if o.source == "last")

    def bias_name(self, matrix: str) -> str:
        return _bias_of(self.config, matrix)

    def encode(self) -> tuple[list[OpStruct], list[str]]:
        """The operations as structs for the kernels, and the names of the matrices by index."""
        buffers = {name: number for number, name in enumerate(self.buffers)}
        vectors = {name: number for number, name in enumerate(self.vectors)}
        matrices: list[str] = []
        ops = []
        for o in self.operations:
            flags = ADD * o.add | GATED * o.gated | CENTRED * o.centred | NORMALIZE * o.normalize
            flags |= QUERIES_ONLY * o.queries_only | KEYS_AS_VALUES * o.keys_as_values
            flags |= NORM_VALUES * o.norm_values | SIGMOID_ROUTER * o.sigmoid_router
            flags |= TILED_HEADS * o.tiled_heads | GROUP_WEIGHTS * o.group_weights
            flags |= DIFFERENCE * o.difference
            ops.append(
                OpStruct(
                    kind=KINDS[o.kind],
                    rows=ROWS[o.rows],
                    source=buffers.get(o.source, -1),
                    target=buffers.get(o.target, -1),
                    offset=o.offset,
                    width=o.width,
                    heads=o.heads,
                    matrix=len(matrices),
                    matrix_count=len(o.matrices) // max(1, o.experts),
                    vector=vectors.get(o.vector, -1),
                    second_vector=vectors.get(o.second_vector, -1),
                    layer=o.layer,
                    window=o.window,
                    rotary=o.rotary,
                    prepare=PREPARE[o.prepare],
                    activation=ACTIVATIONS[o.activation],
                    flags=flags | BIDIRECTIONAL * o.bidirectional,
                    experts=o.experts,
                    experts_per_token=o.experts_per_token,
                    second_source=buffers.get(o.second_source, -1),
                    state_offset=o.state_offset,
                    key_heads=o.key_heads,
                    value_width=o.value_width,
                    third_vector=vectors.get(o.third_vector, -1),
                    scale=o.scale,
                    cap=o.cap,
                    epsilon=o.epsilon,
                )
            )
            matrices += o.matrices
        return ops, matrices

    def __str__(self) -> str:
        widths = [f"{name} {width:,} ({rows})" for name, (width, rows) in self.buffers.items()]
        lines = [f"buffers: {', '.join(widths)}"]
        # Places where values can be changed and read are not shown: they are free.
        visible = [o for o in self.operations if o.kind not in ("site", "stash")]
        lines += [f"{number:>4}  {operation}" for number, operation in enumerate(visible)]
        return "\n".join(lines)


def _bias_of(config: ModelConfig, matrix: str) -> str:
    """Name of a matrix's bias; "" if it has none."""
    if matrix.endswith("]"):  # of an expert
        return matrix.replace(".weight[", ".bias[") if config.expert_bias else ""
    if not matrix.endswith(".weight"):
        return ""
    if matrix == "embed.weight":  # as the tied head; an embedding lookup adds no bias
        return "head_bias" if config.tied and config.head_bias else ""
    if matrix == "head.weight":
        has_bias = config.head_bias
    elif matrix == "transform.dense.weight":
        has_bias = config.head_transform_bias
    elif ".attention.out." in matrix:
        has_bias = config.out_bias
    elif ".attention." in matrix:
        has_bias = config.qkv_bias
    elif ".router." in matrix:
        has_bias = config.router_bias
    elif any(part in matrix for part in ("token_input", ".mixer.", ".shared")):
        has_bias = False
    else:
        has_bias = config.ff_bias
    return matrix.removesuffix("weight") + "bias" if has_bias else ""


# -- Base of the plan builder: named buffers, and operations that every part of a model uses


class PlanParts:
    """A plan under construction."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.plan = ExecutionPlan(config)

    def buffer(self, name: str, width: int, rows: str = "tokens") -> str:
        """Declare a buffer; its width is the maximum over all declarations."""
        current_width = self.plan.buffers.get(name, (0, rows))[0]
        self.plan.buffers[name] = (max(width, current_width), rows)
        return name

    def add(self, operation: Operation) -> None:
        self.plan.operations.append(operation)

    def linear(
        self,
        source: str,
        target: str,
        matrices: tuple[str, ...],
        *,
        norm: str = "",
        kind: str = "linear",
        rows: str = "tokens",
        experts: int = 0,
    ) -> None:
        centred = self.config.norm == "layer"
        self.add(
            Operation(
                kind=kind,
                source=source,
                target=target,
                rows=rows,
                matrices=matrices,
                width=self.plan.buffers[source][0],
                prepare="norm" if norm else "none",
                vector=f"{norm}.weight" if norm else "",
                second_vector=f"{norm}.bias" if norm and centred and self.config.norm_bias else "",
                centred=bool(norm) and centred,
                epsilon=self.config.norm_eps,
                experts=experts,
            )
        )

    def norm(
        self,
        source: str,
        target: str,
        name: str,
        *,
        width: int,
        offset: int = 0,
        add: bool = False,
        centred: bool | None = None,
        rows: str = "tokens",
    ) -> None:
        centred = self.config.norm == "layer" if centred is None else centred
        self.add(
            Operation(
                kind="norm",
                source=source,
                target=target,
                rows=rows,
                offset=offset,
                width=width,
                vector=f"{name}.weight",
                second_vector=f"{name}.bias" if centred and self.config.norm_bias else "",
                centred=centred,
                epsilon=self.config.norm_eps,
                add=add,
            )
        )

    def site(
        self,
        site: str,
        layer: int = 0,
        *,
        source: str = "x",
        width: int = 0,
        rows: str = "tokens",
        kind: str = "site",
        difference: bool = False,
    ) -> None:
        """Mark a place where values can be changed and read; free when they are not."""
        number = self.plan.sites.setdefault((site, layer), len(self.plan.sites))
        self.add(
            Operation(
                kind=kind,
                source=source,
                layer=number,
                width=width or self.config.width,
                rows=rows,
                difference=difference,
            )
        )


# -- Operations of feed-forward layers: dense, experts (MoE), or both


def feed(build: PlanParts, layer: int) -> Operation:
    """Add all but the last operation of a feed-forward; returns the last, which adds to x."""
    config, prefix = build.config, f"layers.{layer}.feed"
    if config.has_dense_and_experts(layer):
        return _dense_and_experts(build, layer)
    norm = f"layers.{layer}.feed_norm" if config.norm_before else ""
    if config.has_experts(layer):
        return _experts(build, prefix, norm, norm)
    return _dense(build, prefix, layer, norm)


def _projections(config: ModelConfig) -> tuple[str, ...]:
    return ("gate", "up") if config.gated else ("up",)


def _dense(build: PlanParts, prefix: str, layer: int, norm: str) -> Operation:
    config, inner = build.config, build.config.shape(layer).ff_width
    projections = _projections(config)
    build.buffer("hidden", inner * len(projections))
    build.linear(
        "x",
        "hidden",
        tuple(f"{prefix}.{projection}.weight" for projection in projections),
        norm=norm,
    )
    return Operation(
        kind="linear",
        source="hidden",
        target="x",
        matrices=(f"{prefix}.down.weight",),
        width=inner,
        prepare="activation",
        activation=config.activation,
        cap=config.activation_limit,
        gated=config.gated,
        add=True,
    )


def _experts(
    build: PlanParts,
    prefix: str,
    norm: str,
    router_norm: str,
    scale: float = 1.0,
    weights: str = "",
) -> Operation:
    """`scale` multiplies the router's scores; `weights` names a vector of extra expert weights."""
    config = build.config
    inner, count, projections = config.expert_width, config.experts, _projections(config)
    build.buffer("router", count)
    build.buffer("expert_hidden", len(projections) * inner, "routed")
    build.buffer("expert_out", config.width, "routed")
    build.linear("x", "router", (f"{prefix}.router.weight",), norm=router_norm)
    if scale != 1:
        build.add(Operation(kind="scale", source="router", target="router", scale=scale))
    build.add(
        Operation(
            kind="route",
            source="router",
            vector=weights,
            second_vector=f"{prefix}.selection_bias" if config.selection_bias else "",
            sigmoid_router=config.router == "sigmoid",
            scale=config.experts_scale,
            experts=count,
            experts_per_token=config.experts_per_token,
            normalize=config.normalize_experts,
        )
    )
    names = tuple(
        f"{prefix}.{projection}.weight[{e}]" for e in range(count) for projection in projections
    )
    build.linear(
        "x", "expert_hidden", names, norm=norm, kind="experts", rows="routed", experts=count
    )
    build.add(
        Operation(
            kind="experts",
            source="expert_hidden",
            target="expert_out",
            rows="routed",
            matrices=tuple(f"{prefix}.down.weight[{e}]" for e in range(count)),
            width=inner,
            prepare="activation",
            activation=config.activation,
            cap=config.activation_limit,
            gated=config.gated,
            experts=count,
        )
    )
    if config.shared_width:
        _shared(build, prefix, norm)
        build.add(Operation(kind="combine", source="expert_out", target="fed", add=True))
        return Operation(kind="scale", source="fed", target="x", add=True)
    return Operation(kind="combine", source="expert_out", target="x", add=True)


def _shared(build: PlanParts, prefix: str, norm: str) -> None:
    """Add the shared expert, multiplied by its gate if it has one."""
    config = build.config
    inner, projections = config.shared_width, _projections(config)
    names = [f"{prefix}.shared.{projection}.weight" for projection in projections]
    if config.shared_gated:
        names.append(f"{prefix}.shared_gate.weight")
    build.buffer("shared", inner * len(projections) + config.shared_gated)
    build.buffer("fed", config.width)
    build.linear("x", "shared", tuple(names), norm=norm)
    build.add(
        Operation(
            kind="linear",
            source="shared",
            target="fed",
            matrices=(f"{prefix}.shared.down.weight",),
            width=inner,
            prepare="activation",
            activation=config.activation,
            gated=config.gated,
        )
    )
    if config.shared_gated:
        build.add(
            Operation(
                kind="gate", source="shared", target="fed", heads=1,
                offset=inner * len(projections), activation="sigmoid",
            )
        )  # fmt: skip


def _dense_and_experts(build: PlanParts, layer: int) -> Operation:
    """A dense feed-forward and experts, each with separate norms; their sum is added to x."""
    prefix, width = f"layers.{layer}.feed", build.config.width
    build.buffer("fed", width)
    build.buffer("out", width)
    dense = _dense(build, f"{prefix}.dense", layer, f"{prefix}.dense_norm")
    build.add(replace(dense, target="fed", add=False))
    build.norm("fed", "fed", f"{prefix}.dense_post_norm", width=width)
    norms = (f"{prefix}.experts_norm", f"{prefix}.router_norm")
    experts = _experts(build, f"{prefix}.experts", *norms, width**-0.5, f"{prefix}.expert_scale")
    build.add(replace(experts, target="out", add=False))
    build.norm("out", "fed", f"{prefix}.experts_post_norm", width=width, add=True)
    return Operation(kind="scale", source="fed", target="x", add=True)


# -- Operations of recurrent layers: gated convolution, gated DeltaNet or Mamba-2


# Limits of the kernels.
MAX_CONV_KERNEL = 8
MAX_KEY_WIDTH = 256


def check_recurrence(config: ModelConfig) -> None:
    """Raise an error for shapes beyond the limits of the kernels."""
    recurrence = config.recurrence
    if recurrence is None:
        return
    limits = {
        "the convolution kernel": (recurrence.conv_kernel, MAX_CONV_KERNEL),
        "the key width": (recurrence.key_width, MAX_KEY_WIDTH),
    }
    for name, (size, limit) in limits.items():
        if size > limit:
            raise ModelFileError(
                f"{name} must be <= {limit} on the native backend, got {size}; load the model with "
                "backend='torch'"
            )


def recurrent(build: PlanParts, layer: int) -> Operation:
    """Add all but the last operation of a recurrent layer; returns the last, which adds to x."""
    config, prefix = build.config, f"layers.{layer}.mixer"
    assert config.recurrence is not None
    norm = f"layers.{layer}.attention_norm" if config.has_attention_norm(layer) else ""
    if config.mixer(layer) == "conv":
        build.buffer("mix", 3 * config.width)
        width = config.width
        build.buffer("recurred", width)
        build.linear("x", "mix", tuple(f"{prefix}.{part}.weight" for part in "bcx"), norm=norm)
        build.add(_convolution(config, layer, "recurred"))
    else:
        width = config.recurrence.value_dim
        _with_heads(build, layer, norm)
    return Operation(
        kind="linear",
        source="recurred",
        target="x",
        matrices=(f"{prefix}.out.weight",),
        width=width,
        add=True,
    )


def _convolution(config: ModelConfig, layer: int, target: str) -> Operation:
    recurrence, mixer = config.recurrence, config.mixer(layer)
    assert recurrence is not None
    return Operation(
        kind="conv",
        source="mix",
        target=target,
        vector=f"layers.{layer}.mixer.conv.weight",
        second_vector=f"layers.{layer}.mixer.conv.bias" if recurrence.conv_bias else "",
        width=recurrence.channels(mixer, config.width),
        window=recurrence.conv_kernel,
        gated=mixer == "conv",
        layer=layer,
        state_offset=config.state_offsets[layer],
    )


def _with_heads(build: PlanParts, layer: int, norm: str) -> None:
    """Gated DeltaNet or Mamba-2: project, convolve, recur head by head, gate and norm."""
    config, prefix, shape = build.config, f"layers.{layer}.mixer", build.config.recurrence
    mixer = config.mixer(layer)
    is_mamba = mixer == "mamba2"
    assert shape is not None
    channels = shape.channels(mixer, config.width)
    # "mix" holds the channels to convolve, the gate z, and two values per head (DeltaNet: b and a;
    # Mamba: dt and the decay).
    build.buffer("mix", channels + shape.value_dim + 2 * shape.value_heads)
    build.buffer("convolved", channels)
    build.buffer("recurred", shape.value_dim)
    parts = ("vkq", "z", "dt") if is_mamba else ("qkv", "z", "b", "a")
    build.linear("x", "mix", tuple(f"{prefix}.{part}.weight" for part in parts), norm=norm)
    build.add(_convolution(config, layer, "convolved"))
    build.add(
        Operation(
            kind="mamba" if is_mamba else "delta",
            source="convolved",
            second_source="mix",
            target="recurred",
            offset=channels + shape.value_dim,
            vector=f"{prefix}.a_log",
            second_vector=f"{prefix}.dt_bias",
            third_vector=f"{prefix}.d" if is_mamba else "",
            heads=shape.value_heads,
            key_heads=shape.key_heads,
            width=shape.key_width,
            value_width=shape.value_width,
            tiled_heads=shape.tiled and not is_mamba,
            layer=layer,
            state_offset=config.state_offsets[layer] + shape.conv_floats(mixer, config.width),
        )
    )
    groups = shape.norm_groups if is_mamba else shape.value_heads
    normed = Operation(
        kind="norm",
        source="recurred",
        target="recurred",
        vector=f"{prefix}.norm_weight",
        width=shape.value_dim // groups,
        heads=groups,
        group_weights=is_mamba,
        epsilon=config.norm_eps,
    )
    gated = Operation(
        kind="gate", source="mix", target="recurred", offset=channels, width=shape.value_dim,
        activation="silu",
    )  # fmt: skip
    for operation in (gated, normed) if is_mamba else (normed, gated):
        build.add(operation)


# -- Builds the execution plan of a model from its config


# Limits of the kernels.
MAX_GROUP = 64  # query heads per key head
MAX_HEAD_WIDTH = 2048


def build_plan(config: ModelConfig, *, embedding_scale: float | None = None) -> ExecutionPlan:
    """Build the plan of one step. `embedding_scale` replaces that of the config."""
    shapes = [config.shape(layer) for layer in range(config.layers)]
    group = max(shape.heads // shape.kv_heads for shape in shapes)
    if group > MAX_GROUP:
        raise ModelFileError(
            f"query heads per key head must be <= {MAX_GROUP} on the native backend, got {group}; "
            "load the model with backend='torch'"
        )
    if config.head_width > MAX_HEAD_WIDTH:
        raise ModelFileError(
            f"the head width must be <= {MAX_HEAD_WIDTH:,} on the native backend, got "
            f"{config.head_width:,}; load the model with backend='torch'"
        )
    check_recurrence(config)
    builder = _PlanBuilder(config)
    scale = config.embedding_scale if embedding_scale is None else embedding_scale
    builder.begin(scale)
    for layer in range(config.layers):
        builder.layer(layer)
    builder.end()
    return builder.plan


class _PlanBuilder(PlanParts):
    """Adds the parts of a model, one method each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.buffer("x", config.width)
        for layer in range(config.layers):
            shape = config.shape(layer)
            gates = shape.out_width if config.attention_gate else 0
            self.buffer("qkv", shape.out_width + 2 * shape.kv_width + gates)
            self.buffer("mixed", shape.out_width)
            rotary = config.layer_rope(layer)
            if rotary is not None and rotary not in self.plan.rotary:
                self.plan.rotary.append(rotary)

    def begin(self, scale: float) -> None:
        learned = self.config.positions in ("learned", "sinusoidal")
        self.add(
            Operation(
                kind="embed",
                target="x",
                matrices=("embed.weight",),
                vector="positions" if learned else "",
                scale=scale,
            )
        )
        if self.config.embedding_norm:
            self.norm("x", "x", "embed_norm", width=self.config.width)
        self.site("embedding")
        if self.config.token_width:
            self.token_inputs()
        self.site("resid", 0)

    def layer(self, layer: int) -> None:
        config = self.config
        if config.parallel:  # the feed-forward reads x before attention has added to it
            out, down = self.mix(layer), feed(self, layer)
            self.add_residual(out, layer, "attention_post_norm")
            self.site("resid_mid", layer)
            self.add_residual(down, layer, "feed_post_norm")
        else:
            if config.mixer(layer) != "none":
                self.add_residual(self.mix(layer), layer, "attention_post_norm")
            self.site("resid_mid", layer)
            if config.has_feed(layer):
                self.add_residual(feed(self, layer), layer, "feed_post_norm")
        if self.config.token_width:
            self.token_input(layer)
        if self.config.layer_scale:
            vector = f"layers.{layer}.scale"
            self.add(Operation(kind="scale", source="x", target="x", vector=vector))
        self.site("resid", layer + 1)

    def mix(self, layer: int) -> Operation:
        """Add the token mixer of a layer; returns the operation that adds its result to x."""
        is_attention = self.config.mixer(layer) == "attention"
        return self.attention(layer) if is_attention else recurrent(self, layer)

    def attention(self, layer: int) -> Operation:
        """Add attention up to the heads' outputs; returns the operation that adds them to x."""
        config, prefix, shape = self.config, f"layers.{layer}.attention", self.config.shape(layer)
        computes_kv = config.kv_source(layer) == layer
        parts = ["q"] + ["k"] * computes_kv + ["v"] * (computes_kv and config.has_values(layer))
        parts += [
            "gate"
        ] * config.attention_gate  # such models compute keys and values in every layer
        norm = f"layers.{layer}.attention_norm" if config.has_attention_norm(layer) else ""
        self.linear("x", "qkv", tuple(f"{prefix}.{part}.weight" for part in parts), norm=norm)
        if config.qk_norm == "whole":
            sizes = {"q_norm": (0, shape.out_width), "k_norm": (shape.out_width, shape.kv_width)}
            for part, (offset, width) in list(sizes.items())[: 1 + computes_kv]:
                self.norm(
                    "qkv", "qkv", f"{prefix}.{part}", offset=offset, width=width, centred=False
                )
        by_head = config.qk_norm == "head"
        rotary = config.layer_rope(layer)
        self.add(
            Operation(
                kind="rope",
                source="qkv",
                vector=f"{prefix}.q_norm.weight" if by_head else "",
                second_vector=f"{prefix}.k_norm.weight" if by_head and computes_kv else "",
                layer=layer,
                heads=shape.heads,
                rotary=self.plan.rotary.index(rotary) if rotary is not None else -1,
                queries_only=not computes_kv,
                keys_as_values=not config.has_values(layer),
                norm_values=config.value_norm,
                scale=config.query_growth,
                cap=config.query_span if config.query_growth else 0,
                epsilon=config.norm_eps,
            )
        )
        self.add(
            Operation(
                kind="attention",
                source="qkv",
                target="mixed",
                layer=layer,
                heads=shape.heads,
                window=config.window(layer),
                bidirectional=config.sight == "whole",
                scale=config.score_scale(layer),
                cap=config.attention_softcap,
                vector=f"{prefix}.sinks" if config.sinks else "",
            )
        )
        if config.attention_gate:
            gates = Operation(
                kind="gate", source="qkv", target="mixed", activation="sigmoid",
                offset=shape.out_width + 2 * shape.kv_width, width=shape.out_width,
            )  # fmt: skip
            self.add(gates)
        self.site("head_out", layer, source="mixed", width=shape.out_width)
        return Operation(
            kind="linear",
            source="mixed",
            target="x",
            matrices=(f"{prefix}.out.weight",),
            width=shape.out_width,
            add=True,
        )

    def add_residual(self, operation: Operation, layer: int, post_norm: str) -> None:
        """Add a result to x. Some models norm or scale the result first, or norm the sum."""
        name, width = f"layers.{layer}.{post_norm}", self.config.width
        scale = self.config.residual_scale
        site = "mlp_out"
        if post_norm == "attention_post_norm":
            is_attention = self.config.mixer(layer) == "attention"
            site = "attn_out" if is_attention else "recurrent_out"
        self.site(site, layer, kind="stash")
        if self.config.norm_after or scale != 1:
            self.add(replace(operation, target=self.buffer("out", width), add=False))
            if self.config.norm_after:
                unscaled = scale == 1
                self.norm("out", "x" if unscaled else "out", name, width=width, add=unscaled)
            if scale != 1:
                self.add(Operation(kind="scale", source="out", target="x", scale=scale, add=True))
        else:
            self.add(operation)
        self.site(site, layer, difference=True)
        if self.config.norm_sums:
            self.norm("x", "x", name, width=width)

    def token_inputs(self) -> None:
        """Per-layer embeddings: from a table, and projected from the token's input vector.

        The model divides the projection by sqrt(width) before its norm; a norm with an epsilon
        `width` times larger gives the same result.
        """
        config = self.config
        total_width, width = config.layers * config.token_width, config.token_width
        table = "token_inputs.embed.weight"
        self.buffer("token_inputs", total_width)
        self.buffer("projected", total_width)
        self.add(
            Operation(
                kind="embed", target="token_inputs", matrices=(table,), scale=(width / 2) ** 0.5
            )
        )
        self.linear("x", "projected", ("token_inputs.project.weight",))
        self.add(
            Operation(
                kind="norm",
                source="projected",
                target="projected",
                width=width,
                heads=config.layers,
                vector="token_inputs.norm.weight",
                epsilon=config.norm_eps * config.width,
            )
        )
        self.add(
            Operation(
                kind="scale", source="projected", target="token_inputs", scale=2**-0.5, add=True
            )
        )

    def token_input(self, layer: int) -> None:
        config, prefix = self.config, f"layers.{layer}.token_input"
        width = config.token_width
        self.buffer("gated", width)
        self.buffer("out", config.width)
        self.linear("x", "gated", (f"{prefix}.gate.weight",))
        self.add(
            Operation(
                kind="activate",
                source="token_inputs",
                target="gated",
                offset=layer * width,
                activation=config.activation,
            )
        )
        self.linear("gated", "out", (f"{prefix}.out.weight",))
        self.norm("out", "x", f"{prefix}.norm", width=config.width, add=True)

    def end(self) -> None:
        config = self.config
        self.buffer("last", config.width, "selected")
        self.buffer("logits", config.vocab_size, "selected")
        self.add(Operation(kind="gather", source="x", target="last", rows="selected"))
        head_input = "last"
        if config.head_transform:
            head_input = self.buffer("transformed", config.width, "selected")
            norm = "transform.norm" if config.norm_before else ""
            self.linear("last", head_input, ("transform.dense.weight",), norm=norm, rows="selected")
            self.add(
                Operation(
                    kind="activate",
                    target=head_input,
                    rows="selected",
                    activation=config.activation,
                )
            )
        head = "embed.weight" if config.tied else "head.weight"
        self.norm(head_input, head_input, "norm", width=config.width, rows="selected")
        self.site("final_norm", source=head_input, rows="selected")
        self.linear(head_input, "logits", (head,), rows="selected")
        if config.logit_scale != 1:
            self.add(
                Operation(
                    kind="scale", source="logits", target="logits", rows="selected",
                    scale=config.logit_scale,
                )
            )  # fmt: skip
        if config.logit_softcap:
            self.add(
                Operation(
                    kind="softcap", target="logits", rows="selected", cap=config.logit_softcap
                )
            )
        self.site("logits", source="logits", width=config.vocab_size, rows="selected")


def format_plan(checkpoint: Checkpoint) -> str:
    """The plan of a checkpoint's model as text."""
    return str(build_plan(checkpoint.config))
