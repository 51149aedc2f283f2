"""The operations of feed-forwards: one for every token, experts, or both."""

from __future__ import annotations

from dataclasses import replace

from unspool.backends.cpu.plan import Operation
from unspool.backends.cpu.plan_parts import PlanParts
from unspool.model.config import ModelConfig


def feed(build: PlanParts, layer: int) -> Operation:
    """The first half of a feed-forward; gives the operation of the second."""
    config, at = build.config, f"layers.{layer}.feed"
    if config.has_both(layer):
        return _dense_and_experts(build, layer)
    norm = f"layers.{layer}.feed_norm" if config.norm_before else ""
    if config.has_experts(layer):
        return _experts(build, at, norm, norm)
    return _dense(build, at, layer, norm)


def _sides(config: ModelConfig) -> tuple[str, ...]:
    return ("gate", "up") if config.gated else ("up",)


def _dense(build: PlanParts, at: str, layer: int, norm: str) -> Operation:
    config, inner = build.config, build.config.shape(layer).ff_width
    sides = _sides(config)
    build.buffer("hidden", inner * len(sides))
    build.linear("x", "hidden", tuple(f"{at}.{side}.weight" for side in sides), norm=norm)
    return Operation(
        kind="linear",
        source="hidden",
        target="x",
        matrices=(f"{at}.down.weight",),
        width=inner,
        prepare="activated",
        activation=config.activation,
        cap=config.activation_limit,
        gated=config.gated,
        add=True,
    )


def _experts(
    build: PlanParts, at: str, norm: str, router_norm: str, scale: float = 1.0, counts: str = ""
) -> Operation:
    """`scale` is that of the router's scores, `counts` the vector of what each expert counts
    beside them."""
    config = build.config
    inner, count, sides = config.expert_width, config.experts, _sides(config)
    build.buffer("router", count)
    build.buffer("picked", len(sides) * inner, "picks")
    build.buffer("answers", config.width, "picks")
    build.linear("x", "router", (f"{at}.router.weight",), norm=router_norm)
    if scale != 1:
        build.add(Operation(kind="scale", source="router", target="router", scale=scale))
    build.add(
        Operation(
            kind="route",
            source="router",
            vector=counts,
            second_vector=f"{at}.selection_bias" if config.selection_bias else "",
            sigmoid_router=config.router == "sigmoid",
            scale=config.experts_scale,
            experts=count,
            chosen=config.experts_per_token,
            normalize=config.normalize_experts,
        )
    )
    names = tuple(f"{at}.{side}.weight[{e}]" for e in range(count) for side in sides)
    build.linear("x", "picked", names, norm=norm, kind="experts", rows="picks", experts=count)
    build.add(
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
            gated=config.gated,
            experts=count,
        )
    )
    if config.shared_width:
        _shared(build, at, norm)
        build.add(Operation(kind="combine", source="answers", target="fed", add=True))
        return Operation(kind="scale", source="fed", target="x", add=True)
    return Operation(kind="combine", source="answers", target="x", add=True)


def _shared(build: PlanParts, at: str, norm: str) -> None:
    """What the feed-forward beside the experts says, behind its gate if it has one."""
    config = build.config
    inner, sides = config.shared_width, _sides(config)
    names = [f"{at}.shared.{side}.weight" for side in sides]
    if config.shared_gated:
        names.append(f"{at}.shared_gate.weight")
    build.buffer("shared", inner * len(sides) + config.shared_gated)
    build.buffer("fed", config.width)
    build.linear("x", "shared", tuple(names), norm=norm)
    build.add(
        Operation(
            kind="linear",
            source="shared",
            target="fed",
            matrices=(f"{at}.shared.down.weight",),
            width=inner,
            prepare="activated",
            activation=config.activation,
            gated=config.gated,
        )
    )
    if config.shared_gated:
        build.add(
            Operation(
                kind="gate", source="shared", target="fed", offset=inner * len(sides), heads=1,
                activation="sigmoid",
            )
        )  # fmt: skip


def _dense_and_experts(build: PlanParts, layer: int) -> Operation:
    """Both read x, each through norms of its own; their sum is what is added."""
    at, width = f"layers.{layer}.feed", build.config.width
    build.buffer("fed", width)
    build.buffer("out", width)
    dense = _dense(build, f"{at}.dense", layer, f"{at}.dense_norm")
    build.add(replace(dense, target="fed", add=False))
    build.norm("fed", "fed", f"{at}.dense_post_norm", width=width)
    norms = (f"{at}.experts_norm", f"{at}.router_norm")
    answers = _experts(build, f"{at}.experts", *norms, width**-0.5, f"{at}.expert_scale")
    build.add(replace(answers, target="out", add=False))
    build.norm("out", "fed", f"{at}.experts_post_norm", width=width, add=True)
    return Operation(kind="scale", source="fed", target="x", add=True)
