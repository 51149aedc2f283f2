"""The runs of a study of scaling: one vocabulary and one text for all, each a run folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unspool.errors import UnspoolError
from unspool.model.config import ModelConfig
from unspool.train.learning.shape import new_config
from unspool.train.new import begin, train
from unspool.train.running.events import Event, Logged
from unspool.train.running.runs import Run
from unspool.train.scaling.side_by_side import left_alone
from unspool.train.scaling.study import Planned
from unspool.train.settings import NewSettings

_NEVER = 1_000_000_000  # steps: at the end only


def _silent(run: Planned, share: float) -> None:
    """Tell nobody; a function, as it goes to other processes with the rest."""


@dataclass(frozen=True, slots=True)
class Runs:
    """How every run of a study is trained; `settings` names data and vocabulary."""

    settings: NewSettings
    vocab_size: int
    length: int
    aspect: int = 64  # the width of a model is so many times its depth
    told: Callable[[Planned, float], object] = _silent  # how much of a run is done

    def config_of(self, depth: int) -> ModelConfig:
        return new_config(depth, self.vocab_size, self.length, width=self.aspect * depth)

    def __call__(self, planned: Planned, folder: Path) -> float:
        """Train one, or go on with it, and give its loss on what is held out."""
        if (folder / "run.json").exists():
            run = Run.open(folder)
            if run.final is None:
                run.take_over()
        else:
            run = begin(
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
            if left_alone():
                raise UnspoolError("the study that this run belongs to has ended")
            if isinstance(event, Logged):
                self.told(planned, event.tokens / planned.tokens)

        if run.final is None:
            ended = train(run, listen)
            if ended.state != "done":
                raise UnspoolError(
                    f"the run {run.name} was {ended.state}; the same command goes on from here"
                )
            _leave_the_last_checkpoint(run)
        return held_out_loss(run)


def _leave_the_last_checkpoint(run: Run) -> None:
    """A grid is many runs: what is needed only to look back, or to go on, makes room."""
    for saved in run.checkpoints():
        if saved.folder != run.final:
            shutil.rmtree(saved.folder)
        else:
            shutil.rmtree(saved.folder / "state", ignore_errors=True)


def held_out_loss(run: Run) -> float:
    """The last that was measured."""
    judged = [line["held_out_loss"] for line in run.log() if "held_out_loss" in line]
    if not judged:
        raise UnspoolError(
            f"the run {run.name} has no held-out loss: hold out more text (--held-out 0.05)"
        )
    return float(judged[-1])


def shared_vocabulary(
    data: Sequence[str], folder: Path, size: int, **options: Any
) -> tuple[Path, int]:
    """A tokenizer for all runs, made once and kept beside them: its folder and its tokens."""
    from unspool.text.tokenizer.tokenizer import Tokenizer
    from unspool.train.data.tokenizer import TokenizerSettings, make_tokenizer

    if not (folder / "tokenizer.json").exists():
        make_tokenizer(list(data), TokenizerSettings(size), **options).tokenizer.save(folder)
    return folder, Tokenizer.from_file(folder).vocab_size


def prepared_tokens(data: Sequence[str], vocabulary: Path, **options: Any) -> int:
    """How many tokens there are to train on."""
    from unspool.text.tokenizer.tokenizer import Tokenizer
    from unspool.train.data.shards import prepare

    return prepare(list(data), Tokenizer.from_file(vocabulary), **options).card.tokens
