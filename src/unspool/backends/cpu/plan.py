"""What the native backend does, as a flat list of operations: from a ModelConfig, in Python.

    plan = build_plan(config)
    print(plan)                  # also: unspool models plan

An operation reads and writes numbered buffers, one row a token. A layer of a Llama is six:

    linear   qkv     = q, k, v * normed x           place    qkv turned, keys and values to pages
    attend   mixed   = heads over pages             linear   x += out * mixed
    linear   hidden  = gate, up * normed x          linear   x += down * activated hidden

`native/plan.h` has the same words for the same things.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from unspool.backends.cpu.structures import (
    ACTIVATIONS,
    ADD,
    CENTRED,
    GATED,
    KINDS,
    NORMALIZE,
    PREPARE,
    QUERIES_ONLY,
    ROWS,
    Op,
)
from unspool.errors import ModelFileError
from unspool.model.checkpoint import Checkpoint
from unspool.model.config import ModelConfig
from unspool.model.positions import Rotary

MOST_SHARING = 64  # query heads of one key head: the kernels' room for them
WIDEST_HEAD = 2048


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
    vector: str = ""
    second_vector: str = ""
    layer: int = 0
    window: int = 0
    rotary: int = -1
    prepare: str = "as is"
    activation: str = "silu"
    add: bool = False
    gated: bool = False
    centred: bool = False
    normalize: bool = False
    queries_only: bool = False
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
        if self.kind == "place":
            words.append(f"-> pages of layer {self.layer}")
        if self.window:
            words.append(f"(last {self.window:,})")
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
            names = [operation.vector, operation.second_vector]
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
            flags |= QUERIES_ONLY * o.queries_only
            ops.append(
                Op(
                    kind=KINDS[o.kind],
                    rows=ROWS[o.rows],
                    source=buffers.get(o.source, -1),
                    target=buffers.get(o.target, -1),
                    offset=o.offset,
                    width=o.width,
                    matrix=len(matrices),
                    matrix_count=len(o.matrices) // max(1, o.experts),
                    vector=vectors.get(o.vector, -1),
                    second_vector=vectors.get(o.second_vector, -1),
                    layer=o.layer,
                    window=o.window,
                    rotary=o.rotary,
                    prepare=PREPARE[o.prepare],
                    activation=ACTIVATIONS[o.activation],
                    flags=flags,
                    experts=o.experts,
                    chosen=o.chosen,
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


def build_plan(config: ModelConfig, *, embedding_scale: float | None = None) -> Plan:
    """The operations of one run, for any model that a config can describe."""
    if config.heads // config.kv_heads > MOST_SHARING:
        raise ModelFileError(
            f"{config.heads // config.kv_heads} heads share one key head, and the native backend "
            f"takes {MOST_SHARING}; load the model with backend='torch'"
        )
    if config.head_width > WIDEST_HEAD:
        raise ModelFileError(
            f"a head is {config.head_width:,} wide, and the native backend takes {WIDEST_HEAD:,}; "
            "load the model with backend='torch'"
        )
    builder = _Builder(config)
    scale = config.embedding_scale if embedding_scale is None else embedding_scale
    builder.begin(scale)
    for layer in range(config.layers):
        builder.layer(layer)
    builder.end()
    return builder.plan


class _Builder:
    """Adds operations one by one; each method is a part of the model."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.plan = Plan(config)
        self.heads = config.heads * config.head_width
        self.buffer("x", config.width)
        self.buffer("qkv", self.heads + 2 * config.kv_width)
        self.buffer("mixed", self.heads)
        for layer in range(config.layers):
            rotary = config.layer_rotary(layer)
            if rotary is not None and rotary not in self.plan.rotary:
                self.plan.rotary.append(rotary)

    def buffer(self, name: str, width: int, rows: str = "tokens") -> str:
        self.plan.buffers.setdefault(name, (width, rows))
        return name

    def add(self, operation: Operation) -> None:
        self.plan.operations.append(operation)

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
        self.snapshot(0)

    def layer(self, layer: int) -> None:
        self.attention(layer)
        if self.config.parallel:  # the feed-forward reads x before attention has added to it
            down = self.feed(layer)
            self.attention_out(layer)
            self.snapshot(2 * layer + 1)
        else:
            self.attention_out(layer)
            self.snapshot(2 * layer + 1)
            down = self.feed(layer)
        self.after(down, layer, "feed_post_norm")
        self.snapshot(2 * layer + 2)

    def attention(self, layer: int) -> None:
        config, at = self.config, f"layers.{layer}.attention"
        parts = tuple(f"{at}.{part}.weight" for part in "qkv")
        self.linear("x", "qkv", parts, norm=self.norm_before(f"layers.{layer}.attention_norm"))
        if config.qk_norm == "whole":
            for part, offset, width in (
                ("q_norm", 0, self.heads),
                ("k_norm", self.heads, config.kv_width),
            ):
                self.norm("qkv", "qkv", f"{at}.{part}", offset=offset, width=width, centred=False)
        by_head = config.qk_norm == "head"
        rotary = config.layer_rotary(layer)
        self.add(
            Operation(
                kind="place",
                source="qkv",
                vector=f"{at}.q_norm.weight" if by_head else "",
                second_vector=f"{at}.k_norm.weight" if by_head else "",
                layer=layer,
                rotary=self.plan.rotary.index(rotary) if rotary is not None else -1,
                epsilon=config.norm_eps,
            )
        )
        self.add(
            Operation(
                kind="attend",
                source="qkv",
                target="mixed",
                layer=layer,
                window=config.window(layer),
                scale=config.scale,
                cap=config.attention_softcap,
            )
        )

    def attention_out(self, layer: int) -> None:
        out = Operation(
            kind="linear",
            source="mixed",
            target="x",
            matrices=(f"layers.{layer}.attention.out.weight",),
            width=self.heads,
            add=True,
        )
        self.after(out, layer, "attention_post_norm")

    def feed(self, layer: int) -> Operation:
        """The first half of the feed-forward; gives the operation of the second."""
        config, at = self.config, f"layers.{layer}.feed"
        norm = self.norm_before(f"layers.{layer}.feed_norm")
        if config.has_experts(layer):
            return self.experts(layer, norm)
        sides = ("gate", "up") if config.gated else ("up",)
        self.buffer("hidden", config.ff_width * len(sides))
        self.linear("x", "hidden", tuple(f"{at}.{side}.weight" for side in sides), norm=norm)
        return Operation(
            kind="linear",
            source="hidden",
            target="x",
            matrices=(f"{at}.down.weight",),
            width=config.ff_width,
            prepare="activated",
            activation=config.activation,
            gated=config.gated,
            add=True,
        )

    def experts(self, layer: int, norm: str) -> Operation:
        config, at = self.config, f"layers.{layer}.feed"
        inner, count = config.expert_width, config.experts
        self.buffer("router", count)
        self.buffer("picked", 2 * inner, "picks")
        self.buffer("answers", config.width, "picks")
        self.linear("x", "router", (f"{at}.router.weight",), norm=norm)
        self.add(
            Operation(
                kind="route",
                source="router",
                experts=count,
                chosen=config.experts_per_token,
                normalize=config.normalize_experts,
            )
        )
        sides = tuple(f"{at}.{side}.weight[{e}]" for e in range(count) for side in ("gate", "up"))
        self.linear("x", "picked", sides, norm=norm, kind="experts", rows="picks", experts=count)
        self.add(
            Operation(
                kind="experts",
                source="picked",
                target="answers",
                rows="picks",
                matrices=tuple(f"{at}.down.weight[{e}]" for e in range(count)),
                width=inner,
                prepare="activated",
                activation=config.activation,
                gated=True,
                experts=count,
            )
        )
        return Operation(kind="combine", source="answers", target="x", add=True)

    def after(self, operation: Operation, layer: int, post_norm: str) -> None:
        """Add a result to x, normed first where the model does that."""
        if not self.config.norm_after:
            self.add(operation)
            return
        self.add(replace(operation, target=self.buffer("out", self.config.width), add=False))
        self.norm("out", "x", f"layers.{layer}.{post_norm}", width=self.config.width, add=True)

    def end(self) -> None:
        config = self.config
        self.buffer("last", config.width, "wanted")
        self.buffer("logits", config.vocab_size, "wanted")
        self.add(Operation(kind="gather", source="x", target="last", rows="wanted"))
        head = "embed.weight" if config.tied else "head.weight"
        self.linear("last", "logits", (head,), norm="norm", rows="wanted")
        if config.logit_softcap:
            self.add(
                Operation(kind="softcap", target="logits", rows="wanted", cap=config.logit_softcap)
            )

    # -- the small words -------------------------------------------------------------------

    def norm_before(self, name: str) -> str:
        return name if self.config.norm_before else ""

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
                prepare="normed" if norm else "as is",
                vector=f"{norm}.weight" if norm else "",
                second_vector=f"{norm}.bias" if norm and centred else "",
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
    ) -> None:
        centred = self.config.norm == "layer" if centred is None else centred
        self.add(
            Operation(
                kind="norm",
                source=source,
                target=target,
                offset=offset,
                width=width,
                vector=f"{name}.weight",
                second_vector=f"{name}.bias" if centred else "",
                centred=centred,
                epsilon=self.config.norm_eps,
                add=add,
            )
        )

    def snapshot(self, number: int) -> None:
        """Where somebody may look at x; costs nothing when nobody does."""
        self.add(Operation(kind="snapshot", source="x", layer=number))


def _bias_of(config: ModelConfig, matrix: str) -> str:
    """The vector that is added to a matrix's product; "" if there is none."""
    if not matrix.endswith(".weight"):
        return ""
    if matrix == "head.weight":
        has = config.head_bias
    elif ".attention.out." in matrix:
        has = config.out_bias
    elif ".attention." in matrix:
        has = config.qkv_bias
    elif ".router." in matrix or matrix == "embed.weight":
        has = False
    else:
        has = config.ff_bias
    return matrix.removesuffix("weight") + "bias" if has else ""


def printed(checkpoint: Checkpoint) -> str:
    """The plan of a checkpoint's model, for people."""
    return str(build_plan(checkpoint.config))
