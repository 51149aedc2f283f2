"""Where models come from: a path, a short name, another program's store, the Hugging Face hub.

    find_model()                                    the default model
    find_model("models/tiny.gguf")                  a file or a folder
    find_model("runs/mine"), find_model("mine")     the best checkpoint of a training run
    find_model("sudoku")                            one that comes with Unspool
    find_model("qwen3-0.6b")                        a model of the catalogue
    find_model("ollama/llama3.2:1b")                a model that another program keeps here
    find_model("org/name")                          a repository; of several files the best one
    find_model("org/name:Q4_K_M")                   one of several GGUF files, by its kind
    find_model("org/name/file.gguf")                or by its name
    find_model("org/name@revision")

What was fetched once is found again without network. Importing this module is cheap: what talks
to a network, and the catalogue, are loaded when they are needed.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.default_model import DEFAULT, default_model
from unspool.model.hub_files import RepoName
from unspool.model.packaged import cache_folder
from unspool.model.run_folder import find_run, resolve_run
from unspool.model.shipped import shipped_models

__all__ = ["CachedModel", "cache_folder", "cached_models", "find_model", "is_default"]

_DEFAULT_NAMES = ("default", DEFAULT.name)


@dataclass(frozen=True)
class CachedModel:
    """A model that is on this machine already."""

    name: str
    path: Path
    bytes: int
    source: str = "unspool"  # who keeps it: unspool, huggingface, ...; shipped: came with Unspool
    kind: str | None = None  # Q4_K_M, BF16, ...
    needs: int = 0  # bytes of memory, about, to run it
    problem: str = ""  # why it cannot be opened here, in words

    @property
    def fits(self) -> bool:
        """Whether the free memory is enough."""
        from unspool.model.memory import free_memory

        return self.needs <= free_memory()


def is_default(name: str | Path | None) -> bool:
    """Whether the default model is meant."""
    return name is None or (isinstance(name, str) and name.lower() in _DEFAULT_NAMES)


def find_model(
    name: str | Path | None = None,
    *,
    offline: bool = False,
    progress: bool = True,
    refresh: bool = False,
) -> Path:
    """The file or folder of a model; fetched if it is not here yet.

    With `offline` the network is never asked. `progress` shows on stderr what is chosen, and a
    bar. `refresh` asks the hub for the newest even if a model of the catalogue is here.
    """
    if is_default(name):
        return default_model(offline=offline, progress=progress)
    if not str(name) or "\0" in str(name):
        raise UnspoolError(f"{str(name)!r} names no model: give a path, org/name, or 'default'")
    path = Path(str(name)).expanduser()
    try:
        if path.exists():
            return resolve_run(path)
    except OSError as error:
        raise UnspoolError(f"{str(name)[:80]!r} is no usable path: {error.strerror}") from None
    if isinstance(name, Path) or _only_a_path(str(name)):
        raise ModelFileError(_missing(path))
    if (shipped := shipped_models().get(str(name).lower())) is not None:
        return shipped
    if (run := find_run(str(name))) is not None:
        return resolve_run(run)
    from unspool.model.names import find_stored, without_address

    written = without_address(str(name))
    stored = find_stored(written)
    if stored is not None:
        return stored
    repo = _repo_name(written)
    if repo is not None:
        return _from_hub(repo, path, offline, progress)
    return _from_catalogue(written, path, offline, progress, refresh)


def _only_a_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or "\\" in name


def _repo_name(name: str) -> RepoName | None:
    """The name as a repository's, unless it can only be a path."""
    repo = RepoName.parse(name)
    if repo is not None and repo.file is not None and Path(name).parent.is_dir():
        return None
    return repo


def _from_hub(repo: RepoName, path: Path, offline: bool, progress: bool) -> Path:
    from unspool.model.hub_repo import Wanted, find_in_hub

    try:
        return find_in_hub(Wanted(repo), offline=offline, progress=progress)
    except ModelFileError:
        raise
    except UnspoolError as error:
        near = _near_paths(path)
        if near:
            raise UnspoolError(f"{error}; or did you mean the path {near[0]}?") from None
        raise


def _from_catalogue(name: str, path: Path, offline: bool, progress: bool, refresh: bool) -> Path:
    """A model by its short name, or the beginning of it."""
    from unspool.model.catalogue import entries_called

    if "://" in name:
        raise UnspoolError(f"{name} is no address of the hub: fetch the file, and give its path")
    entries, kind = entries_called(name) if "/" not in name else ([], None)
    if not entries:
        raise ModelFileError(_missing(path))
    if len(entries) > 1:
        names = ", ".join(entry.name for entry in entries)
        raise UnspoolError(f"{name} may be one of {names}: write more of it")
    (entry,) = entries
    if entry.is_default and kind in (None, *entry.size):
        return default_model(offline=offline, progress=progress)
    from unspool.model.hub_repo import Wanted, find_in_hub

    wanted = Wanted(RepoName(entry.repository, tag=kind), entry.name, entry.text_memory)
    return find_in_hub(wanted, offline=offline, progress=progress, cached_first=not refresh)


def _missing(path: Path) -> str:
    from unspool.model.names import near_names

    plain = "/" not in str(path) and path.suffix not in (".gguf", ".safetensors")
    near = [str(each) for each in _near_paths(path)]
    if plain:
        near += near_names(str(path))
    if near:
        return f"{path} does not exist: did you mean {' or '.join(near)}?"
    folder = path.parent
    if not folder.is_dir():
        return f"{path} does not exist, nor does its folder: check the path"
    if plain:
        return (
            f"{path} is no file here, and no model is called so: give a path, org/name on the hub,"
            " a name that unspool models list --all shows, or 'default'"
        )
    return f"{path} does not exist, and nothing in {folder} is called like it: check the path"


def _near_paths(path: Path) -> list[Path]:
    try:
        there = [each.name for each in path.parent.iterdir()]
    except OSError:
        return []
    return [path.with_name(each) for each in difflib.get_close_matches(path.name, there, n=3)]


def cached_models(*, everything: bool = False) -> list[CachedModel]:
    """The models on this machine that can be opened: ours, the hub's cache, others' stores, and
    last those that came with Unspool.

    With `everything` also those that cannot, which have a `problem`.
    """
    from unspool.model.glance import glance
    from unspool.model.hub_cache import cached_repos
    from unspool.model.stores import is_file, stored_models

    found = []

    def add(name: str, path: Path, source: str, kind: str | None = None, problem: str = "") -> None:
        seen = glance(path, kind)
        problem = problem or seen.problem
        if everything or not problem:
            found.append(
                CachedModel(name, path, seen.bytes, source, seen.kind, seen.needs, problem)
            )

    own = cache_folder() / "models" / DEFAULT.file_name
    if is_file(own):
        add(DEFAULT.name, own, "unspool")
    for repo in cached_repos():
        for name, path in repo.models():
            add(name, path, "huggingface")
    for model in stored_models():
        add(model.name, model.path, model.source, model.kind, model.problem)
    for name, path in shipped_models().items():
        add(name, path, "shipped")
    return found
