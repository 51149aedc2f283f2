"""Taking a model from this machine: only what Unspool or the hub's library fetched.

What other programs keep is theirs; removing it there keeps their books in order.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from unspool.errors import UnspoolError
from unspool.model.default_model import default_files
from unspool.model.gguf import part_paths
from unspool.model.hub import cached_models, is_default
from unspool.model.hub_cache import CachedRepo, cached_repos, hub_cache_folder
from unspool.model.names import without_address
from unspool.model.shipped import shipped_models
from unspool.model.stores import stored_models

_THEIR_WAY = {
    "ollama": "ollama rm {}",
    "lmstudio": "its My Models page",
    "llama.cpp": "deleting the file {path}",
}


@dataclass(frozen=True)
class Removal:
    """What would go."""

    name: str
    files: tuple[Path, ...] = ()
    folder: Path | None = None  # goes with everything in it

    @property
    def bytes(self) -> int:
        """How much room that makes."""
        inside = self.folder.rglob("*") if self.folder else ()
        files = [*self.files, *inside]
        return sum(file.lstat().st_size for file in files if file.is_file())

    def run(self) -> int:
        """Delete it; gives the number of bytes that became free."""
        freed = self.bytes
        try:
            for file in self.files:
                file.unlink(missing_ok=True)
            if self.folder:
                shutil.rmtree(self.folder)
        except OSError as error:
            raise UnspoolError(f"{self.name} cannot be removed: {error}") from None
        return freed


def removal(name: str) -> Removal:
    """What removing a model would take away; a reason in words if nothing can be."""
    from unspool.model.catalogue import entries_called

    written = without_address(name)
    entries, kind = ([], None) if "/" in written else entries_called(written)
    if is_default(written) or (len(entries) == 1 and entries[0].is_default and kind is None):
        files = default_files()
        if not files:
            raise UnspoolError("the default model is not in the cache: nothing to remove")
        return Removal(name, tuple(files))
    _refuse_what_is_not_ours(written)
    if len(entries) == 1:
        written = entries[0].repository + (f":{kind}" if kind else "")
    for repo in cached_repos():
        if repo.repo.lower() == written.lower():
            return Removal(repo.repo, folder=_folder(repo))
        for each, path in repo.models():
            if written.lower() in (each.lower(), f"{repo.repo}/{path.name}".lower()):
                return _one_of(repo, each, path)
    known = ", ".join(model.name for model in cached_models()) or "nothing"
    raise UnspoolError(f"{name} is not in the cache; on this machine there is {known}")


def _refuse_what_is_not_ours(name: str) -> None:
    if name.lower() in shipped_models():
        raise UnspoolError(
            f"{name} is a part of Unspool: nothing was fetched that could be removed"
        )
    for model in stored_models():
        if name.lower() in (model.name.lower(), model.short.lower()):
            way = _THEIR_WAY[model.source].format(model.short, path=model.path)
            raise UnspoolError(
                f"{name} belongs to {model.source}, and Unspool only reads it: remove it there,"
                f" with {way}"
            )


def _folder(repo: CachedRepo) -> Path:
    return hub_cache_folder() / f"models--{repo.repo.replace('/', '--')}"


def _one_of(repo: CachedRepo, name: str, path: Path) -> Removal:
    """One of the models of a repository; the last one takes the rest of it along."""
    if len(list(repo.models())) == 1:
        return Removal(name, folder=_folder(repo))
    blobs = {part.resolve() for part in part_paths(path) if part.exists()}
    links = [
        each for each in _folder(repo).rglob("*") if each.is_file() and each.resolve() in blobs
    ]
    return Removal(name, tuple({*blobs, *links}))
