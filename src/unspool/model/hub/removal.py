"""Remove downloaded models: only those of Unspool's and the hub's cache.

Models in other programs' stores must be removed by those programs.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from unspool.errors import UnspoolError
from unspool.model.files.gguf import part_paths
from unspool.model.hub.catalogue import strip_hub_url
from unspool.model.hub.download import default_files
from unspool.model.hub.find import cached_models, is_default
from unspool.model.hub.stores import CachedRepo, cached_repos, hub_cache_folder, stored_models
from unspool.model.shipped import shipped_models

_THEIR_WAY = {
    "ollama": "ollama rm {}",
    "lmstudio": "its My Models page",
    "llama.cpp": "deleting the file {path}",
}


@dataclass(frozen=True)
class ModelRemoval:
    """The files that removing a model deletes."""

    name: str
    files: tuple[Path, ...] = ()
    folder: Path | None = None  # deleted with its content

    @property
    def bytes(self) -> int:
        """Size of the files."""
        inside = self.folder.rglob("*") if self.folder else ()
        files = [*self.files, *inside]
        return sum(file.lstat().st_size for file in files if file.is_file())

    def run(self) -> int:
        """Delete the files; return the number of bytes freed."""
        freed = self.bytes
        try:
            for file in self.files:
                file.unlink(missing_ok=True)
            if self.folder:
                shutil.rmtree(self.folder)
        except OSError as error:
            raise UnspoolError(f"{self.name} cannot be removed: {error}") from None
        return freed


def plan_removal(name: str) -> ModelRemoval:
    """The files of a model to delete; raises if it cannot be removed."""
    from unspool.model.hub.catalogue import find_entries

    plain_name = strip_hub_url(name)
    entries, kind = ([], None) if "/" in plain_name else find_entries(plain_name)
    if is_default(plain_name) or (len(entries) == 1 and entries[0].is_default and kind is None):
        files = default_files()
        if not files:
            raise UnspoolError("the default model is not in the cache: nothing to remove")
        return ModelRemoval(name, tuple(files))
    _refuse_what_is_not_ours(plain_name)
    if len(entries) == 1:
        plain_name = entries[0].repository + (f":{kind}" if kind else "")
    for repo in cached_repos():
        if repo.repo.lower() == plain_name.lower():
            return ModelRemoval(repo.repo, folder=_folder(repo))
        for model_name, path in repo.models():
            if plain_name.lower() in (model_name.lower(), f"{repo.repo}/{path.name}".lower()):
                return _one_of(repo, model_name, path)
    available = ", ".join(model.name for model in cached_models()) or "nothing"
    raise UnspoolError(f"{name} is not in the cache; models on this machine: {available}")


def _refuse_what_is_not_ours(name: str) -> None:
    if name.lower() in shipped_models():
        raise UnspoolError(f"{name} is shipped with Unspool and cannot be removed")
    for model in stored_models():
        if name.lower() in (model.name.lower(), model.short.lower()):
            way = _THEIR_WAY[model.source].format(model.short, path=model.path)
            raise UnspoolError(
                f"{name} is in the store of {model.source}, which Unspool only reads: remove it"
                f" with {way}"
            )


def _folder(repo: CachedRepo) -> Path:
    return hub_cache_folder() / f"models--{repo.repo.replace('/', '--')}"


def _one_of(repo: CachedRepo, name: str, path: Path) -> ModelRemoval:
    """Remove one model of a repository; the last one removes the repository."""
    if len(list(repo.models())) == 1:
        return ModelRemoval(name, folder=_folder(repo))
    blobs = {part.resolve() for part in part_paths(path) if part.exists()}
    links = [
        file for file in _folder(repo).rglob("*") if file.is_file() and file.resolve() in blobs
    ]
    return ModelRemoval(name, tuple({*blobs, *links}))
