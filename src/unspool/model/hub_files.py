"""Select the files of a repository to download.

Only formats that cannot run code are allowed: safetensors and GGUF. Of several GGUF files the best
kind that fits the free memory is selected, unless the name selects one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.kinds import by_preference, kind_in_name
from unspool.model.memory import format_bytes, free_memory, memory_needed

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
    from unspool.model.safetensors_file import PICKLE_SUFFIXES  # imports numpy

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
