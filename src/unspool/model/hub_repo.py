"""Download models from the Hugging Face hub, and find them again offline.

Downloads go to huggingface_hub's cache (HF_HOME), shared with other programs; HF_ENDPOINT, HF_TOKEN
and HF_HUB_OFFLINE have their usual meaning.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.errors import UnspoolError
from unspool.model.hub_files import FileSelection, RepoName, choose_files
from unspool.model.kinds import kind_in_name
from unspool.model.memory import format_bytes, free_memory, memory_needed


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
