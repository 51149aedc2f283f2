"""`unspool models plan --gpus N`: what of a model fits where, and how to start it so."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from unspool.cli.table import print_columns, print_json
from unspool.errors import SettingsError
from unspool.model.hub.inspect import MemoryPlan, plan_memory
from unspool.model.hub.memory import PLANNED_CONTEXT, format_bytes, parse_size

if TYPE_CHECKING:
    from unspool.model.config import ModelConfig

_USUAL_MEMORY = 80_000_000_000  # bytes, where this machine has no GPU
_MOST_GPUS = 1024


def gpu_plan(
    model: str | None,
    gpus: int | None,
    memory: str | None,
    context: int | None,
    batch: int | None,
    *,
    offline: bool,
    as_json: bool,
) -> None:
    """Say what fits; without `gpus` and `memory`, on the GPUs that are here."""
    for name, value in {"gpus": gpus, "context": context, "batch": batch}.items():
        if value is not None and value < 1:
            raise SettingsError(f"--{name} is {value}; it must be at least 1")
    here = _gpus_here() if gpus is None or memory is None else []
    count = gpus or len(here) or 1
    if count > _MOST_GPUS:
        raise SettingsError(f"--gpus is {count}; it may be up to {_MOST_GPUS:,}")
    each = parse_size(memory) if memory is not None else min(here, default=_USUAL_MEMORY)
    config, packed = _settings(model, offline)
    length = min(context or PLANNED_CONTEXT, config.context)
    found = plan_memory(config, gpus=count, memory=each, packed=packed)
    if as_json:
        rows = [{**asdict(fit), "texts": fit.texts(length)} for fit in found]
        print_json({"gpus": count, "memory": each, "context": length, "ways": rows})
        return
    _say_model(config)
    wanted = f" · {batch} at once" if batch else ""
    gpu_words = "1 GPU" if count == 1 else f"{count} GPUs"
    print(f"{gpu_words} of {format_bytes(each)} · texts of {length:,} tokens{wanted}\n")
    titles = ["", "weights a GPU", "a token", "tokens", f"texts of {length:,}", "fits"]
    print_columns([titles, *(_row(fit, length, batch or 1) for fit in found)])
    print(f"\n{_advice(found, length, batch or 1)}")


def _say_model(config: ModelConfig) -> None:
    from unspool.model.weights import parameter_count

    parameters = parameter_count(config)
    kept = f"{2 * config.kv_floats_per_token:,} bytes of keys and values a token"
    state = f", {format_bytes(config.state_bytes)} a recurrent state" if config.state_bytes else ""
    print(
        f"{config.family} · {parameters / 1e9:,.1f} billion parameters, "
        f"{format_bytes(2 * parameters)} in 16 bits · {kept}{state}"
    )


def _row(fit: MemoryPlan, context: int, batch: int) -> list[str]:
    if fit.problem:
        return [fit.how, "", "", "", "", fit.problem]
    texts = fit.texts(context)
    if not fit.tokens:
        verdict = "no: the weights leave no room"
    elif texts < batch:
        verdict = f"no: {batch} such texts need {format_bytes(batch * context * fit.token)} a GPU"
    else:
        verdict = "yes"
    size = f"{fit.token:,} bytes"
    return [fit.how, format_bytes(fit.weights), size, f"{fit.tokens:,}", f"{texts:,}", verdict]


def _advice(found: list[MemoryPlan], context: int, batch: int) -> str:
    good = [fit for fit in found if not fit.problem and fit.texts(context) >= batch]
    if not good:
        return "None of it fits: more or larger GPUs, fewer bits a weight, or shorter texts."
    if good[0].gpus == 1:
        return f"One GPU is enough: {good[0].options}"
    quickest = good[-1]
    said = f"{quickest.how[0].upper()}{quickest.how[1:]}: {quickest.options}"
    if quickest.options.startswith("--tensor"):
        said += f" (on several machines: torchrun --nproc-per-node {quickest.gpus} -m unspool ...)"
    return said


def _settings(model: str | None, offline: bool) -> tuple[ModelConfig, int]:
    """What the model is, and what its weights take on one GPU."""
    from unspool.model.files.config_json import config_from_hf, read_json
    from unspool.model.weights import parameter_count

    path = Path(model or "")
    path = path.parent if path.name == "config.json" else path
    bare = (path / "config.json").is_file() and not any(path.glob("*.safetensors"))
    if model and bare:
        config = config_from_hf(read_json(path / "config.json"))
        return config, 2 * parameter_count(config)
    from unspool.model.files.checkpoint import open_checkpoint
    from unspool.model.hub.find import find_model

    checkpoint = open_checkpoint(find_model(model, offline=offline))
    parameters = parameter_count(checkpoint.config)
    bits = min(16.0, checkpoint.bits_per_weight())
    return checkpoint.config, int(parameters * bits / 8)


def _gpus_here() -> list[int]:
    """The memory of each GPU of this machine."""
    from unspool.backends.placement import has_nvidia_driver

    if not has_nvidia_driver():
        return []
    try:
        import torch
    except ImportError:
        return []
    count = torch.cuda.device_count()
    return [int(torch.cuda.get_device_properties(n).total_memory) for n in range(count)]
