"""Features on top of the engine, as plain data: what each adds to commands and server.

The server, the page and the command line know this list and nothing else about a feature.
Everything is named as "module:attribute" and imported by `load` when it is first needed, so a
server that only serves models imports no feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class RouteGroup:
    """HTTP routes that are imported with the first request for one of their paths."""

    paths: tuple[str, ...]  # prefixes of the request path
    routers: tuple[str, ...]  # "module:attribute" of each APIRouter


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `unspool`."""

    name: str
    target: str  # "module:attribute": a function, or a Typer group
    panel: str  # the section of --help that lists it


@dataclass(frozen=True, slots=True)
class ModelFinder:
    """Models that are in no list, but can be requested by name."""

    pattern: str  # regular expression that the whole name matches
    find: str  # "module:attribute": function of (ServerState, name) -> ModelEntry | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One feature: its commands, HTTP routes and models."""

    name: str
    commands: tuple[Command, ...] = ()
    routes: tuple[RouteGroup, ...] = ()
    models: tuple[ModelFinder, ...] = ()


FEATURES = (
    Feature(
        name="train",
        commands=(Command("train", "unspool.cli.train.group:train", "Train"),),
        routes=(RouteGroup(("/v1/runs",), ("unspool.train.routes:router",)),),
        models=(ModelFinder(r".+@[0-9]{1,12}", "unspool.train.routes:find_checkpoint"),),
    ),
    Feature(
        name="puzzles",
        routes=(RouteGroup(("/v1/puzzles",), ("unspool.train.puzzle_routes:router",)),),
    ),
    Feature(
        name="costs",
        commands=(Command("costs", "unspool.cli.costs:costs", "Look"),),
        routes=(RouteGroup(("/v1/costs",), ("unspool.costs.routes:router",)),),
    ),
    Feature(name="scale", commands=(Command("batch", "unspool.cli.batch:batch", "Write"),)),
)


def load(target: str) -> Any:
    """Import what a "module:attribute" string names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
