"""What a name means that is no path: an address of the hub, a model in a store, a short name.

hf.co/org/name:Q4_K_M              a repository, as other programs write it
https://huggingface.co/org/name    or as the browser does
ollama/llama3.2:1b                 a model that another program keeps on this machine
llama3.2:1b                        the same, if nothing else is called so
qwen3-0.6b                         a model of the catalogue
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from urllib.parse import unquote

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.shipped import shipped_models
from unspool.model.stores import STORES, StoredModel, models_of, stored_models

_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/|hf://(?:models/)?", re.IGNORECASE
)
_INSIDE = re.compile(  # of a repository: the branch, and perhaps a file
    r"(?P<repo>[^/]+/[^/]+)/(?:blob|resolve|tree|raw)/(?P<revision>[^/]+)(?:/(?P<file>.+))?"
)


def without_address(name: str) -> str:
    """`https://huggingface.co/org/name/blob/main/m.gguf` as `org/name/m.gguf@main`."""
    match = _ADDRESS.match(name)
    if match is None:
        return name
    rest = unquote(re.split(r"[?#]", name[match.end() :])[0]).strip("/")
    if inside := _INSIDE.fullmatch(rest):
        rest = inside["repo"]
        rest += f"/{inside['file']}" if inside["file"] else ""
        rest += f"@{inside['revision']}" if inside["revision"] != "main" else ""
    return rest.removesuffix(":latest")


def find_stored(name: str) -> Path | None:
    """The file of a model in the store of another program; None if no store is meant."""
    source, _, short = name.partition("/")
    source = {"lm-studio": "lmstudio", "llamacpp": "llama.cpp"}.get(source.lower(), source.lower())
    if short and source in STORES:
        models = models_of(source)
        found = _called(models, short)
        if not found:
            raise ModelFileError(_not_there(source, short, models))
        return _usable(found[0])
    if "/" in name:
        return None
    found = _called(stored_models(), name)
    if len({model.path for model in found}) > 1:
        names = " or ".join(model.name for model in found)
        raise UnspoolError(f"{name} is the name of several models here: write {names}")
    return _usable(found[0]) if found else None


def _called(models: list[StoredModel], name: str) -> list[StoredModel]:
    """Those with just this name; Ollama's tag `latest` need not be said."""
    wanted = name.lower()
    return [m for m in models if m.short.lower() in (wanted, f"{wanted}:latest")]


def _usable(model: StoredModel) -> Path:
    if model.problem:
        raise ModelFileError(f"{model.name} cannot be used: {model.problem}")
    return model.path


def _not_there(source: str, short: str, models: list[StoredModel]) -> str:
    if not models:
        return f"there are no models of {source} on this machine: {short} is not one of them"
    names = [model.short for model in models]
    near = difflib.get_close_matches(short, names, n=1)
    if near:
        return f"{source} has no {short} here: did you mean {source}/{near[0]}?"
    return f"{source} has no {short} here, but {', '.join(names[:20])}"


def display_name(given: str, path: Path) -> str:
    """What to call a model that was asked for by `given` and lies at `path`."""
    if path.suffix == ".gguf" and path.is_file():
        return path.stem
    if Path(given).expanduser().exists():  # a folder, or a file called anyhow
        return path.resolve().name
    return without_address(given).rpartition("/")[2]  # in a store, files are called by checksums


def near_names(name: str) -> list[str]:
    """Short names that are written nearly like this one."""
    from unspool.model.catalogue import catalogue

    known = {each.lower(): each for each in (*catalogue(), *shipped_models())}
    known |= {model.short.lower(): model.name for model in stored_models() if not model.problem}
    close = difflib.get_close_matches(name.lower().replace(":", "-"), known, n=3)
    return [known[each] for each in close]
