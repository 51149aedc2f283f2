"""The applications that Ray Serve deploys on a cluster: replicas, and the gateway before them.

    serve deploy deploy/serve.yaml

They are two, because Ray restarts all of an application when a part of it is told something new:
so replicas are updated while the gateways stay. A gateway listens on its own port on each node it
is on; Ray's own proxies are not used (`proxy_location: Disabled`).
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from unspool.scale.replicas.config import ReplicasConfig, config_from, gateway_config_from
from unspool.scale.replicas.gateway import create_gateway
from unspool.scale.replicas.listening import ServerThread
from unspool.scale.replicas.pool import Pool, RayChooser
from unspool.scale.replicas.replica import Replica
from unspool.serve.http.logs import set_up
from unspool.serve.http.settings import ServeSettings

_HEALTH_SECONDS = 5.0
_GRACE_SECONDS = 15.0  # beside those for what runs
_UNCOUNTED = 1_000_000  # Ray sends no requests itself; the server has limits of its own


class GatewayServer:
    """The gateway as a deployment: on its own port, on each node that has one."""

    def __init__(self, settings: ServeSettings, application: str, log: tuple[str, bool]) -> None:
        set_up(*log)
        # Which is there, or will be: the order of deploying does not matter.
        handle = serve.get_deployment_handle("Replica", application, _check_exists=False)
        app, self._gateway = create_gateway(settings, Pool(RayChooser(handle)))
        self._server = ServerThread(app, settings, settings.host, self._stopping, settings.port)

    def _stopping(self) -> None:
        self._gateway.admission.refusing = True

    def check_health(self) -> None:
        self._server.check()

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await asyncio.to_thread(self._server.stop)


def build_gateway(args: dict[str, Any]) -> serve.Application:
    """What `import_path` in a `serve.yaml` names: `args` are those of `GatewayConfig`."""
    config = gateway_config_from(args)
    return (
        serve.deployment(GatewayServer, name="Gateway")
        .options(
            max_replicas_per_node=1,
            health_check_period_s=_HEALTH_SECONDS,
            graceful_shutdown_timeout_s=config.settings.drain + _GRACE_SECONDS,
            ray_actor_options={"num_cpus": 0.1},  # so not on a head that is to have no work
        )
        .bind(config.settings, config.application, config.log)
    )


def build_replicas(args: dict[str, Any]) -> serve.Application:
    """The same for the replicas: `args` are those of `ReplicasConfig`."""
    return replicas(config_from(args))


def replicas(config: ReplicasConfig, **actor: Any) -> serve.Application:
    """The replicas alone. `actor`: what Ray should give each (`num_cpus`, `num_gpus`)."""
    number: dict[str, Any] = {"num_replicas": config.replicas}
    if config.most > config.replicas:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=config.replicas,
                max_replicas=config.most,
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
            max_ongoing_requests=_UNCOUNTED,
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
    """How many replicas the texts that run and wait need. Ray keeps this between the least and the
    most, and lets it change only once it has held for a while."""
    counts = (context.aggregated_metrics or {}).get("in_flight", {})
    target = context.config.target_ongoing_requests
    return max(1, math.ceil(sum(counts.values()) / target)), {}
