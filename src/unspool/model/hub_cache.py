"""What lies in the cache of the Hugging Face hub, read from its folders.

The hub's own library can list its cache too, but takes half a second to import, and this is asked
whenever the page starts. New versions of llama.cpp keep their models there as well.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unspool.model.hub_files import one_per_model
from unspool.model.kinds import kind_in_name
from unspool.model.stores import is_file, walk

_DEEPEST = 3  # folders inside a repository


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """A repository of which something was fetched."""

    repo: str
    snapshot: Path
    files: list[str]

    def models(self) -> Iterator[tuple[str, Path]]:
        """The models in it, each by a name under which it is found again."""
        if any(name.endswith(".safetensors") and "/" not in name for name in self.files):
            yield self.repo, self.snapshot
        ggufs = one_per_model(self.files)
        kinds = Counter(kind_in_name(file) for file in ggufs)
        for file in ggufs:
            kind = kind_in_name(file)
            tell_by_kind = kind is not None and kinds[kind] == 1
            name = f"{self.repo}:{kind}" if tell_by_kind else f"{self.repo}/{file}"
            yield name, self.snapshot / file


def hub_cache_folder() -> Path:
    """Where the hub's library keeps what it fetched; the same variables say so as there."""
    if chosen := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(chosen).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def cached_repos() -> list[CachedRepo]:
    """The repositories with models, of each the revision that is in use."""
    found = []
    for folder in _folders(hub_cache_folder()):
        organisation, _, name = folder.name.removeprefix("models--").partition("--")
        snapshot = _snapshot(folder)
        if folder.name.startswith("models--") and name and snapshot is not None:
            files = [path.relative_to(snapshot).as_posix() for path in walk(snapshot, _DEEPEST)]
            found.append(CachedRepo(f"{organisation}/{name}", snapshot, files))
    return sorted(found, key=lambda each: each.repo.lower())


def _snapshot(repo: Path) -> Path | None:
    """The revision that `main` names, else the newest."""
    try:
        main = repo / "refs" / "main"
        if is_file(main):
            named = repo / "snapshots" / main.read_text(encoding="utf-8").strip()
            if named.parent == repo / "snapshots" and named.is_dir():
                return named
        return max(_folders(repo / "snapshots"), key=lambda each: each.stat().st_mtime)
    except (OSError, ValueError):
        return None


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.is_dir())
    except OSError:
        return []
