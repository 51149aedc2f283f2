"""The files in deploy/: Ray and KubeRay would take them, and what they say can be built."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve")
import jsonschema
import yaml

from unspool.scale.replicas.config import config_from, gateway_config_from

DEPLOY = Path(__file__).parent.parent.parent / "deploy"

# The part of KubeRay's RayService (ray.io/v1) that we use. It says what the types in
# github.com/ray-project/kuberay, ray-operator/apis/ray/v1/rayservice_types.go and
# raycluster_types.go, say, and Kubernetes' core/v1 of pods. Unknown names are refused, as
# `kubectl apply --validate=strict` does.
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def strict(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


CONTAINER = strict(
    ("name", "image"),
    name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    image=TEXT,
    ports=many(strict(("containerPort",), containerPort=COUNT, name=TEXT)),
    resources=strict(requests=TEXTS, limits=TEXTS),
    volumeMounts=many(
        strict(("name", "mountPath"), name=TEXT, mountPath=TEXT, readOnly={"type": "boolean"})
    ),
)
TEMPLATE = strict(
    ("spec",),
    spec=strict(
        ("containers",),
        containers=many(CONTAINER),
        terminationGracePeriodSeconds=COUNT,
        volumes=many(strict(("name",), name=TEXT, secret=strict(secretName=TEXT))),
    ),
)
HEAD = strict(("rayStartParams", "template"), rayStartParams=TEXTS, template=TEMPLATE)
WORKERS = strict(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
CLUSTER = strict(
    ("headGroupSpec",),
    rayVersion=TEXT,
    enableInTreeAutoscaling={"type": "boolean"},
    headGroupSpec=HEAD,
    workerGroupSpecs=many(WORKERS),
)
RAY_SERVICE = strict(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=strict(("name",), name=TEXT),
    spec=strict(serveConfigV2=TEXT, rayClusterConfig=CLUSTER),
)


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return found


def test_kuberay_would_take_the_manifest():
    manifest = read("kuberay.yaml")
    jsonschema.validate(manifest, RAY_SERVICE)
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(wrong, RAY_SERVICE)
    (worker,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    serving = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    args, before = (each["args"] for each in serving["applications"])
    pod = worker["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > args["settings"]["drain"]
    assert pod["containers"][0]["ports"][0]["containerPort"] == before["settings"]["port"]
    assert args["max_replicas"] <= worker["maxReplicas"]


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay.yaml"])
def test_ray_serve_would_take_the_applications(name: str, tmp_path: Path):
    from ray.serve.schema import ServeDeploySchema

    from unspool.scale.replicas.application import build_gateway, build_replicas

    found = read(name)
    if name == "kuberay.yaml":
        found = yaml.safe_load(found["spec"]["serveConfigV2"])
    checked = ServeDeploySchema.model_validate(found)
    assert str(checked.proxy_location.value) == "Disabled"
    applications = {each.name: each for each in checked.applications}
    builders = {"replicas": build_replicas, "gateway": build_gateway}
    keys = tmp_path / "keys"
    keys.write_text("a-key-for-tests\nand-another\n")
    built = {}
    for each, build in builders.items():
        application = applications.pop(each)
        assert application.import_path == f"{build.__module__}:{build.__name__}"
        has_keys = "api_key_file" in application.args
        args = {**application.args, **({"api_key_file": str(keys)} if has_keys else {})}
        built[each] = build(args)._bound_deployment
        (deployment,) = application.deployments
        assert deployment.name == built[each].name
        if each == "replicas":
            config = config_from(args)
            assert deployment.ray_actor_options.num_cpus == config.cores
        else:
            gateway = gateway_config_from(args)
    assert not applications
    assert gateway.application == "replicas"
    assert gateway.settings.api_keys == config.settings.api_keys
    assert len(gateway.settings.api_keys) == (2 if name == "kuberay.yaml" else 0)
    assert gateway.settings.host == config.settings.host == "0.0.0.0"
    scaling = built["replicas"]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 8) == (config.replicas, config.most)


def test_as_many_replicas_as_texts_run_and_wait_for():
    from types import SimpleNamespace

    from unspool.scale.replicas.application import by_queue_length

    def wanted(*in_flight: float) -> int:
        context: Any = SimpleNamespace(
            aggregated_metrics={"in_flight": dict(enumerate(in_flight))},
            config=SimpleNamespace(target_ongoing_requests=16),
        )
        return by_queue_length(context)[0]

    assert (wanted(), wanted(0, 0), wanted(16), wanted(17), wanted(40, 30)) == (1, 1, 1, 2, 5)
