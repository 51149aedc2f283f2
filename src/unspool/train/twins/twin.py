"""Train a twin of a causal model, or a puzzle model.

    settings = TwinSettings(kind="block", data=("books/",), minutes=10)
    run = train_twin(settings, new_run(settings))         # or settings_of(run) to resume

    block      a block-diffusion twin of the frozen model: all weights, or an adapter (lora)
    fill       a bidirectional twin, for infilling and error detection
    sudoku, countdown      a small model from scratch, causal or masked

The result is a run folder; its checkpoints are models or adapters.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from unspool.errors import SettingsError
from unspool.model.adapters import CANVAS_SETTINGS, write_adapter
from unspool.model.config import ModelConfig
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_weights
from unspool.model.files.config_json import read_json
from unspool.model.hub.find import find_model
from unspool.model.layers.transformer import Transformer
from unspool.model.weights import parameter_count
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.learning.forward import AttentionMask, full_mask, hidden_states
from unspool.train.learning.lora import LoraConfig, adapter_from_weights, add_lora
from unspool.train.learning.model_size import new_model, rates_for
from unspool.train.learning.objectives import Masked, Objective, next_token
from unspool.train.learning.optimizers import Rates, make_optimizers
from unspool.train.running.events import Event
from unspool.train.running.loop import Trainer, TrainSettings, on_device
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run
from unspool.train.twins.data import CausalModel, Mixture, evaluator, load_sources
from unspool.train.twins.objectives import BlockTwinObjective, FillTwinObjective
from unspool.train.twins.puzzles import (
    END,
    HELD_OUT,
    MASK,
    Puzzle,
    PuzzleBatches,
    decode_rows,
    encode_texts,
    puzzle_by_name,
    save_tokenizer,
    token_ids,
)
from unspool.train.twins.settings import TwinParts, TwinSettings

# -- Solve puzzles with a model, without engine and KV cache, in various orders of unmasking

ORDERS = ("left", "confident", "margin", "random", "all", "0.9", "0.99")


@dataclass(frozen=True, slots=True)
class Solutions:
    answers: list[str]
    passes: float  # mean number of forward passes per puzzle


@torch.no_grad()
def solve(
    model: Transformer, puzzle: Puzzle, prompts: list[str], order: str | None = None, seed: int = 0
) -> Solutions:
    """Greedy answers to prompts, in an order of ORDERS (or a probability threshold)."""
    causal = model.config.sight == "causal"
    order = order or ("left" if causal else "confident")
    if causal and order != "left":
        raise SettingsError("a causal model generates from left to right only")
    device = model.embed.weight.device
    prompt_ids = torch.from_numpy(encode_texts(puzzle, prompts)).to(device)
    if causal:
        answers, passes = _generate(model, prompt_ids, puzzle.answer), float(puzzle.answer)
    else:
        answers, passes = _unmask(model, prompt_ids, puzzle.answer, order, seed)
    return Solutions(decode_rows(puzzle, answers.cpu().numpy()), passes)


def _generate(model: Transformer, prompt: Tensor, count: int) -> Tensor:
    cache = model.new_cache(prompt.shape[1] + count, len(prompt))
    token, answer = prompt, []
    for _ in range(count):
        token = model(token, cache, last_only=True)[:, -1].argmax(-1, keepdim=True)
        answer.append(token)
    return torch.cat(answer, 1)


def _unmask(
    model: Transformer, prompt: Tensor, count: int, order: str, seed: int
) -> tuple[Tensor, float]:
    mask = model.config.mask_id
    assert mask is not None
    rng = torch.Generator().manual_seed(seed)
    canvas = torch.full((len(prompt), count), mask, device=prompt.device)
    attention = AttentionMask.build(model.config, torch.cat((prompt, canvas), 1), full_mask)
    passes = torch.zeros(len(prompt))
    while bool((masked := canvas == mask).any()):
        passes += masked.any(1).cpu()
        x = hidden_states(model, torch.cat((prompt, canvas), 1), attention)[:, prompt.shape[1] :]
        logits = model.logits(x).float()
        logits[..., mask] = -torch.inf
        probabilities = logits.softmax(-1)
        commit = masked & _choose_positions(probabilities, masked, order, rng)
        canvas = torch.where(commit, probabilities.argmax(-1), canvas)
    return canvas, float(passes.mean())


def _choose_positions(
    probabilities: Tensor, masked: Tensor, order: str, rng: torch.Generator
) -> Tensor:
    """The positions to unmask in this pass; at least one per row."""
    if order == "all":
        return masked
    best = probabilities.topk(2, -1).values
    if order == "random":
        priority = torch.rand(masked.shape, generator=rng).to(masked.device)
    elif order == "left":
        priority = -torch.arange(masked.shape[1], device=masked.device).expand_as(masked).float()
    else:
        priority = best[..., 0] - best[..., 1] if order == "margin" else best[..., 0]
    priority = priority.masked_fill(~masked, -torch.inf)
    first = torch.zeros_like(masked).scatter_(1, priority.argmax(1, keepdim=True), True)
    return first | (best[..., 0] >= _threshold(order))


def _threshold(order: str) -> float:
    try:
        return float(order)
    except ValueError:
        if order in ORDERS:
            return torch.inf
        raise SettingsError(
            f"unknown order {order!r}; choose from {', '.join(ORDERS[:5])}, or give a probability "
            "threshold"
        ) from None


FAMILY = "unspool-puzzle"  # not a family of transformers
_PUZZLE_EVAL_BATCHES = 4


def puzzle_config(puzzle: Puzzle, sight: str, depth: int, width: int, heads: int) -> ModelConfig:
    """Config of either model; they differ only in their attention mask."""
    if width % heads:
        raise SettingsError(f"width {width} must be a multiple of heads {heads}")
    ids = token_ids(puzzle)
    return ModelConfig(
        family=FAMILY, vocab_size=len(ids), width=width, layers=depth, heads=heads, kv_heads=heads,
        head_width=width // heads, ff_width=-(-8 * width // 3 // 32) * 32,
        context=puzzle.prompt_length + puzzle.answer + 1, positions="learned", qk_norm="head",
        tied=True,
        end_ids=(ids[END],), sight="causal" if sight == "causal" else "whole",
        mask_id=None if sight == "causal" else ids[MASK], canvas_length=puzzle.answer,
    )  # fmt: skip


def puzzle_objective(puzzle: Puzzle, sight: str) -> Objective:
    if sight == "causal":
        return next_token
    return Masked(token_ids(puzzle)[MASK], weighting="plain")


def puzzle_parts(settings: TwinSettings, device: torch.device) -> TwinParts:
    puzzle = puzzle_by_name(settings.kind)
    config = puzzle_config(puzzle, settings.sight, settings.depth, settings.width, settings.heads)
    objective = puzzle_objective(puzzle, settings.sight)
    default_rows = 1024 if device.type == "cuda" else 64
    batches = PuzzleBatches(puzzle, settings.batch or default_rows, settings.seed)
    rates = rates_for(config)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = save_tokenizer(puzzle, Path(folder))

    def save(weights: Mapping[str, Tensor], folder: Path) -> None:
        save_weights(config, weights, folder)
        tokenizer.save(folder)

    def evaluate(model: Transformer) -> tuple[float, float | None]:
        total = count = 0.0
        for number in range(_PUZZLE_EVAL_BATCHES):
            batch = on_device(batches.batch(HELD_OUT + number), device)
            loss = objective(model, batch, torch.Generator().manual_seed(number))
            total += float(loss.mean) * float(loss.tokens)
            count += float(loss.tokens)
        return total / max(1.0, count), None

    def sample(model: Transformer) -> list[tuple[str, int, str]]:
        prompts, _ = puzzle.generate(1, PuzzleBatches(puzzle, 1, settings.seed).rng(HELD_OUT))
        return [(prompts[0], 0, solve(model, puzzle, prompts).answers[0])]

    return TwinParts(
        new_model(config, settings.seed).to(device), batches, objective, save, evaluate, sample,
        rates if settings.rate is None else rates.times(settings.rate / rates.matrices),
        "adamw" if settings.optimizer == "adamw" else "muon",
        {"parameters": parameter_count(config), "config": config.to_dict(),
         "data": {"source": [puzzle.name], "kind": "puzzle"}},
    )  # fmt: skip


_MASK_NAMES = ("<|mask|>", "<mask>", "[MASK]", "<|MASK|>", "<|mdm_mask|>")
_MASK_VECTOR = "embed.mask"


def mask_token(config: ModelConfig, tokenizer: Tokenizer) -> int:
    """Choose a mask token.

    In order: the model's own, a special token with a mask's name, an unused special token, or an id
    after the vocabulary, if the embedding table has one.
    """
    if config.mask_id is not None:
        return config.mask_id
    specials = tokenizer.special_tokens
    named = [specials[name] for name in _MASK_NAMES if name in specials]
    if named:
        return named[0]
    used = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.pad_id}
    used |= {*tokenizer.end_ids, *config.end_ids}
    template = tokenizer.chat_template or ""
    free = [
        token
        for text, token in tokenizer.special_tokens.items()
        if token not in used and token < config.vocab_size and text not in template
    ]
    if free:
        return max(free)
    if config.vocab_size > tokenizer.vocab_size:  # many embedding tables are padded
        return config.vocab_size - 1
    raise SettingsError(
        "the tokenizer has no unused token for the mask; name one that does not occur in your "
        "texts: --mask ID"
    )


class MaskedEmbedding(nn.Embedding):
    """A frozen embedding table with a trainable vector for one token."""

    def __init__(self, table: nn.Embedding, mask_id: int) -> None:
        with torch.device("meta"):  # no allocation: the weights are those of `table`
            super().__init__(table.num_embeddings, table.embedding_dim)
        self.weight, self.mask_id = table.weight, mask_id
        self.mask = nn.Parameter(table.weight.detach()[mask_id].float().clone())

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        return torch.where((input == self.mask_id)[..., None], self.mask.to(x.dtype), x)


def add_mask_embedding(model: Transformer, mask_id: int, *, fresh: bool) -> None:
    """Make the mask's embedding trainable; a fresh one starts near the mean of all tokens."""
    embedding = MaskedEmbedding(model.embed, mask_id)
    if fresh:
        with torch.no_grad():
            table = model.embed.weight.float()
            embedding.mask.copy_(table.mean(0) + 0.5 * table[mask_id])
    model.embed = embedding


def merge_mask_embedding(weights: Mapping[str, Tensor], mask_id: int) -> dict[str, Tensor]:
    """The weights with the mask's vector as a row of the embedding table."""
    merged = dict(weights)
    mask = merged.pop(_MASK_VECTOR, None)
    if mask is not None:
        merged["embed.weight"] = merged["embed.weight"].clone()
        merged["embed.weight"][mask_id] = mask.to(merged["embed.weight"])
    return merged


_TWIN_FIELDS = ("sight", "block", "mask_id", "shifted")  # of the config, for twin.json
_FULL_RATES = {"block": 4e-4, "fill": 3e-4}  # with all weights trained
_LORA_RATE = 1e-3


def text_parts(
    settings: TwinSettings, device: torch.device, on_text: Callable[[int], object]
) -> TwinParts:
    causal = CausalModel.open(settings.model)
    train, held_out, facts = load_sources(causal, settings, device, on_text)
    mask = settings.mask
    if mask is None:
        mask = mask_token(causal.checkpoint.config, causal.tokenizer)
    config = _twin_config(causal.checkpoint.config, settings, mask)
    clean = causal.frozen(device)
    model = _model(causal, settings, mask, device, clean)
    objective = _objective(settings, mask, None if settings.lora else clean)
    cuda = device.type == "cuda"
    rows, length = settings.batch or (48 if cuda else 4), _length(settings, config, cuda)
    if settings.compile and not settings.lora:
        for layer in clean.layers:  # the trainer compiles those of the twin
            layer.compile(dynamic=False)
    rate = settings.rate or (_LORA_RATE if settings.lora else _FULL_RATES[settings.kind])
    return TwinParts(
        model,
        Mixture(train, rows, length, settings.seed),
        objective,
        _saver(config, causal, settings, mask),
        evaluator(held_out, settings, rows, length, objective),
        None,
        Rates(rate, rate, rate, rate, weight_decay=settings.weight_decay),
        "muon" if settings.optimizer == "muon" else "adamw",
        {"base": causal.base, "adapter": bool(settings.lora), "data": facts,
         "config": config.to_dict()},
    )  # fmt: skip


def _length(settings: TwinSettings, config: ModelConfig, cuda: bool) -> int:
    return min(settings.length or (640 if cuda else 128), config.context)


def _twin_config(config: ModelConfig, settings: TwinSettings, mask: int) -> ModelConfig:
    block = settings.kind == "block"
    return replace(
        config, sight="block" if block else "whole", block=settings.block if block else 0,
        mask_id=mask, shifted=True,
    )  # fmt: skip


def _objective(settings: TwinSettings, mask: int, clean: Transformer | None) -> Objective:
    return (
        BlockTwinObjective(mask, clean)
        if settings.kind == "block"
        else FillTwinObjective(mask, clean)
    )


def _model(
    causal: CausalModel, settings: TwinSettings, mask: int, device: torch.device, clean: Transformer
) -> Transformer:
    """The trained model: the causal model with LoRA, or a copy of it (or of another twin).

    A copy has frozen embeddings and head, and a trainable vector for the mask token.
    """
    if settings.lora:
        if settings.start:
            raise SettingsError("--from cannot be combined with --lora; leave one of them out")
        add_lora(clean, LoraConfig(rank=settings.lora, alpha=settings.alpha), seed=settings.seed)
        return clean
    first = causal.checkpoint
    if settings.start:
        first = open_checkpoint(find_model(settings.start, progress=False))
        same_vocabulary = first.config.vocab_size == causal.checkpoint.config.vocab_size
        if not same_vocabulary or _read_mask(first.path) != mask:
            raise SettingsError(
                f"{settings.start} is not a twin of this model with mask token {mask}"
            )
    model = load_transformer(first, device=str(device)).requires_grad_(True)
    model.embed.requires_grad_(False)
    if model.head is not None:
        model.head.requires_grad_(False)
    add_mask_embedding(model, mask, fresh=settings.start is None)
    return model


def _read_mask(folder: Path) -> int | None:
    """Mask token of another twin; None if it is not a twin."""
    file = folder / CANVAS_SETTINGS
    return None if not file.is_file() else read_json(file).get("mask_id")


def _saver(
    config: ModelConfig, causal: CausalModel, settings: TwinSettings, mask: int
) -> Callable[[Mapping[str, Tensor], Path], None]:
    lora = LoraConfig(rank=settings.lora or 1, alpha=settings.alpha)

    def save_adapter(weights: Mapping[str, Tensor], folder: Path) -> None:
        adapter = adapter_from_weights(weights, lora.scale, causal.base)
        write_adapter(adapter, folder, causal.checkpoint.config)
        write_twin_file(folder)

    def save_model(weights: Mapping[str, Tensor], folder: Path) -> None:
        save_weights(config, merge_mask_embedding(weights, mask), folder)
        causal.tokenizer.save(folder)
        write_twin_file(folder)

    def write_twin_file(folder: Path) -> None:
        content = {"base": causal.base, **{name: getattr(config, name) for name in _TWIN_FIELDS}}
        (folder / CANVAS_SETTINGS).write_text(json.dumps(content, indent=2) + "\n")

    return save_adapter if settings.lora else save_model


_TRAINING_SHARE = 0.93  # of the time budget; evaluation and saving take the rest
_TRIAL_STEPS = 4  # to measure the speed


def new_run(settings: TwinSettings, folder: Path | None = None) -> Run:
    suffix = f"-{settings.sight}" if settings.is_puzzle else ""
    name = f"twin-{settings.kind.replace(':', '-')}{suffix}"
    return Run.create(
        folder or Run.free_folder(name), "twin", settings=asdict(settings), seed=settings.seed
    )


def settings_of(run: Run) -> TwinSettings:
    """The settings stored in a run."""
    stored = run.facts.get("settings", {})
    names = {field.name for field in fields(TwinSettings)}
    tuples = {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
    return TwinSettings(**{n: v for n, v in {**stored, **tuples}.items() if n in names})


def train_twin(
    settings: TwinSettings,
    run: Run,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    on_text: Callable[[int], object] = lambda done: None,
) -> Run:
    """Train to the end, from the run's last checkpoint if it has one.

    `on_text` is called with the number of texts that the model has generated for its twin.
    """
    parallel = Parallel.single_process(settings.device)
    cuda = parallel.device.type == "cuda"
    settings = replace(
        settings,
        bf16=cuda if settings.bf16 is None else settings.bf16,
        compile=cuda if settings.compile is None else settings.compile,
    )
    with _discard_on_error(run):
        parts = _parts(settings, parallel.device, on_text)
        generated = parts.facts["data"].get("sources", {}).get("written")
        if generated is not None:  # a resumed run must use the same texts
            settings = replace(settings, chat=generated["texts"], writing_minutes=None)
        settings = _with_steps(settings, parts, parallel)
        run.update(
            settings=asdict(settings), steps=settings.steps,
            trained=sum(p.numel() for p in parts.model.parameters() if p.requires_grad),
            **parts.facts,
        )  # fmt: skip
    _trainer(settings, parts, parallel, run).run(on_event)
    return run


def _parts(
    settings: TwinSettings, device: torch.device, on_text: Callable[[int], object]
) -> TwinParts:
    if settings.is_puzzle:
        return puzzle_parts(settings, device)
    return text_parts(settings, device, on_text)


@contextmanager
def _discard_on_error(run: Run) -> Iterator[None]:
    """Delete the folder of a run that fails before its first step."""
    try:
        yield
    except BaseException as error:
        if run.checkpoints():
            run.update(state="failed", error=str(error))
        else:
            run.discard_if_empty()
        raise


def _trainer(
    settings: TwinSettings, parts: TwinParts, parallel: Parallel, run: Run | None
) -> Trainer:
    steps = settings.steps or 1_000_000
    every = max(1, steps // 10)
    return Trainer(
        parts.model,
        parts.batches,
        parts.objective,
        lambda model: make_optimizers(model, parts.rates, parts.optimizer),
        TrainSettings(
            steps=steps, warmup=round(steps * settings.warmup), decay=settings.decay,
            accumulate=settings.accumulate, seed=settings.seed, log_every=max(1, steps // 2000),
            judge_every=settings.judge_every or every, save_every=settings.save_every or every,
            seconds=settings.budget_s, bf16=bool(settings.bf16), compile=bool(settings.compile),
        ),
        run,
        save_model=parts.save,
        evaluate=parts.evaluate,
        sampler=parts.sampler,
        parallel=parallel,
    )  # fmt: skip


def _with_steps(settings: TwinSettings, parts: TwinParts, parallel: Parallel) -> TwinSettings:
    """Set the number of steps, from `minutes` by a few trial steps that are undone."""
    if settings.steps is not None:
        return settings
    if settings.minutes is None:
        return replace(settings, steps=1000)
    trained = {n: p for n, p in parts.model.named_parameters() if p.requires_grad}
    before = {name: value.detach().clone() for name, value in trained.items()}
    trial = _trainer(settings, parts, parallel, None)
    seconds = []
    for _ in range(_TRIAL_STEPS):
        step_start = time.monotonic()
        trial.train_step()
        seconds.append(time.monotonic() - step_start)
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(before[name])
    budget_s = settings.minutes * 60 * _TRAINING_SHARE
    steps = max(1, int(budget_s / min(seconds[1:])))
    return replace(settings, steps=steps, minutes=None, budget_s=budget_s)
