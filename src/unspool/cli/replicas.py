"""`unspool serve --replicas N`: from its options to several servers behind one address."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from unspool.cli import options as o
from unspool.cli.interrupt import raised
from unspool.server.http.settings import ServerSettings


def serve_replicas(
    chosen: list[o.ModelChoice],
    settings: ServerSettings,
    bound: socket.socket,
    started: Callable[[str, list[str]], None],
    *,
    replicas: int,
    max_replicas: int | None,
    cores: int | None,
    routing: str,
    log: tuple[str, bool],
    cache_memory: int | None = None,
    model_memory: int | None = None,
    unload_after: float | None = None,
    adapters: Path | None = None,
) -> None:
    """Serve until asked to stop. What the machine has is shared out among the replicas."""
    from unspool.scale import require_ray

    require_ray("--replicas")
    from unspool.model.hub.locate import locate
    from unspool.scale.replicas.config import ReplicaModelConfig, ReplicasConfig
    from unspool.scale.replicas.local import serve_replicas as serve

    most = max_replicas or replicas
    on_gpus = any(choice.device() != "cpu" for choice in chosen)
    if not on_gpus:
        cache_memory = cache_memory or _share_of_memory(most)
    models = []
    for choice in chosen:
        choice.check()
        found = locate(choice.model, offline=bool(choice.options.get("offline")))
        where = None if found.path is None else f"{found.name}={Path(found.path).resolve()}"
        models.append(
            ReplicaModelConfig(model=where, options={**choice.options, "memory": cache_memory})
        )
    config = ReplicasConfig(
        models=tuple(models),
        settings=settings,
        replicas=replicas,
        max_replicas=max_replicas,
        routing=routing,
        cores=cores or (_cores() // most if most <= _cores() else None),
        adapters=None if adapters is None else str(adapters.resolve()),
        model_memory=model_memory,
        unload_after=unload_after,
        log=log,
    )
    with raised():
        serve(config, bound, started, gpus=min(1.0, _gpus() / most) if on_gpus else 0.0)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _share_of_memory(parts: int) -> int:
    """For keys and values of each: as much as one server takes, as long as all of them together
    leave most of the memory to others."""
    from unspool.backends.step import free_memory

    return min(2 << 30, free_memory() // 2 // parts)
