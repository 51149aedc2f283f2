"""A replica: a server with its engine, in a process that Ray supervises.

It listens on its own port, to which gateways send requests. Ray calls `check_health`,
`record_replica_metadata` (the address) and `record_autoscaling_stats` (the load), and `__del__` for
a graceful shutdown.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from unspool.scale.replicas.config import ReplicaModelConfig, ReplicasConfig
from unspool.scale.replicas.listening import ServerThread
from unspool.serve.core.adapters import AdapterFolder
from unspool.serve.core.locating import locate
from unspool.serve.core.registry import ModelEntry, ModelRegistry
from unspool.serve.http.app import create_app
from unspool.serve.http.logs import configure_logging
from unspool.session import Session


class Replica:
    """The class of the Ray Serve deployment."""

    def __init__(self, config: ReplicasConfig) -> None:
        from ray import serve, util

        context = serve.get_replica_context()
        if config.cores is not None:
            pin_to_cores(config.cores, context.rank.local_rank)
        configure_logging(*config.log)
        is_here = config.settings.is_local  # a local gateway has local replicas
        settings = replace(config.settings, cors=(), replica=context.replica_id.unique_id)
        registry = _registry(config)
        app, self.state = create_app(settings, registry)
        self.server = ServerThread(
            app, settings, "127.0.0.1" if is_here else util.get_node_ip_address(), self._stopping
        )
        if self.state.startup_error is not None:
            raise self.state.startup_error

    def _stopping(self) -> None:
        self.state.admission.is_stopping = True

    def record_replica_metadata(self) -> dict[str, Any]:
        return {"address": self.server.address}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"in_flight": float(self.state.admission.running + self.state.admission.queued)}

    def check_health(self) -> None:
        """Raise if the replica is broken; Ray then replaces it."""
        self.server.check()
        for served in self.state.registry.loaded.values():
            if not served.is_alive:
                raise RuntimeError(f"the engine of {served.name} has stopped")

    async def __del__(self) -> None:
        """Refuse new requests and finish running ones. Ray waits for this."""
        if hasattr(self, "server"):  # False if the start failed
            await asyncio.to_thread(self.server.stop)


def pin_to_cores(count: int, rank: int) -> None:
    """Pin this thread and its children to `count` cores: those of the `rank`-th local replica.

    Does nothing if there are not enough cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    available = sorted(os.sched_getaffinity(0))
    cores = available[rank * count : (rank + 1) * count]
    if len(cores) == count:
        os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(count)  # Ray sets it to num_cpus


def _registry(config: ReplicasConfig) -> ModelRegistry:
    from unspool.backends.memory import free_memory

    return ModelRegistry(
        [_entry(model) for model in config.models],
        model_memory=config.model_memory or free_memory() * 4 // 5,
        keep_alive=config.unload_after,
        adapters=AdapterFolder(Path(config.adapters)) if config.adapters is not None else None,
    )


def _entry(model: ReplicaModelConfig) -> ModelEntry:
    located = locate(model.model, offline=bool(model.options.get("offline")))

    def load() -> Session:
        from unspool.loading import load

        lm = load(located.path, **model.options)
        lm.engine  # noqa: B018  starts the engine
        return lm

    return ModelEntry(located.name, load, located.size)
