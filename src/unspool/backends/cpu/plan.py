"""What the native backend does, as a flat list of operations; `plan_builder.py` makes it.

    plan = build_plan(config)
    print(plan)                  # also: unspool models plan

An operation reads and writes numbered buffers, one row a token. A layer of a Llama is six:

    linear   qkv     = q, k, v * normed x           place    qkv turned, keys and values to pages
    attend   mixed   = heads over pages             linear   x += out * mixed
    linear   hidden  = gate, up * normed x          linear   x += down * activated hidden

`native/plan.h` has the same words for the same things.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unspool.backends.cpu.structures import (
    ACTIVATIONS,
    ADD,
    BOTH_WAYS,
    CENTRED,
    GATED,
    KEYS_AS_VALUES,
    KINDS,
    NORM_VALUES,
    NORMALIZE,
    OWN_WEIGHTS,
    PREPARE,
    QUERIES_ONLY,
    ROWS,
    SIGMOID_ROUTER,
    TILED_HEADS,
    Op,
)
from unspool.model.config import ModelConfig
from unspool.model.positions import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One step. Weights are named, buffers too; the numbers come when the plan is encoded."""

    kind: str
    source: str = ""
    target: str = ""
    rows: str = "tokens"
    matrices: tuple[str, ...] = ()  # those with the same input; for experts, "name[e]"
    offset: int = 0
    width: int = 0
    heads: int = 0  # of queries; for a norm the parts that it takes each by itself
    vector: str = ""
    second_vector: str = ""
    third_vector: str = ""
    layer: int = 0
    window: int = 0
    both_ways: bool = False  # the window reaches as far ahead as back
    rotary: int = -1
    prepare: str = "as is"
    activation: str = "silu"
    add: bool = False
    gated: bool = False
    centred: bool = False
    normalize: bool = False
    queries_only: bool = False
    keys_as_values: bool = False
    norm_values: bool = False
    sigmoid_router: bool = False
    other: str = ""  # one more buffer that is read
    state: int = 0  # where in a text's state that of the operation begins
    key_heads: int = 0
    value_width: int = 0
    tiled_heads: bool = False
    own_weights: bool = False  # of a norm's parts, one behind the other
    experts: int = 0
    chosen: int = 0
    scale: float = 1.0
    cap: float = 0.0
    epsilon: float = 0.0

    def __str__(self) -> str:
        words = [f"{self.kind:<9}"]
        if self.target:
            words.append(f"{self.target:<8} {'+=' if self.add else ' ='}")
        if self.matrices:
            shown = ", ".join(name.removesuffix(".weight") for name in self.matrices[:4])
            words.append(shown + (", ..." if len(self.matrices) > 4 else "") + " *")
        if self.prepare != "as is":
            words.append(self.prepare)
        words.append(self.source)
        if self.kind == "scale":
            words.append(f"* {self.vector or format(self.scale, '.4g')}")
        if self.kind == "place" and not self.queries_only:
            words.append(f"-> pages of layer {self.layer}")
        if self.window:
            words.append(f"(last {self.window:,}{' and next' * self.both_ways})")
        if self.cap:
            words.append(f"(capped at {self.cap:g})")
        return " ".join(word for word in words if word)


@dataclass(slots=True)
class Plan:
    """Operations, and what they work on."""

    config: ModelConfig
    operations: list[Operation] = field(default_factory=list)
    buffers: dict[str, tuple[int, str]] = field(default_factory=dict)  # name: width, rows
    rotary: list[Rotary] = field(default_factory=list)

    @property
    def vectors(self) -> list[str]:
        """Weights that are no matrices, in the order of their first use."""
        found: dict[str, None] = {}
        for operation in self.operations:
            names = [operation.vector, operation.second_vector, operation.third_vector]
            names += [_bias_of(self.config, name) for name in operation.matrices]
            found.update(dict.fromkeys(name for name in names if name))
        return list(found)

    @property
    def head(self) -> int:
        """The operation from which on vectors become logits."""
        return next(n for n, o in enumerate(self.operations) if o.source == "last")

    def bias(self, matrix: str) -> str:
        return _bias_of(self.config, matrix)

    def encoded(self) -> tuple[list[Op], list[str]]:
        """The operations as the kernels take them, and the names of the matrices they number."""
        buffers = {name: number for number, name in enumerate(self.buffers)}
        vectors = {name: number for number, name in enumerate(self.vectors)}
        matrices: list[str] = []
        ops = []
        for o in self.operations:
            flags = ADD * o.add | GATED * o.gated | CENTRED * o.centred | NORMALIZE * o.normalize
            flags |= QUERIES_ONLY * o.queries_only | KEYS_AS_VALUES * o.keys_as_values
            flags |= NORM_VALUES * o.norm_values | SIGMOID_ROUTER * o.sigmoid_router
            flags |= TILED_HEADS * o.tiled_heads | OWN_WEIGHTS * o.own_weights
            ops.append(
                Op(
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
                    flags=flags | BOTH_WAYS * o.both_ways,
                    experts=o.experts,
                    chosen=o.chosen,
                    other=buffers.get(o.other, -1),
                    state=o.state,
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
    """The vector that is added to a matrix's product; "" if there is none."""
    if matrix.endswith("]"):  # an expert's
        return matrix.replace(".weight[", ".bias[") if config.expert_bias else ""
    if not matrix.endswith(".weight"):
        return ""
    if matrix == "embed.weight":  # where it is the head as well; looking a token up adds none
        return "head_bias" if config.tied and config.head_bias else ""
    if matrix == "head.weight":
        has = config.head_bias
    elif matrix == "transform.dense.weight":
        has = config.head_transform_bias
    elif ".attention.out." in matrix:
        has = config.out_bias
    elif ".attention." in matrix:
        has = config.qkv_bias
    elif ".router." in matrix:
        has = config.router_bias
    elif any(part in matrix for part in ("token_input", ".mixer.", ".shared")):
        has = False
    else:
        has = config.ff_bias
    return matrix.removesuffix("weight") + "bias" if has else ""
