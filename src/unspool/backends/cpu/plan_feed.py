"""Operations of feed-forward layers: dense, experts (MoE), or both."""

from __future__ import annotations

from dataclasses import replace

from unspool.backends.cpu.plan import Operation
from unspool.backends.cpu.plan_parts import PlanParts
from unspool.model.config import ModelConfig


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
