"""A model that does not fit one device: over several, by layers or by splitting every layer."""

from __future__ import annotations

import atexit
from collections.abc import Sequence

import torch

from unspool.backends.torch import torchrun
from unspool.backends.torch.loaded import TorchModel
from unspool.backends.torch.parallel.loaded import SplitModel, split_model
from unspool.backends.torch.parallel.ranks import Device, Ranks
from unspool.errors import SettingsError
from unspool.model.checkpoint import Checkpoint, load_transformer
from unspool.model.layer_places import places_of
from unspool.model.split import check_split

_of_torchrun: list[Ranks] = []  # which hold all models that are asked for


def load_on_several(
    checkpoint: Checkpoint, devices: Sequence[str], ranks: int, dtype: str, name: str = ""
) -> TorchModel | SplitModel:
    """The model split over so many `ranks`; 1: its layers over the devices, in order."""
    if ranks == 1:
        places = places_of(checkpoint.config, devices, _room(devices))
        return TorchModel(load_transformer(checkpoint, dtype=dtype, device=places))
    check_split(checkpoint.config, ranks)  # before any process is started
    if 1 < len(devices) < ranks:
        raise SettingsError(f"tensor_parallel is {ranks}, and there are {len(devices)} GPUs here")
    device: Device = devices[0] if len(devices) == 1 else list(devices[:ranks])
    started = torchrun.ranks()
    if started is None:
        found = Ranks.spawned(ranks, device)
        try:
            return split_model(checkpoint, found, dtype, own_ranks=True)
        except BaseException:
            found.close()
            raise
    if started != ranks:
        raise SettingsError(
            f"tensor_parallel is {ranks}, and torchrun has started {started} processes; leave "
            "tensor_parallel out"
        )
    if not _of_torchrun:
        _of_torchrun.append(Ranks.of_torchrun("cuda" if devices[0].startswith("cuda") else device))
        atexit.register(_of_torchrun[0].close)
    return split_model(checkpoint, _of_torchrun[0], dtype, name=name)


def _room(devices: Sequence[str]) -> list[float] | None:
    """What is free on each GPU; None: they are not all GPUs, and get the same."""
    if not all(device.startswith("cuda") for device in devices):
        return None
    return [float(torch.cuda.mem_get_info(device)[0]) for device in devices]
