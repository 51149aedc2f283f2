"""Loading a model over several devices: layer by layer, or by splitting every layer."""

from __future__ import annotations

import atexit
from collections.abc import Sequence

import torch

from unspool.backends.torch.backend import TorchModel
from unspool.backends.torch.parallel import worker
from unspool.backends.torch.parallel.model import SplitModel, split_model
from unspool.backends.torch.parallel.ranks import Device, Ranks
from unspool.errors import SettingsError
from unspool.model.files.checkpoint import Checkpoint, load_transformer
from unspool.model.files.sharding import build_device_map, check_shardable

_torchrun_ranks: list[Ranks] = []  # shared by all models of this process


def load_on_devices(
    checkpoint: Checkpoint, devices: Sequence[str], ranks: int, dtype: str, name: str = ""
) -> TorchModel | SplitModel:
    """Load a model with tensor parallelism over `ranks`; 1: with its layers over the devices."""
    if ranks == 1:
        layer_devices = build_device_map(checkpoint.config, devices, _free_memory(devices))
        return TorchModel(load_transformer(checkpoint, dtype=dtype, device=layer_devices))
    check_shardable(checkpoint.config, ranks)  # before starting processes
    if 1 < len(devices) < ranks:
        raise SettingsError(
            f"tensor_parallel must be <= {len(devices)}, the GPUs here, got {ranks}"
        )
    device: Device = devices[0] if len(devices) == 1 else list(devices[:ranks])
    world_size = worker.world_size()
    if world_size is None:
        spawned = Ranks.spawn(ranks, device)
        try:
            return split_model(checkpoint, spawned, dtype, own_ranks=True)
        except BaseException:
            spawned.close()
            raise
    if world_size != ranks:
        raise SettingsError(
            f"tensor_parallel must be {world_size}, the processes of torchrun, got {ranks}; leave "
            "tensor_parallel out"
        )
    if not _torchrun_ranks:
        device = "cuda" if devices[0].startswith("cuda") else device
        _torchrun_ranks.append(Ranks.from_torchrun(device))
        atexit.register(_torchrun_ranks[0].close)
    return split_model(checkpoint, _torchrun_ranks[0], dtype, name=name)


def _free_memory(devices: Sequence[str]) -> list[float] | None:
    """Free bytes of each GPU; None if not all devices are GPUs (then layers are divided evenly)."""
    if not all(device.startswith("cuda") for device in devices):
        return None
    return [float(torch.cuda.mem_get_info(device)[0]) for device in devices]
