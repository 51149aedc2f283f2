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

from dataclasses import dataclass, field

from unspool.backends.cpu.structures import (
    ACTIVATIONS,
    ADD,
    BIDIRECTIONAL,
    CENTRED,
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
from unspool.model.config import ModelConfig
from unspool.model.positions import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation. Weights and buffers are named; `Plan.encoded` replaces names by numbers."""

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
        lines += [f"{number:>4}  {operation}" for number, operation in enumerate(self.operations)]
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
