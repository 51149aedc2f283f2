"""`unspool train twin`: train a masked twin, a draft head, or a puzzle model."""

from __future__ import annotations

from typing import Annotated

import typer

from unspool.cli import options as o
from unspool.cli.train import source as s
from unspool.cli.train import tuning as t

_TEXT, _PUZZLE, _TRAINING = "Twin of a text model", "Puzzle model", "Training"
_opt = s.panel_option


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
        _opt(_TEXT, "Files, folders, patterns or hub data sets; repeatable.", "--data", "-d"),
    ] = None,
    share: Annotated[
        list[float] | None, _opt(_TEXT, "Share of each source, in order. Default: equal.")
    ] = None,
    chat: Annotated[int, _opt(_TEXT, "Number of texts the model generates.", min=0)] = 16000,
    chat_share: Annotated[float, _opt(_TEXT, "Share of generated texts.", min=0, max=1)] = 0.6,
    chat_tokens: Annotated[int, _opt(_TEXT, "Maximum tokens of each.", min=1)] = 256,
    questions: Annotated[
        str | None, _opt(_TEXT, "File with one question for the model per line.", metavar="FILE")
    ] = None,
    start: Annotated[
        str | None,
        _opt(
            _TEXT,
            "fill, draft: start from this twin (a run or its folder).",
            "--from",
            metavar="TWIN",
        ),
    ] = None,
    lora: Annotated[int, _opt(_TEXT, "LoRA rank; 0 trains all weights.", min=0)] = 0,
    mask: Annotated[int | None, _opt(_TEXT, "Id of the mask token.", min=0)] = None,
    block: Annotated[int, _opt(_TEXT, "Default block size.", min=1)] = 8,
    draft_steps: Annotated[int, _opt(_TEXT, "draft: tokens drafted in training.", min=1)] = 6,
    draft_tokens: Annotated[int, _opt(_TEXT, "draft: size of its vocabulary.", min=1)] = 12288,
    sight: Annotated[str, _opt(_PUZZLE, "Attention: whole (any order) or causal.")] = "whole",
    depth: Annotated[int, _opt(_PUZZLE, "Layers.", min=1)] = 6,
    width: Annotated[int, _opt(_PUZZLE, "Hidden size.", min=8)] = 224,
    heads: Annotated[int, _opt(_PUZZLE, "Attention heads.", min=1)] = 7,
    minutes: Annotated[float | None, _opt(_TRAINING, "Time budget.", min=0)] = None,
    steps: Annotated[int | None, _opt(_TRAINING, "Number of steps. Default: 1000.", min=1)] = None,
    batch: Annotated[int | None, _opt(_TRAINING, "Rows per batch.", min=1)] = None,
    length: Annotated[int | None, _opt(_TRAINING, "Tokens per row.", min=8)] = None,
    accumulate: t.Accumulate = 1,
    rate: t.Rate = None,
    optimizer: Annotated[
        str | None, _opt(_TRAINING, "muon or adamw. Default: adamw for block and fill.")
    ] = None,
    seed: t.Seed = 0,
    save_every: Annotated[int | None, _opt(_TRAINING, "Steps between checkpoints.", min=1)] = None,
    device: t.Device = "auto",
    name: t.Name = None,
    resume: t.Resume = None,
    quiet: o.Quiet = False,
) -> None:
    """Train a twin for infilling, a draft head for speculative decoding, or a puzzle model.

    The model itself is not changed. It first generates texts for its twin to train on (cached);
    --data adds other texts.

    [b]Examples[/b]

      unspool train twin --kind block --data books/ --minutes 20
      unspool train twin --kind block --lora 64 --data books/
      unspool train twin --kind fill --from runs/twin-block --data books/
      unspool train twin --kind draft --chat 60000 --chat-share 1
      unspool train twin --kind sudoku:48 --sight causal --steps 2000
      unspool train twin --resume runs/twin-block
    """
    from unspool.backends.placement import check_torch

    s.check_resume(context, resume)
    check_torch()
    from unspool.model.hub.find import runs_folder
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.running.runs import Run
    from unspool.train.twins.settings import TwinSettings
    from unspool.train.twins.twin import new_run, settings_of, train_twin

    if resume is not None:
        run = Run.open(resume)
        run.resume_here()
        settings = settings_of(run)
    else:
        settings = TwinSettings(
            kind=kind, model=model, start=start, data=tuple(data or (DEFAULT_SOURCE,)),
            shares=tuple(share or ()), chat=chat, chat_share=chat_share, chat_tokens=chat_tokens,
            questions=questions, mask=mask, block=block, lora=lora, sight=sight, depth=depth,
            width=width, heads=heads, steps=steps, minutes=minutes, batch=batch, length=length,
            accumulate=accumulate, rate=rate, optimizer=optimizer, draft_steps=draft_steps,
            draft_tokens=draft_tokens, seed=seed, save_every=save_every, device=device,
        )  # fmt: skip
        run = new_run(settings, runs_folder() / name if name else None)
    from unspool.progress import progress_bar

    with (
        progress_bar("generating texts", settings.chat, show=not quiet) as on_text,
        t.TuningDisplay(run, quiet) as display,
    ):
        train_twin(settings, run, display, on_text=on_text)
    if run.state == "stopped":
        o.say(f"stopped; resume with: unspool train twin --resume {run.folder}")
    else:
        o.say(f"done: {run.final}")
        o.say(f"open the page:  unspool page --run {run.folder}")
    s.exit_if_signalled(run)
