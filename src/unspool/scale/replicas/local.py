"""`unspool serve --replicas N`: Ray, replicas and gateway on this machine.

The gateway runs in this process, so that it stops like a server: on Ctrl-C and SIGTERM running
requests finish, then the replicas stop, and Ray with all its processes.
"""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from unspool.errors import UnspoolError
from unspool.scale import require_ray
from unspool.scale.replicas.config import ReplicasConfig

_STORE_BYTES = 80 << 20  # of Ray's object store, which is not used: the minimum
_APPLICATION = "unspool"

# Defaults for one machine whose cores are all busy with inference: Ray's processes would cost
# several percent, as they wake up hundreds of times per second and interrupt an engine thread while
# the others wait for it. Variables that are already set are kept.
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # replicas are not less urgent than Ray's own processes
    "RAY_enable_metrics_collection": "0",  # of Ray itself; ours are those of the server
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "0",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}


def serve_replicas(
    config: ReplicasConfig,
    bound: socket.socket,
    started: Callable[[str, list[str]], None],
    *,
    gpus: float = 0.0,
) -> None:
    """Serve until stopped by a signal.

    `started` is called with the address and a description; `gpus` is the number (or fraction) of
    GPUs per replica.
    """
    require_ray("--replicas")
    with _ray(config.max_count), _replicas(config, gpus) as handle:
        _serve_gateway(config, bound, handle, started)


@contextmanager
def _ray(most: int) -> Iterator[None]:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray  # which reads them

    with _terminated_as_interrupted():
        ray.init(
            num_cpus=most + 1,  # one more, so that an update can start before stopping a replica
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_STORE_BYTES,
        )
    with _terminated_as_interrupted():  # again, as Ray has replaced the handler
        try:
            yield
        finally:
            with _quiet():
                ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Ray's messages about processes that it stops itself."""
    with redirect_stderr(io.StringIO()):
        yield


@contextmanager
def _replicas(config: ReplicasConfig, gpus: float) -> Iterator[Any]:
    from ray import serve

    from unspool.scale.replicas.application import build_replicas_from

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    actor = {"num_cpus": 1, "num_gpus": gpus}
    try:
        try:
            application = build_replicas_from(config, **actor)
            yield serve.run(application, name=_APPLICATION, route_prefix=None)
        except RuntimeError as error:
            raise UnspoolError(_why_not_started(error)) from None
    finally:
        with _quiet():
            serve.shutdown()


def _why_not_started(error: RuntimeError) -> str:
    """Return why a replica could not be started: the last line of its traceback."""
    from ray import serve

    application = serve.status().applications.get(_APPLICATION)
    deployments = application.deployments.values() if application else []
    messages = "\n".join(deployment.message for deployment in deployments)
    errors = re.findall(r"^(?:unspool\.[\w.]+|\w*Error): (.+)$", messages, re.MULTILINE)
    return errors[-1] if errors else f"the replicas could not be started: {error}"


def _serve_gateway(
    config: ReplicasConfig,
    bound: socket.socket,
    handle: Any,
    started: Callable[[str, list[str]], None],
) -> None:
    from unspool.scale.replicas.gateway import RayChooser, ReplicaPool, create_gateway
    from unspool.server.http import server
    from unspool.server.http.logs import log_event

    app, gateway = create_gateway(config.settings, ReplicaPool(RayChooser(handle)))

    def on_started(address: str) -> bool:
        log_event("started", address=address, replicas=config.replicas)
        started(address, [f"{config.replicas} replicas"])
        return True

    def stopping() -> None:
        gateway.admission.is_stopping = True
        log_event("stopping", in_flight=gateway.pool.in_flight.total())

    server.run(app, config.settings, bound, on_stopping=stopping, on_started=on_started)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, for a clean stop while Ray starts or stops."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
