"""Configuration of replicas and gateway, as plain values for `serve.yaml` and for pickling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from unspool.errors import SettingsError
from unspool.scale.replicas.routing import SLACK
from unspool.server.http.settings import ServerSettings

POLICIES = ("prefix", "round-robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModelConfig:
    """A model and its load options."""

    model: str | None = None  # NAME=PATH, a path or a repo id; None: the default model
    options: dict[str, Any] = field(default_factory=dict)  # of `unspool.load`


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasConfig:
    """A replicated server."""

    models: tuple[ReplicaModelConfig, ...] = (ReplicaModelConfig(),)
    settings: ServerSettings = field(default_factory=ServerSettings)  # `port` is the gateway's
    replicas: int = 1
    max_replicas: int | None = None  # None: no autoscaling
    target_in_flight: int = 16  # running and queued requests per replica, for autoscaling
    routing: str = "prefix"
    slack: float = SLACK
    cores: int | None = None  # CPU affinity of a replica; None: all cores
    adapters: str | None = None
    model_memory: int | None = None
    unload_after: float | None = None
    log: tuple[str, bool] = ("info", True)  # the level, and whether as JSON

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise SettingsError(f"replicas must be >= 1, got {self.replicas}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise SettingsError(
                f"max_replicas must be >= replicas ({self.replicas}), got {self.max_replicas}"
            )
        if self.target_in_flight < 1:
            raise SettingsError(f"target_in_flight must be >= 1, got {self.target_in_flight}")
        if self.routing not in POLICIES:
            raise SettingsError(f"routing must be {' or '.join(POLICIES)}, got {self.routing!r}")

    @property
    def max_count(self) -> int:
        return self.max_replicas or self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The gateway in front of the replicas."""

    application: str = "replicas"  # name of the replicas' application
    settings: ServerSettings = field(default_factory=ServerSettings)
    log: tuple[str, bool] = ("info", True)


def replicas_config_from(args: Mapping[str, Any]) -> ReplicasConfig:
    """Return the configuration from the `args` of replicas in a `serve.yaml`."""
    values = dict(args)
    models = [
        _construct(ReplicaModelConfig, model, "models") for model in values.pop("models", [{}])
    ]
    values = {**_with_settings(values), "models": tuple(models)}
    config: ReplicasConfig = _construct(ReplicasConfig, values, "args")
    return config


def gateway_config_from(args: Mapping[str, Any]) -> GatewayConfig:
    """Return the configuration from the `args` of a gateway."""
    config: GatewayConfig = _construct(GatewayConfig, _with_settings(args), "args")
    return config


def _with_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `settings` by ServeSettings, with the keys of `api_key_file`."""
    values = dict(args)
    server_settings = values.pop("settings", {})
    for name in ("api_keys", "cors"):
        if name in server_settings:
            server_settings = {**server_settings, name: tuple(server_settings[name])}
    settings = _construct(ServerSettings, server_settings, "settings")
    key_file = values.pop("api_key_file", None)
    if key_file is not None:
        keys = _keys_in(Path(key_file))
        settings = replace(settings, api_keys=(*settings.api_keys, *keys))
    return {**values, "settings": settings}


def _keys_in(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} cannot be read as a file of API keys ({error})") from None


def _construct(cls: Any, values: Any, where: str) -> Any:
    """Return `cls(**values)`; raise SettingsError for unknown names."""
    if not isinstance(values, Mapping):
        raise SettingsError(f"{where} must be a mapping of names to values, got {values!r}")
    names = [field.name for field in fields(cls)]
    for name in values:
        if name not in names:
            raise SettingsError(
                f"{where} has unknown name {name!r}; choose from {', '.join(names)}"
            )
    return cls(**values)
