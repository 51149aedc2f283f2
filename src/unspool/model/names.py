"""Resolve model names that are not paths: URLs of the hub, models in stores, short names.

hf.co/org/name:Q4_K_M              a repository, as other programs write it
https://huggingface.co/org/name    a URL
ollama/llama3.2:1b                 a model in another program's store
llama3.2:1b                        the same, if the name is unique
qwen3-0.6b                         a model of the catalogue
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from urllib.parse import unquote

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.shipped import shipped_models
from unspool.model.stores import STORES, StoredModel, models_in_store, stored_models

_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/|hf://(?:models/)?", re.IGNORECASE
)
_INSIDE = re.compile(  # of a repository: the branch, and perhaps a file
    r"(?P<repo>[^/]+/[^/]+)/(?:blob|resolve|tree|raw)/(?P<revision>[^/]+)(?:/(?P<file>.+))?"
)


def strip_hub_url(name: str) -> str:
    """`https://huggingface.co/org/name/blob/main/m.gguf` as `org/name/m.gguf@main`."""
    match = _ADDRESS.match(name)
    if match is None:
        return name
    repo_path = unquote(re.split(r"[?#]", name[match.end() :])[0]).strip("/")
    if inside := _INSIDE.fullmatch(repo_path):
        repo_path = inside["repo"]
        repo_path += f"/{inside['file']}" if inside["file"] else ""
        repo_path += f"@{inside['revision']}" if inside["revision"] != "main" else ""
    return repo_path.removesuffix(":latest")


def find_in_stores(name: str) -> Path | None:
    """The file of a model in another program's store; None: the name matches none."""
    source, _, short = name.partition("/")
    source = {"lm-studio": "lmstudio", "llamacpp": "llama.cpp"}.get(source.lower(), source.lower())
    if short and source in STORES:
        models = models_in_store(source)
        matches = _called(models, short)
        if not matches:
            raise ModelFileError(_not_there(source, short, models))
        return _usable(matches[0])
    if "/" in name:
        return None
    matches = _called(stored_models(), name)
    if len({model.path for model in matches}) > 1:
        names = " or ".join(model.name for model in matches)
        raise UnspoolError(f"{name} is ambiguous: give {names}")
    return _usable(matches[0]) if matches else None


def _called(models: list[StoredModel], name: str) -> list[StoredModel]:
    """The models with exactly this name; Ollama's tag `latest` is optional."""
    lower_name = name.lower()
    return [m for m in models if m.short.lower() in (lower_name, f"{lower_name}:latest")]


def _usable(model: StoredModel) -> Path:
    if model.problem:
        raise ModelFileError(f"{model.name} cannot be used: {model.problem}")
    return model.path


def _not_there(source: str, short: str, models: list[StoredModel]) -> str:
    if not models:
        return f"{source} has no models on this machine: {short} does not exist"
    names = [model.short for model in models]
    near = difflib.get_close_matches(short, names, n=1)
    if near:
        return f"{source} has no model {short}: did you mean {source}/{near[0]}?"
    return f"{source} has no model {short}; it has {', '.join(names[:20])}"


def display_name(requested_name: str, path: Path) -> str:
    """The display name of the model at `path` that was requested by `requested_name`."""
    if path.suffix == ".gguf" and path.is_file():
        return path.stem
    if Path(requested_name).expanduser().exists():  # a folder, or a file with any name
        return path.resolve().name
    return strip_hub_url(requested_name).rpartition("/")[2]  # stores name files by checksum


def similar_names(name: str) -> list[str]:
    """Short names similar to this one."""
    from unspool.model.catalogue import catalogue

    candidates = {candidate.lower(): candidate for candidate in (*catalogue(), *shipped_models())}
    candidates |= {
        model.short.lower(): model.name for model in stored_models() if not model.problem
    }
    close = difflib.get_close_matches(name.lower().replace(":", "-"), candidates, n=3)
    return [candidates[candidate] for candidate in close]
