"""A replica: our server, with an engine of its own, in a process that Ray looks after.

It listens on a port of its own, to which gateways send requests. Ray asks it whether it is well
(`check_health`), where it is (`record_replica_metadata`) and how busy (`record_autoscaling_stats`),
and lets it finish before it goes (`__del__`).
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from unspool.scale.replicas.config import ModelConfig, ReplicasConfig
from unspool.scale.replicas.listening import ServerThread
from unspool.serve.core.adapters import AdapterFolder
from unspool.serve.core.locating import locate
from unspool.serve.core.registry import ModelEntry, ModelRegistry
from unspool.serve.http.app import create_app
from unspool.serve.http.logs import set_up
from unspool.session import Session


class Replica:
    """What Ray Serve deploys, several times."""

    def __init__(self, config: ReplicasConfig) -> None:
        from ray import serve, util

        context = serve.get_replica_context()
        if config.cores is not None:
            keep_to_cores(config.cores, context.rank.local_rank)
        set_up(*config.log)
        is_here = config.settings.is_local  # whom only this machine asks has its replicas here too
        settings = replace(config.settings, cors=(), replica=context.replica_id.unique_id)
        registry = _registry(config)
        app, self.state = create_app(settings, registry)
        self.server = ServerThread(
            app, settings, "127.0.0.1" if is_here else util.get_node_ip_address(), self._stopping
        )
        if self.state.fault is not None:
            raise self.state.fault

    def _stopping(self) -> None:
        self.state.admission.refusing = True

    def record_replica_metadata(self) -> dict[str, Any]:
        return {"address": self.server.address}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"in_flight": float(self.state.admission.running + self.state.admission.queued)}

    def check_health(self) -> None:
        """Raises if the replica is of no use any more; Ray starts another one then."""
        self.server.check()
        for served in self.state.registry.loaded.values():
            if not served.is_alive:
                raise RuntimeError(f"the engine of {served.name} has stopped")

    async def __del__(self) -> None:
        """Take nothing new, and finish what runs. Ray waits for it, and sends nobody here now."""
        if hasattr(self, "server"):  # not if it could not be started
            await asyncio.to_thread(self.server.stop)


def keep_to_cores(count: int, place: int) -> None:
    """Let this thread, and all that it starts, run on its own cores only: those of the `place`-th
    replica on this machine. Where there are not so many, all of them."""
    if not hasattr(os, "sched_setaffinity"):
        return
    every = sorted(os.sched_getaffinity(0))
    own = every[place * count : (place + 1) * count]
    if len(own) == count:
        os.sched_setaffinity(0, own)
    os.environ["OMP_NUM_THREADS"] = str(count)  # which Ray sets to the processors it counts


def _registry(config: ReplicasConfig) -> ModelRegistry:
    from unspool.backends.memory import free_memory

    return ModelRegistry(
        [_entry(model) for model in config.models],
        room=config.model_memory or free_memory() * 4 // 5,
        idle=config.unload_after,
        adapters=AdapterFolder(Path(config.adapters)) if config.adapters is not None else None,
    )


def _entry(model: ModelConfig) -> ModelEntry:
    found = locate(model.model, offline=bool(model.options.get("offline")))

    def load() -> Session:
        from unspool.loading import load

        lm = load(found.path, **model.options)
        lm.engine  # noqa: B018  which starts the engine
        return lm

    return ModelEntry(found.name, load, found.size)
