"""The files in deploy/ are valid for Ray and KubeRay, and their applications can be built."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from helpers.manifest_schema import COUNT, TEXT, TEXTS, list_of, strict
from unspool.scale.replicas.config import gateway_config_from, replicas_config_from

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")

DEPLOY = Path(__file__).parent.parent.parent / "deploy"

# The part of KubeRay's RayService (ray.io/v1) that we use. It says what the types in
# github.com/ray-project/kuberay, ray-operator/apis/ray/v1/rayservice_types.go and
# raycluster_types.go, say, and Kubernetes' core/v1 of pods. Unknown names are refused, as
# `kubectl apply --validate=strict` does.


CONTAINER = strict(
    "name",
    "image",
    name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    image=TEXT,
    ports=list_of(strict("containerPort", containerPort=COUNT, name=TEXT)),
    resources=strict(requests=TEXTS, limits=TEXTS),
    volumeMounts=list_of(
        strict("name", "mountPath", name=TEXT, mountPath=TEXT, readOnly={"type": "boolean"})
    ),
)
TEMPLATE = strict(
    "spec",
    spec=strict(
        "containers",
        containers=list_of(CONTAINER),
        terminationGracePeriodSeconds=COUNT,
        volumes=list_of(strict("name", name=TEXT, secret=strict(secretName=TEXT))),
    ),
)
HEAD = strict("rayStartParams", "template", rayStartParams=TEXTS, template=TEMPLATE)
WORKERS = strict(
    "groupName",
    "minReplicas",
    "maxReplicas",
    "rayStartParams",
    "template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
CLUSTER = strict(
    "headGroupSpec",
    rayVersion=TEXT,
    enableInTreeAutoscaling={"type": "boolean"},
    headGroupSpec=HEAD,
    workerGroupSpecs=list_of(WORKERS),
)
RAY_SERVICE = strict(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=strict("name", name=TEXT),
    spec=strict(serveConfigV2=TEXT, rayClusterConfig=CLUSTER),
)


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return content


def test_kuberay_would_take_the_manifest():
    manifest = read("kuberay.yaml")
    jsonschema.validate(manifest, RAY_SERVICE)
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(wrong, RAY_SERVICE)
    (worker,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    serving = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    args, gateway = (application["args"] for application in serving["applications"])
    pod = worker["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > args["settings"]["drain"]
    assert pod["containers"][0]["ports"][0]["containerPort"] == gateway["settings"]["port"]
    assert args["max_replicas"] <= worker["maxReplicas"]


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay.yaml"])
def test_ray_serve_would_take_the_applications(name: str, tmp_path: Path):
    from ray.serve.schema import ServeDeploySchema

    from unspool.scale.replicas.application import build_gateway, build_replicas

    config_file = read(name)
    if name == "kuberay.yaml":
        config_file = yaml.safe_load(config_file["spec"]["serveConfigV2"])
    schema = ServeDeploySchema.model_validate(config_file)
    assert str(schema.proxy_location.value) == "Disabled"
    applications = {application.name: application for application in schema.applications}
    builders = {"replicas": build_replicas, "gateway": build_gateway}
    keys = tmp_path / "keys"
    keys.write_text("a-key-for-tests\nand-another\n")
    built = {}
    for key, build in builders.items():
        application = applications.pop(key)
        assert application.import_path == f"{build.__module__}:{build.__name__}"
        has_keys = "api_key_file" in application.args
        args = {**application.args, **({"api_key_file": str(keys)} if has_keys else {})}
        built[key] = build(args)._bound_deployment
        (deployment,) = application.deployments
        assert deployment.name == built[key].name
        if key == "replicas":
            config = replicas_config_from(args)
            assert deployment.ray_actor_options.num_cpus == config.cores
        else:
            gateway = gateway_config_from(args)
    assert not applications
    assert gateway.application == "replicas"
    assert gateway.settings.api_keys == config.settings.api_keys
    assert len(gateway.settings.api_keys) == (2 if name == "kuberay.yaml" else 0)
    assert gateway.settings.host == config.settings.host == "0.0.0.0"
    scaling = built["replicas"]._deployment_config.autoscaling_config
    assert (
        (scaling.min_replicas, scaling.max_replicas)
        == (2, 8)
        == (config.replicas, config.max_replicas)
    )


def test_autoscaling_by_queue_length():
    from types import SimpleNamespace

    from unspool.scale.replicas.application import by_queue_length

    def replicas(*in_flight: float) -> int:
        context: Any = SimpleNamespace(
            aggregated_metrics={"in_flight": dict(enumerate(in_flight))},
            config=SimpleNamespace(target_ongoing_requests=16),
        )
        return by_queue_length(context)[0]

    loads = [(), (0, 0), (16,), (17,), (40, 30)]
    assert [replicas(*load) for load in loads] == [1, 1, 1, 2, 5]
