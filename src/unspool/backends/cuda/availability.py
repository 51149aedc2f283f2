"""Whether the GPU kernels can run on this machine. Does not import them."""

from __future__ import annotations

import importlib.util

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
