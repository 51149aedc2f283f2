"""From what a person calls a model to its weights: a run means its newest checkpoint."""

from __future__ import annotations

from pathlib import Path

from unspool.errors import UnspoolError
from unspool.model.hub import find_model
from unspool.train.running.runs import Run, runs_folder


def model_path(model: str | Path | None) -> Path:
    """A run (its folder or name), one of its checkpoints, or whatever `unspool.load` takes."""
    if model is None:
        return find_model(None)
    for folder in (Path(model), runs_folder() / model):
        if (folder / "run.json").exists():
            found = Run.open(folder).model
            if found is None:
                raise UnspoolError(f"the run {folder.name} has no checkpoint yet; wait for one")
            return found
    return find_model(model)
