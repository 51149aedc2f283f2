"""`unspool serve --replicas N`: Ray, the replicas and the gateway, all on this machine.

The gateway runs in this process, so that it ends as a server does: Ctrl-C and SIGTERM let what runs
finish, then the replicas, and Ray with all its processes.
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
from unspool.scale.needs_ray import require_ray
from unspool.scale.replicas.config import ReplicasConfig

_STORE_BYTES = 80 << 20  # Ray's object store, which nothing here uses: the least it takes
_APPLICATION = "unspool"

# Ray is made for many machines that somebody watches. On one, whose cores are all busy writing, its
# own processes would cost several percent: they wake hundreds of times a second, and each time an
# engine's thread stands still while the others wait for it. Whoever sets one of these keeps it.
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
    """Serve until asked to stop; `started` is called with the address and what serves there.
    `gpus`: how many each replica has, or how much of one."""
    require_ray("--replicas")
    with _ray(config.most), _replicas(config, gpus) as handle:
        _serve_gateway(config, bound, handle, started)


@contextmanager
def _ray(most: int) -> Iterator[None]:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray  # which reads them

    with _terminated_as_interrupted():
        ray.init(
            num_cpus=most + 1,  # one more, so that an update need not stop a replica first
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_STORE_BYTES,
        )
    with _terminated_as_interrupted():  # again: Ray has put its own in its place
        try:
            yield
        finally:
            with _quiet():
                ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray tells of processes that it ends itself as if they had failed; nobody need read that."""
    with redirect_stderr(io.StringIO()):
        yield


@contextmanager
def _replicas(config: ReplicasConfig, gpus: float) -> Iterator[Any]:
    from ray import serve

    from unspool.scale.replicas.application import replicas

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    actor = {"num_cpus": 1, "num_gpus": gpus}
    try:
        try:
            application = replicas(config, **actor)
            yield serve.run(application, name=_APPLICATION, route_prefix=None)
        except RuntimeError as error:
            raise UnspoolError(_why_not_started(error)) from None
    finally:
        with _quiet():
            serve.shutdown()


def _why_not_started(error: RuntimeError) -> str:
    """What a replica said that could not be started: the last line of its trace."""
    from ray import serve

    application = serve.status().applications.get(_APPLICATION)
    told = [each.message for each in application.deployments.values()] if application else []
    errors = re.findall(r"^(?:unspool\.[\w.]+|\w*Error): (.+)$", "\n".join(told), re.MULTILINE)
    return errors[-1] if errors else f"the replicas could not be started: {error}"


def _serve_gateway(
    config: ReplicasConfig,
    bound: socket.socket,
    handle: Any,
    started: Callable[[str, list[str]], None],
) -> None:
    from unspool.scale.replicas.gateway import create_gateway
    from unspool.scale.replicas.pool import Pool, RayChooser
    from unspool.serve.http import server
    from unspool.serve.http.logs import log_event

    app, gateway = create_gateway(config.settings, Pool(RayChooser(handle)))

    def on_started(address: str) -> bool:
        log_event("started", address=address, replicas=config.replicas)
        started(address, [f"{config.replicas} replicas"])
        return True

    def stopping() -> None:
        gateway.admission.refusing = True
        log_event("stopping", in_flight=gateway.pool.in_flight.total())

    server.run(app, config.settings, bound, stopping=stopping, started=on_started)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM while Ray starts or stops ends it in order too, as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
