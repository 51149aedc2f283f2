"""Recommended models by short name: `qwen3-0.6b`, `qwen3:0.6b`, `qwen3-0` mean the same.

The data are in catalogue.toml, which is read on first use.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.hub.download import DEFAULT
from unspool.model.hub.memory import (
    by_preference,
    free_memory,
    kind_in_name,
    memory_needed,
    sequence_memory,
)
from unspool.model.hub.stores import STORES, StoredModel, models_in_store, stored_models
from unspool.model.shipped import shipped_models

_MIN_PREFIX_LENGTH = 3  # letters: a typo must not download gigabytes
_IGNORED_SUFFIX = re.compile(r"[-:](instruct|it|chat|latest)$")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model of the catalogue."""

    name: str
    repository: str
    family: str
    parameters: int
    context: int
    kv_bytes: int  # KV cache bytes per token
    size: Mapping[str, float]  # GB of the file, by kind
    licence: str
    use: str
    state_bytes: int = 0  # of a recurrent state

    @property
    def is_default(self) -> bool:
        """Whether it is the default model, which is downloaded in another way."""
        return DEFAULT.name.startswith(self.name)

    @property
    def text_memory(self) -> int:
        return sequence_memory(self.kv_bytes, self.context, self.state_bytes)

    def bytes(self, kind: str) -> int:
        return round(self.size[kind] * 1e9)

    def required_bytes(self, kind: str) -> int:
        """Approximate bytes of memory to run it in this kind."""
        return memory_needed(self.bytes(kind), kind, self.text_memory)

    def best(self, free: int | None = None) -> tuple[str, bool]:
        """The best kind for `free` bytes of memory, and whether it fits."""
        free = free_memory() if free is None else free
        kinds = by_preference({kind: self.bytes(kind) for kind in self.size})
        fitting = [kind for kind in kinds if self.required_bytes(kind) <= free]
        return (fitting or [min(kinds, key=self.required_bytes)])[0], bool(fitting)


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """All models, by name."""
    import tomllib

    text = Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")
    return {name: CatalogueEntry(name=name, **facts) for name, facts in tomllib.loads(text).items()}


def find_entries(name: str) -> tuple[list[CatalogueEntry], str | None]:
    """The models that match a name (one if it is unambiguous), and the kind in it.

    Case, separators and suffixes such as `instruct` are ignored, and a prefix is enough.
    """
    kind = kind_in_name(name)
    if kind is not None:
        name = re.sub(rf"[-:.]{re.escape(kind)}$", "", name, flags=re.IGNORECASE)
    key = _normalize_name(_IGNORED_SUFFIX.sub("", name.lower()))
    exact_matches = [entry for entry in catalogue().values() if _normalize_name(entry.name) == key]
    if exact_matches or len(key) < _MIN_PREFIX_LENGTH:
        return exact_matches, kind
    prefix_matches = [
        entry for entry in catalogue().values() if _normalize_name(entry.name).startswith(key)
    ]
    return prefix_matches, kind


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_: ]", "", name.lower())


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

    candidates = {candidate.lower(): candidate for candidate in (*catalogue(), *shipped_models())}
    candidates |= {
        model.short.lower(): model.name for model in stored_models() if not model.problem
    }
    close = difflib.get_close_matches(name.lower().replace(":", "-"), candidates, n=3)
    return [candidates[candidate] for candidate in close]
