"""Models that other programs keep on this machine: found, read where they lie, never written.

    ollama/llama3.2:1b                 Ollama's store (OLLAMA_MODELS, ~/.ollama/models)
    llama.cpp/gemma-3-1b-it-Q4_K_M     llama.cpp's cache (LLAMA_CACHE, ~/.cache/llama.cpp)
    lmstudio/Qwen3-0.6B-Q8_0           LM Studio's models (~/.lmstudio/models)

What is broken, cannot be read or leads out of a store is passed over: a store is somebody else's,
and its faults are no reason to stop. Only names are looked at here; `glance` looks at the files.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.model.kinds import kind_in_name

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_SHARED_OLLAMA = Path("/usr/share/ollama/.ollama/models")  # where its service on Linux has them
_LARGEST_MANIFEST = 1 << 20
_MOST_ENTRIES = 20_000  # files and folders looked at in one store: a start must not wait for it


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in somebody's store."""

    source: str
    short: str  # what it is called there
    path: Path
    kind: str | None = None  # as the store says
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.source}/{self.short}"


def stored_models() -> list[StoredModel]:
    """All models in the stores of other programs."""
    return [model for source in STORES for model in models_of(source)]


def models_of(source: str) -> list[StoredModel]:
    """The models of one store, by name."""
    found: dict[str, StoredModel] = {}
    for model in STORES[source]():
        found.setdefault(model.short, model)
    return sorted(found.values(), key=lambda model: model.short.lower())


# -- Ollama --------------------------------------------------------------------------------------


def _ollama() -> Iterator[StoredModel]:
    for store in _ollama_folders():
        root = store / "manifests"
        for path in walk(root, depth=4):
            parts = path.relative_to(root).parts
            if len(parts) == 4 and not any(part.startswith(".") for part in parts):
                yield _ollama_model(store, path, _ollama_name(*parts))


def _ollama_folders() -> list[Path]:
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return [Path(chosen).expanduser()]
    return [_home() / ".ollama" / "models", _SHARED_OLLAMA]


def _ollama_name(host: str, space: str, name: str, tag: str) -> str:
    if host != "registry.ollama.ai":
        return f"{host}/{space}/{name}:{tag}"
    return f"{name}:{tag}" if space == "library" else f"{space}/{name}:{tag}"


def _ollama_model(store: Path, manifest: Path, short: str) -> StoredModel:
    read = _small_json(manifest)
    layers = read.get("layers")
    layers = [each for each in layers if isinstance(each, dict)] if isinstance(layers, list) else []

    def blobs(kind: str) -> list[Path | None]:
        wanted = f"application/vnd.ollama.image.{kind}"
        return [_blob(store, each) for each in layers if each.get("mediaType") == wanted]

    models = blobs("model")
    problem = ""
    if not layers:
        problem = "its manifest cannot be read"
    elif len(models) != 1:
        problem = "its weights are not in one GGUF file"
    elif models[0] is None:
        problem = "its weights are missing from the store"
    elif blobs("adapter"):
        problem = "it needs an adapter on top of its weights, which is not supported"
    config = _blob(store, read.get("config"))
    told = _small_json(config).get("file_type") if config else None
    return StoredModel(
        "ollama",
        short,
        models[0] if models and models[0] else manifest,
        kind_in_name(str(told)) if told else None,
        problem,
    )


def _blob(store: Path, layer: Any) -> Path | None:
    """The file that a layer of a manifest names by its digest, if it is in the store."""
    digest = layer.get("digest") if isinstance(layer, dict) else None
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        return None
    path = store / "blobs" / digest.replace(":", "-")
    try:
        inside = path.resolve(strict=True).is_relative_to(store.resolve())
        return path if inside and path.is_file() and os.access(path, os.R_OK) else None
    except (OSError, RuntimeError):  # a circle of links is a RuntimeError
        return None


def _small_json(path: Path) -> dict[str, Any]:
    """A JSON object from a small file; empty if it is none."""
    try:
        if not is_file(path) or path.stat().st_size > _LARGEST_MANIFEST:
            return {}
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


# -- llama.cpp -----------------------------------------------------------------------------------


def _llama_cpp() -> Iterator[StoredModel]:
    for folder in _llama_cpp_folders():
        files = _ggufs(folder, depth=1)
        prefixes = [  # manifest=org=repo=tag.json stands beside org_repo_file.gguf
            "_".join(path.name.split("=")[1:3]) + "_" for path in walk(folder, 1, "manifest=")
        ]
        for path in files:
            prefix = next((each for each in prefixes if path.name.startswith(each)), "")
            yield StoredModel("llama.cpp", _stem(path.name.removeprefix(prefix)), path)


def _llama_cpp_folders() -> list[Path]:
    if chosen := os.environ.get("LLAMA_CACHE"):
        return [Path(chosen).expanduser()]
    if sys.platform == "win32":
        return [Path(os.environ.get("LOCALAPPDATA", _home())) / "llama.cpp"]
    if sys.platform == "darwin":
        return [_home() / "Library" / "Caches" / "llama.cpp"]
    return [Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "llama.cpp"]


# -- LM Studio -----------------------------------------------------------------------------------


def _lm_studio() -> Iterator[StoredModel]:
    for folder in _lm_studio_folders():
        files = _ggufs(folder, depth=3)
        stems = [_stem(path.name) for path in files]
        for path, stem in zip(files, stems, strict=True):
            twice = stems.count(stem) > 1  # of two publishers: then the folder tells them apart
            short = f"{path.parent.relative_to(folder).as_posix()}/{stem}" if twice else stem
            yield StoredModel("lmstudio", short, path)


def _lm_studio_folders() -> list[Path]:
    homes = [_home() / ".lmstudio", _home() / ".cache" / "lm-studio"]
    try:
        pointer = (_home() / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
        homes.insert(0, Path(pointer).expanduser())
    except (OSError, ValueError):
        pass
    folders = []
    for home in homes:
        chosen = _small_json(home / "settings.json").get("downloadsFolder")
        folders.append(Path(chosen) if isinstance(chosen, str) and chosen else home / "models")
    return list(dict.fromkeys(folders))


# -- shared --------------------------------------------------------------------------------------

STORES: dict[str, Callable[[], Iterator[StoredModel]]] = {
    "ollama": _ollama,
    "llama.cpp": _llama_cpp,
    "lmstudio": _lm_studio,
}


def _home() -> Path:
    return Path(os.path.expanduser("~"))  # noqa: PTH111  Path.home() raises where there is none


def _ggufs(folder: Path, depth: int) -> list[Path]:
    """The models in a folder: no projectors for pictures, of a split model the first part."""
    return [
        path
        for path in walk(folder, depth, ends=".gguf")
        if "mmproj" not in path.name.lower()
        and (not (part := _PART.search(path.name)) or int(part[1]) == 1)
    ]


def _stem(name: str) -> str:
    return _PART.sub("", name).removesuffix(".gguf").removesuffix(".GGUF")


def walk(folder: Path, depth: int, starts: str = "", ends: str = "") -> list[Path]:
    """The files below a folder, in order; links to folders are not followed."""
    found: list[Path] = []
    waiting = [(folder, depth)]
    seen = 0
    while waiting and seen < _MOST_ENTRIES:
        here, left = waiting.pop(0)
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    seen += 1
                    if seen >= _MOST_ENTRIES:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        if left > 1:
                            waiting.append((Path(entry.path), left - 1))
                    elif entry.name.startswith(starts) and entry.name.lower().endswith(ends):
                        found.append(Path(entry.path))
        except OSError:
            continue
    return sorted(path for path in found if is_file(path))


def is_file(path: Path) -> bool:
    """Whether a file is there; one that we may not look at is not."""
    try:
        return path.is_file()
    except OSError:
        return False
