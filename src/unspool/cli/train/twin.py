"""`unspool train twin`: a model beside a causal one, that fills, drafts, or solves puzzles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import options as o
from unspool.cli.train import source as s
from unspool.cli.train import tuning as t

if TYPE_CHECKING:
    from unspool.train.running.runs import Run

_TEXT, _PUZZLE, _STEP = "Of a text model", "Of a puzzle", "How long, and how"


def _opt(panel: str, words: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=words, rich_help_panel=panel, **more)


def twin(
    context: typer.Context,
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            "-k",
            help="block, fill, draft; or a puzzle: sudoku, sudoku:48, countdown, countdown:3.",
        ),
    ] = "block",
    model: o.Model = None,
    data: Annotated[
        list[str] | None,
        _opt(_TEXT, "Files, a folder, a pattern or a hub data set; several times.", "--data", "-d"),
    ] = None,
    share: Annotated[
        list[float] | None, _opt(_TEXT, "Of each source, in their order. Default: alike.")
    ] = None,
    chat: Annotated[int, _opt(_TEXT, "Texts that the model writes itself.", min=0)] = 16000,
    chat_share: Annotated[float, _opt(_TEXT, "Share of those.", min=0, max=1)] = 0.6,
    chat_tokens: Annotated[int, _opt(_TEXT, "Tokens of each, at most.", min=1)] = 256,
    questions: Annotated[
        str | None, _opt(_TEXT, "A file: one thing to ask the model in each line.", metavar="FILE")
    ] = None,
    start: Annotated[
        str | None,
        _opt(
            _TEXT,
            "fill, draft: begin as this twin (a run or its folder).",
            "--from",
            metavar="TWIN",
        ),
    ] = None,
    lora: Annotated[int, _opt(_TEXT, "An adapter of this rank; 0: all weights.", min=0)] = 0,
    mask: Annotated[int | None, _opt(_TEXT, "The token that is the mask.", min=0)] = None,
    block: Annotated[int, _opt(_TEXT, "Tokens of a block, usually.", min=1)] = 8,
    draft_steps: Annotated[int, _opt(_TEXT, "draft: tokens drafted in training.", min=1)] = 6,
    draft_tokens: Annotated[int, _opt(_TEXT, "draft: tokens it knows.", min=1)] = 12288,
    sight: Annotated[str, _opt(_PUZZLE, "whole (fills in any order) or causal.")] = "whole",
    depth: Annotated[int, _opt(_PUZZLE, "Layers.", min=1)] = 6,
    width: Annotated[int, _opt(_PUZZLE, "Numbers a token carries.", min=8)] = 224,
    heads: Annotated[int, _opt(_PUZZLE, "Attention heads.", min=1)] = 7,
    minutes: Annotated[float | None, _opt(_STEP, "About so long.", min=0)] = None,
    steps: Annotated[int | None, _opt(_STEP, "So many steps. Default: 1000.", min=1)] = None,
    batch: Annotated[int | None, _opt(_STEP, "Rows at once.", min=1)] = None,
    length: Annotated[int | None, _opt(_STEP, "Tokens of a row.", min=8)] = None,
    accumulate: t.Accumulate = 1,
    rate: t.Rate = None,
    optimizer: Annotated[
        str | None, _opt(_STEP, "muon or adamw. Default: adamw for block and fill.")
    ] = None,
    seed: t.Seed = 0,
    save_every: Annotated[int | None, _opt(_STEP, "Steps between checkpoints.", min=1)] = None,
    device: t.Device = "auto",
    name: t.Name = None,
    resume: t.Resume = None,
    quiet: o.Quiet = False,
) -> None:
    """A twin of a model: it fills text in any order, doubts it, drafts it, or solves puzzles.

    The model itself stays what it is. First it writes texts for its twin to learn from (kept, and
    found again); --data is learned from besides.

    [b]Examples[/b]

      unspool train twin --kind block --data books/ --minutes 20
      unspool train twin --kind block --lora 64 --data books/
      unspool train twin --kind fill --from runs/twin-block --data books/
      unspool train twin --kind draft --chat 60000 --chat-share 1
      unspool train twin --kind sudoku:48 --sight causal --steps 2000
      unspool train twin --resume runs/twin-block
    """
    from unspool.backends.torch.available import check_torch

    s.check_resume(context, resume)
    check_torch()
    from unspool.model.run_folder import runs_folder
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.running.runs import Run
    from unspool.train.twins.settings import TwinSettings
    from unspool.train.twins.twin import new_run, settings_of, train_twin

    if resume is not None:
        run = Run.open(resume)
        run.take_over()
        wanted = settings_of(run)
    else:
        wanted = TwinSettings(
            kind=kind, model=model, start=start, data=tuple(data or (DEFAULT_SOURCE,)),
            shares=tuple(share or ()), chat=chat, chat_share=chat_share, chat_tokens=chat_tokens,
            questions=questions, mask=mask, block=block, lora=lora, sight=sight, depth=depth,
            width=width, heads=heads, steps=steps, minutes=minutes, batch=batch, length=length,
            accumulate=accumulate, rate=rate, optimizer=optimizer, draft_steps=draft_steps,
            draft_tokens=draft_tokens, seed=seed, save_every=save_every, device=device,
        )  # fmt: skip
        run = new_run(wanted, runs_folder() / name if name else None)
    from unspool.decoding.progress import progress_bar

    with (
        progress_bar("the model writes", wanted.chat, show=not quiet) as tell,
        t.Telling(run, quiet) as telling,
    ):
        train_twin(wanted, run, telling, tell=tell)
    _close(run)
    s.exit_if_signalled(run)


def _close(run: Run) -> None:
    """What came out, and what to do with it."""
    if run.state == "stopped":
        o.say(f"stopped; go on with: unspool train twin --resume {run.folder}")
        return
    o.say(f"done: {run.final}")
    o.say(f"look at it:  unspool page --run {run.folder}")
