"""The manifests in deploy/ fit together, and their commands have only options that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from helpers.manifest_schema import COUNT, TEXT, TEXTS, list_of, strict
from unspool.cli.main import app_with
from unspool.model.hub.catalogue import catalogue

DEPLOY = Path(__file__).parent.parent / "deploy"
MANIFESTS = sorted(DEPLOY.rglob("*.yaml"))
DEPLOYMENTS = sorted((DEPLOY / "kubernetes").glob("deployment-*.yaml"))
IMAGE = re.compile(r"ghcr\.io/unspool-ai/unspool:\d+\.\d+\.\d+-(cpu|cuda)")

# The part of Kubernetes' apps/v1 and core/v1 that we use. Unknown names are refused, as `kubectl
# apply --validate=strict` does.
FLAG = {"type": "boolean"}


PROBE = strict(
    "httpGet",
    httpGet=strict("path", "port", path=TEXT, port=TEXT),
    periodSeconds=COUNT,
    timeoutSeconds=COUNT,
    failureThreshold=COUNT,
)
CONTAINER = strict(
    "name", "image", "args", "resources", "livenessProbe", "readinessProbe", "securityContext",
    name=TEXT, image=TEXT, command=list_of(TEXT), args=list_of(TEXT),
    env=list_of(strict("name", "value", name=TEXT, value=TEXT)),
    ports=list_of(strict("containerPort", containerPort=COUNT, name=TEXT)),
    startupProbe=PROBE, readinessProbe=PROBE, livenessProbe=PROBE,
    resources=strict("requests", "limits", requests=TEXTS, limits=TEXTS),
    securityContext=strict(
        "allowPrivilegeEscalation",
        allowPrivilegeEscalation={"const": False},
        readOnlyRootFilesystem=FLAG,
        capabilities=strict(drop={"const": ["ALL"]}),
    ),
    volumeMounts=list_of(
        strict("name", "mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)
    ),
)  # fmt: skip
POD = strict(
    "containers", "securityContext",
    terminationGracePeriodSeconds=COUNT, automountServiceAccountToken=FLAG,
    securityContext=strict(
        "runAsNonRoot", "runAsUser",
        runAsNonRoot={"const": True}, runAsUser={"type": "integer", "minimum": 1},
        runAsGroup=COUNT, fsGroup=COUNT, seccompProfile=strict("type", type=TEXT),
    ),
    containers=list_of(CONTAINER),
    volumes=list_of(
        strict(
            "name", name=TEXT, emptyDir={"type": "object"}, secret=strict(secretName=TEXT),
            persistentVolumeClaim=strict("claimName", claimName=TEXT),
        )
    ),
)  # fmt: skip
META = strict("name", name=TEXT, labels=TEXTS)
DEPLOYMENT = strict(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion={"const": "apps/v1"}, kind={"const": "Deployment"}, metadata=META,
    spec=strict(
        "selector", "template",
        replicas=COUNT, strategy=strict(type=TEXT), selector=strict(matchLabels=TEXTS),
        template=strict("metadata", "spec", metadata=strict(labels=TEXTS), spec=POD),
    ),
)  # fmt: skip
SERVICE = strict(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion={"const": "v1"}, kind={"const": "Service"}, metadata=META,
    spec=strict(
        "selector", "ports", selector=TEXTS, sessionAffinity=TEXT,
        ports=list_of(strict("port", name=TEXT, port=COUNT, targetPort=TEXT)),
    ),
)  # fmt: skip
CLAIM = strict(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion={"const": "v1"}, kind={"const": "PersistentVolumeClaim"}, metadata=META,
    spec=strict(
        "accessModes", "resources", accessModes=list_of(TEXT), resources=strict(requests=TEXTS)
    ),
)  # fmt: skip


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def containers(node: Any) -> list[dict[str, Any]]:
    """Every container in a manifest, at any depth."""
    if isinstance(node, list):
        return [item for part in node for item in containers(part)]
    if not isinstance(node, dict):
        return []
    return [*node.get("containers", []), *(c for value in node.values() for c in containers(value))]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_yaml_and_name_images_that_are_built(path: Path):
    manifest = read(path)
    assert isinstance(manifest, dict)
    assert "registry.example" not in path.read_text()
    for container in containers(manifest):
        assert IMAGE.fullmatch(container["image"]), container["image"]


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_a_deployment_starts_a_server(path: Path):
    manifest = read(path)
    jsonschema.validate(manifest, DEPLOYMENT)
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert IMAGE.fullmatch(container["image"])[1] == path.stem.partition("-")[2]  # type: ignore[index]

    program, name, *words = [*container["command"], *container["args"]]
    assert program == "unspool"
    command: Any = typer.main.get_command(app_with()).commands[name]  # type: ignore[attr-defined]
    params = command.make_context(name, list(words)).params  # raises for an unknown option
    assert params["host"] == "0.0.0.0" and str(params["api_key_file"]).startswith("/etc/unspool/")
    assert pod["terminationGracePeriodSeconds"] > params["drain"]
    (model,) = [word.partition("=")[2] for word in words if word.startswith("--model=")]
    assert model in catalogue()

    (port,) = container["ports"]
    assert port["containerPort"] == params["port"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asks = container[probe]["httpGet"]
        assert asks["port"] == port["name"]
        assert asks["path"] == ("/health" if probe == "livenessProbe" else "/ready")
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == path.stem.endswith("cuda")
    assert manifest["spec"]["selector"]["matchLabels"].items() <= (
        manifest["spec"]["template"]["metadata"]["labels"].items()
    )


def test_service_and_volume_belong_to_the_deployments():
    service, claim = (
        read(DEPLOY / "kubernetes/service.yaml"),
        read(DEPLOY / "kubernetes/cache.yaml"),
    )
    jsonschema.validate(service, SERVICE)
    jsonschema.validate(claim, CLAIM)
    assert len(DEPLOYMENTS) == 2
    for path in DEPLOYMENTS:
        template = read(path)["spec"]["template"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        (container,) = template["spec"]["containers"]
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= {
            p["name"] for p in container["ports"]
        }
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in template["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        ]
        assert claims == [claim["metadata"]["name"]]
        values = {entry["name"]: entry["value"] for entry in container["env"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert values["UNSPOOL_CACHE"].startswith(mounts["cache"])
        assert values["HF_HOME"].startswith(mounts["cache"])


def test_an_option_that_does_not_exist_is_noticed():
    command: Any = typer.main.get_command(app_with()).commands["serve"]  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="no-such"):
        command.make_context("serve", ["--no-such=1"])


@pytest.mark.parametrize("name", ["Containerfile.cpu", "Containerfile.cuda"])
def test_images_have_what_kuberay_runs(name: str):
    """KubeRay's probes run wget; before 1.4 it starts `ray` in a shell that resets PATH."""
    _, last_stage = (DEPLOY / name).read_text(encoding="utf-8").split("\nFROM ")[1:]
    folder = re.search(r"ENV PATH=(\S+):\$PATH", last_stage)[1]  # type: ignore[index]
    assert f"'PATH={folder}:$PATH' > /etc/profile.d/" in last_stage
    assert re.search(r"apt-get install [^&]*\bwget\b", last_stage)
