"""The training runs of a server, by name, and their checkpoints as models.

A checkpoint is a model named `RUN@STEP`: it is loaded on the first request and evicted when memory
is needed. It is not listed in `/v1/models`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from unspool.errors import UnspoolError
from unspool.model.run_folder import runs_folder
from unspool.serve.core.passing import ephemeral_entry
from unspool.serve.core.registry import ModelEntry
from unspool.serve.core.state import ServerState
from unspool.serve.http.errors import ApiError
from unspool.train.running.runs import Run


def run_library(state: ServerState) -> RunLibrary:
    """The training runs of a server."""
    return state.extension("runs", lambda: RunLibrary(state.settings.runs))


def find_checkpoint(state: ServerState, name: str) -> ModelEntry | None:
    """The checkpoint that a model name such as `RUN@STEP` means."""
    return run_library(state).checkpoint(name)


class RunLibrary:
    """The runs in one folder. A path is never built from more than one plain name."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (runs_folder() if root is None else root).absolute()

    def all(self) -> list[Run]:
        return [run for run in Run.all(self.root) if self._is_inside(run.folder)]

    def get(self, name: str) -> Run:
        """The run of this name. Raises 404 if there is none, or it is outside the root."""
        folder = self.root / name
        is_plain = name not in ("", ".", "..") and name.isprintable() and Path(name).name == name
        if not is_plain or not path_exists(folder / "run.json") or not self._is_inside(folder):
            message = f"there is no training run {name[:100]!r} in {self.root}"
            raise ApiError(404, message, param="run", code="run_not_found")
        return Run(folder)

    def checkpoint(self, model: str) -> ModelEntry | None:
        """The checkpoint `RUN@STEP`; None if the name has another form, or there is none."""
        name, _, step = model.rpartition("@")
        if not name or not (step.isascii() and step.isdecimal()) or len(step) > 12:
            return None
        try:
            checkpoints = self.get(name).checkpoints()
        except (UnspoolError, ApiError):
            return None
        checkpoint = next((saved for saved in checkpoints if saved.step == int(step)), None)
        if checkpoint is None or not self._is_inside(checkpoint.folder):
            return None
        return ephemeral_entry(f"{name}@{checkpoint.step}", checkpoint.folder, "training")

    def _is_inside(self, folder: Path) -> bool:
        """Whether the folder is inside the root after following links."""
        return folder.resolve().is_relative_to(self.root.resolve())


def path_exists(path: Path) -> bool:
    """`Path.exists`; False for names that are too long for the file system."""
    with suppress(OSError):
        return path.exists()
    return False
