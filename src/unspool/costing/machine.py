"""What was measured, and where: the head of a report."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unspool.language_model import LanguageModel


VOCABULARY = "vocabulary"  # nats a token are compared only where it is the same


def model_name(lm: LanguageModel) -> str:
    """What people call the model: its file, folder or run, or its family if it came from none."""
    if lm.path is None:
        return lm.config.family
    path = Path(lm.path).resolve()
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}/{path.name}"
    return path.stem if path.suffix == ".gguf" else path.name


def machine_facts(lm: LanguageModel) -> dict[str, str]:
    """The machine, and how the model runs on it."""
    from unspool.model.weights import parameter_count

    return {
        "parameters": f"{parameter_count(lm.config):,}",
        "weights": lm.model.precision,
        "context": f"{lm.context:,} tokens",
        VOCABULARY: f"{lm.config.vocab_size:,} tokens",
        "device": _device(lm.model.device),
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "threads": str(getattr(lm.model, "threads", "")) or "as many as torch takes",
    }


def processor_name() -> str:
    """The processor as the system calls it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _device(name: str) -> str:
    """A device, and what it is called by its maker where it is no processor."""
    if not name.startswith("cuda"):
        return name
    import torch

    return f"{name}, {torch.cuda.get_device_name(name)}"
