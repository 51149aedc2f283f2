"""A repository on the Hugging Face hub: choose its weights, fetch them, find them again offline.

Only formats that cannot run code are taken: safetensors and GGUF. What is fetched lies in the
library's own cache (HF_HOME), shared with other programs; HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE mean what they mean there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.errors import ModelFileError, UnspoolError

_BESIDE_WEIGHTS = re.compile(r"[^/]+\.(json|jinja|tiktoken|model|txt)")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NAME = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?P<file>(?:/[^/@:]+)+)?(?:@(?P<revision>[^@:]+))?(?::(?P<tag>[\w.-]+))?"
)


@dataclass(frozen=True)
class RepoName:
    """`org/name`, with `/file.gguf` or `:Q4_K_M` to choose a file and `@revision`."""

    repo: str
    file: str | None
    revision: str | None
    tag: str | None

    @classmethod
    def parse(cls, name: str) -> RepoName | None:
        match = _NAME.fullmatch(name)
        if match is None or match["repo"].endswith((".gguf", ".safetensors")):
            return None
        if any(part in (".", "..") for part in match["repo"].split("/")):
            return None
        file = match["file"].lstrip("/") if match["file"] else None
        return cls(match["repo"], file, match["revision"], match["tag"])


def choose_files(name: RepoName, files: Sequence[str]) -> tuple[list[str], str | None]:
    """Which files to fetch, and which one is the model (None: the folder is)."""
    ggufs = sorted(f for f in files if f.lower().endswith(".gguf") and "mmproj" not in f.lower())
    tensors = [file for file in files if re.fullmatch(r"[^/]+\.safetensors", file)]
    if name.file is not None:
        if name.file not in files:
            raise ModelFileError(
                f"{name.repo} has no file {name.file}{_choices('; it has', [*ggufs, *tensors])}"
            )
        if name.file.lower().endswith(PICKLES):
            raise ModelFileError(_pickle_reason(name.repo, [name.file]))
        return _all_shards(name.file, files), name.file
    if name.tag is not None:
        chosen = [f for f in ggufs if re.search(rf"(^|[-._/]){re.escape(name.tag)}[-._]", f, re.I)]
        firsts = _one_per_model(chosen)
        if len(firsts) != 1:
            what = "no GGUF file" if not firsts else "several GGUF files"
            raise ModelFileError(
                f"{name.repo} has {what} of kind {name.tag}{_choices('; choose from', ggufs)}"
            )
        return _all_shards(firsts[0], files), firsts[0]
    if tensors:
        main = [file for file in tensors if file.startswith("model")] or tensors
        beside = [file for file in files if _BESIDE_WEIGHTS.fullmatch(file)]
        return [*beside, *main], None
    firsts = _one_per_model(ggufs)
    if len(firsts) == 1:
        return _all_shards(firsts[0], files), firsts[0]
    if firsts:
        raise ModelFileError(
            f"{name.repo} has {len(firsts)} GGUF files: choose one, such as"
            f" {name.repo}/{firsts[0]}{_choices('; there are', firsts)}"
        )
    pickles = [file for file in files if file.lower().endswith(PICKLES)]
    if pickles:
        raise ModelFileError(_pickle_reason(name.repo, pickles))
    raise ModelFileError(f"{name.repo} has no weights as safetensors or GGUF: choose another")


def _one_per_model(ggufs: Sequence[str]) -> list[str]:
    return [f for f in ggufs if not (s := re.search(r"-(\d+)-of-\d+\.gguf$", f)) or int(s[1]) == 1]


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


def find_in_hub(name: RepoName, *, offline: bool, progress: bool) -> Path:
    """The file or folder of a repository, fetched if needed."""
    import huggingface_hub
    from huggingface_hub import constants

    with _in_words(name), _progress_bars(progress):
        if offline or constants.HF_HUB_OFFLINE:
            return _find_cached(name)
        try:
            info = huggingface_hub.HfApi().model_info(name.repo, revision=name.revision)
        except Exception as error:
            if not _is_network_problem(error):
                raise
            try:  # no network, but perhaps it is here already
                return _find_cached(name)
            except UnspoolError:
                raise
            except Exception:
                raise error from None
        chosen, file = choose_files(name, [each.rfilename for each in info.siblings or []])
        folder = huggingface_hub.snapshot_download(
            name.repo, revision=name.revision, allow_patterns=[_literal(each) for each in chosen]
        )
        return Path(folder) / file if file else Path(folder)


def _literal(file: str) -> str:
    """A pattern that matches this name only."""
    return re.sub(r"([*?\[])", r"[\1]", file)


def _find_cached(name: RepoName) -> Path:
    import huggingface_hub

    folder = Path(
        huggingface_hub.snapshot_download(
            name.repo, revision=name.revision, local_files_only=True, allow_patterns=[]
        )
    )
    files = [str(f.relative_to(folder).as_posix()) for f in folder.rglob("*") if f.is_file()]
    wanted = {name.file} if name.file else set()
    for index in folder.glob("*.safetensors.index.json"):
        wanted |= set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
    if wanted - set(files) or not any(each.endswith((".gguf", ".safetensors")) for each in files):
        raise UnspoolError(
            f"{name.repo} is only partly in the cache and the network is off: run once with it"
        )
    _, file = choose_files(name, files)
    return folder / file if file else folder


def _is_network_problem(error: Exception) -> bool:
    """A connection that failed, rather than a server that answered no."""
    if getattr(error, "response", None) is not None:
        return getattr(error.response, "status_code", 0) >= 500  # type: ignore[attr-defined]
    libraries = ("httpx", "httpcore", "requests", "urllib3")
    return isinstance(error, OSError) or type(error).__module__.startswith(libraries)


@contextmanager
def _in_words(name: RepoName) -> Iterator[None]:
    """What the library raises, as one line that says what to do."""
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
        raise UnspoolError(f"{repo} is no name of a repository: {_one_line(error)}") from None
    except Exception as error:
        if _is_network_problem(error):
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
