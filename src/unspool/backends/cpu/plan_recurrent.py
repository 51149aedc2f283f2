"""Operations of recurrent layers: gated convolution, gated DeltaNet or Mamba-2."""

from __future__ import annotations

from unspool.backends.cpu.plan import Operation
from unspool.backends.cpu.plan_parts import PlanParts
from unspool.errors import ModelFileError
from unspool.model.config import ModelConfig

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
