"""The training runs of a server, by name, and their checkpoints as models.

A checkpoint is a model like every other, called `RUN@STEP`: it is loaded when somebody asks for
it, and goes when room is needed. It is in no list of models, because there are so many.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from unspool.errors import UnspoolError
from unspool.model.run_folder import runs_folder
from unspool.serve.core.passing import passing_entry
from unspool.serve.core.registry import ModelEntry
from unspool.serve.http.errors import ApiError
from unspool.train.running.runs import Run


class RunLibrary:
    """The runs below one folder. No path is ever put together from more than one plain name."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (runs_folder() if root is None else root).absolute()

    def all(self) -> list[Run]:
        return [run for run in Run.all(self.root) if self._is_inside(run.folder)]

    def get(self, name: str) -> Run:
        """The run of this name; an error if there is none, or if it lies elsewhere."""
        folder = self.root / name
        is_plain = name not in ("", ".", "..") and name.isprintable() and Path(name).name == name
        if not is_plain or not is_there(folder / "run.json") or not self._is_inside(folder):
            message = f"there is no training run {name[:100]!r} in {self.root}"
            raise ApiError(404, message, param="run", code="run_not_found")
        return Run(folder)

    def checkpoint(self, model: str) -> ModelEntry | None:
        """The checkpoint that a model's name means: `RUN@STEP`."""
        name, _, step = model.rpartition("@")
        if not name or not (step.isascii() and step.isdecimal()) or len(step) > 12:
            return None
        try:
            saved = self.get(name).checkpoints()
        except (UnspoolError, ApiError):
            return None
        found = next((each for each in saved if each.step == int(step)), None)
        if found is None or not self._is_inside(found.folder):
            return None
        return passing_entry(f"{name}@{found.step}", found.folder, "training")

    def _is_inside(self, folder: Path) -> bool:
        """Whether it lies here also when links are followed."""
        return folder.resolve().is_relative_to(self.root.resolve())


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder; also of names that are too long for any."""
    with suppress(OSError):
        return path.exists()
    return False
