"""Which files of a repository are the model: what its name says, else the best for this machine.

Only formats that cannot run code are taken: safetensors and GGUF. Of several GGUF files the best
kind that fits the free memory is chosen, unless the name chooses one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.kinds import by_preference, kind_in_name
from unspool.model.memory import free_memory, in_words, memory_needed

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_BESIDE_WEIGHTS = re.compile(r"[^/]+\.(json|jinja|tiktoken|model|txt)")
_NAME = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?P<file>(?:/[^/@:]+)+)?(?:@(?P<revision>[^@:]+))?(?::(?P<tag>[\w.-]+))?"
)


@dataclass(frozen=True)
class RepoName:
    """`org/name`, with `/file.gguf` or `:Q4_K_M` to choose a file and `@revision`."""

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
class Chosen:
    """The files to fetch, and which one is the model (None: the folder is)."""

    files: list[str]
    file: str | None
    among: int = 1  # GGUF files that it was chosen from


def choose_files(
    name: RepoName,
    sizes: Mapping[str, int],
    *,
    here: Collection[str] = (),
    text: int | None = None,
) -> Chosen:
    """The model among the files of a repository, each with its size (0: not known).

    `here` are those on this machine already, which need not be fetched; `text` is the memory that
    a long text takes (see `memory_needed`).
    """
    files = list(sizes)
    ggufs = sorted(f for f in files if f.lower().endswith(".gguf") and "mmproj" not in f.lower())
    tensors = [file for file in files if re.fullmatch(r"[^/]+\.safetensors", file)]
    if name.file is not None:
        if name.file not in files:
            raise ModelFileError(
                f"{name.repo} has no file {name.file}{_choices('; it has', [*ggufs, *tensors])}"
            )
        if name.file.lower().endswith(PICKLES):
            raise ModelFileError(_pickle_reason(name.repo, [name.file]))
        return Chosen(_all_shards(name.file, files), name.file)
    if name.tag is not None:
        tagged = [f for f in ggufs if re.search(rf"(^|[-._/]){re.escape(name.tag)}[-./]", f, re.I)]
        firsts = one_per_model(tagged)
        if len(firsts) != 1:
            what = "no GGUF file" if not firsts else "several GGUF files"
            raise ModelFileError(
                f"{name.repo} has {what} of kind {name.tag}{_choices('; choose from', ggufs)}"
            )
        return Chosen(_all_shards(firsts[0], files), firsts[0])
    if tensors:
        main = [file for file in tensors if file.startswith("model")] or tensors
        beside = [file for file in files if _BESIDE_WEIGHTS.fullmatch(file)]
        return Chosen([*beside, *main], None)
    firsts = one_per_model(ggufs)
    if firsts:
        whole = {each: sum(sizes[f] for f in _all_shards(each, files)) for each in firsts}
        best = firsts[0] if len(firsts) == 1 else _best_for_here(name.repo, whole, here, text)
        return Chosen(_all_shards(best, files), best, len(firsts))
    pickles = [file for file in files if file.lower().endswith(PICKLES)]
    if pickles:
        raise ModelFileError(_pickle_reason(name.repo, pickles))
    raise ModelFileError(f"{name.repo} has no weights as safetensors or GGUF: choose another")


def _best_for_here(
    repo: str, sizes: Mapping[str, int], here: Collection[str], text: int | None
) -> str:
    """The best of several GGUF files that fits the memory; one that is here already comes first."""
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
            f"none of the {len(kinds)} GGUF files of {repo} fits the {in_words(free)} of memory"
            f" that are free: the smallest, {least}, needs about {in_words(needs[least])}; choose a"
            f" smaller model (unspool models list --all), or take it anyway as {repo}:{least}"
        )
    there = [kind for kind in fitting if file_of[kind] in here]
    return file_of[(there or fitting)[0]]


def one_per_model(files: Sequence[str]) -> list[str]:
    """The GGUF files that are models: no projectors for pictures, of a split one its first part."""
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
    shown = ", ".join(files[:30]) + (", ..." if len(files) > 30 else "")
    return f"{lead}: {shown}" if files else ""


def _pickle_reason(repo: str, files: Sequence[str]) -> str:
    return (
        f"{repo} has its weights only as pickle ({files[0]}), which can run any code when it is"
        " opened: choose a repository with safetensors or GGUF"
    )
