"""Models in the stores of other programs, used in place and never written.

    ollama/llama3.2:1b                 Ollama's store (OLLAMA_MODELS, ~/.ollama/models)
    llama.cpp/gemma-3-1b-it-Q4_K_M     llama.cpp's cache (LLAMA_CACHE, ~/.cache/llama.cpp)
    lmstudio/Qwen3-0.6B-Q8_0           LM Studio's models (~/.lmstudio/models)

Broken or unreadable entries, and links out of a store, are skipped: faults of another program's
store must not stop us. Only names are read here; `glance` reads the files.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.model.hub.memory import kind_in_name
from unspool.model.hub.repository import first_shards

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_SHARED_OLLAMA = Path("/usr/share/ollama/.ollama/models")  # of its service on Linux
_LARGEST_MANIFEST = 1 << 20
_MOST_ENTRIES = 20_000  # files and folders listed per store, so that startup is not delayed


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in another program's store."""

    source: str
    short: str  # its name in the store
    path: Path
    kind: str | None = None  # from the store's metadata
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.source}/{self.short}"


def stored_models() -> list[StoredModel]:
    """All models in the stores of other programs."""
    return [model for source in STORES for model in models_in_store(source)]


def models_in_store(source: str) -> list[StoredModel]:
    """The models of one store, by name."""
    models: dict[str, StoredModel] = {}
    for model in STORES[source]():
        models.setdefault(model.short, model)
    return sorted(models.values(), key=lambda model: model.short.lower())


# -- Ollama --------------------------------------------------------------------------------------


def _ollama() -> Iterator[StoredModel]:
    for store in _ollama_folders():
        root = store / "manifests"
        for path in walk(root, depth=4):
            parts = path.relative_to(root).parts
            if len(parts) == 4 and not any(part.startswith(".") for part in parts):
                yield _ollama_model(store, path, _ollama_name(*parts))


def _ollama_folders() -> list[Path]:
    if configured := os.environ.get("OLLAMA_MODELS"):
        return [Path(configured).expanduser()]
    return [_home() / ".ollama" / "models", _SHARED_OLLAMA]


def _ollama_name(host: str, space: str, name: str, tag: str) -> str:
    if host != "registry.ollama.ai":
        return f"{host}/{space}/{name}:{tag}"
    return f"{name}:{tag}" if space == "library" else f"{space}/{name}:{tag}"


def _ollama_model(store: Path, manifest: Path, short: str) -> StoredModel:
    manifest_content = _small_json(manifest)
    layers = manifest_content.get("layers")
    layers = (
        [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    )

    def blobs(kind: str) -> list[Path | None]:
        media_type = f"application/vnd.ollama.image.{kind}"
        return [_blob(store, layer) for layer in layers if layer.get("mediaType") == media_type]

    models = blobs("model")
    problem = ""
    if not layers:
        problem = "its manifest is unreadable"
    elif len(models) != 1:
        problem = "its weights are not in one GGUF file"
    elif models[0] is None:
        problem = "its weights are missing from the store"
    elif blobs("adapter"):
        problem = "it needs an adapter on top of its weights, which is not supported"
    config = _blob(store, manifest_content.get("config"))
    file_type = _small_json(config).get("file_type") if config else None
    return StoredModel(
        "ollama",
        short,
        models[0] if models and models[0] else manifest,
        kind_in_name(str(file_type)) if file_type else None,
        problem,
    )


def _blob(store: Path, layer: Any) -> Path | None:
    """The file of a manifest's layer, if it is in the store."""
    digest = layer.get("digest") if isinstance(layer, dict) else None
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        return None
    path = store / "blobs" / digest.replace(":", "-")
    try:
        inside = path.resolve(strict=True).is_relative_to(store.resolve())
        return path if inside and path.is_file() and os.access(path, os.R_OK) else None
    except (OSError, RuntimeError):  # a symlink loop is a RuntimeError
        return None


def _small_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a small file; empty if that fails."""
    try:
        if not is_file(path) or path.stat().st_size > _LARGEST_MANIFEST:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# -- llama.cpp -----------------------------------------------------------------------------------


def _llama_cpp() -> Iterator[StoredModel]:
    for folder in _llama_cpp_folders():
        files = _ggufs(folder, depth=1)
        prefixes = [  # manifest=org=repo=tag.json stands beside org_repo_file.gguf
            "_".join(path.name.split("=")[1:3]) + "_" for path in walk(folder, 1, "manifest=")
        ]
        for path in files:
            prefix = next(
                (candidate for candidate in prefixes if path.name.startswith(candidate)), ""
            )
            yield StoredModel("llama.cpp", _stem(path.name.removeprefix(prefix)), path)


def _llama_cpp_folders() -> list[Path]:
    if configured := os.environ.get("LLAMA_CACHE"):
        return [Path(configured).expanduser()]
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
            twice = stems.count(stem) > 1  # from two publishers: add the folder
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
        configured = _small_json(home / "settings.json").get("downloadsFolder")
        folders.append(
            Path(configured) if isinstance(configured, str) and configured else home / "models"
        )
    return list(dict.fromkeys(folders))


# -- shared --------------------------------------------------------------------------------------

STORES: dict[str, Callable[[], Iterator[StoredModel]]] = {
    "ollama": _ollama,
    "llama.cpp": _llama_cpp,
    "lmstudio": _lm_studio,
}


def _home() -> Path:
    return Path(os.path.expanduser("~"))  # noqa: PTH111  Path.home() raises if there is none


def _ggufs(folder: Path, depth: int) -> list[Path]:
    """The models in a folder: no image projectors, and only the first of split files."""
    return [
        path
        for path in walk(folder, depth, ends=".gguf")
        if "mmproj" not in path.name.lower()
        and (not (part := _PART.search(path.name)) or int(part[1]) == 1)
    ]


def _stem(name: str) -> str:
    return _PART.sub("", name).removesuffix(".gguf").removesuffix(".GGUF")


def walk(folder: Path, depth: int, starts: str = "", ends: str = "") -> list[Path]:
    """The files below a folder, sorted; links to folders are not followed."""
    files: list[Path] = []
    pending = [(folder, depth)]
    num_entries = 0
    while pending and num_entries < _MOST_ENTRIES:
        current, levels = pending.pop(0)
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries >= _MOST_ENTRIES:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        if levels > 1:
                            pending.append((Path(entry.path), levels - 1))
                    elif entry.name.startswith(starts) and entry.name.lower().endswith(ends):
                        files.append(Path(entry.path))
        except OSError:
            continue
    return sorted(path for path in files if is_file(path))


def is_file(path: Path) -> bool:
    """Whether a file exists and is accessible."""
    try:
        return path.is_file()
    except OSError:
        return False


# -- List the cache of the Hugging Face hub by reading its folders

_DEEPEST = 3  # folders inside a repository


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """A repository in the cache, complete or not."""

    repo: str
    snapshot: Path
    files: list[str]

    def models(self) -> Iterator[tuple[str, Path]]:
        """Its models: names that `find_model` accepts, and paths."""
        if any(name.endswith(".safetensors") and "/" not in name for name in self.files):
            yield self.repo, self.snapshot
        ggufs = first_shards(self.files)
        kinds = Counter(kind_in_name(file) for file in ggufs)
        for file in ggufs:
            kind = kind_in_name(file)
            is_unique = kind is not None and kinds[kind] == 1
            name = f"{self.repo}:{kind}" if is_unique else f"{self.repo}/{file}"
            yield name, self.snapshot / file


def hub_cache_folder() -> Path:
    """The hub's cache folder, from the same environment variables as in huggingface_hub."""
    if cache_path := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache_path).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def cached_repos() -> list[CachedRepo]:
    """The repositories in the cache, each with its current revision."""
    repos = []
    for folder in _folders(hub_cache_folder()):
        organisation, _, name = folder.name.removeprefix("models--").partition("--")
        snapshot = _snapshot(folder)
        if folder.name.startswith("models--") and name and snapshot is not None:
            files = [path.relative_to(snapshot).as_posix() for path in walk(snapshot, _DEEPEST)]
            repos.append(CachedRepo(f"{organisation}/{name}", snapshot, files))
    return sorted(repos, key=lambda repo: repo.repo.lower())


def _snapshot(repo: Path) -> Path | None:
    """The revision of `main`, else the newest."""
    try:
        main = repo / "refs" / "main"
        if is_file(main):
            main_snapshot = repo / "snapshots" / main.read_text(encoding="utf-8").strip()
            if main_snapshot.parent == repo / "snapshots" and main_snapshot.is_dir():
                return main_snapshot
        return max(_folders(repo / "snapshots"), key=lambda folder: folder.stat().st_mtime)
    except (OSError, ValueError):
        return None


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir())
    except OSError:
        return []
