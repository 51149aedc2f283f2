"""Facts about model and machine for the head of a report."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from unspool.costing.part import VOCABULARY

if TYPE_CHECKING:
    from unspool.language_model import LanguageModel


def model_name(lm: LanguageModel) -> str:
    """Return a model's display name: its file, folder or run, else its family."""
    if lm.path is None:
        return lm.config.family
    path = Path(lm.path).resolve()
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}/{path.name}"
    return path.stem if path.suffix == ".gguf" else path.name


def machine_facts(lm: LanguageModel) -> dict[str, str]:
    """Return facts about the machine and how the model runs on it, by name."""
    from unspool.model.weights import parameter_count

    return {
        "parameters": f"{parameter_count(lm.config):,}",
        "weights": lm.model.precision,
        "context": f"{lm.context:,} tokens",
        VOCABULARY: f"{lm.config.vocab_size:,} tokens",
        "device": _device(lm.model.device),
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "threads": str(getattr(lm.model, "threads", "")) or "torch default",
    }


def processor_name() -> str:
    """Return the processor's name from the system, or its architecture."""
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
    """Return a device with its product name if it is a GPU."""
    if not name.startswith("cuda"):
        return name
    import torch

    return f"{name}, {torch.cuda.get_device_name(name)}"
