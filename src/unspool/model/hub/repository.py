"""Repositories of the Hugging Face hub: choose files, download them, find them offline."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.hub.memory import (
    by_preference,
    format_bytes,
    free_memory,
    kind_in_name,
    memory_needed,
)

# -- Select the files of a repository to download
#
# Only formats that cannot run code are allowed: safetensors and GGUF. Of several GGUF files the
# best kind that fits the free memory is selected, unless the name selects one.

_BESIDE_WEIGHTS = re.compile(r"[^/]+\.(json|jinja|tiktoken|model|txt)")
_NAME = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?P<file>(?:/[^/@:]+)+)?(?:@(?P<revision>[^@:]+))?(?::(?P<tag>[\w.-]+))?"
)


@dataclass(frozen=True)
class RepoName:
    """`org/name`, with `/file.gguf` or `:Q4_K_M` to select a file, and `@revision`."""

    repo: str
    file: str | None = None
    revision: str | None = None
    tag: str | None = None

    @classmethod
    def parse(cls, name: str) -> RepoName | None:
        match = _NAME.fullmatch(name)
        if match is None or match["repo"].endswith((".gguf", ".safetensors")):
            return None
        if any(part in (".", "..") for part in match["repo"].split("/")):
            return None
        file = match["file"].lstrip("/") if match["file"] else None
        return cls(match["repo"], file, match["revision"], match["tag"])


@dataclass(frozen=True)
class FileSelection:
    """The files to download, and which one is the model (None: the folder is)."""

    files: list[str]
    file: str | None
    among: int = 1  # number of GGUF files it was selected from


def choose_files(
    name: RepoName,
    sizes: Mapping[str, int],
    *,
    cached: Collection[str] = (),
    text: int | None = None,
) -> FileSelection:
    """Select the model among the files of a repository.

    Args:
        sizes: Bytes of each file; 0: unknown.
        cached: Files that are on this machine already; preferred.
        text: `sequence_memory` of the model, if known.
    """
    from unspool.model.files.safetensors import PICKLE_SUFFIXES  # imports numpy

    files = list(sizes)
    ggufs = sorted(f for f in files if f.lower().endswith(".gguf") and "mmproj" not in f.lower())
    tensors = [file for file in files if re.fullmatch(r"[^/]+\.safetensors", file)]
    if name.file is not None:
        if name.file not in files:
            raise ModelFileError(
                f"{name.repo} has no file {name.file}{_choices('; it has', [*ggufs, *tensors])}"
            )
        if name.file.lower().endswith(PICKLE_SUFFIXES):
            raise ModelFileError(_pickle_reason(name.repo, [name.file]))
        return FileSelection(_all_shards(name.file, files), name.file)
    if name.tag is not None:
        tagged = [f for f in ggufs if re.search(rf"(^|[-._/]){re.escape(name.tag)}[-./]", f, re.I)]
        firsts = first_shards(tagged)
        if len(firsts) != 1:
            what = "no GGUF file" if not firsts else "several GGUF files"
            raise ModelFileError(
                f"{name.repo} has {what} of kind {name.tag}{_choices('; choose from', ggufs)}"
            )
        return FileSelection(_all_shards(firsts[0], files), firsts[0])
    if tensors:
        main = [file for file in tensors if file.startswith("model")] or tensors
        metadata_files = [file for file in files if _BESIDE_WEIGHTS.fullmatch(file)]
        return FileSelection([*metadata_files, *main], None)
    firsts = first_shards(ggufs)
    if firsts:
        total_sizes = {first: sum(sizes[f] for f in _all_shards(first, files)) for first in firsts}
        best = (
            firsts[0] if len(firsts) == 1 else _best_for_here(name.repo, total_sizes, cached, text)
        )
        return FileSelection(_all_shards(best, files), best, len(firsts))
    pickles = [file for file in files if file.lower().endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise ModelFileError(_pickle_reason(name.repo, pickles))
    raise ModelFileError(f"{name.repo} has no safetensors or GGUF files: choose another repository")


def _best_for_here(
    repo: str, sizes: Mapping[str, int], cached: Collection[str], text: int | None
) -> str:
    """The best of several GGUF files that fits the free memory; cached ones are preferred."""
    file_of = {kind: file for file in list(sizes)[::-1] if (kind := kind_in_name(file))}
    kinds = by_preference({kind: sizes[file] for kind, file in file_of.items()})
    if not kinds:
        raise ModelFileError(
            f"{repo} has {len(sizes)} GGUF files: choose one, such as"
            f" {repo}/{next(iter(sizes))}{_choices('; there are', list(sizes))}"
        )
    free = free_memory()
    needs = {kind: memory_needed(sizes[file_of[kind]], kind, text) for kind in kinds}
    fitting = [kind for kind in kinds if needs[kind] <= free or not sizes[file_of[kind]]]
    if not fitting:
        least = min(kinds, key=lambda kind: needs[kind])
        raise UnspoolError(
            f"none of the {len(kinds)} GGUF files of {repo} fits the {format_bytes(free)} of memory"
            f" that are free: the smallest, {least}, needs about {format_bytes(needs[least])};"
            f" choose a smaller model (unspool models list --all), or force it with {repo}:{least}"
        )
    cached_kinds = [kind for kind in fitting if file_of[kind] in cached]
    return file_of[(cached_kinds or fitting)[0]]


def first_shards(files: Sequence[str]) -> list[str]:
    """The GGUF files that are models: no image projectors, and only the first of split files."""
    return [
        f
        for f in sorted(files)
        if f.lower().endswith(".gguf")
        and "mmproj" not in f.lower()
        and (not (part := re.search(r"-(\d+)-of-\d+\.gguf$", f)) or int(part[1]) == 1)
    ]


def _all_shards(file: str, files: Sequence[str]) -> list[str]:
    shard = re.fullmatch(r"(.*-)\d+(-of-\d+\.\w+)", file)
    if shard is None:
        return [file]
    return [f for f in files if f.startswith(shard[1]) and f.endswith(shard[2])]


def _choices(lead: str, files: Sequence[str]) -> str:
    listing = ", ".join(files[:30]) + (", ..." if len(files) > 30 else "")
    return f"{lead}: {listing}" if files else ""


def _pickle_reason(repo: str, files: Sequence[str]) -> str:
    return (
        f"{repo} has only pickle weights ({files[0]}), which can run any code when opened: choose"
        " a repository with safetensors or GGUF"
    )


@dataclass(frozen=True)
class HubRequest:
    """A request for a model on the hub."""

    name: RepoName
    label: str | None = None  # the catalogue name it was requested by
    text: int | None = None  # `sequence_memory` of the model, if known

    def say(self, selection: FileSelection, sizes: dict[str, int]) -> None:
        """Print one line about the selected file, if there was a choice."""
        if self.label is None and selection.among == 1:
            return
        repo, size = self.name.repo, sum(sizes[file] for file in selection.files)
        kind = kind_in_name(selection.file) if selection.file else None
        words = [kind] if kind else []
        if self.label is None:
            words = [f"{kind} of its {selection.among} GGUF files"]
        else:
            words.insert(0, repo)
        if size:
            needs, free = memory_needed(size, kind, self.text), free_memory()
            words += [format_bytes(size), f"needs about {format_bytes(needs)}"]
            if needs > free:
                words.append(f"and only {format_bytes(free)} of memory are free")
        print(f"{self.label or repo}: {', '.join(words)}", file=sys.stderr, flush=True)


def find_in_hub(
    request: HubRequest, *, offline: bool, progress: bool, cached_first: bool = False
) -> Path:
    """The file or folder of a repository; downloads it if necessary.

    Args:
        cached_first: Do not contact the hub if a cached version is complete.
    """
    import huggingface_hub
    from huggingface_hub import constants

    name = request.name
    with translate_hub_errors(name), _progress_bars(progress):
        if offline or constants.HF_HUB_OFFLINE:
            return _find_cached(request, progress)
        if cached_first and (cached_path := _cached_or_none(request, progress)):
            return cached_path
        try:
            info = huggingface_hub.HfApi().model_info(
                name.repo, revision=name.revision, files_metadata=True
            )
        except Exception as error:
            if not is_network_problem(error):
                raise
            try:  # no network, but it may be cached
                return _find_cached(request, progress)
            except UnspoolError:
                raise
            except Exception:
                raise error from None
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
        cached = {file for file in sizes if _is_here(name, file)}
        selection = choose_files(name, sizes, cached=cached, text=request.text)
        if progress:
            request.say(selection, sizes)
        folder = huggingface_hub.snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=[literal_pattern(sibling) for sibling in selection.files],
        )
        return Path(folder) / selection.file if selection.file else Path(folder)


def literal_pattern(file: str) -> str:
    """A pattern that matches this name only."""
    return re.sub(r"([*?\[])", r"[\1]", file)


def _is_here(name: RepoName, file: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    if not file.lower().endswith(".gguf"):
        return False
    return isinstance(try_to_load_from_cache(name.repo, file, revision=name.revision), str)


def _cached_or_none(request: HubRequest, progress: bool) -> Path | None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _find_cached(request, progress)
    except (UnspoolError, LocalEntryNotFoundError):
        return None


def _find_cached(request: HubRequest, progress: bool) -> Path:
    import huggingface_hub

    name = request.name
    folder = Path(
        huggingface_hub.snapshot_download(
            name.repo, revision=name.revision, local_files_only=True, allow_patterns=[]
        )
    )
    sizes = {
        f.relative_to(folder).as_posix(): f.stat().st_size for f in folder.rglob("*") if f.is_file()
    }
    needed = {name.file} if name.file else set()
    for index in folder.glob("*.safetensors.index.json"):
        needed |= set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
    if needed - set(sizes) or not any(file.endswith((".gguf", ".safetensors")) for file in sizes):
        raise UnspoolError(
            f"{name.repo} is incomplete in the cache and the network is off: run once with network"
        )
    selection = choose_files(name, sizes, text=request.text)
    if progress:
        request.say(selection, sizes)
    return folder / selection.file if selection.file else folder


def is_network_problem(error: Exception) -> bool:
    """Whether the connection failed, rather than the server refused."""
    if getattr(error, "response", None) is not None:
        return getattr(error.response, "status_code", 0) >= 500  # type: ignore[attr-defined]
    libraries = ("httpx", "httpcore", "requests", "urllib3")
    return isinstance(error, OSError) or type(error).__module__.startswith(libraries)


@contextmanager
def translate_hub_errors(name: RepoName) -> Iterator[None]:
    """Translate huggingface_hub's exceptions to one line with advice."""
    from huggingface_hub import constants, errors

    repo = name.repo
    try:
        yield
    except UnspoolError:
        raise
    except errors.GatedRepoError:
        raise UnspoolError(
            f"{repo} is gated: accept its terms on its page, then set HF_TOKEN to your token"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UnspoolError(
            f"{repo} is not on the hub, or is private: check the name; for a private one set"
            " HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise UnspoolError(f"{repo} has no revision {name.revision!r}: check the name") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise UnspoolError(
            f"{repo} is not in the cache and the network is off: run once without offline mode"
        ) from None
    except errors.HFValidationError as error:
        raise UnspoolError(f"{repo} is not a repository name: {_one_line(error)}") from None
    except Exception as error:
        if is_network_problem(error):
            raise UnspoolError(
                f"the hub at {constants.ENDPOINT} cannot be reached for {repo}"
                f" ({_one_line(error)}): check the network, or give a path to a file"
            ) from None
        if isinstance(error, errors.HfHubHTTPError):
            raise UnspoolError(f"the hub refuses {repo}: {_one_line(error)}") from None
        raise


@contextmanager
def _progress_bars(show: bool) -> Iterator[None]:
    from huggingface_hub import utils

    if show or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _one_line(error: Any) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
