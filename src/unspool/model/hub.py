"""Find models: by path, short name, in another program's store, on the Hugging Face hub.

    find_model()                                    the default model
    find_model("models/tiny.gguf")                  a file or a folder
    find_model("runs/mine"), find_model("mine")     the best checkpoint of a training run
    find_model("sudoku")                            a model shipped with Unspool
    find_model("qwen3-0.6b")                        a model of the catalogue
    find_model("ollama/llama3.2:1b")                a model in another program's store
    find_model("org/name")                          a repository; of several GGUF files the best
    find_model("org/name:Q4_K_M")                   a GGUF file of a repository, by its kind
    find_model("org/name/file.gguf")                or by its name
    find_model("org/name@revision")

Downloaded models are found again offline. Importing this module is cheap: network code and the
catalogue are imported on use.
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
        from unspool.model.memory import free_memory

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
    from unspool.model.names import find_in_stores, strip_hub_url

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
    from unspool.model.hub_repo import HubRequest, find_in_hub

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
    from unspool.model.catalogue import find_entries

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
    from unspool.model.hub_repo import HubRequest, find_in_hub

    request = HubRequest(RepoName(entry.repository, tag=kind), entry.name, entry.text_memory)
    return find_in_hub(request, offline=offline, progress=progress, cached_first=not refresh)


def _missing(path: Path) -> str:
    from unspool.model.names import similar_names

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
    from unspool.model.glance import summarize_model
    from unspool.model.hub_cache import cached_repos
    from unspool.model.stores import is_file, stored_models

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
