"""From a ModelConfig to the plan of operations that the native backend runs."""

from __future__ import annotations

from dataclasses import replace

from unspool.backends.cpu.plan import Operation, Plan
from unspool.backends.cpu.plan_feed import feed
from unspool.backends.cpu.plan_parts import PlanParts
from unspool.backends.cpu.plan_recurrent import check_recurrence, recurrent
from unspool.errors import ModelFileError
from unspool.model.checkpoint import Checkpoint
from unspool.model.config import ModelConfig

MOST_SHARING = 64  # query heads of one key head: the kernels' room for them
WIDEST_HEAD = 2048


def build_plan(config: ModelConfig, *, embedding_scale: float | None = None) -> Plan:
    """The operations of one run, for any model that a config can describe."""
    shapes = [config.shape(layer) for layer in range(config.layers)]
    sharing = max(shape.heads // shape.kv_heads for shape in shapes)
    if sharing > MOST_SHARING:
        raise ModelFileError(
            f"{sharing} heads share one key head, and the native backend "
            f"takes {MOST_SHARING}; load the model with backend='torch'"
        )
    if config.head_width > WIDEST_HEAD:
        raise ModelFileError(
            f"a head is {config.head_width:,} wide, and the native backend takes {WIDEST_HEAD:,}; "
            "load the model with backend='torch'"
        )
    check_recurrence(config)
    builder = _Builder(config)
    scale = config.embedding_scale if embedding_scale is None else embedding_scale
    builder.begin(scale)
    for layer in range(config.layers):
        builder.layer(layer)
    builder.end()
    return builder.plan


class _Builder(PlanParts):
    """Each method is a part of the model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.buffer("x", config.width)
        for layer in range(config.layers):
            shape = config.shape(layer)
            gates = shape.out_width if config.attention_gate else 0
            self.buffer("qkv", shape.out_width + 2 * shape.kv_width + gates)
            self.buffer("mixed", shape.out_width)
            rotary = config.layer_rotary(layer)
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
            self.after(out, layer, "attention_post_norm")
            self.snapshot(2 * layer + 1)
            self.after(down, layer, "feed_post_norm")
        else:
            if config.mixer(layer) != "none":
                self.after(self.mix(layer), layer, "attention_post_norm")
            self.snapshot(2 * layer + 1)
            if config.has_feed(layer):
                self.after(feed(self, layer), layer, "feed_post_norm")
        if self.config.token_width:
            self.token_input(layer)
        if self.config.layer_scale:
            vector = f"layers.{layer}.scale"
            self.add(Operation(kind="scale", source="x", target="x", vector=vector))
        self.snapshot(2 * layer + 2)

    def mix(self, layer: int) -> Operation:
        """What brings tokens together; gives the operation that adds it to x."""
        attends = self.config.mixer(layer) == "attention"
        return self.attention(layer) if attends else recurrent(self, layer)

    def attention(self, layer: int) -> Operation:
        """Up to what the heads gather; gives the operation that adds it to x."""
        config, at, shape = self.config, f"layers.{layer}.attention", self.config.shape(layer)
        own = config.kv_source(layer) == layer
        parts = ["q"] + ["k"] * own + ["v"] * (own and config.has_values(layer))
        parts += ["gate"] * config.attention_gate  # only where layers have all the others
        norm = f"layers.{layer}.attention_norm" if config.normed_attention(layer) else ""
        self.linear("x", "qkv", tuple(f"{at}.{part}.weight" for part in parts), norm=norm)
        if config.qk_norm == "whole":
            sizes = {"q_norm": (0, shape.out_width), "k_norm": (shape.out_width, shape.kv_width)}
            for part, (offset, width) in list(sizes.items())[: 1 + own]:
                self.norm("qkv", "qkv", f"{at}.{part}", offset=offset, width=width, centred=False)
        by_head = config.qk_norm == "head"
        rotary = config.layer_rotary(layer)
        self.add(
            Operation(
                kind="place",
                source="qkv",
                vector=f"{at}.q_norm.weight" if by_head else "",
                second_vector=f"{at}.k_norm.weight" if by_head and own else "",
                layer=layer,
                heads=shape.heads,
                rotary=self.plan.rotary.index(rotary) if rotary is not None else -1,
                queries_only=not own,
                keys_as_values=not config.has_values(layer),
                norm_values=config.value_norm,
                scale=config.query_growth,
                cap=config.query_span if config.query_growth else 0,
                epsilon=config.norm_eps,
            )
        )
        self.add(
            Operation(
                kind="attend",
                source="qkv",
                target="mixed",
                layer=layer,
                heads=shape.heads,
                window=config.window(layer),
                both_ways=config.sight == "whole",
                scale=config.score_scale(layer),
                cap=config.attention_softcap,
                vector=f"{at}.sinks" if config.sinks else "",
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
            matrices=(f"{at}.out.weight",),
            width=shape.out_width,
            add=True,
        )

    def after(self, operation: Operation, layer: int, post_norm: str) -> None:
        """Add a result to x; the result is normed or scaled first, or the sum normed then, where
        the model does that."""
        name, width = f"layers.{layer}.{post_norm}", self.config.width
        scale = self.config.residual_scale
        if self.config.norm_after or scale != 1:
            self.add(replace(operation, target=self.buffer("out", width), add=False))
            if self.config.norm_after:
                plain = scale == 1
                self.norm("out", "x" if plain else "out", name, width=width, add=plain)
            if scale != 1:
                self.add(Operation(kind="scale", source="out", target="x", scale=scale, add=True))
            return
        self.add(operation)
        if self.config.norm_sums:
            self.norm("x", "x", name, width=width)

    def token_inputs(self) -> None:
        """What every layer is told of the token: from a table, and from the vector it begins with.

        The products would be scaled by the root of the width; their norm does the same with as much
        larger an epsilon.
        """
        config = self.config
        every, width = config.layers * config.token_width, config.token_width
        table = "token_inputs.embed.weight"
        self.buffer("told", every)
        self.buffer("made", every)
        self.add(
            Operation(kind="embed", target="told", matrices=(table,), scale=(width / 2) ** 0.5)
        )
        self.linear("x", "made", ("token_inputs.project.weight",))
        self.add(
            Operation(
                kind="norm",
                source="made",
                target="made",
                width=width,
                heads=config.layers,
                vector="token_inputs.norm.weight",
                epsilon=config.norm_eps * config.width,
            )
        )
        self.add(Operation(kind="scale", source="made", target="told", scale=2**-0.5, add=True))

    def token_input(self, layer: int) -> None:
        config, at = self.config, f"layers.{layer}.token_input"
        width = config.token_width
        self.buffer("gated", width)
        self.buffer("out", config.width)
        self.linear("x", "gated", (f"{at}.gate.weight",))
        self.add(
            Operation(
                kind="activate",
                source="told",
                target="gated",
                offset=layer * width,
                activation=config.activation,
            )
        )
        self.linear("gated", "out", (f"{at}.out.weight",))
        self.norm("out", "x", f"{at}.norm", width=config.width, add=True)

    def end(self) -> None:
        config = self.config
        self.buffer("last", config.width, "wanted")
        self.buffer("logits", config.vocab_size, "wanted")
        self.add(Operation(kind="gather", source="x", target="last", rows="wanted"))
        ready = "last"
        if config.head_transform:
            ready = self.buffer("transformed", config.width, "wanted")
            norm = "transform.norm" if config.norm_before else ""
            self.linear("last", ready, ("transform.dense.weight",), norm=norm, rows="wanted")
            self.add(
                Operation(
                    kind="activate", target=ready, rows="wanted", activation=config.activation
                )
            )
        head = "embed.weight" if config.tied else "head.weight"
        self.linear(ready, "logits", (head,), norm="norm", rows="wanted")
        if config.logit_scale != 1:
            self.add(
                Operation(
                    kind="scale", source="logits", target="logits", rows="wanted",
                    scale=config.logit_scale,
                )
            )  # fmt: skip
        if config.logit_softcap:
            self.add(
                Operation(kind="softcap", target="logits", rows="wanted", cap=config.logit_softcap)
            )


def printed(checkpoint: Checkpoint) -> str:
    """The plan of a checkpoint's model, for people."""
    return str(build_plan(checkpoint.config))
