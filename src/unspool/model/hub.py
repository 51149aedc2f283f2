"""Where models come from: a path, a repository on the Hugging Face hub, or the default model.

    find_model()                                    the default model
    find_model("models/tiny.gguf")                  a file or a folder
    find_model("org/name")                          a repository with safetensors or one GGUF
    find_model("org/name:Q4_K_M")                   one of several GGUF files, by its kind
    find_model("org/name/file.gguf")                or by its name
    find_model("org/name@revision")

What was fetched once is found again without network. Importing this module is cheap: what talks
to a network is loaded when it is needed.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.default_model import DEFAULT, cache_folder, default_files, default_model
from unspool.model.hub_repo import RepoName, find_in_hub

__all__ = ["CachedModel", "cache_folder", "cached_models", "find_model", "remove"]

_DEFAULT_NAMES = ("default", DEFAULT.name)


@dataclass(frozen=True)
class CachedModel:
    """A model that is on this machine already."""

    name: str
    path: Path
    bytes: int


def find_model(
    name: str | Path | None = None, *, offline: bool = False, progress: bool = True
) -> Path:
    """The file or folder of a model; fetched if it is not here yet.

    With `offline` the network is never asked. `progress` shows a bar on stderr.
    """
    if name is None or (isinstance(name, str) and name.lower() in _DEFAULT_NAMES):
        return default_model(offline=offline, progress=progress)
    if not str(name) or "\0" in str(name):
        raise UnspoolError(f"{str(name)!r} names no model: give a path, org/name, or 'default'")
    path = Path(name).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:
        raise UnspoolError(f"{str(name)[:80]!r} is no usable path: {error.strerror}") from None
    repo = None if isinstance(name, Path) else _repo_name(name)
    if repo is None:
        raise ModelFileError(_missing(path))
    try:
        return find_in_hub(repo, offline=offline, progress=progress)
    except ModelFileError:
        raise
    except UnspoolError as error:
        near = _near_names(path)
        if near:
            raise UnspoolError(f"{error}; or did you mean the path {near[0]}?") from None
        raise


def _repo_name(name: str) -> RepoName | None:
    """The name as a repository's, unless it can only be a path."""
    if name.startswith(("/", ".", "~")) or "\\" in name:
        return None
    repo = RepoName.parse(name)
    if repo is not None and repo.file is not None and Path(name).parent.is_dir():
        return None
    return repo


def _missing(path: Path) -> str:
    near = _near_names(path)
    if near:
        return f"{path} does not exist: did you mean {' or '.join(map(str, near))}?"
    folder = path.parent
    if not folder.is_dir():
        return f"{path} does not exist, nor does its folder: check the path"
    if "/" not in str(path) and not path.suffix:
        return f"{path} is no file here: give a path, org/name on the hub, or 'default'"
    return f"{path} does not exist, and nothing in {folder} is called like it: check the path"


def _near_names(path: Path) -> list[Path]:
    try:
        there = [each.name for each in path.parent.iterdir()]
    except OSError:
        return []
    return [path.with_name(each) for each in difflib.get_close_matches(path.name, there, n=3)]


def cached_models() -> list[CachedModel]:
    """The models on this machine: the default model, and the hub's cache."""
    found = []
    target = cache_folder() / "models" / DEFAULT.file_name
    if target.exists():
        found.append(CachedModel(DEFAULT.name, target, target.stat().st_size))
    return found + _cached_repos()


def _hub_cache() -> Any:
    """What the hub's library keeps on this machine; None if there is nothing."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir()
    except (CacheNotFound, OSError):
        return None


def _repos(cache: Any) -> list[Any]:
    repos = cache.repos if cache else ()
    return sorted((r for r in repos if r.repo_type == "model"), key=lambda repo: repo.repo_id)


def _cached_repos() -> list[CachedModel]:
    found = []
    for repo in _repos(_hub_cache()):
        newest = max(repo.revisions, key=lambda each: each.last_modified, default=None)
        names = [file.file_name for file in newest.files] if newest else []
        if newest and any(name.endswith((".gguf", ".safetensors")) for name in names):
            found.append(CachedModel(repo.repo_id, Path(newest.snapshot_path), repo.size_on_disk))
    return found


def remove(name: str) -> int:
    """Delete a model from the cache; gives the number of bytes that became free."""
    if name.lower() in _DEFAULT_NAMES:
        files = default_files()
        if not files:
            raise UnspoolError("the default model is not in the cache: nothing to remove")
        freed = sum(path.stat().st_size for path in files)
        for path in files:
            path.unlink()
        return freed
    cache = _hub_cache()
    repo = next((each for each in _repos(cache) if each.repo_id == name), None)
    if repo is None:
        known = ", ".join(model.name for model in cached_models()) or "nothing"
        raise UnspoolError(f"{name} is not in the cache, which holds {known}")
    freed = repo.size_on_disk
    cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
    return int(freed)
