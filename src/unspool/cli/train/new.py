"""`unspool train`: a new model from text, in one command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import options as o
from unspool.cli.train import source as s
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from unspool.train.running.parallel import Parallel
    from unspool.train.running.runs import Run
    from unspool.train.settings import NewSettings

_SIZE, _LENGTH, _STEP = "How large", "How long", "How each step is done"
_TELL, _WHERE = "What is told and kept", "Where"


def _opt(panel: str, words: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=words, rich_help_panel=panel, **more)


def new(
    context: typer.Context,
    source: s.Sources = None,
    depth: Annotated[int | None, _opt(_SIZE, "Layers; all else follows.", min=1)] = None,
    shape: Annotated[
        str, _opt(_SIZE, "What a layer is: qwen3, llama; lfm2, qwen3.5 recur in most layers.")
    ] = "qwen3",
    width: Annotated[
        int | None, _opt(_SIZE, "Numbers a token carries. Default: 64 for each layer.", min=1)
    ] = None,
    heads: Annotated[int | None, _opt(_SIZE, "Attention heads.", min=1)] = None,
    kv_heads: Annotated[int | None, _opt(_SIZE, "Heads of keys and values.", min=1)] = None,
    head_width: Annotated[int | None, _opt(_SIZE, "Numbers in a head.", min=1)] = None,
    ff_width: Annotated[int | None, _opt(_SIZE, "Width of the feed-forward.", min=1)] = None,
    tied: Annotated[
        bool | None, _opt(_SIZE, "The head is the embedding table.", "--tied/--untied")
    ] = None,
    like: Annotated[
        str | None, _opt(_SIZE, "A model, or a config.json, whose shape to take.", metavar="MODEL")
    ] = None,
    start: Annotated[
        str | None, _opt(_SIZE, "A model, or a run, to go on from.", "--from", metavar="MODEL")
    ] = None,
    vocab_size: Annotated[int | None, _opt(_SIZE, "Tokens of the vocabulary made.", min=1)] = None,
    tokenizer: Annotated[
        str | None, _opt(_SIZE, "A vocabulary to use; else one is made.", metavar="FOLDER")
    ] = None,
    minutes: Annotated[float | None, _opt(_LENGTH, "Time budget: train about this long.")] = None,
    steps: Annotated[int | None, _opt(_LENGTH, "So many steps.", min=1)] = None,
    tokens: Annotated[
        int | None, _opt(_LENGTH, "So many tokens. Default with --depth: 20 a weight.", min=1)
    ] = None,
    objective: Annotated[str, _opt(_STEP, "next_token, masked or block_diffusion.")] = "next_token",
    block: Annotated[int, _opt(_STEP, "Tokens in a block of block diffusion.", min=1)] = 8,
    scheduled_sampling: Annotated[
        float, _opt(_STEP, "Share of the inputs that the model draws itself, at the end.")
    ] = 0.0,
    unlikelihood: Annotated[
        float, _opt(_STEP, "Weight of not repeating what occurred before; 0: off.")
    ] = 0.0,
    optimizer: Annotated[str, _opt(_STEP, "muon (with AdamW) or adamw.")] = "muon",
    rate: Annotated[float, _opt(_STEP, "Times the usual learning rates.", min=0)] = 1.0,
    weight_decay: Annotated[float, _opt(_STEP, "Of matrices.", min=0)] = 0.1,
    length: Annotated[int | None, _opt(_STEP, "Tokens in a row of text.", min=2)] = None,
    batch: Annotated[int | None, _opt(_STEP, "Rows at once, in each process.", min=1)] = None,
    batch_tokens: Annotated[int | None, _opt(_STEP, "Tokens in a step.", min=1)] = None,
    warmup: Annotated[float, _opt(_STEP, "Share of the steps.", min=0, max=1)] = 0.02,
    decay: Annotated[float, _opt(_STEP, "Share of the steps, at the end.", min=0, max=1)] = 0.5,
    clip: Annotated[float, _opt(_STEP, "Longest gradient; 0: any.", min=0)] = 1.0,
    inside_documents: Annotated[
        bool, _opt(_STEP, "No token sees another document.", "--inside-documents")
    ] = False,
    recompute: Annotated[
        bool, _opt(_STEP, "Less memory for a third more work.", "--recompute")
    ] = False,
    bf16: Annotated[bool | None, _opt(_STEP, "bfloat16; default: on a GPU.")] = None,
    compile: Annotated[bool | None, _opt(_STEP, "torch.compile; default: on a GPU.")] = None,
    prompt: Annotated[
        list[str] | None, _opt(_TELL, "Begin the samples so; may be given several times.")
    ] = None,
    save_every: Annotated[int | None, _opt(_TELL, "Steps between checkpoints.", min=1)] = None,
    keep: Annotated[int, _opt(_TELL, "Checkpoints beside those of the film.", min=1)] = 2,
    patience: Annotated[
        int,
        _opt(_LENGTH, "Stop after this many evaluations without a new best; 0: never.", min=0),
    ] = 3,
    sample_every: Annotated[int | None, _opt(_TELL, "Steps between samples.", min=1)] = None,
    judge_every: Annotated[
        int | None, _opt(_TELL, "Steps between judgements on held-out text.", min=1)
    ] = None,
    report: Annotated[
        list[str] | None, _opt(_TELL, "Also to tensorboard, wandb or trackio.")
    ] = None,
    quiet: Annotated[bool, _opt(_TELL, "Only the closing lines.", "--quiet", "-q")] = False,
    name: Annotated[str | None, _opt(_WHERE, "Of the run: a folder in ./runs.")] = None,
    resume: Annotated[
        str | None, _opt(_WHERE, "Go on with a run that was broken off.", metavar="RUN")
    ] = None,
    device: Annotated[
        str, _opt(_WHERE, "cpu, cuda, ...; default: a GPU if there is one.")
    ] = "auto",
    shard: Annotated[
        bool, _opt(_WHERE, "With torchrun: each process has a part of the model.", "--shard")
    ] = False,
    timeout: Annotated[
        float, _opt(_WHERE, "With torchrun: minutes to wait for a process that is silent.", min=0)
    ] = 10,
    held_out: s.HeldOut = "0.01",
    field: s.Field = None,
    limit: s.Limit = None,
    seed: Annotated[int, _opt(_STEP, "Of the start, the order, and what is held out.")] = 0,
    offline: o.Offline = False,
) -> None:
    """Train a new model on text: a tokenizer, the data, a model, and it writes.

    With nothing said it fetches the State of the Union addresses (4 MB) and learns from them for
    about five minutes on two cores. Ctrl-C stops it with a checkpoint to go on from.

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
    from unspool.train.settings import NewSettings

    settings = NewSettings(
        data=tuple(source or (DEFAULT_SOURCE,)), field=field, limit=limit,
        held_out=s.share_or_source(held_out), tokenizer=tokenizer, vocab_size=vocab_size,
        depth=depth, shape=shape, width=width, heads=heads, kv_heads=kv_heads,
        head_width=head_width, ff_width=ff_width, tied=tied, like=like, start=start,
        objective=objective, block=block,
        scheduled_sampling=scheduled_sampling, unlikelihood=unlikelihood,
        optimizer=optimizer, rate=rate, weight_decay=weight_decay, length=length, batch=batch,
        batch_tokens=batch_tokens, steps=steps, tokens=tokens, minutes=minutes, warmup=warmup,
        decay=decay, clip=clip, inside_documents=inside_documents, seed=seed, device=device,
        bf16=bf16, compile=compile, recompute=recompute, judge_every=judge_every,
        sample_every=sample_every, save_every=save_every, keep=keep,
        patience=patience, prompts=tuple(prompt or ()),
    )  # fmt: skip
    _train(settings, name, resume, shard, timeout, report or [], quiet, offline)


def _check_torch() -> None:
    from unspool.backends.torch.available import TorchMissingError, check_torch

    try:
        check_torch()
        import safetensors  # noqa: F401
    except (TorchMissingError, ImportError):
        raise TorchMissingError(
            "training needs torch, which is not here: pip install 'unspool[train]'"
        ) from None


def _train(
    settings: NewSettings, name: str | None, resume: str | None, shard: bool, timeout: float,
    reports: list[str], quiet: bool, offline: bool,
) -> None:  # fmt: skip
    from unspool.cli.train.telling import Telling
    from unspool.train.new import train
    from unspool.train.running.elastic import seen_by_all
    from unspool.train.running.parallel import Parallel
    from unspool.train.running.reports import Listener, all_of, reporters

    with Parallel.started(settings.device, shard=shard, timeout=timeout) as parallel:
        folder, told = None, list[Listener]()
        with parallel.agreed():
            if parallel.first:
                begun = _begun(settings, name, resume, parallel, offline)
                try:
                    folder, told = begun.folder, reporters(reports, begun)
                except UnspoolError:
                    begun.discard_if_empty()
                    raise
        run = seen_by_all(folder, parallel)
        with Telling(run, quiet=quiet or not parallel.first) as telling:
            ended = train(run, all_of(telling, *told), parallel=parallel)
        if parallel.first:
            telling.close(ended)
            s.exit_if_signalled(run)


def _begun(
    settings: NewSettings, name: str | None, resume: str | None, parallel: Parallel, offline: bool
) -> Run:
    """A run to be trained: the one to go on with, or a new one."""
    from unspool.model.run_folder import runs_folder
    from unspool.train.new import begin
    from unspool.train.running.elastic import begun_before
    from unspool.train.running.runs import Run

    run = Run.open(resume) if resume is not None else begun_before(settings)
    if run is not None:
        run.take_over()
        return run
    where = runs_folder() / name if name else None
    with s.reading_bar() as progress:
        return begin(settings, where, parallel=parallel, progress=progress, offline=offline)
