"""Find a model: by path, short name, training run, another program's store, or on the hub."""

from __future__ import annotations

import difflib
import json
import math
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.files.gguf import part_paths
from unspool.model.hub.catalogue import strip_hub_url
from unspool.model.hub.download import DEFAULT, cache_folder, default_files, default_model
from unspool.model.hub.repository import RepoName
from unspool.model.hub.stores import CachedRepo, cached_repos, hub_cache_folder, stored_models
from unspool.model.shipped import shipped_models

# -- Find the model of a training run, so that a run's name can be given as a model
#
#     find_run("mine")               runs/mine, if that is a run
#     run_model(Path("runs/mine"))   its best checkpoint
#
# The trainer writes these folders (`train/running/runs.py`); reading them needs no torch.


def runs_folder() -> Path:
    """The folder that holds training runs: UNSPOOL_RUNS, or `runs` in the current folder."""
    return Path(os.environ.get("UNSPOOL_RUNS") or "runs").expanduser()


def find_run(name: str | Path) -> Path | None:
    """The folder of a training run, given by path or by its name among the runs."""
    path = Path(name).expanduser()
    candidates = [path, runs_folder() / path] if len(path.parts) == 1 else [path]
    with suppress(OSError, ValueError):  # a name that no file can have
        return next((folder for folder in candidates if (folder / "run.json").is_file()), None)
    return None


def run_model(folder: Path) -> Path | None:
    """The checkpoint of a run to generate with; None: there is none yet.

    A finished run names it (final.json). Otherwise it is the one with the lowest held-out loss, or
    the newest if none was evaluated.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        final = json.loads((folder / "final.json").read_text(encoding="utf-8"))["checkpoint"]
        if (folder / "checkpoints" / Path(final).name).is_dir():
            return folder / "checkpoints" / Path(final).name
    newest = best = None
    best_loss = math.inf
    for path in sorted((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name)):
        with suppress(OSError, ValueError, TypeError):  # it may be removed concurrently
            facts = json.loads((path / "training.json").read_text(encoding="utf-8"))
            loss = facts.get("held_out_loss")
            newest = path
            if loss is not None and float(loss) <= best_loss:
                best, best_loss = path, float(loss)
    return best or newest


def resolve_run(path: Path) -> Path:
    """The checkpoint to use if `path` is a run's folder, else `path` itself."""
    if not (path / "run.json").is_file():
        return path
    checkpoint = run_model(path)
    if checkpoint is None:
        raise UnspoolError(f"the run {path} has no checkpoint yet; wait for the first one")
    return checkpoint


_DEFAULT_NAMES = ("default", DEFAULT.name)


@dataclass(frozen=True)
class CachedModel:
    """A model on this machine."""

    name: str
    path: Path
    bytes: int
    source: str = "unspool"  # its store: unspool, huggingface, ollama, ...; shipped: in the package
    kind: str | None = None  # Q4_K_M, BF16, ...
    required_bytes: int = 0  # approximate bytes of memory to run it
    problem: str = ""  # why it cannot be opened

    @property
    def fits(self) -> bool:
        """Whether enough memory is free."""
        from unspool.model.hub.memory import free_memory

        return self.required_bytes <= free_memory()


def is_default(name: str | Path | None) -> bool:
    """Whether a name means the default model."""
    return name is None or (isinstance(name, str) and name.lower() in _DEFAULT_NAMES)


def find_model(
    name: str | Path | None = None,
    *,
    offline: bool = False,
    progress: bool = True,
    refresh: bool = False,
) -> Path:
    """The file or folder of a model; downloads it if necessary.

    Args:
        offline: Never use the network.
        progress: Print the selected file and a progress bar to stderr.
        refresh: Ask the hub for the newest version of a catalogue model even if it is cached.
    """
    if is_default(name):
        return default_model(offline=offline, progress=progress)
    if not str(name) or "\0" in str(name):
        raise UnspoolError(f"invalid model {str(name)!r}: give a path, org/name, or 'default'")
    path = Path(str(name)).expanduser()
    try:
        if path.exists():
            return resolve_run(path)
    except OSError as error:
        raise UnspoolError(f"invalid path {str(name)[:80]!r}: {error.strerror}") from None
    if isinstance(name, Path) or _only_a_path(str(name)):
        raise ModelFileError(_missing(path))
    if (shipped := shipped_models().get(str(name).lower())) is not None:
        return shipped
    if (run := find_run(str(name))) is not None:
        return resolve_run(run)
    from unspool.model.hub.catalogue import find_in_stores, strip_hub_url

    plain_name = strip_hub_url(str(name))
    stored = find_in_stores(plain_name)
    if stored is not None:
        return stored
    repo = _repo_name(plain_name)
    if repo is not None:
        return _from_hub(repo, path, offline, progress)
    return _from_catalogue(plain_name, path, offline, progress, refresh)


def _only_a_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or "\\" in name


def _repo_name(name: str) -> RepoName | None:
    """Parse a repository's name; None: it can only be a path."""
    repo = RepoName.parse(name)
    if repo is not None and repo.file is not None and Path(name).parent.is_dir():
        return None
    return repo


def _from_hub(repo: RepoName, path: Path, offline: bool, progress: bool) -> Path:
    from unspool.model.hub.repository import HubRequest, find_in_hub

    try:
        return find_in_hub(HubRequest(repo), offline=offline, progress=progress)
    except ModelFileError:
        raise
    except UnspoolError as error:
        suggestions = _near_paths(path)
        if suggestions:
            raise UnspoolError(f"{error}; or did you mean the path {suggestions[0]}?") from None
        raise


def _from_catalogue(name: str, path: Path, offline: bool, progress: bool, refresh: bool) -> Path:
    """A catalogue model by its short name or a prefix of it."""
    from unspool.model.hub.catalogue import find_entries

    if "://" in name:
        raise UnspoolError(f"{name} is not a URL of the hub: download the file and give its path")
    entries, kind = find_entries(name) if "/" not in name else ([], None)
    if not entries:
        raise ModelFileError(_missing(path))
    if len(entries) > 1:
        names = ", ".join(entry.name for entry in entries)
        raise UnspoolError(f"{name} is ambiguous: give one of {names}")
    (entry,) = entries
    if entry.is_default and kind in (None, *entry.size):
        return default_model(offline=offline, progress=progress)
    from unspool.model.hub.repository import HubRequest, find_in_hub

    request = HubRequest(RepoName(entry.repository, tag=kind), entry.name, entry.text_memory)
    return find_in_hub(request, offline=offline, progress=progress, cached_first=not refresh)


def _missing(path: Path) -> str:
    from unspool.model.hub.catalogue import similar_names

    is_bare_name = "/" not in str(path) and path.suffix not in (".gguf", ".safetensors")
    suggestions = [str(candidate) for candidate in _near_paths(path)]
    if is_bare_name:
        suggestions += similar_names(str(path))
    if suggestions:
        return f"{path} does not exist: did you mean {' or '.join(suggestions)}?"
    folder = path.parent
    if not folder.is_dir():
        return f"{path} does not exist, and neither does its folder: check the path"
    if is_bare_name:
        return (
            f"No such file or model: {path}. Give a path, org/name on the hub, a name that"
            " unspool models list --all shows, or 'default'"
        )
    return f"{path} does not exist, and {folder} has no similar name: check the path"


def _near_paths(path: Path) -> list[Path]:
    try:
        names = [name.name for name in path.parent.iterdir()]
    except OSError:
        return []
    return [path.with_name(name) for name in difflib.get_close_matches(path.name, names, n=3)]


def cached_models(*, include_unusable: bool = False) -> list[CachedModel]:
    """The models on this machine: the default model, the hub's cache, other programs' stores, and
    those shipped with Unspool.

    Args:
        everything: Also list models that cannot be opened; they have a `problem`.
    """
    from unspool.model.hub.inspect import summarize_model
    from unspool.model.hub.stores import cached_repos, is_file, stored_models

    models = []

    def add(name: str, path: Path, source: str, kind: str | None = None, problem: str = "") -> None:
        summary = summarize_model(path, kind)
        problem = problem or summary.problem
        if include_unusable or not problem:
            models.append(
                CachedModel(
                    name, path, summary.bytes, source, summary.kind, summary.required_bytes, problem
                )
            )

    default_path = cache_folder() / "models" / DEFAULT.file_name
    if is_file(default_path):
        add(DEFAULT.name, default_path, "unspool")
    for repo in cached_repos():
        for name, path in repo.models():
            add(name, path, "huggingface")
    for model in stored_models():
        add(model.name, model.path, model.source, model.kind, model.problem)
    for name, path in shipped_models().items():
        add(name, path, "shipped")
    return models


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
