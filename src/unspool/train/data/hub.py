"""Data sets on the Hugging Face hub: which files are data, downloaded once.

org/name              the data set; with several parts, one must be chosen
org/name:part         one part (a folder of the repository)
org/name/file.jsonl   one file
org/name@revision
"""

from __future__ import annotations

from pathlib import Path

from unspool.errors import DataError
from unspool.model.hub_files import RepoName
from unspool.model.hub_repo import is_network_problem, literal_pattern, translate_hub_errors
from unspool.train.data.readers import TABLES, TEXTS


def hub_files(name: RepoName, *, offline: bool = False) -> list[Path]:
    """Download the data files of a data set (or find them in the cache)."""
    import huggingface_hub
    from huggingface_hub import constants

    def snapshot(files: list[str], local: bool) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                name.repo,
                repo_type="dataset",
                revision=name.revision,
                allow_patterns=[literal_pattern(file) for file in files],
                local_files_only=local,
            )
        )

    def cached() -> list[Path]:
        folder = snapshot([], local=True)
        files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        return [folder / file for file in chosen_files(name, files)]

    with translate_hub_errors(name):
        if offline or constants.HF_HUB_OFFLINE:
            return cached()
        try:
            info = huggingface_hub.HfApi().dataset_info(name.repo, revision=name.revision)
        except Exception as error:
            if not is_network_problem(error):
                raise
            try:  # no network, but it may be in the cache
                return cached()
            except Exception:
                raise error from None
        files = chosen_files(name, [sibling.rfilename for sibling in info.siblings or []])
        folder = snapshot(files, local=False)
    return [folder / file for file in files]


def chosen_files(name: RepoName, files: list[str]) -> list[str]:
    """Choose the files of a repository that hold the requested data."""
    if name.file is not None:
        if name.file not in files:
            raise DataError(f"{name.repo} has no file {name.file}; it has {_first_names(files)}")
        return [name.file]
    metadata = ("dataset_info", "dataset_infos", "config", "metadata", "state")
    data = [
        file
        for file in sorted(files)
        if _has_suffix(file, TABLES)
        and not (_has_suffix(file, (".json",)) and Path(file).stem in metadata)
    ]
    if not data:  # plain texts, but not those that describe the repository
        about = ("readme", "license", "licence", "contributing", "changelog")
        data = [
            file
            for file in sorted(files)
            if _has_suffix(file, TEXTS) and not file.lower().rpartition("/")[2].startswith(about)
        ]
    parts = {_part_of(file) for file in data}
    if name.tag is not None:
        data = [file for file in data if _part_of(file) == name.tag]
        if not data:
            raise DataError(
                f"{name.repo} has no part {name.tag}; it has {_first_names(sorted(parts))}"
            )
    elif len(parts) > 1:
        raise DataError(
            f"{name.repo} has several parts: choose one, such as {name.repo}:{min(parts)}; it has"
            f" {_first_names(sorted(parts))}"
        )
    if not data:
        raise DataError(f"{name.repo} has no data files ({', '.join((*TABLES, *TEXTS[:3]))})")
    return data


def _part_of(file: str) -> str:
    """Folder of a file, which names a part of the data set; most have one part, or none."""
    folder = file.rpartition("/")[0]
    return "data" if folder in ("", "data") else folder.removeprefix("data/")


def _has_suffix(file: str, suffixes: tuple[str, ...]) -> bool:
    return file.lower().removesuffix(".gz").endswith(suffixes)


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
