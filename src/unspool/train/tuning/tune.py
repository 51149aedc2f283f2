"""Fine-tune a model: on texts and conversations, on pairs of answers, or with a reward function.

    settings = TuneSettings(data=("data.jsonl",), lora=16, steps=300)
    run = tune(settings, new_run(settings))        # or tune(settings_of(run), run) to resume

The result is a run folder. With LoRA its checkpoints are adapters in PEFT's format, without
(lora=0) full models. Processes share the rows of each batch, so the result does not depend on their
number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unspool.backends.torch.backend import TorchModel
from unspool.errors import DataError, SettingsError
from unspool.lm import LanguageModel
from unspool.loading import load, open_tokenizer
from unspool.model.adapters import read_adapter, write_adapter
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_weights
from unspool.model.hub.find import find_model
from unspool.model.layers.transformer import Transformer
from unspool.text.chat.template import ChatTemplate
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.batches import PackedBatches, TrainingBatch
from unspool.train.data.prepared import PackedDocuments, prepare
from unspool.train.learning.forward import AttentionMask, hidden_states
from unspool.train.learning.lora import (
    TARGETS,
    LoraConfig,
    adapter_from_weights,
    add_lora,
    load_adapter,
)
from unspool.train.learning.objectives import Loss, next_token, summed_loss
from unspool.train.learning.optimizers import Rates, make_optimizers
from unspool.train.running.checkpoints import SaveModel
from unspool.train.running.events import Event
from unspool.train.running.loop import Trainer, TrainSettings, on_device
from unspool.train.running.parallel import Parallel, job_facts
from unspool.train.running.runs import Run
from unspool.train.tuning.dpo import Dpo, PairBatches
from unspool.train.tuning.grpo import AnswerBatches, Grpo, Question
from unspool.train.tuning.tasks import Task, load_reward_function

_RATES = {"tune": (5e-4, 2e-5), "dpo": (5e-5, 1e-6), "grpo": (1e-4, 1e-6)}  # with LoRA, without
_MIN_EVAL_BATCHES, _MAX_EVAL_BATCHES = 4, 16  # of held-out data


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """Settings of a fine-tuning run, stored in run.json."""

    kind: str = "tune"  # or dpo, grpo
    model: str | None = None
    data: tuple[str, ...] = ()
    task: str | None = None  # of reasoning-gym, instead of data
    examples: int = 2000  # of the task
    judge: str | None = None  # grpo: reward function, as module:function
    lora: int = 16  # rank; 0: train all weights
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = tuple(TARGETS)
    layers: int | None = None  # LoRA only in the last n layers
    adapter: str | None = None  # to start from
    steps: int | None = None
    epochs: float = 3.0
    batch: int = 8  # rows, or pairs
    length: int = 512
    accumulate: int = 1
    rate: float | None = None
    seed: int = 0
    save_every: int | None = None  # also between evaluations; None: a tenth of the steps
    patience: int = 3  # evaluations in a row without a new best that end the run; 0: never
    device: str = "auto"
    beta: float = 0.1  # dpo: strength of the constraint to the reference model
    smoothing: float = 0.0
    groups: int = 4  # grpo: questions per step
    answers: int = 8  # grpo: answers per question
    max_tokens: int = 64  # grpo: tokens per answer
    temperature: float = 1.0
    updates: int = 1  # grpo: steps per rollout
    kl: float = 0.0

    def __post_init__(self) -> None:
        if bool(self.data) == bool(self.task):
            raise SettingsError("give either --data or --task")
        if self.kind == "dpo" and self.task:
            raise SettingsError("a task has no pairs of answers; give --data with pairs")
        if self.kind == "grpo" and not (self.task or self.judge):
            raise SettingsError("grpo needs a reward: --judge module:function, or --task")

    @property
    def learning_rate(self) -> float:
        with_lora, without = _RATES[self.kind]
        return self.rate if self.rate is not None else with_lora if self.lora else without


def new_run(settings: TuneSettings, folder: Path | None = None) -> Run:
    name = Path(settings.task or settings.data[0]).stem
    return Run.create(
        folder or Run.free_folder(f"{settings.kind}-{name}"),
        settings.kind,
        settings=asdict(settings),
        seed=settings.seed,
        **job_facts(settings),
    )


def settings_of(run: Run) -> TuneSettings:
    """The settings stored in a run."""
    stored = run.facts.get("settings", {})
    names = {field.name for field in fields(TuneSettings)}
    tuples = {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
    return TuneSettings(**{n: v for n, v in {**stored, **tuples}.items() if n in names})


def tune(
    settings: TuneSettings,
    run: Run,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    parallel: Parallel | None = None,
) -> Run:
    """Train to the end, from the run's last checkpoint if it has one."""
    parallel = parallel or Parallel.single_process(settings.device)
    try:
        tuning = _TuningJob(settings, run, parallel)
    except BaseException as error:
        if not parallel.is_first:
            pass
        elif run.checkpoints():
            run.update(state="failed", error=str(error))
        else:
            run.discard_if_empty()
        raise
    trainer = Trainer(
        tuning.model,
        tuning.batches,
        tuning.objective,
        lambda model: make_optimizers(model, tuning.rates, "adamw"),
        tuning.train_settings,
        run,
        save_model=tuning.saver(),
        evaluate=tuning.evaluate if tuning.held_out is not None else None,
        parallel=parallel,
    )
    trainer.run(on_event)
    return run


class _TuningJob:
    """Model, data and objective of a fine-tuning run, built from its settings."""

    def __init__(self, settings: TuneSettings, run: Run, parallel: Parallel) -> None:
        self.settings, self.run, self.parallel = settings, run, parallel
        if settings.kind == "grpo" and parallel.shard:
            raise SettingsError(
                "grpo needs the full model in each process, to generate answers; leave out --shard"
            )
        path = find_model(settings.model, progress=False)
        self.base = settings.model if settings.model and not Path(settings.model).exists() else ""
        self.base = self.base or str(path.resolve())
        checkpoint = open_checkpoint(path)
        checkpoint.config.require_causal()  # the objectives are causal
        checkpoint.config.require_head()
        device = str(parallel.device)
        # Frozen weights need only 16 bits, which are slower on a CPU.
        use_bf16 = bool(settings.lora) and device.startswith("cuda")
        self.model = load_transformer(checkpoint, dtype="bfloat16" if use_bf16 else "float32")
        self.tokenizer = _tokenizer_of(checkpoint, path)
        self.lora = LoraConfig(
            rank=settings.lora or 1, alpha=settings.alpha, dropout=settings.dropout,
            targets=settings.targets, layers=settings.layers,
        )  # fmt: skip
        if settings.lora:
            add_lora(self.model, self.lora, seed=settings.seed)
            if settings.adapter:
                load_adapter(self.model, read_adapter(Path(settings.adapter), self.model.config))
        else:
            self.model.requires_grad_(True)
        self.model = parallel.place(self.model)
        self.held_out: PackedBatches | None = None
        rate = settings.learning_rate
        self.rates = Rates(rate, rate, rate, rate, weight_decay=0.0, betas=(0.9, 0.999))
        self.batches, self.objective, rows = self._parts(device)
        steps = settings.steps
        batch_rows = settings.groups if settings.kind == "grpo" else settings.batch
        if steps is None:
            steps = max(1, round(rows * settings.epochs / (batch_rows * settings.accumulate)))
        # An adapter is small: it is evaluated and saved ten times. A model takes longer to save.
        default = min(100, max(10, steps // 10)) if settings.lora else 100
        every = settings.save_every or default
        self.train_settings = TrainSettings(
            steps=steps, warmup=min(20, steps // 10), decay=0.5, accumulate=settings.accumulate,
            seed=settings.seed, save_every=every, judge_every=every, patience=settings.patience,
            bf16=device.startswith("cuda"),
        )  # fmt: skip
        self._update_run(
            epochs=steps * batch_rows * settings.accumulate / max(1, rows),
            steps=steps, base=self.base, adapter=bool(settings.lora),
            model=self.model.config.to_dict(),
            trained=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
        )  # fmt: skip

    def _update_run(self, **facts: Any) -> None:
        if self.parallel.is_first:
            self.run.update(**facts)

    def _parts(self, device: str) -> tuple[Any, Any, int]:
        """Batches, objective, and number of data rows."""
        settings = self.settings
        if settings.kind == "dpo":
            pairs = PairBatches(
                _rows(settings.data), self.tokenizer, self._share(settings.batch, "--batch"),
                settings.length, seed=settings.seed, rank=self.parallel.rank,
                world=self.parallel.world_size,
            )  # fmt: skip
            reference = self._reference_copy(device)
            return pairs, Dpo(settings.beta, settings.smoothing, reference), len(pairs)
        if settings.kind == "grpo":
            answers, count = self._answers(device)
            reference = self._reference_copy(device) if settings.kl else None
            return answers, Grpo(kl_weight=settings.kl, reference=reference), count
        source: Any = settings.data if len(settings.data) != 1 else settings.data[0]
        with self.parallel.first_alone():
            if settings.task:
                source = self._task_file(settings.task)
            prepared = prepare(source, self.tokenizer, seed=settings.seed)
        self._update_run(data=prepared.card.to_json())
        batches = self._batches(prepared.train, self.parallel)
        if prepared.held_out.num_documents:  # every process evaluates on all of it
            self.held_out = self._batches(prepared.held_out, Parallel(self.parallel.device))
        is_chat = prepared.train.loss_mask is not None
        return batches, answers_only if is_chat else next_token, batches.rows

    def _reference_copy(self, device: str) -> Transformer | None:
        """A frozen copy of the model; None with LoRA, which can be disabled instead."""
        if self.settings.lora:
            return None
        path = find_model(self.settings.model, progress=False)
        return load_transformer(open_checkpoint(path), device=device)

    def _batches(self, packed: PackedDocuments, parallel: Parallel) -> PackedBatches:
        length = min(self.settings.length, self.model.config.context)
        rows = self._share(self.settings.batch, "--batch") if parallel.world_size > 1 else None
        return PackedBatches(
            packed, rows or self.settings.batch, length, self.settings.seed, parallel.rank,
            parallel.world_size,
        )  # fmt: skip

    def _share(self, count: int, name: str) -> int:
        """Rows of a batch per process."""
        share, remainder = divmod(count, self.parallel.world_size)
        if remainder:
            raise SettingsError(
                f"{name} {count} must be a multiple of the {self.parallel.world_size} processes"
            )
        return share

    def _task_file(self, name: str) -> str:
        """Write the task's questions and answers into the run folder, once."""
        path = self.run.folder / f"{name}.jsonl"
        if not path.exists():
            rows = Task(name).rows(self.settings.examples, self.settings.seed)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    def _answers(self, device: str) -> tuple[AnswerBatches, int]:
        settings = self.settings
        template = ChatTemplate(self.tokenizer.chat_template, self.tokenizer)
        if settings.task:
            task = Task(settings.task)
            rows = task.entries(settings.examples, settings.seed)
            prompts = [(row["question"], row) for row in rows]
        else:
            rows = _rows(settings.data)
            prompts = [(_prompt(row, number), row) for number, row in enumerate(rows)]
        reward = load_reward_function(settings.judge) if settings.judge else task.reward
        questions = [
            Question(tuple(_encode_prompt(template, prompt)), _last_text(prompt), row)
            for prompt, row in prompts
        ]
        if settings.lora:
            lm = load(settings.model, device=device, progress=False)
        else:  # the engine runs on the trained weights themselves
            lm = LanguageModel(TorchModel(self.model), self.tokenizer)
        batches = AnswerBatches(
            self.model, lm, questions, reward, groups=self._share(settings.groups, "--groups"),
            answers=settings.answers, max_tokens=settings.max_tokens,
            temperature=settings.temperature, updates=settings.updates, seed=settings.seed,
            rank=self.parallel.rank, world=self.parallel.world_size,
        )  # fmt: skip
        return batches, len(questions)

    def evaluate(self, model: Transformer) -> tuple[float, float | None]:
        """Mean loss on the held-out data."""
        assert self.held_out is not None
        total = count = 0.0
        # One batch per ten steps between evaluations, so that they take little of the time.
        batches = max(_MIN_EVAL_BATCHES, self.train_settings.judge_every // 10)
        batches = min(_MAX_EVAL_BATCHES, batches, -(-self.held_out.rows // self.settings.batch))
        device = model.embed.weight.device
        for number in range(batches):
            batch = on_device(self.held_out.batch(number), device)
            loss = self.objective(model, batch, torch.Generator())
            total += float(loss.mean) * float(loss.tokens)
            count += float(loss.tokens)
        return total / max(1.0, count), None

    def saver(self) -> SaveModel:
        config, tokenizer, lora = self.model.config, self.tokenizer, self.lora

        def save_adapter(weights: Mapping[str, Tensor], folder: Path) -> None:
            adapter = adapter_from_weights(weights, lora.scale, self.base)
            write_adapter(adapter, folder, config, dropout=lora.dropout)

        def save_model(weights: Mapping[str, Tensor], folder: Path) -> None:
            save_weights(config, weights, folder)
            tokenizer.save(folder)

        return save_adapter if self.settings.lora else save_model


def answers_only(model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
    """`next_token` with a loss mask: logits, a fifth of a small model's work, only where needed."""
    assert batch.loss_mask is not None
    # There is no loss after the last answer, so padding is cut off.
    length = int(batch.loss_mask.any(0).nonzero().max()) + 1
    inputs, loss_mask = batch.inputs[:, :length], batch.loss_mask[:, :length]
    x = hidden_states(model, inputs, AttentionMask.build(model.config, inputs))
    summed = summed_loss(model, x[loss_mask], batch.targets[:, :length][loss_mask], None)
    tokens = int(loss_mask.sum())
    return Loss(summed / max(1, tokens), tokens)


def _tokenizer_of(checkpoint: Any, path: Path) -> Tokenizer:
    tokenizer = open_tokenizer(checkpoint)
    if tokenizer is None:
        raise DataError(f"{path}: has no tokenizer.json to encode the data with")
    return tokenizer


def _rows(paths: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of jsonl files."""
    rows = []
    for name in paths:
        try:
            lines = Path(name).read_text(encoding="utf-8").splitlines()
            rows += [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise DataError(f"{name}: cannot be read as lines of JSON ({error})") from None
    if not all(isinstance(row, dict) for row in rows) or not rows:
        raise DataError(f"{', '.join(paths)}: must have at least one line, each a JSON object")
    return rows


def _prompt(row: dict[str, Any], number: int) -> Any:
    if "prompt" not in row:
        raise DataError(f"row {number + 1} has no field prompt")
    return row["prompt"]


def _encode_prompt(template: ChatTemplate, prompt: Any) -> list[int]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return list(template.encode(messages).ids)


def _last_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
