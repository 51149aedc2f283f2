"""Train a new model: settings stored in run.json, creation of the run, saving."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unspool.errors import SettingsError
from unspool.loading import open_tokenizer
from unspool.model.config import ModelConfig
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_weights
from unspool.model.files.config_json import config_from_hf, read_json
from unspool.model.hub.find import find_model, runs_folder
from unspool.model.layers.transformer import Transformer
from unspool.model.weights import parameter_count
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.batches import PackedBatches
from unspool.train.data.prepared import PreparedData, prepare
from unspool.train.data.sources import DEFAULT_SOURCE
from unspool.train.data.tokenizer import TokenizerSettings, make_tokenizer
from unspool.train.learning.model_size import (
    RECURRENT_SHAPES,
    SHAPES,
    SMALLEST,
    ModelPlan,
    batch_tokens,
    batch_tokens_for_steps,
    config_like,
    micro_batch_tokens,
    new_config,
    new_model,
    rates_for,
    vocabulary_for,
)
from unspool.train.learning.objectives import (
    BlockDiffusion,
    Masked,
    MitigatedNextToken,
    NextTokenAndMtp,
    Objective,
    next_token,
)
from unspool.train.learning.optimizers import make_optimizers
from unspool.train.running.events import Event, RunEnded
from unspool.train.running.loop import (
    HeldOutEvaluation,
    SampleGenerator,
    Trainer,
    TrainSettings,
    first_words,
)
from unspool.train.running.parallel import Parallel, job_facts
from unspool.train.running.runs import Run, RunError

if TYPE_CHECKING:
    from unspool.train.data.selection import Progress


# -- Settings of training a new model, stored in run.json

OBJECTIVES = ("next_token", "masked", "block_diffusion")
OPTIMIZERS = ("muon", "adamw")

_POSITIVE = (
    "limit", "vocab_size", "depth", "width", "heads", "kv_heads", "head_width", "ff_width",
    "block", "length", "batch", "batch_tokens", "steps", "tokens", "minutes", "log_every",
    "judge_every", "sample_every", "save_every",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSettings:
    """All settings. One that is None follows from the others by the rules in `model_size.py`."""

    data: tuple[str, ...] = (DEFAULT_SOURCE,)
    field: str | None = None
    limit: int | None = None
    held_out: float | str = 0.01
    tokenizer: str | None = None  # a folder; None: train one
    vocab_size: int | None = None
    depth: int | None = None
    shape: str = "qwen3"  # layer type: one of SHAPES
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_width: int | None = None
    ff_width: int | None = None
    tied: bool | None = None
    like: str | None = None  # a model whose config to use
    start: str | None = None  # a model whose weights to start from
    objective: str = "next_token"
    block: int = 8  # block size of block diffusion
    scheduled_sampling: float = 0.0  # share of inputs sampled from the model, at the end
    unlikelihood: float = 0.0  # weight of the repetition penalty; 0: off
    mtp: float = 0.0  # weight of the loss of a multi-token prediction layer; 0: no such layer
    optimizer: str = "muon"
    rate: float = 1.0  # factor on the default learning rates
    weight_decay: float = 0.1
    length: int | None = None  # tokens per row
    batch: int | None = None  # rows per forward pass and process
    batch_tokens: int | None = None  # per step, over all processes
    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    warmup: float = 0.02  # share of the steps
    decay: float = 0.5
    clip: float = 1.0
    inside_documents: bool = False
    seed: int = 0
    device: str = "auto"
    bf16: bool | None = None
    compile: bool | None = None
    recompute: bool = False
    log_every: int = 1
    judge_every: int | None = None
    sample_every: int | None = None
    save_every: int | None = None
    keep: int = 2
    patience: int = 3  # evaluations in a row without a new best that end the run; 0: never
    prompts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingsError(f"{name} must be more than 0, got {value}")
        if self.objective not in OBJECTIVES:
            raise _unknown("objective", self.objective, OBJECTIVES)
        if self.optimizer not in OPTIMIZERS:
            raise _unknown("optimizer", self.optimizer, OPTIMIZERS)
        MitigatedNextToken(self.scheduled_sampling, self.unlikelihood)  # checks both
        if self.is_mitigated and self.objective != "next_token":
            raise SettingsError(
                "scheduled sampling and unlikelihood need the objective next_token, not "
                f"{self.objective}; leave them out"
            )
        if not 0 <= self.mtp < math.inf:
            raise SettingsError(f"mtp must be a finite number >= 0, got {self.mtp!r}")
        if self.mtp and (self.is_mitigated or self.objective != "next_token"):
            raise SettingsError(
                "an MTP layer needs the objective next_token, without scheduled sampling and "
                "unlikelihood; leave them or mtp out"
            )
        if self.shape not in SHAPES:
            raise _unknown("shape", self.shape, SHAPES)
        if self.shape in RECURRENT_SHAPES and self.objective != "next_token":
            raise SettingsError(
                f"the recurrent layers of {self.shape} are causal, but the objective "
                f"{self.objective} is bidirectional; use --shape qwen3 or llama with it"
            )
        if self.shape != "qwen3" and (self.like or self.start):
            raise SettingsError("--like and --from bring their own shape; leave out --shape")
        if self.start and (self.like or self.depth or self.tokenizer):
            raise SettingsError(
                "--from brings its own shape and tokenizer; leave out --like, --depth and "
                "--tokenizer"
            )

    @property
    def is_mitigated(self) -> bool:
        """Whether scheduled sampling or unlikelihood is on."""
        return bool(self.scheduled_sampling or self.unlikelihood)

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of the model config that were set explicitly."""
        names = ("width", "heads", "kv_heads", "head_width", "ff_width", "tied")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def _unknown(name: str, value: str, choices: tuple[str, ...]) -> SettingsError:
    return SettingsError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")


def settings_of(run: Run) -> NewSettings:
    """The settings stored in a run."""
    names = {field.name for field in fields(NewSettings)}
    stored = {n: value for n, value in run.facts.get("settings", {}).items() if n in names}
    for name in ("data", "prompts"):
        stored[name] = tuple(stored.get(name, ()))
    return NewSettings(**stored)


# -- Train a new model from text: tokenizer, data, config and training, in one run folder

_TRAINING_SHARE = 0.93  # of the time budget; evaluation, sampling and saving take the rest


def create_run(
    settings: NewSettings,
    folder: Path | None = None,
    *,
    parallel: Parallel | None = None,
    progress: Progress | None = None,
    offline: bool = False,
) -> Run:
    """Prepare the data, resolve all settings, and create the run folder."""
    parallel = parallel or Parallel.single_process(settings.device)
    if folder is not None and (folder / "run.json").exists():
        raise RunError(f"{folder}: has a run already; continue it with --resume, or name another")
    job = job_facts(settings)
    settings = _with_default_size(settings)
    tokenizer = _tokenizer(settings, progress, offline)
    prepared = _prepare(settings, tokenizer, progress, offline)
    config = _config(settings, tokenizer)
    settings = _resolve(settings, config, tokenizer, prepared, parallel)
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


def _with_default_size(settings: NewSettings) -> NewSettings:
    """Fill in the default model size and number of steps."""
    budgets = (settings.steps, settings.tokens, settings.minutes)
    if sum(budget is not None for budget in budgets) > 1:
        raise SettingsError("give only one of steps, tokens and minutes")
    has_size = settings.depth or settings.like or settings.start
    if not has_size:
        settings = replace(
            settings, depth=SMALLEST["depth"], width=settings.width or SMALLEST["width"]
        )
    if not (has_size or any(budgets)):
        settings = replace(
            settings,
            steps=SMALLEST["steps"],
            batch_tokens=settings.batch_tokens or SMALLEST["batch_tokens"],
        )
    return settings


def _tokenizer(settings: NewSettings, progress: Progress | None, offline: bool) -> Tokenizer:
    if settings.start:
        tokenizer = open_tokenizer(open_checkpoint(find_model(settings.start, offline=offline)))
        if tokenizer is None:
            raise SettingsError(f"{settings.start} has no tokenizer.json to encode the text with")
        return tokenizer
    if settings.tokenizer:
        return Tokenizer.from_file(settings.tokenizer)
    size = settings.vocab_size or vocabulary_for(settings.depth or 12)
    return make_tokenizer(
        settings.data, TokenizerSettings(size), field=settings.field, limit=settings.limit,
        held_out=settings.held_out, seed=settings.seed, progress=progress, offline=offline,
    ).tokenizer  # fmt: skip


def _prepare(
    settings: NewSettings, tokenizer: Tokenizer, progress: Progress | None, offline: bool
) -> PreparedData:
    return prepare(
        settings.data, tokenizer, field=settings.field, limit=settings.limit,
        held_out=settings.held_out, seed=settings.seed, progress=progress, offline=offline,
    )  # fmt: skip


def _config(settings: NewSettings, tokenizer: Tokenizer) -> ModelConfig:
    """Config of the model, with the attention pattern of its objective."""
    config = _causal_config(settings, tokenizer)
    if settings.objective == "next_token":
        return config
    block = settings.block if settings.objective == "block_diffusion" else 0
    return replace(
        config, sight="block" if block else "whole", block=block, mask_id=config.vocab_size - 1,
        shifted=settings.start is not None,
    )  # fmt: skip


def _causal_config(settings: NewSettings, tokenizer: Tokenizer) -> ModelConfig:
    if settings.start:
        return open_checkpoint(find_model(settings.start)).config
    # One more id for the mask token, which is not in the text.
    vocabulary = tokenizer.vocab_size + (settings.objective != "next_token")
    ends = tuple(sorted(tokenizer.end_ids))
    length = settings.length or default_length(settings.depth)
    if settings.like:
        config = config_like(_read_config(settings.like), vocabulary, **settings.sizes)
        return replace(config, end_ids=ends)
    assert settings.depth is not None
    config = new_config(settings.depth, vocabulary, length, settings.shape, **settings.sizes)
    return replace(config, end_ids=ends)


def _read_config(name: str) -> ModelConfig:
    """Config of a model, or of a config.json without weights."""
    if Path(name).name == "config.json" and Path(name).is_file():
        return config_from_hf(read_json(Path(name)))
    return open_checkpoint(find_model(name)).config


def default_length(depth: int | None) -> int:
    """Tokens per row: short for small models, which are coherent for a sentence or two."""
    return 256 if depth is not None and depth <= 4 else 1024 if depth and depth <= 8 else 2048


def _resolve(
    settings: NewSettings,
    config: ModelConfig,
    tokenizer: Tokenizer,
    prepared: PreparedData,
    parallel: Parallel,
) -> NewSettings:
    """Replace every None by its value for this model, data and machine."""
    cuda = parallel.device.type == "cuda"
    length = min(settings.length or default_length(settings.depth), config.context)
    length = min(length, max(8, len(prepared.train.ids) - 1))
    settings = replace(
        settings,
        length=length,
        bf16=cuda if settings.bf16 is None else settings.bf16,
        compile=cuda if settings.compile is None else settings.compile,
        prompts=settings.prompts or (first_words(prepared.held_out, tokenizer),),
        batch=settings.batch or max(1, micro_batch_tokens(config, _gpu_bytes(parallel)) // length),
    )
    rows = settings.batch or 1
    tokens = settings.tokens or ModelPlan.for_config(config).tokens
    if settings.minutes:
        # On a CPU few rows are as fast per token, and the trial is over sooner; not on a GPU.
        trial = settings if cuda else replace(settings, batch=max(1, min(rows, 2048 // length)))
        speed = _measure_speed(trial, config, prepared, parallel)
        tokens = int(speed * settings.minutes * 60 * _TRAINING_SHARE)
    default = batch_tokens_for_steps(settings.steps) if settings.steps else batch_tokens(tokens)
    target = settings.batch_tokens or default
    rows = max(1, min(rows, target // (length * parallel.world_size)))
    accumulate = max(1, round(target / (rows * length * parallel.world_size)))
    step_tokens = rows * accumulate * length * parallel.world_size
    steps = settings.steps or max(1, tokens // step_tokens)
    return replace(
        settings,
        batch=rows,
        batch_tokens=step_tokens,
        steps=steps,
        tokens=steps * step_tokens,
        judge_every=settings.judge_every or max(1, steps // 10),
        sample_every=settings.sample_every or max(1, steps // 8),
        save_every=settings.save_every or max(1, steps // 10),
        log_every=max(settings.log_every, steps // 2000),
    )


def _gpu_bytes(parallel: Parallel) -> int | None:
    """Memory of the GPU in bytes; None on a CPU."""
    if parallel.device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(parallel.device).total_memory)


def _measure_speed(
    settings: NewSettings, config: ModelConfig, prepared: PreparedData, parallel: Parallel
) -> float:
    """Tokens per second of all processes, from three discarded steps of this one."""
    alone = Parallel(parallel.device)
    model = new_model(config, settings.seed, mtp=settings.mtp > 0).to(parallel.device)
    trainer = Trainer(
        model, _batches(settings, prepared, alone), _objective(settings, config),
        make_optimizers(model, rates_for(config), settings.optimizer),  # type: ignore[arg-type]
        _train_settings(settings, 1), parallel=alone,
    )  # fmt: skip
    seconds = []
    for _ in range(3):
        step_start = time.monotonic()
        *_, tokens, _ = trainer.train_step()
        seconds.append(time.monotonic() - step_start)
    return tokens / min(seconds[1:]) * parallel.world_size


def train(
    run: Run,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    parallel: Parallel | None = None,
) -> RunEnded:
    """Train a run to the end, from its last checkpoint if it has one."""
    settings = settings_of(run)
    parallel = parallel or Parallel.single_process(settings.device)
    tokenizer = Tokenizer.from_file(run.folder / "tokenizer")
    with parallel.all_succeed():  # each machine prepares the data if it is not in its cache
        prepared = _open_data(run, settings, tokenizer)
    config = ModelConfig.from_dict(run.facts["config"])
    objective = _objective(settings, config)
    rates = rates_for(config).times(settings.rate)
    rates = replace(rates, weight_decay=settings.weight_decay)
    settings, accumulate = _divide_batch(settings, parallel.world_size)
    assert settings.length is not None
    # Evaluated with the plain loss, so that runs can be compared.
    evaluated = next_token if settings.is_mitigated or settings.mtp else objective
    judge = HeldOutEvaluation(prepared.held_out, tokenizer, evaluated, settings.length, rows=64)
    sampler = (
        SampleGenerator(tokenizer, settings.prompts) if settings.objective == "next_token" else None
    )
    trainer = Trainer(
        parallel.place(_model(settings, config)),
        _batches(settings, prepared, parallel),
        objective,
        lambda model: make_optimizers(model, rates, settings.optimizer),  # type: ignore[arg-type]
        _train_settings(settings, accumulate),
        run,
        save_model=lambda weights, folder: save_model(config, weights, tokenizer, folder),
        evaluate=judge if judge.batches else None,
        sampler=sampler,
        parallel=parallel,
    )
    return trainer.run(on_event)


def _divide_batch(settings: NewSettings, world: int) -> tuple[NewSettings, int]:
    """Divide the rows of a step by `world` processes, which may be more than the run started with.

    Returns settings with the rows per forward pass, and the number of accumulated passes.
    """
    assert settings.length and settings.batch_tokens and settings.batch
    rows = settings.batch_tokens // settings.length
    process_rows, remainder = divmod(rows, world)
    if remainder:
        raise RunError(
            f"a step of this run has {rows} rows, which {world} processes cannot share evenly; "
            f"use a number of processes that divides {rows}"
        )
    limit = min(settings.batch, process_rows)
    batch = next(n for n in range(limit, 0, -1) if process_rows % n == 0)
    return replace(settings, batch=batch), process_rows // batch


def save_model(
    config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer, folder: Path
) -> None:
    """Write a model folder for `unspool.load` and transformers."""
    save_weights(config, weights, folder)
    tokenizer.save(folder)


def _open_data(run: Run, settings: NewSettings, tokenizer: Tokenizer) -> PreparedData:
    """The data that the run started with; a resumed run must see the same batches."""
    folder = Path(run.facts["data"]["folder"])
    if (folder / "card.json").exists():
        return PreparedData.open(folder)
    prepared = _prepare(settings, tokenizer, None, False)
    if prepared.folder.name != folder.name:
        raise RunError(
            f"the data of {run.name} ({', '.join(settings.data)}) has changed since it started, so "
            "it cannot be resumed; start a new run"
        )
    return prepared


def _model(settings: NewSettings, config: ModelConfig) -> Transformer:
    if settings.start is None:
        return new_model(config, settings.seed, mtp=settings.mtp > 0)
    checkpoint = open_checkpoint(find_model(settings.start))
    checkpoint.config.require_head()
    model = load_transformer(checkpoint).requires_grad_(True)
    if settings.mtp:
        model.mtp = new_model(config, settings.seed, mtp=True).mtp
    return model


def _objective(settings: NewSettings, config: ModelConfig) -> Objective:
    mask = config.vocab_size - 1
    if settings.objective == "masked":
        return Masked(mask, shifted=settings.start is not None)
    if settings.objective == "block_diffusion":
        return BlockDiffusion(mask, settings.block, shifted=settings.start is not None)
    if settings.is_mitigated:
        return MitigatedNextToken(settings.scheduled_sampling, settings.unlikelihood)
    return NextTokenAndMtp(settings.mtp) if settings.mtp else next_token


def _batches(settings: NewSettings, prepared: PreparedData, parallel: Parallel) -> PackedBatches:
    assert settings.batch is not None and settings.length is not None
    return PackedBatches(
        prepared.train, settings.batch, settings.length, settings.seed, parallel.rank,
        parallel.world_size, settings.inside_documents,
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
        seconds=settings.minutes * 60 * _TRAINING_SHARE if settings.minutes else None,
        bf16=bool(settings.bf16),
        compile=bool(settings.compile),
        recompute=settings.recompute,
    )
