"""List the cache of the Hugging Face hub by reading its folders.

huggingface_hub can list its cache too, but takes half a second to import, and the page needs the
list at startup. New versions of llama.cpp use the same cache.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unspool.model.hub_files import first_shards
from unspool.model.kinds import kind_in_name
from unspool.model.stores import is_file, walk

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
