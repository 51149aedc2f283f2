"""What replicas are told: which models, how they serve, how many of them. As plain values, because
it is written in `serve.yaml` and sent to other machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from unspool.errors import SettingsError
from unspool.scale.routing import SLACK
from unspool.serve.http.settings import ServeSettings

POLICIES = ("prefix", "round-robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model as `unspool.load` takes it."""

    model: str | None = None  # NAME=PATH, a path or a repo id; None: the default model
    options: dict[str, Any] = field(default_factory=dict)  # of `unspool.load`


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasConfig:
    """One server made of several."""

    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    settings: ServeSettings = field(
        default_factory=ServeSettings
    )  # of each; the port: the gateway's
    replicas: int = 1
    max_replicas: int | None = None  # None: as many as `replicas`, always
    target_in_flight: int = 16  # texts running and waiting at a replica; more start another one
    routing: str = "prefix"
    slack: float = SLACK
    cores: int | None = None  # that a replica is kept to, on its machine; None: all
    adapters: str | None = None
    model_memory: int | None = None
    unload_after: float | None = None
    log: tuple[str, bool] = ("info", True)  # the level, and whether as JSON

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise SettingsError(f"replicas is {self.replicas}; it must be at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise SettingsError(
                f"max_replicas is {self.max_replicas}, and replicas {self.replicas}; it may not be "
                "less"
            )
        if self.target_in_flight < 1:
            raise SettingsError(
                f"target_in_flight is {self.target_in_flight}; it must be at least 1"
            )
        if self.routing not in POLICIES:
            raise SettingsError(f"routing is {self.routing!r}; it may be {' or '.join(POLICIES)}")

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What stands before them."""

    application: str = "replicas"  # the name of the application that they are
    settings: ServeSettings = field(default_factory=ServeSettings)
    log: tuple[str, bool] = ("info", True)


def config_from(args: Mapping[str, Any]) -> ReplicasConfig:
    """The `args` of replicas in a `serve.yaml`."""
    values = dict(args)
    models = [_made(ModelConfig, each, "models") for each in values.pop("models", [{}])]
    values = {**_with_settings(values), "models": tuple(models)}
    found: ReplicasConfig = _made(ReplicasConfig, values, "args")
    return found


def gateway_config_from(args: Mapping[str, Any]) -> GatewayConfig:
    """The `args` of a gateway."""
    found: GatewayConfig = _made(GatewayConfig, _with_settings(args), "args")
    return found


def _with_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` as they are meant, with the keys of `api_key_file`."""
    values = dict(args)
    told = values.pop("settings", {})
    for name in ("api_keys", "cors"):
        if name in told:
            told = {**told, name: tuple(told[name])}
    settings = _made(ServeSettings, told, "settings")
    key_file = values.pop("api_key_file", None)
    if key_file is not None:
        keys = _keys_in(Path(key_file))
        settings = replace(settings, api_keys=(*settings.api_keys, *keys))
    return {**values, "settings": settings}


def _keys_in(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: cannot be read as a file of keys ({error})") from None


def _made(kind: Any, given: Any, where: str) -> Any:
    if not isinstance(given, Mapping):
        raise SettingsError(f"{where} holds {given!r}; it must be a mapping of names to values")
    known = [each.name for each in fields(kind)]
    for name in given:
        if name not in known:
            raise SettingsError(f"{where} has {name!r}, which is none of {', '.join(known)}")
    return kind(**given)
