"""Training runs of a scaling study: one tokenizer and data set for all, one run folder each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unspool.errors import UnspoolError
from unspool.model.config import ModelConfig
from unspool.train.learning.model_size import new_config
from unspool.train.pretrain import NewSettings, create_run, train
from unspool.train.running.events import Event, StepLogged
from unspool.train.running.runs import Run
from unspool.train.scaling.study import PlannedRun, is_orphaned

_NEVER = 1_000_000_000  # steps: only at the end


def _ignore_progress(run: PlannedRun, share: float) -> None:
    """A function and not a lambda, because it is pickled for other processes."""


@dataclass(frozen=True, slots=True)
class GridTrainer:
    """Trains the runs of a study; `settings` has the data and the tokenizer."""

    settings: NewSettings
    vocab_size: int
    length: int
    aspect: int = 64  # width / depth of the models
    on_progress: Callable[[PlannedRun, float], object] = _ignore_progress  # (run, share done)

    def config_of(self, depth: int) -> ModelConfig:
        return new_config(depth, self.vocab_size, self.length, width=self.aspect * depth)

    def __call__(self, planned: PlannedRun, folder: Path) -> float:
        """Train or resume one run; returns its held-out loss."""
        if (folder / "run.json").exists():
            run = Run.open(folder)
            if run.final is None:
                run.resume_here()
        else:
            run = create_run(
                replace(
                    self.settings,
                    depth=planned.depth,
                    width=self.aspect * planned.depth,
                    length=self.length,
                    tokens=planned.tokens,
                    judge_every=_NEVER,
                    sample_every=_NEVER,
                    patience=0,
                ),
                folder,
            )

        def listen(event: Event) -> None:
            if is_orphaned():
                raise UnspoolError("the study that this run belongs to has ended")
            if isinstance(event, StepLogged):
                self.on_progress(planned, event.tokens / planned.tokens)

        if run.final is None:
            ended = train(run, listen)
            if ended.state != "done":
                raise UnspoolError(
                    f"the run {run.name} was {ended.state}; rerun the same command to resume"
                )
            _delete_other_checkpoints(run)
        return held_out_loss(run)


def _delete_other_checkpoints(run: Run) -> None:
    """Keep only the weights of the final checkpoint: a grid has many runs."""
    for checkpoint in run.checkpoints():
        if checkpoint.folder != run.final:
            shutil.rmtree(checkpoint.folder)
        else:
            shutil.rmtree(checkpoint.folder / "state", ignore_errors=True)


def held_out_loss(run: Run) -> float:
    """The last held-out loss of a run."""
    losses = [line["held_out_loss"] for line in run.log() if "held_out_loss" in line]
    if not losses:
        raise UnspoolError(
            f"the run {run.name} has no held-out loss: hold out more text (--held-out 0.05)"
        )
    return float(losses[-1])


def shared_vocabulary(
    data: Sequence[str], folder: Path, size: int, **options: Any
) -> tuple[Path, int]:
    """Train the tokenizer of all runs, once; returns its folder and vocabulary size."""
    from unspool.text.tokenizer.tokenizer import Tokenizer
    from unspool.train.data.tokenizer import TokenizerSettings, make_tokenizer

    if not (folder / "tokenizer.json").exists():
        make_tokenizer(list(data), TokenizerSettings(size), **options).tokenizer.save(folder)
    return folder, Tokenizer.from_file(folder).vocab_size


def prepared_tokens(data: Sequence[str], vocabulary: Path, **options: Any) -> int:
    """Number of training tokens."""
    from unspool.text.tokenizer.tokenizer import Tokenizer
    from unspool.train.data.prepared import prepare

    return prepare(list(data), Tokenizer.from_file(vocabulary), **options).card.tokens
