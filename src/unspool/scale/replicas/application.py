"""The applications that Ray Serve deploys on a cluster: replicas and gateway.

    serve deploy deploy/serve.yaml

They are two applications, because Ray restarts a complete application when a part of it changes:
this way replicas are updated while gateways keep running. Each gateway listens on its own port;
Ray's proxies are not used (`proxy_location: Disabled`).
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.types import ASGIApp

from unspool.model.hub.locate import locate
from unspool.scale.replicas.config import (
    ReplicaModelConfig,
    ReplicasConfig,
    gateway_config_from,
    replicas_config_from,
)
from unspool.scale.replicas.gateway import RayChooser, ReplicaPool, create_gateway
from unspool.server.app import create_app
from unspool.server.http import server as serving
from unspool.server.http.logs import configure_logging
from unspool.server.http.settings import ServerSettings
from unspool.server.http.sockets import bind_socket
from unspool.server.runtime.registry import AdapterFolder, ModelEntry, ModelRegistry
from unspool.session import Session


class ServerThread:
    """A running server, until `stop`; on any free port by default."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        host: str,
        stopping: Callable[[], None],
        port: int = 0,
    ) -> None:
        bound = bind_socket(replace(settings, host=host, port=port))
        name, number = bound.getsockname()[:2]
        self.address = f"[{name}]:{number}" if ":" in name else f"{name}:{number}"
        self._drain = settings.drain
        ready = threading.Event()

        def started(address: str) -> bool:
            ready.set()
            return True

        self._server = serving.Server(app, settings, on_stopping=stopping, on_started=started)

        def serve() -> None:
            try:
                serving.run_server(self._server, bound)
            finally:
                ready.set()

        self._thread = threading.Thread(target=serve, name="server", daemon=True)
        self._thread.start()
        ready.wait()  # until the first model is loaded, or has failed to load

    def check(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the server's thread has ended")

    def stop(self) -> None:
        """Refuse new requests, finish running ones, and stop."""
        self._server.stop()
        self._thread.join(self._drain + 5.0)


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
    from unspool.backends.step import free_memory

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


_HEALTH_SECONDS = 5.0
_GRACE_SECONDS = 15.0  # in addition to the drain time
_UNLIMITED = 1_000_000  # Ray sends no requests itself; the server has its own limits


class GatewayServer:
    """The gateway as a Ray Serve deployment, at most one per node."""

    def __init__(self, settings: ServerSettings, application: str, log: tuple[str, bool]) -> None:
        configure_logging(*log)
        # The replicas may be deployed later: the order does not matter.
        handle = serve.get_deployment_handle("Replica", application, _check_exists=False)
        app, self._gateway = create_gateway(settings, ReplicaPool(RayChooser(handle)))
        self._server = ServerThread(app, settings, settings.host, self._stopping, settings.port)

    def _stopping(self) -> None:
        self._gateway.admission.is_stopping = True

    def check_health(self) -> None:
        self._server.check()

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await asyncio.to_thread(self._server.stop)


def build_gateway(args: dict[str, Any]) -> serve.Application:
    """Build the gateway application for the `import_path` of a `serve.yaml`.

    `args` are the fields of `GatewayConfig`.
    """
    config = gateway_config_from(args)
    return (
        serve.deployment(GatewayServer, name="Gateway")
        .options(
            max_replicas_per_node=1,
            health_check_period_s=_HEALTH_SECONDS,
            graceful_shutdown_timeout_s=config.settings.drain + _GRACE_SECONDS,
            ray_actor_options={"num_cpus": 0.1},  # not on a head node without CPUs
        )
        .bind(config.settings, config.application, config.log)
    )


def build_replicas(args: dict[str, Any]) -> serve.Application:
    """Build the replicas application; `args` are the fields of `ReplicasConfig`."""
    return build_replicas_from(replicas_config_from(args))


def build_replicas_from(config: ReplicasConfig, **actor: Any) -> serve.Application:
    """Build the replicas application; `actor` are Ray resources per replica (`num_cpus`, ...)."""
    number: dict[str, Any] = {"num_replicas": config.replicas}
    if config.max_count > config.replicas:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=config.replicas,
                max_replicas=config.max_count,
                target_ongoing_requests=config.target_in_flight,
                metrics_interval_s=2.0,
                look_back_period_s=10.0,
                upscale_delay_s=10.0,
                policy=AutoscalingPolicy(policy_function=f"{__name__}:by_queue_length"),
            )
        }
    return (
        serve.deployment(Replica, name="Replica")
        .options(
            **number,
            max_ongoing_requests=_UNLIMITED,
            health_check_period_s=_HEALTH_SECONDS,
            graceful_shutdown_wait_loop_s=0.2,
            graceful_shutdown_timeout_s=config.settings.drain + _GRACE_SECONDS,
            max_constructor_retry_count=2,
            request_router_config={
                "request_router_class": "unspool.scale.replicas.request_router:PrefixRequestRouter",
                "request_router_kwargs": {"policy": config.routing, "slack": config.slack},
            },
            ray_actor_options=actor or None,
        )
        .bind(config)
    )


def by_queue_length(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy: the number of replicas for the running and queued requests.

    Ray limits it to the minimum and maximum, and delays changes.
    """
    counts = (context.aggregated_metrics or {}).get("in_flight", {})
    target = context.config.target_ongoing_requests
    return max(1, math.ceil(sum(counts.values()) / target)), {}
