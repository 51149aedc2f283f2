"""The applications that Ray Serve deploys on a cluster: replicas and gateway.

    serve deploy deploy/serve.yaml

They are two applications, because Ray restarts a complete application when a part of it changes:
this way replicas are updated while gateways keep running. Each gateway listens on its own port;
Ray's proxies are not used (`proxy_location: Disabled`).
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from unspool.scale.replicas.config import ReplicasConfig, gateway_config_from, replicas_config_from
from unspool.scale.replicas.gateway import create_gateway
from unspool.scale.replicas.listening import ServerThread
from unspool.scale.replicas.pool import RayChooser, ReplicaPool
from unspool.scale.replicas.replica import Replica
from unspool.serve.http.logs import configure_logging
from unspool.serve.http.settings import ServerSettings

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
