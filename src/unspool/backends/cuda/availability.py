"""Whether the GPU kernels can run on this machine and run this model. Does not import them."""

from __future__ import annotations

import importlib.util

from unspool.model.config import ModelConfig

_MIN_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16


def why_unavailable(device: str) -> str | None:
    """Why the GPU kernels cannot run on this device; None: they can."""
    import torch

    if not device.startswith("cuda"):
        return f"they need an NVIDIA GPU, got {device!r}"
    if torch.version.hip is not None:
        return "this torch build is for AMD GPUs"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} is too old: compute capability 8.0 or later is required"
    return None


def why_unsupported(config: ModelConfig) -> str | None:
    """Why the GPU kernels cannot run a model; None: they can. Plain torch runs all models."""
    reasons = {
        "it normalizes residual sums": config.norm_sums,
        "it normalizes its embeddings": config.embedding_norm,
        "it has a dense layer before its head": config.head_transform,
        "its layer norms have no bias": config.norm == "layer" and not config.norm_bias,
        "its tied head has a bias": config.tied and config.head_bias,
        "its layers have different numbers of heads": bool(config.shapes),
        "its layers share keys and values": config.kv_shared > 0,
        "some of its values are keys": bool(config.keys_as_values),
        "it normalizes its values": config.value_norm,
        "it scales queries by position": config.query_growth != 0,
        "it scales the outputs of its layers": config.residual_scale != 1 or config.layer_scale,
        "it scales its logits": config.logit_scale != 1,
        "it has per-layer embeddings": config.token_width > 0,
        "it has experts beside a dense feed-forward": config.dense_beside_experts,
        "it has recurrent layers": config.state_bytes > 0,
        "some layers have no attention or no feed-forward": bool(config.feedless_layers)
        or "none" in config.mixers,
        "its activation is relu2": config.activation == "relu2",
        "its experts have no gate": config.experts > 0 and not config.gated,
        "its attention has a gate": config.attention_gate,
        "its router is not a softmax": config.router != "softmax" or config.experts_scale != 1,
        "it has a shared expert": config.shared_width > 0,
        "it has attention sinks": config.sinks,
        "its router or its experts have biases": config.router_bias or config.expert_bias,
        "its activation is clamped": config.activation == "swiglu_clamped",
        "its sliding windows are bidirectional": config.sight == "whole" and any(config.windows),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
