"""Whether the kernels for a GPU can run here, found out without importing them."""

from __future__ import annotations

import importlib.util

from unspool.model.config import ModelConfig

_OLDEST = (8, 0)  # Ampere: the first with bfloat16


def missing(device: str) -> str | None:
    """What is in the way of our own kernels on this device; None: nothing."""
    import torch

    if not device.startswith("cuda"):
        return f"they are for NVIDIA GPUs, not for {device!r}"
    if torch.version.hip is not None:
        return "this torch is made for AMD GPUs"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if torch.cuda.get_device_capability(device) < _OLDEST:
        name = torch.cuda.get_device_name(device)
        return f"{name} is older than those that they are written for"
    return None


def lacking(config: ModelConfig) -> str | None:
    """What our own kernels cannot do that a model needs; None: nothing. Plain torch can."""
    needs = {
        "it normalizes sums": config.norm_sums,
        "it normalizes its embeddings": config.embedding_norm,
        "it has one more matrix before its head": config.head_transform,
        "its norms have no bias": config.norm == "layer" and not config.norm_bias,
        "its head is the table of tokens and has a bias": config.tied and config.head_bias,
        "its layers differ in their heads": bool(config.shapes),
        "its layers share keys and values": config.kv_shared > 0,
        "some of its values are keys": bool(config.keys_as_values),
        "it normalizes its values": config.value_norm,
        "its queries grow with the position": config.query_growth != 0,
        "it scales what its layers add": config.residual_scale != 1 or config.layer_scale,
        "it scales its logits": config.logit_scale != 1,
        "its layers look up the token": config.token_width > 0,
        "it has experts beside a feed-forward": config.dense_beside_experts,
        "it has recurrent layers": config.state_bytes > 0,
        "its layers lack attention or feed-forward": bool(config.feedless_layers)
        or "none" in config.mixers,
        "its activation is a square": config.activation == "relu2",
        "its experts have no gate": config.experts > 0 and not config.gated,
        "its attention has a gate": config.attention_gate,
        "its router is no softmax": config.router != "softmax" or config.experts_scale != 1,
        "it has an expert that is shared": config.shared_width > 0,
        "its heads have sinks": config.sinks,
        "its router or its experts have biases": config.router_bias or config.expert_bias,
        "its activation is clamped": config.activation == "swiglu_clamped",
        "its windows reach ahead": config.sight == "whole" and any(config.windows),
    }
    return next((words for words, needed in needs.items() if needed), None)
