"""Builds the execution plan of a model from its config."""

from __future__ import annotations

from dataclasses import replace

from unspool.backends.cpu.plan import ExecutionPlan, Operation
from unspool.backends.cpu.plan_feed import feed
from unspool.backends.cpu.plan_parts import PlanParts
from unspool.backends.cpu.plan_recurrent import check_recurrence, recurrent
from unspool.errors import ModelFileError
from unspool.model.checkpoint import Checkpoint
from unspool.model.config import ModelConfig

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
        if self.config.token_width:
            self.token_inputs()
        self.snapshot(0)

    def layer(self, layer: int) -> None:
        config = self.config
        if config.parallel:  # the feed-forward reads x before attention has added to it
            out, down = self.mix(layer), feed(self, layer)
            self.add_residual(out, layer, "attention_post_norm")
            self.snapshot(2 * layer + 1)
            self.add_residual(down, layer, "feed_post_norm")
        else:
            if config.mixer(layer) != "none":
                self.add_residual(self.mix(layer), layer, "attention_post_norm")
            self.snapshot(2 * layer + 1)
            if config.has_feed(layer):
                self.add_residual(feed(self, layer), layer, "feed_post_norm")
        if self.config.token_width:
            self.token_input(layer)
        if self.config.layer_scale:
            vector = f"layers.{layer}.scale"
            self.add(Operation(kind="scale", source="x", target="x", vector=vector))
        self.snapshot(2 * layer + 2)

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
        if self.config.norm_after or scale != 1:
            self.add(replace(operation, target=self.buffer("out", width), add=False))
            if self.config.norm_after:
                unscaled = scale == 1
                self.norm("out", "x" if unscaled else "out", name, width=width, add=unscaled)
            if scale != 1:
                self.add(Operation(kind="scale", source="out", target="x", scale=scale, add=True))
            return
        self.add(operation)
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
        self.linear(head_input, "logits", (head,), norm="norm", rows="selected")
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


def format_plan(checkpoint: Checkpoint) -> str:
    """The plan of a checkpoint's model as text."""
    return str(build_plan(checkpoint.config))
