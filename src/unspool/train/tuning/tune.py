"""Tuning a model that is there: on texts and conversations, on pairs of answers, or by a judge.

    settings = TuneSettings(data=("data.jsonl",), lora=16, steps=300)
    run = tune(settings, new_run(settings))        # or tune(settings_of(run), run) to go on

What comes out is a run like any other. With LoRA its checkpoints are adapters in PEFT's format,
without (lora=0) whole models. Several processes share the rows of each batch, so that what is
learned does not depend on how many there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unspool.backends.torch.loaded import TorchModel
from unspool.errors import DataError, SettingsError
from unspool.language_model import LanguageModel
from unspool.loading import load, open_tokenizer
from unspool.model.adapters import Adapter, LowRank, read_adapter, write_adapter
from unspool.model.checkpoint import load_transformer, open_checkpoint, save_weights
from unspool.model.hub import find_model
from unspool.model.transformer import Transformer
from unspool.text.chat.template import ChatTemplate
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.batches import Batch, Batches
from unspool.train.data.shards import Packed, prepare
from unspool.train.learning.cross_entropy import summed_loss
from unspool.train.learning.forward import Sight, hidden
from unspool.train.learning.lora import TARGETS, Lora, add_lora, put_adapter
from unspool.train.learning.objectives import Loss, next_token
from unspool.train.learning.optimizers import Rates, make_optimizers
from unspool.train.running.checkpoints import SaveModel
from unspool.train.running.elastic import job_facts
from unspool.train.running.events import Event
from unspool.train.running.loop import Trainer, TrainSettings
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run
from unspool.train.tuning.grpo import AnswerBatches, Grpo, Question
from unspool.train.tuning.preference import Dpo, PairBatches
from unspool.train.tuning.tasks import Task, judge_of

_RATES = {"tune": (5e-4, 2e-5), "dpo": (5e-5, 1e-6), "grpo": (1e-4, 1e-6)}  # with LoRA, without
_JUDGED = (4, 16)  # batches of held-out data: at least and at most


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """All dials of a tuning; run.json keeps them."""

    kind: str = "tune"  # or dpo, grpo
    model: str | None = None
    data: tuple[str, ...] = ()
    task: str | None = None  # of reasoning-gym, instead of data
    examples: int = 2000  # of the task
    judge: str | None = None  # grpo: module:function
    lora: int = 16  # rank; 0: all weights are trained
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = tuple(TARGETS)
    layers: int | None = None  # LoRA only in so many last ones
    adapter: str | None = None  # to go on from
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
    beta: float = 0.1  # dpo: how closely the model stays to what it was
    smoothing: float = 0.0
    groups: int = 4  # grpo: questions in a step, ...
    answers: int = 8  # ... answers to each, ...
    max_tokens: int = 64  # ... of so many tokens
    temperature: float = 1.0
    updates: int = 1  # steps that learn from the same answers
    kl: float = 0.0

    def __post_init__(self) -> None:
        if bool(self.data) == bool(self.task):
            raise SettingsError("give data to learn from, or a task: --data or --task")
        if self.kind == "dpo" and self.task:
            raise SettingsError("a task has no pairs of answers; give --data with them")
        if self.kind == "grpo" and not (self.task or self.judge):
            raise SettingsError(
                "somebody must judge the answers: --judge module:function, or --task"
            )

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
    """What a run was started with."""
    kept = run.facts.get("settings", {})
    names = {each.name for each in fields(TuneSettings)}
    tuples = {name: tuple(value) for name, value in kept.items() if isinstance(value, list)}
    return TuneSettings(**{n: v for n, v in {**kept, **tuples}.items() if n in names})


def tune(
    settings: TuneSettings,
    run: Run,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    parallel: Parallel | None = None,
) -> Run:
    """Train to the end; a run with a checkpoint goes on from it."""
    parallel = parallel or Parallel.alone(settings.device)
    try:
        tuning = _Tuning(settings, run, parallel)
    except BaseException as error:
        if not parallel.first:
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
        judge=tuning.judge if tuning.held_out is not None else None,
        parallel=parallel,
    )
    trainer.run(on_event)
    return run


class _Tuning:
    """The parts of one tuning, made from its settings."""

    def __init__(self, settings: TuneSettings, run: Run, parallel: Parallel) -> None:
        self.settings, self.run, self.parallel = settings, run, parallel
        if settings.kind == "grpo" and parallel.shard:
            raise SettingsError(
                "the engine that writes the answers needs the model whole in each process; leave "
                "out --shard"
            )
        path = find_model(settings.model, progress=False)
        self.base = settings.model if settings.model and not Path(settings.model).exists() else ""
        self.base = self.base or str(path.resolve())
        checkpoint = open_checkpoint(path)
        checkpoint.config.check_left_to_right()  # each token is learned from those before it
        checkpoint.config.check_head()
        device = str(parallel.device)
        # Frozen weights need no more than 16 bits; on a CPU those would be slower.
        narrow = bool(settings.lora) and device.startswith("cuda")
        dtype = "bfloat16" if narrow else "float32"
        self.model = load_transformer(checkpoint, dtype=dtype)
        self.tokenizer = _tokenizer_of(checkpoint, path)
        self.lora = Lora(
            rank=settings.lora or 1, alpha=settings.alpha, dropout=settings.dropout,
            targets=settings.targets, layers=settings.layers,
        )  # fmt: skip
        if settings.lora:
            add_lora(self.model, self.lora, seed=settings.seed)
            if settings.adapter:
                put_adapter(self.model, read_adapter(Path(settings.adapter), self.model.config))
        else:
            self.model.requires_grad_(True)
        self.model = parallel.place(self.model)
        self.held_out: Batches | None = None
        rate = settings.learning_rate
        self.rates = Rates(rate, rate, rate, rate, weight_decay=0.0, betas=(0.9, 0.999))
        self.batches, self.objective, rows = self._parts(device)
        steps = settings.steps
        at_once = settings.groups if settings.kind == "grpo" else settings.batch
        if steps is None:
            steps = max(1, round(rows * settings.epochs / (at_once * settings.accumulate)))
        # An adapter is small: it is evaluated and saved ten times. A model takes longer to save.
        often = min(100, max(10, steps // 10)) if settings.lora else 100
        every = settings.save_every or often
        self.train_settings = TrainSettings(
            steps=steps, warmup=min(20, steps // 10), decay=0.5, accumulate=settings.accumulate,
            seed=settings.seed, save_every=every, judge_every=every, patience=settings.patience,
            bf16=device.startswith("cuda"),
        )  # fmt: skip
        self._tell(epochs=steps * at_once * settings.accumulate / max(1, rows))
        self._tell(
            steps=steps, base=self.base, adapter=bool(settings.lora),
            model=self.model.config.to_dict(),
            trained=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
        )  # fmt: skip

    def _tell(self, **facts: Any) -> None:
        if self.parallel.first:
            self.run.update(**facts)

    # -- what is learned from -------------------------------------------------------------------

    def _parts(self, device: str) -> tuple[Any, Any, int]:
        """Batches, the objective, and how many rows there are."""
        settings = self.settings
        if settings.kind == "dpo":
            pairs = PairBatches(
                _rows(settings.data), self.tokenizer, self._share(settings.batch, "--batch"),
                settings.length, seed=settings.seed, rank=self.parallel.rank,
                world=self.parallel.world,
            )  # fmt: skip
            before = self._as_it_was(device)
            return pairs, Dpo(settings.beta, settings.smoothing, before), len(pairs)
        if settings.kind == "grpo":
            answers, count = self._answers(device)
            before = self._as_it_was(device) if settings.kl else None
            return answers, Grpo(kl_weight=settings.kl, earlier=before), count
        source: Any = settings.data if len(settings.data) != 1 else settings.data[0]
        with self.parallel.first_alone():
            if settings.task:
                source = self._task_file(settings.task)
            prepared = prepare(source, self.tokenizer, seed=settings.seed)
        self._tell(data=prepared.card.to_json())
        batches = self._batches(prepared.train, self.parallel)
        if prepared.held_out.documents:  # all processes judge all of it
            self.held_out = self._batches(prepared.held_out, Parallel(self.parallel.device))
        chat = prepared.train.counted is not None
        return batches, answers_only if chat else next_token, batches.rows

    def _as_it_was(self, device: str) -> Transformer | None:
        """A frozen copy of the model, where LoRA cannot be switched off to have it."""
        if self.settings.lora:
            return None
        path = find_model(self.settings.model, progress=False)
        return load_transformer(open_checkpoint(path), device=device)

    def _batches(self, packed: Packed, parallel: Parallel) -> Batches:
        length = min(self.settings.length, self.model.config.context)
        rows = self._share(self.settings.batch, "--batch") if parallel.world > 1 else None
        return Batches(
            packed, rows or self.settings.batch, length, self.settings.seed, parallel.rank,
            parallel.world,
        )  # fmt: skip

    def _share(self, count: int, name: str) -> int:
        """What one process takes of the rows of a batch."""
        each, left = divmod(count, self.parallel.world)
        if left:
            raise SettingsError(
                f"{self.parallel.world} processes cannot share {name} {count} evenly; give a "
                "multiple of their number"
            )
        return each

    def _task_file(self, name: str) -> str:
        """The task's questions and answers, written once into the run's folder."""
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
            asked = [(row["question"], row) for row in rows]
        else:
            rows = _rows(settings.data)
            asked = [(_prompt(row, number), row) for number, row in enumerate(rows)]
        judge = judge_of(settings.judge) if settings.judge else task.judge
        questions = [
            Question(tuple(_ids(template, prompt)), _text(prompt), row) for prompt, row in asked
        ]
        if settings.lora:
            lm = load(settings.model, device=device, progress=False)
        else:  # what is trained is what writes
            lm = LanguageModel(TorchModel(self.model), self.tokenizer)
        batches = AnswerBatches(
            self.model, lm, questions, judge, groups=self._share(settings.groups, "--groups"),
            answers=settings.answers, max_tokens=settings.max_tokens,
            temperature=settings.temperature, updates=settings.updates, seed=settings.seed,
            rank=self.parallel.rank, world=self.parallel.world,
        )  # fmt: skip
        return batches, len(questions)

    # -- judging and saving ---------------------------------------------------------------------

    def judge(self, model: Transformer) -> tuple[float, float | None]:
        """The mean loss on what was held out."""
        assert self.held_out is not None
        total = count = 0.0
        # A batch for every ten steps between two judgements, so that those take little of the time.
        least, most = _JUDGED
        batches = min(most, max(least, self.train_settings.judge_every // 10))
        batches = min(batches, -(-self.held_out.rows // self.settings.batch))
        device = model.embed.weight.device
        for number in range(batches):
            batch = self.held_out.batch(number)
            moved = {
                name: value.to(device) if isinstance(value, Tensor) else value
                for name, value in vars(batch).items()
            }
            loss = self.objective(model, Batch(**moved), torch.Generator())
            total += float(loss.total) * float(loss.tokens)
            count += float(loss.tokens)
        return total / max(1.0, count), None

    def saver(self) -> SaveModel:
        config, tokenizer, lora = self.model.config, self.tokenizer, self.lora

        def save_adapter(weights: Mapping[str, Tensor], folder: Path) -> None:
            names = [n.removesuffix(".down") for n in weights if n.endswith(".down")]
            parts = {
                f"{name}.weight": LowRank(
                    _numbers(weights[f"{name}.down"]), _numbers(weights[f"{name}.up"]), lora.scale
                )
                for name in names
            }
            write_adapter(Adapter(parts, self.base), folder, config, dropout=lora.dropout)

        def save_whole(weights: Mapping[str, Tensor], folder: Path) -> None:
            save_weights(config, weights, folder)
            tokenizer.save(folder)

        return save_adapter if self.settings.lora else save_whole


def answers_only(model: Transformer, batch: Batch, rng: torch.Generator) -> Loss:
    """`next_token` where only some targets count: the others get no logits, which are a fifth of a
    small model's work."""
    assert batch.counted is not None
    # Nothing is learned behind the last answer: what rows were filled up with is not even read.
    length = int(batch.counted.any(0).nonzero().max()) + 1
    inputs, counted = batch.inputs[:, :length], batch.counted[:, :length]
    x = hidden(model, inputs, Sight.of(model.config, inputs))
    summed = summed_loss(model, x[counted], batch.targets[:, :length][counted], None)
    tokens = int(counted.sum())
    return Loss(summed / max(1, tokens), tokens)


def _tokenizer_of(checkpoint: Any, path: Path) -> Tokenizer:
    found = open_tokenizer(checkpoint)
    if found is None:
        raise DataError(f"{path}: has no vocabulary (tokenizer.json), so it cannot read the data")
    return found


def _numbers(tensor: Tensor) -> Any:
    return tensor.detach().float().cpu().numpy()


def _rows(paths: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of jsonl files as they are."""
    rows = []
    for name in paths:
        try:
            lines = Path(name).read_text(encoding="utf-8").splitlines()
            rows += [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise DataError(f"{name}: cannot be read as lines of JSON ({error})") from None
    if not all(isinstance(row, dict) for row in rows) or not rows:
        raise DataError(f"{', '.join(paths)}: each line must be an object, and there must be some")
    return rows


def _prompt(row: dict[str, Any], number: int) -> Any:
    if "prompt" not in row:
        raise DataError(f"row {number + 1} has no prompt to be answered")
    return row["prompt"]


def _ids(template: ChatTemplate, prompt: Any) -> list[int]:
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return list(template.encode(asked).ids)


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
