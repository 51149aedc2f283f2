"""`unspool train` (or `unspool train new`): train a new model from text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import options as o
from unspool.cli.train import options as s

if TYPE_CHECKING:
    from unspool.train.pretrain import NewSettings
    from unspool.train.running.parallel import Parallel
    from unspool.train.running.runs import Run

_SIZE, _LENGTH, _STEP = "Model size", "Length of training", "Optimization"
_OUTPUT, _WHERE = "Logging and checkpoints", "Run and devices"
_opt = s.panel_option


def new(
    context: typer.Context,
    source: s.Sources = None,
    depth: Annotated[int | None, _opt(_SIZE, "Layers; other sizes follow from it.", min=1)] = None,
    shape: Annotated[
        str, _opt(_SIZE, "Layer type: qwen3, llama; lfm2, qwen3.5 (mostly recurrent layers).")
    ] = "qwen3",
    width: Annotated[int | None, _opt(_SIZE, "Hidden size. Default: 64 x depth.", min=1)] = None,
    heads: Annotated[int | None, _opt(_SIZE, "Attention heads.", min=1)] = None,
    kv_heads: Annotated[int | None, _opt(_SIZE, "Key-value heads.", min=1)] = None,
    head_width: Annotated[int | None, _opt(_SIZE, "Size of a head.", min=1)] = None,
    ff_width: Annotated[int | None, _opt(_SIZE, "Feed-forward size.", min=1)] = None,
    tied: Annotated[
        bool | None, _opt(_SIZE, "Tie the output head to the embeddings.", "--tied/--untied")
    ] = None,
    like: Annotated[
        str | None, _opt(_SIZE, "Use the shape of this model or config.json.", metavar="MODEL")
    ] = None,
    start: Annotated[
        str | None,
        _opt(_SIZE, "Start from the weights of this model or run.", "--from", metavar="MODEL"),
    ] = None,
    vocab_size: Annotated[int | None, _opt(_SIZE, "Size of the new vocabulary.", min=1)] = None,
    tokenizer: Annotated[
        str | None, _opt(_SIZE, "A tokenizer. Default: train one.", metavar="FOLDER")
    ] = None,
    minutes: Annotated[float | None, _opt(_LENGTH, "Time budget: train about this long.")] = None,
    steps: Annotated[int | None, _opt(_LENGTH, "Number of steps.", min=1)] = None,
    tokens: Annotated[
        int | None, _opt(_LENGTH, "Number of tokens. Default with --depth: 20 x weights.", min=1)
    ] = None,
    objective: Annotated[str, _opt(_STEP, "next_token, masked or block_diffusion.")] = "next_token",
    block: Annotated[int, _opt(_STEP, "Block size of block diffusion.", min=1)] = 8,
    scheduled_sampling: Annotated[
        float, _opt(_STEP, "Share of inputs sampled from the model, at the end of training.")
    ] = 0.0,
    unlikelihood: Annotated[
        float, _opt(_STEP, "Weight of the unlikelihood loss on repeated tokens; 0: off.")
    ] = 0.0,
    mtp: Annotated[
        float,
        _opt(_STEP, "Weight of the loss of a multi-token prediction layer; 0: no such layer."),
    ] = 0.0,
    optimizer: Annotated[str, _opt(_STEP, "muon (with AdamW) or adamw.")] = "muon",
    rate: Annotated[float, _opt(_STEP, "Factor on the default learning rates.", min=0)] = 1.0,
    weight_decay: Annotated[float, _opt(_STEP, "Weight decay of matrices.", min=0)] = 0.1,
    length: Annotated[int | None, _opt(_STEP, "Tokens per row.", min=2)] = None,
    batch: Annotated[int | None, _opt(_STEP, "Rows per forward pass and process.", min=1)] = None,
    batch_tokens: Annotated[int | None, _opt(_STEP, "Tokens per step.", min=1)] = None,
    warmup: Annotated[float, _opt(_STEP, "Share of steps to warm up.", min=0, max=1)] = 0.02,
    decay: Annotated[float, _opt(_STEP, "Share of steps to decay at the end.", min=0, max=1)] = 0.5,
    clip: Annotated[float, _opt(_STEP, "Maximum gradient norm; 0: no clipping.", min=0)] = 1.0,
    inside_documents: Annotated[
        bool, _opt(_STEP, "Restrict attention to the own document.", "--inside-documents")
    ] = False,
    recompute: Annotated[
        bool, _opt(_STEP, "Activation checkpointing: less memory, more work.", "--recompute")
    ] = False,
    bf16: Annotated[bool | None, _opt(_STEP, "bfloat16. Default: on a GPU.")] = None,
    compile: Annotated[bool | None, _opt(_STEP, "torch.compile. Default: on a GPU.")] = None,
    prompt: Annotated[list[str] | None, _opt(_OUTPUT, "Prompt of samples; repeatable.")] = None,
    save_every: Annotated[int | None, _opt(_OUTPUT, "Steps between checkpoints.", min=1)] = None,
    keep: Annotated[int, _opt(_OUTPUT, "Checkpoints to keep, besides milestones.", min=1)] = 2,
    patience: Annotated[
        int,
        _opt(_LENGTH, "Stop after this many evaluations without a new best; 0: never.", min=0),
    ] = 3,
    sample_every: Annotated[int | None, _opt(_OUTPUT, "Steps between samples.", min=1)] = None,
    judge_every: Annotated[
        int | None, _opt(_OUTPUT, "Steps between evaluations on held-out text.", min=1)
    ] = None,
    report: Annotated[
        list[str] | None, _opt(_OUTPUT, "Also log to tensorboard, wandb or trackio.")
    ] = None,
    quiet: Annotated[bool, _opt(_OUTPUT, "Print only the result.", "--quiet", "-q")] = False,
    name: Annotated[str | None, _opt(_WHERE, "Name of the run folder in ./runs.")] = None,
    resume: Annotated[str | None, _opt(_WHERE, "Resume an interrupted run.", metavar="RUN")] = None,
    device: Annotated[str, _opt(_WHERE, "cpu, cuda, ... Default: a GPU if there is one.")] = "auto",
    shard: Annotated[
        bool, _opt(_WHERE, "With torchrun: shard the model over the processes (FSDP).", "--shard")
    ] = False,
    timeout: Annotated[
        float, _opt(_WHERE, "With torchrun: minutes to wait for an unresponsive process.", min=0)
    ] = 10,
    held_out: s.HeldOut = "0.01",
    field: s.Field = None,
    limit: s.Limit = None,
    seed: Annotated[int, _opt(_STEP, "Seed of weights, data order and held-out text.")] = 0,
    offline: o.Offline = False,
) -> None:
    """Train a new model on text: tokenizer, data and model in one command.

    With no arguments it downloads the State of the Union addresses (4 MB) and trains on them for
    about five minutes on two cores. Ctrl-C stops it with a checkpoint to resume from.

    [b]Examples[/b]

      unspool train
      unspool train notes.txt --minutes 10
      unspool train books/ --depth 8 --vocab-size 8192
      unspool train --resume runs/sotu-d4
      torchrun --nproc-per-node 8 --max-restarts 3 -m unspool train big.parquet --depth 12
    """
    s.check_resume(context, resume)
    _check_torch()
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.pretrain import NewSettings

    settings = NewSettings(
        data=tuple(source or (DEFAULT_SOURCE,)), field=field, limit=limit,
        held_out=s.share_or_source(held_out), tokenizer=tokenizer, vocab_size=vocab_size,
        depth=depth, shape=shape, width=width, heads=heads, kv_heads=kv_heads,
        head_width=head_width, ff_width=ff_width, tied=tied, like=like, start=start,
        objective=objective, block=block,
        scheduled_sampling=scheduled_sampling, unlikelihood=unlikelihood, mtp=mtp,
        optimizer=optimizer, rate=rate, weight_decay=weight_decay, length=length, batch=batch,
        batch_tokens=batch_tokens, steps=steps, tokens=tokens, minutes=minutes, warmup=warmup,
        decay=decay, clip=clip, inside_documents=inside_documents, seed=seed, device=device,
        bf16=bf16, compile=compile, recompute=recompute, judge_every=judge_every,
        sample_every=sample_every, save_every=save_every, keep=keep,
        patience=patience, prompts=tuple(prompt or ()),
    )  # fmt: skip
    _train(settings, name, resume, shard, timeout, report or [], quiet, offline)


def _check_torch() -> None:
    from unspool.backends.placement import TorchMissingError, check_torch

    try:
        check_torch()
        import safetensors  # noqa: F401
    except (TorchMissingError, ImportError):
        raise TorchMissingError(
            "training needs torch, which is not installed: pip install 'unspool[train]'"
        ) from None


def _train(
    settings: NewSettings, name: str | None, resume: str | None, shard: bool, timeout: float,
    reports: list[str], quiet: bool, offline: bool,
) -> None:  # fmt: skip
    from unspool.cli.train.display import TrainingDisplay
    from unspool.train.pretrain import train
    from unspool.train.running.events import Listener, combine_listeners
    from unspool.train.running.parallel import Parallel, open_run_everywhere

    with Parallel.from_environment(settings.device, shard=shard, timeout=timeout) as parallel:
        folder, trackers = None, list[Listener]()
        with parallel.all_succeed():
            if parallel.is_first:
                run = _open_run(settings, name, resume, parallel, offline)
                folder, trackers = run.folder, s.open_trackers(reports, run)
        run = open_run_everywhere(folder, parallel)
        with TrainingDisplay(run, quiet=quiet or not parallel.is_first) as display:
            ended = train(run, combine_listeners(display, *trackers), parallel=parallel)
        if parallel.is_first:
            display.close(ended)
            s.exit_if_signalled(run)


def _open_run(
    settings: NewSettings, name: str | None, resume: str | None, parallel: Parallel, offline: bool
) -> Run:
    """The run to resume, or a new one."""
    from unspool.model.hub.find import runs_folder
    from unspool.train.pretrain import create_run
    from unspool.train.running.parallel import find_restarted_run
    from unspool.train.running.runs import Run

    run = Run.open(resume) if resume is not None else find_restarted_run(settings)
    if run is not None:
        run.resume_here()
        return run
    where = runs_folder() / name if name else None
    with s.reading_bar() as progress:
        return create_run(settings, where, parallel=parallel, progress=progress, offline=offline)
