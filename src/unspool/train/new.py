"""A new model from text: tokenizer, data, shape, training, in one run folder.

    run = begin(NewSettings(minutes=4))            # data prepared, all dials set, nothing trained
    train(run, print)                              # to the end; or on, if it was broken off

`begin` makes every dial definite and writes them into run.json, so that `train` needs the folder
alone, now or later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unspool.errors import SettingsError
from unspool.loading import open_tokenizer
from unspool.model.checkpoint import load_transformer, open_checkpoint, save_weights
from unspool.model.config import ModelConfig
from unspool.model.config_hf import config_from_hf, read_json
from unspool.model.hub import find_model
from unspool.model.run_folder import runs_folder
from unspool.model.transformer import Transformer
from unspool.model.weights import parameter_count
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.batches import Batches
from unspool.train.data.shards import Prepared, prepare
from unspool.train.data.tokenizer import TokenizerSettings, make_tokenizer
from unspool.train.learning.mitigations import MitigatedNextToken
from unspool.train.learning.objectives import BlockDiffusion, Masked, Objective, next_token
from unspool.train.learning.optimizers import make_optimizers
from unspool.train.learning.shape import (
    SMALLEST,
    Shape,
    batch_tokens,
    batch_tokens_of,
    like,
    new_config,
    new_model,
    rates_for,
    tokens_at_once,
    vocabulary_for,
)
from unspool.train.running.elastic import job_facts
from unspool.train.running.events import Ended, Event
from unspool.train.running.held_out import HeldOut
from unspool.train.running.loop import Trainer, TrainSettings
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run, RunError
from unspool.train.running.samples import Samples, first_words
from unspool.train.settings import NewSettings, settings_of

if TYPE_CHECKING:
    from unspool.train.data.survey import Progress

_SHARE = 0.93  # of the time that was given: the rest is for judging, sampling and saving


# -- before the first step ------------------------------------------------------------------


def begin(
    settings: NewSettings,
    folder: Path | None = None,
    *,
    parallel: Parallel | None = None,
    progress: Progress | None = None,
    offline: bool = False,
) -> Run:
    """A run with its data prepared and every dial definite."""
    parallel = parallel or Parallel.alone(settings.device)
    if folder is not None and (folder / "run.json").exists():
        raise RunError(f"{folder}: has a run already; go on with it (--resume) or name another")
    job = job_facts(settings)
    settings = _with_depth(settings)
    tokenizer = _tokenizer(settings, progress, offline)
    prepared = _prepared(settings, tokenizer, progress, offline)
    config = _config(settings, tokenizer)
    settings = _definite(settings, config, tokenizer, prepared, parallel)
    name = Path(settings.data[0]).stem or "run"
    run = Run.create(
        folder or Run.free_folder(f"{name}-d{config.layers}", runs_folder()),
        "new",
        settings=asdict(settings),
        config=config.to_dict(),
        parameters=parameter_count(config),
        steps=settings.steps,
        seed=settings.seed,
        data={**prepared.card.to_json(), "folder": str(prepared.folder)},
        **job,
    )
    tokenizer.save(run.folder / "tokenizer")
    return run


def _with_depth(settings: NewSettings) -> NewSettings:
    """A depth where nothing says how large, and an end where nothing says how long."""
    if sum(each is not None for each in (settings.steps, settings.tokens, settings.minutes)) > 1:
        raise SettingsError("give steps, tokens or minutes, not several of them")
    sized = settings.depth or settings.like or settings.start
    timed = settings.steps or settings.tokens or settings.minutes
    if not sized:
        settings = replace(
            settings, depth=SMALLEST["depth"], width=settings.width or SMALLEST["width"]
        )
    if not (timed or sized):
        settings = replace(
            settings,
            steps=SMALLEST["steps"],
            batch_tokens=settings.batch_tokens or SMALLEST["batch_tokens"],
        )
    return settings


def _tokenizer(settings: NewSettings, progress: Progress | None, offline: bool) -> Tokenizer:
    if settings.start:
        opened = open_tokenizer(open_checkpoint(find_model(settings.start, offline=offline)))
        if opened is None:
            raise SettingsError(f"{settings.start} has no tokenizer.json, so text cannot be read")
        return opened
    if settings.tokenizer:
        return Tokenizer.from_file(settings.tokenizer)
    size = settings.vocab_size or vocabulary_for(settings.depth or 12)
    return make_tokenizer(
        settings.data, TokenizerSettings(size), field=settings.field, limit=settings.limit,
        held_out=settings.held_out, seed=settings.seed, progress=progress, offline=offline,
    ).tokenizer  # fmt: skip


def _prepared(
    settings: NewSettings, tokenizer: Tokenizer, progress: Progress | None, offline: bool
) -> Prepared:
    return prepare(
        settings.data, tokenizer, field=settings.field, limit=settings.limit,
        held_out=settings.held_out, seed=settings.seed, progress=progress, offline=offline,
    )  # fmt: skip


def _config(settings: NewSettings, tokenizer: Tokenizer) -> ModelConfig:
    """The model's settings, those too that say how far it will look."""
    config = _shape(settings, tokenizer)
    if settings.objective == "next_token":
        return config
    block = settings.block if settings.objective == "block_diffusion" else 0
    return replace(
        config, sight="block" if block else "whole", block=block, mask_id=config.vocab_size - 1,
        shifted=settings.start is not None,
    )  # fmt: skip


def _shape(settings: NewSettings, tokenizer: Tokenizer) -> ModelConfig:
    if settings.start:
        return open_checkpoint(find_model(settings.start)).config
    # Room for a mask that is no token of the text.
    vocabulary = tokenizer.vocab_size + (settings.objective != "next_token")
    ends = tuple(sorted(tokenizer.end_ids))
    length = settings.length or default_length(settings.depth)
    if settings.like:
        other = _config_of(settings.like)
        return replace(like(other, vocabulary, **settings.sizes), end_ids=ends)
    assert settings.depth is not None
    config = new_config(settings.depth, vocabulary, length, settings.shape, **settings.sizes)
    return replace(config, end_ids=ends)


def _config_of(name: str) -> ModelConfig:
    """Of a model; a config.json alone will do, as none of the weights is wanted."""
    if Path(name).name == "config.json" and Path(name).is_file():
        return config_from_hf(read_json(Path(name)))
    return open_checkpoint(find_model(name)).config


def default_length(depth: int | None) -> int:
    """Tokens in a row: short for small models, whose texts hold together for a sentence or two."""
    return 256 if depth is not None and depth <= 4 else 1024 if depth and depth <= 8 else 2048


def _definite(
    settings: NewSettings,
    config: ModelConfig,
    tokenizer: Tokenizer,
    prepared: Prepared,
    parallel: Parallel,
) -> NewSettings:
    """The same settings with no None left in what decides the training."""
    cuda = parallel.device.type == "cuda"
    length = min(settings.length or default_length(settings.depth), config.context)
    length = min(length, max(8, len(prepared.train.ids) - 1))
    settings = replace(
        settings,
        length=length,
        bf16=cuda if settings.bf16 is None else settings.bf16,
        compile=cuda if settings.compile is None else settings.compile,
        prompts=settings.prompts or (first_words(prepared.held_out, tokenizer),),
        batch=settings.batch or max(1, tokens_at_once(config, _memory(parallel)) // length),
    )
    rows = settings.batch or 1
    tokens = settings.tokens or Shape.around(config).tokens
    if settings.minutes:
        # A CPU is as quick with few rows, and a trial with them over sooner; a GPU is not.
        few = settings if cuda else replace(settings, batch=max(1, min(rows, 2048 // length)))
        tokens = int(_speed(few, config, prepared, parallel) * settings.minutes * 60 * _SHARE)
    usual = batch_tokens_of(settings.steps) if settings.steps else batch_tokens(tokens)
    wanted = settings.batch_tokens or usual
    rows = max(1, min(rows, wanted // (length * parallel.world)))
    accumulate = max(1, round(wanted / (rows * length * parallel.world)))
    in_a_step = rows * accumulate * length * parallel.world
    steps = settings.steps or max(1, tokens // in_a_step)
    return replace(
        settings,
        batch=rows,
        batch_tokens=in_a_step,
        steps=steps,
        tokens=steps * in_a_step,
        judge_every=settings.judge_every or max(1, steps // 10),
        sample_every=settings.sample_every or max(1, steps // 8),
        save_every=settings.save_every or max(1, steps // 10),
        log_every=max(settings.log_every, steps // 2000),
    )


def _memory(parallel: Parallel) -> int | None:
    """Of the GPU; None: it is none."""
    if parallel.device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(parallel.device).total_memory)


def _speed(
    settings: NewSettings, config: ModelConfig, prepared: Prepared, parallel: Parallel
) -> float:
    """Tokens a second of all processes, from three steps of this one that are thrown away."""
    alone = Parallel(parallel.device)
    model = new_model(config, settings.seed).to(parallel.device)
    trainer = Trainer(
        model, _batches(settings, prepared, alone), _objective(settings, config),
        make_optimizers(model, rates_for(config), settings.optimizer),  # type: ignore[arg-type]
        _train_settings(settings, 1), parallel=alone,
    )  # fmt: skip
    seconds = []
    for _ in range(3):
        since = time.monotonic()
        *_, tokens, _ = trainer.one_step()
        seconds.append(time.monotonic() - since)
    return tokens / min(seconds[1:]) * parallel.world


# -- the training ---------------------------------------------------------------------------


def train(
    run: Run,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    parallel: Parallel | None = None,
) -> Ended:
    """Train a run that was begun, from its last checkpoint on if it has one."""
    settings = settings_of(run)
    parallel = parallel or Parallel.alone(settings.device)
    tokenizer = Tokenizer.from_file(run.folder / "tokenizer")
    with parallel.agreed():  # a machine that has not got it yet prepares it
        prepared = _same_data(run, settings, tokenizer)
    config = ModelConfig.from_dict(run.facts["config"])
    objective = _objective(settings, config)
    rates = rates_for(config).times(settings.rate)
    rates = replace(rates, weight_decay=settings.weight_decay)
    settings, accumulate = _shared(settings, parallel.world)
    assert settings.length is not None
    # With remedies the model is judged as without, so that runs can be compared.
    judged_by = next_token if settings.mitigated else objective
    judge = HeldOut(prepared.held_out, tokenizer, judged_by, settings.length, rows=64)
    sampler = Samples(tokenizer, settings.prompts) if settings.objective == "next_token" else None
    trainer = Trainer(
        parallel.place(_model(settings, config)),
        _batches(settings, prepared, parallel),
        objective,
        lambda model: make_optimizers(model, rates, settings.optimizer),  # type: ignore[arg-type]
        _train_settings(settings, accumulate),
        run,
        save_model=lambda weights, folder: save_model(config, weights, tokenizer, folder),
        judge=judge if judge.batches else None,
        sampler=sampler,
        parallel=parallel,
    )
    return trainer.run(on_event)


def _shared(settings: NewSettings, world: int) -> tuple[NewSettings, int]:
    """The rows of a step shared by so many processes, which need not be as many as the run was
    begun with: rows that each takes at once, and how often it does."""
    assert settings.length and settings.batch_tokens and settings.batch
    rows = settings.batch_tokens // settings.length
    each, left = divmod(rows, world)
    if left:
        raise RunError(
            f"a step of this run has {rows} rows of text, which {world} processes cannot share "
            f"evenly; start as many as divide {rows}"
        )
    batch = next(n for n in range(min(settings.batch, each), 0, -1) if each % n == 0)
    return replace(settings, batch=batch), each // batch


def save_model(
    config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer, folder: Path
) -> None:
    """A model folder that `unspool.load` and transformers open."""
    save_weights(config, weights, folder)
    tokenizer.save(folder)


def _same_data(run: Run, settings: NewSettings, tokenizer: Tokenizer) -> Prepared:
    """What the run was begun with: the batches of later steps must be those of then."""
    folder = Path(run.facts["data"]["folder"])
    if (folder / "card.json").exists():
        return Prepared.open(folder)
    prepared = _prepared(settings, tokenizer, None, False)
    if prepared.folder.name != folder.name:
        raise RunError(
            f"the text that {run.name} was begun with ({', '.join(settings.data)}) has changed, so "
            "it cannot go on; begin a new run"
        )
    return prepared


def _model(settings: NewSettings, config: ModelConfig) -> Transformer:
    if settings.start is None:
        return new_model(config, settings.seed)
    checkpoint = open_checkpoint(find_model(settings.start))
    checkpoint.config.check_head()
    return load_transformer(checkpoint).requires_grad_(True)


def _objective(settings: NewSettings, config: ModelConfig) -> Objective:
    mask = config.vocab_size - 1
    if settings.objective == "masked":
        return Masked(mask, shifted=settings.start is not None)
    if settings.objective == "block_diffusion":
        return BlockDiffusion(mask, settings.block, shifted=settings.start is not None)
    if settings.mitigated:
        return MitigatedNextToken(settings.scheduled_sampling, settings.unlikelihood)
    return next_token


def _batches(settings: NewSettings, prepared: Prepared, parallel: Parallel) -> Batches:
    assert settings.batch is not None and settings.length is not None
    return Batches(
        prepared.train, settings.batch, settings.length, settings.seed, parallel.rank,
        parallel.world, settings.inside_documents,
    )  # fmt: skip


def _train_settings(settings: NewSettings, accumulate: int) -> TrainSettings:
    steps = settings.steps or 1
    return TrainSettings(
        steps=steps,
        warmup=round(steps * settings.warmup),
        decay=settings.decay,
        accumulate=accumulate,
        clip=settings.clip,
        seed=settings.seed,
        log_every=settings.log_every,
        judge_every=settings.judge_every or 0,
        sample_every=settings.sample_every or 0,
        save_every=settings.save_every or 0,
        keep=settings.keep,
        patience=settings.patience,
        seconds=settings.minutes * 60 * _SHARE if settings.minutes else None,
        bf16=bool(settings.bf16),
        compile=bool(settings.compile),
        recompute=settings.recompute,
    )
