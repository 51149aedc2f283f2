"""A data set of the Hugging Face hub by its name: which of its files are data, fetched once.

org/name              the data set; of several parts one must be chosen
org/name:part         one of them (a folder of the repository)
org/name/file.jsonl   one file
org/name@revision
"""

from __future__ import annotations

from pathlib import Path

from unspool.errors import DataError
from unspool.model.hub_files import RepoName
from unspool.model.hub_repo import errors_in_words, is_network_problem, literal_pattern
from unspool.train.data.readers import TABLES, TEXTS


def hub_files(name: RepoName, *, offline: bool = False) -> list[Path]:
    """The data files of a data set, on this machine."""
    import huggingface_hub
    from huggingface_hub import constants

    def snapshot(files: list[str], local: bool) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                name.repo,
                repo_type="dataset",
                revision=name.revision,
                allow_patterns=[literal_pattern(each) for each in files],
                local_files_only=local,
            )
        )

    def cached() -> list[Path]:
        folder = snapshot([], local=True)
        here = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        return [folder / each for each in chosen_files(name, here)]

    with errors_in_words(name):
        if offline or constants.HF_HUB_OFFLINE:
            return cached()
        try:
            info = huggingface_hub.HfApi().dataset_info(name.repo, revision=name.revision)
        except Exception as error:
            if not is_network_problem(error):
                raise
            try:  # no network, but perhaps it is here already
                return cached()
            except Exception:
                raise error from None
        files = chosen_files(name, [each.rfilename for each in info.siblings or []])
        folder = snapshot(files, local=False)
    return [folder / each for each in files]


def chosen_files(name: RepoName, files: list[str]) -> list[str]:
    """Which files of a repository are the data that was asked for."""
    if name.file is not None:
        if name.file not in files:
            raise DataError(f"{name.repo} has no file {name.file}: it has {_some(files)}")
        return [name.file]
    described = ("dataset_info", "dataset_infos", "config", "metadata", "state")  # not data
    data = [
        file
        for file in sorted(files)
        if _ends(file, TABLES) and not (_ends(file, (".json",)) and Path(file).stem in described)
    ]
    if not data:  # texts; what describes the repository is none of them
        about = ("readme", "license", "licence", "contributing", "changelog")
        data = [
            file
            for file in sorted(files)
            if _ends(file, TEXTS) and not file.lower().rpartition("/")[2].startswith(about)
        ]
    parts = {_part(file) for file in data}
    if name.tag is not None:
        data = [file for file in data if _part(file) == name.tag]
        if not data:
            raise DataError(f"{name.repo} has no part {name.tag}: it has {_some(sorted(parts))}")
    elif len(parts) > 1:
        raise DataError(
            f"{name.repo} has several parts: choose one, such as {name.repo}:{min(parts)}; there"
            f" are {_some(sorted(parts))}"
        )
    if not data:
        raise DataError(f"{name.repo} has no data as {', '.join((*TABLES, *TEXTS[:3]))}")
    return data


def _part(file: str) -> str:
    """The folder that a data set's part lies in; most have only one, or none at all."""
    folder = file.rpartition("/")[0]
    return "data" if folder in ("", "data") else folder.removeprefix("data/")


def _ends(file: str, ends: tuple[str, ...]) -> bool:
    return file.lower().removesuffix(".gz").endswith(ends)


def _some(names: list[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
