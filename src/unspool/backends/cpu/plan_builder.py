"""From a ModelConfig to the plan of operations that the native backend runs."""

from __future__ import annotations

from dataclasses import replace

from unspool.backends.cpu.plan import Operation, Plan
from unspool.errors import ModelFileError
from unspool.model.checkpoint import Checkpoint
from unspool.model.config import ModelConfig

MOST_SHARING = 64  # query heads of one key head: the kernels' room for them
WIDEST_HEAD = 2048


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
        if self.config.embedding_norm:
            self.norm("x", "x", "embed_norm", width=self.config.width)
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
        norm = f"layers.{layer}.attention_norm" if config.normed_attention(layer) else ""
        self.linear("x", "qkv", parts, norm=norm)
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
                both_ways=config.sight == "whole",
                scale=config.scale,
                cap=config.attention_softcap,
                vector=f"{at}.sinks" if config.sinks else "",
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
        norm = f"layers.{layer}.feed_norm" if config.norm_before else ""
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
            cap=config.activation_limit,
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
                cap=config.activation_limit,
                gated=True,
                experts=count,
            )
        )
        return Operation(kind="combine", source="answers", target="x", add=True)

    def after(self, operation: Operation, layer: int, post_norm: str) -> None:
        """Add a result to x; the result is normed first, or the sum then, where the model does
        that."""
        name, width = f"layers.{layer}.{post_norm}", self.config.width
        if self.config.norm_after:
            self.add(replace(operation, target=self.buffer("out", width), add=False))
            self.norm("out", "x", name, width=width, add=True)
            return
        self.add(operation)
        if self.config.norm_sums:
            self.norm("x", "x", name, width=width)

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
        if config.logit_softcap:
            self.add(
                Operation(kind="softcap", target="logits", rows="wanted", cap=config.logit_softcap)
            )

    # -- the small words -------------------------------------------------------------------

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
                second_vector=f"{name}.bias" if centred and self.config.norm_bias else "",
                centred=centred,
                epsilon=self.config.norm_eps,
                add=add,
            )
        )

    def snapshot(self, number: int) -> None:
        """Where somebody may look at x; costs nothing when nobody does."""
        self.add(Operation(kind="snapshot", source="x", layer=number))


def printed(checkpoint: Checkpoint) -> str:
    """The plan of a checkpoint's model, for people."""
    return str(build_plan(checkpoint.config))
