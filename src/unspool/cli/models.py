"""`unspool models`: what is on this machine, what can be fetched, fetching and removing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli.completing import fetchable_names, model_names
from unspool.cli.model_info import Json, info, plan
from unspool.cli.ps import ps
from unspool.cli.table import print_json, print_table
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from unspool.model.hub.catalogue import CatalogueEntry
    from unspool.model.hub.find import CachedModel

All = Annotated[bool, typer.Option("--all", help="Also what can be fetched.")]

models = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="List models, fetch one, look at what one is.",
    epilog="Examples:  unspool models list --all   ·   unspool models pull qwen3-0.6b   ·   "
    "unspool models show model.gguf",
)


@models.command("list")
def list_models(everything: All = False, as_json: Json = False) -> None:
    """The models on this machine, those of Ollama, llama.cpp and LM Studio too.

    What is called shipped came with Unspool: two models for each puzzle.

    [b]Examples[/b]

      unspool models list
      unspool models list --all
    """
    from unspool.model.hub.find import cached_models

    found = sorted(cached_models(include_unusable=True), key=lambda model: bool(model.problem))
    if as_json:
        rows = [_model_facts(model) for model in found]
        print_json({"models": rows, "catalogue": _catalogue_facts()} if everything else rows)
        return
    print_table("name size kind source fits", [_model_row(model) for model in found])
    if all(model.source == "shipped" for model in found):
        print("no others yet; unspool models pull fetches the default one (98 MB)")
    if everything:
        print()
        _print_catalogue()


@models.command()
def catalogue(as_json: Json = False) -> None:
    """Models worth running that can be fetched, each by its short name.

    Those that do not fit the memory that is free now are marked.

    [b]Example[/b]

      unspool models catalogue
    """
    if as_json:
        print_json(_catalogue_facts())
    else:
        _print_catalogue()


@models.command()
def pull(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A short name or a repo id; nothing: the default.",
            autocompletion=fetchable_names,
        ),
    ] = None,
) -> None:
    """Fetch a model, so that it can be used offline.

    [b]Examples[/b]

      unspool models pull
      unspool models pull qwen3-0.6b
      unspool models pull HuggingFaceTB/SmolLM2-360M-Instruct
      unspool models pull hf.co/Qwen/Qwen3-4B-GGUF:Q8_0
    """
    from unspool.model.hub.find import find_model

    print(find_model(model, refresh=True))


@models.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", autocompletion=model_names)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model that was fetched. What other programs keep is left to them.

    [b]Examples[/b]

      unspool models rm qwen3-0.6b
      unspool models rm HuggingFaceTB/SmolLM2-360M-Instruct --yes
    """
    from unspool.model.hub.find import plan_removal
    from unspool.model.hub.memory import format_bytes

    for going in [plan_removal(name) for name in names]:
        if not yes:
            if not sys.stdin.isatty():
                raise UnspoolError(f"removing {going.name} must be confirmed: add --yes")
            typer.confirm(
                f"remove {going.name} ({format_bytes(going.bytes)})?", abort=True, err=True
            )
        print(f"removed {going.name}, {format_bytes(going.run())}")


models.command("show")(info)
models.command("info")(info)
models.command("plan")(plan)

# Commands that people know from elsewhere, without `models`.
SHORTCUTS: dict[str, Callable[..., Any]] = {
    "pull": pull, "list": list_models, "ls": list_models, "rm": rm, "show": info, "ps": ps,
}  # fmt: skip


def _print_catalogue() -> None:
    from unspool.model.hub.catalogue import catalogue
    from unspool.model.hub.memory import free_memory

    free = free_memory()
    rows = [_entry_row(entry, free) for entry in catalogue().values()]
    print_table("name size kind fits licence for", rows)


def _entry_row(entry: CatalogueEntry, free: int) -> list[str]:
    from unspool.model.hub.memory import format_bytes

    kind, fits = entry.best(free)
    enough = "yes" if fits else f"needs {format_bytes(entry.required_bytes(kind))}"
    return [entry.name, format_bytes(entry.bytes(kind)), kind, enough, entry.licence, entry.use]


def _model_row(model: CachedModel) -> list[str]:
    from unspool.model.hub.memory import format_bytes

    if model.problem:
        fits = f"cannot be opened: {model.problem.partition(';')[0]}"
    else:
        fits = "yes" if model.fits else f"needs {format_bytes(model.required_bytes)}"
    return [model.name, format_bytes(model.bytes), model.kind or "", model.source, fits]


def _model_facts(model: CachedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "bytes": model.bytes,
        "kind": model.kind,
        "source": model.source,
        "needs": model.required_bytes,
        "fits": model.fits and not model.problem,
        "problem": model.problem or None,
    }


def _catalogue_facts() -> list[dict[str, Any]]:
    from dataclasses import asdict

    from unspool.model.hub.catalogue import catalogue
    from unspool.model.hub.memory import free_memory

    free = free_memory()
    facts = []
    for entry in catalogue().values():
        kind, fits = entry.best(free)
        chosen = {"kind": kind, "bytes": entry.bytes(kind), "needs": entry.required_bytes(kind)}
        facts.append({**asdict(entry), **chosen, "fits": fits})
    return facts
