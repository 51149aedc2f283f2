"""Features on top of the engine, as plain data: what each adds to commands, server and page.

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
    subcommands: tuple[str, ...] = ()  # of a group
    default: str = ""  # the subcommand that may be left out
    is_hidden: bool = False  # not in --help
    on_all_ranks: bool = False  # under torchrun every process runs it, not only rank 0


@dataclass(frozen=True, slots=True)
class OptionHandler:
    """The code of an option that a feature adds to a command it does not own."""

    option: str  # "serve --replicas"
    target: str  # "module:attribute"


@dataclass(frozen=True, slots=True)
class ModelFinder:
    """Models that are in no list, but can be requested by name."""

    pattern: str  # regular expression that the whole name matches
    find: str  # "module:attribute": function of (ServerState, name) -> ModelEntry | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One feature: its commands, HTTP routes, models and views of the page."""

    name: str
    commands: tuple[Command, ...] = ()
    options: tuple[OptionHandler, ...] = ()
    routes: tuple[RouteGroup, ...] = ()
    models: tuple[ModelFinder, ...] = ()
    page_views: tuple[str, ...] = ()  # folders of page/code


_TRAIN = (
    "new", "tune", "dpo", "grpo", "twin", "merge", "task", "runs", "data", "tokenizer", "judge",
    "export", "scaling", "sae",
)  # fmt: skip

FEATURES = (
    Feature(
        name="train",
        commands=(
            Command(
                "train",
                "unspool.cli.train.group:train",
                "Train",
                subcommands=_TRAIN,
                default="new",
                on_all_ranks=True,
            ),
        ),
        options=(OptionHandler("page --run", "unspool.cli.train.runs:open_on_page"),),
        routes=(RouteGroup(("/v1/runs",), ("unspool.train.routes:router",)),),
        models=(ModelFinder(r".+@[0-9]{1,12}", "unspool.train.routes:find_checkpoint"),),
        page_views=("training",),
    ),
    Feature(
        name="puzzles",
        routes=(RouteGroup(("/v1/puzzles",), ("unspool.train.puzzle_routes:router",)),),
        page_views=("diffusion",),
    ),
    Feature(
        name="costs",
        commands=(Command("costs", "unspool.cli.costs:costs", "Inspect"),),
        routes=(RouteGroup(("/v1/costs",), ("unspool.costs.routes:router",)),),
        page_views=("measure",),
    ),
    Feature(
        name="scale",
        commands=(Command("batch", "unspool.cli.scale:batch", "Generate"),),
        options=(OptionHandler("serve --replicas", "unspool.cli.scale:serve_replicas"),),
    ),
)


def load(target: str) -> Any:
    """Import what a "module:attribute" string names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def load_option_handler(option: str) -> Any:
    """Import the handler of an option such as "serve --replicas"."""
    handlers = {handler.option: handler for feature in FEATURES for handler in feature.options}
    return load(handlers[option].target)
