"""Measures of twins: models trained from a causal model for diffusion, infill, puzzles."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lib.stats import roc_auc
from unspool.model.adapters import is_adapter, read_adapter
from unspool.model.files.checkpoint import load_transformer, open_checkpoint
from unspool.model.layers.transformer import Transformer
from unspool.train.data.batches import TrainingBatch
from unspool.train.learning.lora import LoraConfig, add_lora, load_adapter
from unspool.train.learning.objectives import token_losses
from unspool.train.running.loop import on_device
from unspool.train.twins.data import CausalModel, Mixture, Sources
from unspool.train.twins.objectives import (
    CleanNoisyPasses,
    FillTwinObjective,
    block_starts,
    document_ids,
    document_starts,
)
from unspool.train.twins.puzzles import puzzle_by_name
from unspool.train.twins.twin import ORDERS, solve


@dataclass(frozen=True)
class Pair:
    """A causal model and its twin, in eval mode on one device."""

    clean: Transformer
    twin: Transformer
    mask: int

    @classmethod
    def open(cls, causal: CausalModel, folder: Path, device: torch.device) -> "Pair":
        clean = causal.frozen(device)
        mask = int(json.loads((folder / "twin.json").read_text())["mask_id"])
        if not is_adapter(folder):
            dtype = "bfloat16" if device.type == "cuda" else "float32"
            checkpoint = open_checkpoint(folder)
            return cls(clean, load_transformer(checkpoint, dtype=dtype, device=str(device)), mask)
        twin = causal.frozen(device)
        adapter = read_adapter(folder, twin.config)
        part = next(iter(adapter.parts.values()))
        add_lora(twin, LoraConfig(rank=part.rank, alpha=part.scale * part.rank))
        load_adapter(twin, adapter)
        return cls(clean, twin.requires_grad_(False).eval(), mask)


def held_out_batches(
    sources: Sources, rows: int, length: int, count: int, device: torch.device
) -> dict[str, list[TrainingBatch]]:
    """Fixed batches of each held-out source that is long enough."""
    batches = {}
    for name, (packed, _) in sources.items():
        if packed.loss_mask is not None or len(packed.ids) > length:
            mixture = Mixture({name: (packed, 1.0)}, rows, length, seed=1)
            numbers = range(count)
            batches[Path(name).stem] = [on_device(mixture.batch(n), device) for n in numbers]
    return batches


@torch.no_grad()
def surprises(model: Transformer, x: Tensor, targets: Tensor) -> Tensor:
    """Negative log-probability of each target."""
    return token_losses(model, x, targets).float()


def top_tokens(model: Transformer, x: Tensor, banned: int | None = None) -> Tensor:
    """Most probable token of each hidden state."""
    parts = []
    for part in x.flatten(0, -2).split(8192):
        logits = model.logits(part)
        if banned is not None:
            logits[:, banned] = -torch.inf
        parts.append(logits.argmax(-1))
    return torch.cat(parts).view(x.shape[:-1])


# -- block diffusion -------------------------------------------------------------------------------

SIZES = (4, 8, 16, 32)


@torch.no_grad()
def block_perplexities(
    pair: Pair, batches: list[TrainingBatch], repeats: int = 8
) -> dict[str, Any]:
    """Perplexity of the causal model, and bounds of the twin at each block size relative to it.

    The bound (arXiv 2503.09573) adds, for each block, the causal cost of its first token and the
    twin's cost of the others: k of them hidden, k uniform, each hidden one weighted by n/k.
    """
    rows, length = batches[0].inputs.shape
    halves = CleanNoisyPasses(pair.clean.config, rows, length, batches[0].ids.device, copies=1)
    nats: dict[int, float] = dict.fromkeys((0, *SIZES), 0.0)
    count = 0.0
    random = torch.Generator().manual_seed(0)
    for batch in batches:
        tokens, starts = batch.inputs, document_starts(document_ids(batch))
        counted = _counted_targets(batch, starts)
        count += float(counted.sum())
        for size in SIZES:
            blocks = _blocks(starts, size)
            halves.set_starts(starts, blocks)
            clean = surprises(
                pair.clean, halves.clean_pass(pair.clean, tokens)[:, :-1], tokens[:, 1:]
            )
            nats[0] += float((clean * counted).sum()) / len(SIZES)
            for _ in range(repeats):
                hidden, weight = draw_hidden(blocks, random)
                x = halves.noisy_pass(pair.twin, tokens.masked_fill(hidden, pair.mask))[:, :-1]
                costs = surprises(pair.twin, x, tokens[:, 1:]) * (hidden * weight)[:, 1:]
                first = (torch.arange(length, device=blocks.device) == blocks)[:, 1:]
                nats[size] += float(((costs + clean * first) * counted).sum()) / repeats
    causal = math.exp(nats[0] / count)
    bounds = {f"block {size}": math.exp(nats[size] / count) / causal for size in SIZES}
    return {"causal perplexity": causal, **bounds}


def _blocks(starts: Tensor, size: int) -> Tensor:
    sizes = torch.full((len(starts), 1), size, device=starts.device)
    return block_starts(starts, sizes, torch.zeros_like(sizes))


def _counted_targets(batch: TrainingBatch, starts: Tensor) -> Tensor:
    """Targets that are text, in conversations the answers, and not the start of a document."""
    positions = torch.arange(starts.shape[1], device=starts.device)
    counted = ((positions != starts) & (document_ids(batch) >= 0))[:, 1:]
    return counted if batch.loss_mask is None else counted & batch.loss_mask[:, :-1]


def draw_hidden(blocks: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Hide k tokens of each block of n (not the first), k uniform in 1..n; weights are n/k."""
    rows, length = blocks.shape
    positions = torch.arange(length, device=blocks.device).expand(rows, -1)
    blocks = blocks.long()
    others = torch.zeros_like(blocks).scatter_add_(1, blocks, torch.ones_like(blocks))
    others = others.gather(1, blocks) - 1
    level = torch.rand(blocks.shape, generator=random).to(blocks.device).gather(1, blocks)
    hidden = (level * others).floor() + 1
    score = torch.rand(blocks.shape, generator=random, dtype=torch.float64).to(blocks.device)
    score = torch.where(positions == blocks, 2.0, score)  # the first is never hidden
    order = (blocks * 4 + score).argsort(1)
    rank = torch.zeros_like(blocks).scatter_(1, order, positions) - blocks
    return (rank < hidden) & (positions != blocks), others / hidden


@torch.no_grad()
def block_agreement(pair: Pair, batches: list[TrainingBatch], size: int = 8) -> dict[str, Any]:
    """How often the twin, shown only a block's first token, agrees with the causal model's top
    token, by position in the block; and the tokens per pass that this would give as drafts."""
    (rows, length), device = batches[0].inputs.shape, batches[0].ids.device
    halves = CleanNoisyPasses(pair.clean.config, rows, length, device, copies=1)
    hits, totals = torch.zeros(size, device=device), torch.zeros(size, device=device)
    accepted = drafts = 0.0
    positions = torch.arange(length, device=device)
    for batch in batches:
        tokens, starts = batch.inputs, document_starts(document_ids(batch))
        blocks = _blocks(starts, size)
        halves.set_starts(starts, blocks)
        clean = top_tokens(pair.clean, halves.clean_pass(pair.clean, tokens)[:, :-1])
        noisy = tokens.masked_fill(positions != blocks, pair.mask)
        twin = top_tokens(pair.twin, halves.noisy_pass(pair.twin, noisy)[:, :-1], pair.mask)
        offset, counted = (positions - blocks)[:, 1:], _counted_targets(batch, starts)
        agrees = (twin == clean) & counted
        for position in range(1, size):
            hits[position] += (agrees & (offset == position)).sum()
            totals[position] += (counted & (offset == position)).sum()
        running = torch.zeros_like(agrees[:, 0])
        for position in range(length - 1):  # runs of agreement from each block's start
            first = offset[:, position] == 1
            running = torch.where(first, counted[:, position], running) & agrees[:, position]
            drafts += float((first & counted[:, position]).sum())
            accepted += float((running & (offset[:, position] >= 1)).sum())
    shares = (hits / totals.clamp(min=1))[1:].tolist()
    return {"agreement": shares, "tokens a pass": 1 + accepted / max(1.0, drafts)}


# -- infill ----------------------------------------------------------------------------------------

HOLES = (1, 2, 4, 8)
_CANDIDATES = 20
_RIGHT = 12  # tokens after a hole by which candidates are ranked


class FillPasses:
    """Passes of both models over rows of one length, each one document."""

    def __init__(self, pair: Pair, tokens: Tensor) -> None:
        self.pair, (rows, length) = pair, tokens.shape
        self._halves = CleanNoisyPasses(pair.clean.config, rows, length, tokens.device, copies=1)
        self._halves.set_starts(torch.zeros_like(tokens))

    def causal(self, tokens: Tensor) -> Tensor:
        return self._halves.clean_pass(self.pair.clean, tokens)

    def bidirectional(self, tokens: Tensor) -> Tensor:
        return self._halves.bidirectional_pass(self.pair.twin, tokens)

    def twin_logits(self, x: Tensor) -> Tensor:
        """Without the mask token."""
        logits = self.pair.twin.logits(x).float()
        logits[..., self.pair.mask] = -torch.inf
        return logits


@torch.no_grad()
def fill_holes(pair: Pair, batch: TrainingBatch, seed: int = 0) -> dict[str, Any]:
    """Share of holes of each length that are restored exactly: by the twin, most certain position
    first; by the causal model from left to right; and for one token by ranking."""
    tokens = batch.inputs
    rows, length = tokens.shape
    random = torch.Generator().manual_seed(seed)
    passes, row = FillPasses(pair, tokens), torch.arange(rows, device=tokens.device)
    shares: dict[str, Any] = {}
    for count in HOLES:
        low, high = length // 3, max(length // 3 + 1, length - _RIGHT - count - 1)
        start = torch.randint(low, high, (rows,), generator=random).to(tokens.device)
        hole = start[:, None] + torch.arange(count, device=tokens.device)
        original = tokens.gather(1, hole)
        guesses = {
            "twin": _fill_by_twin(passes, tokens, hole),
            "causal": _fill_left_to_right(passes, tokens, hole),
        }
        if count == 1:
            causal = passes.causal(tokens)[row, start - 1]
            hidden = passes.bidirectional(tokens.scatter(1, hole, pair.mask))[row, start - 1]
            logits = {
                "causal ranks its own": pair.clean.logits(causal).float(),
                "causal ranks the twin's": passes.twin_logits(hidden),
            }
            for name, values in logits.items():
                candidates = values.topk(_CANDIDATES, -1).indices
                guesses[name] = _rank(passes, tokens, start, candidates)[:, None]
        shares[str(count)] = {
            name: float((guess == original).all(1).float().mean())
            for name, guess in guesses.items()
        }
    return shares


def _fill_by_twin(passes: FillPasses, tokens: Tensor, hole: Tensor) -> Tensor:
    """Set the most certain position of the hole in each pass."""
    mask = passes.pair.mask
    canvas = tokens.scatter(1, hole, mask)
    row = torch.arange(len(tokens), device=tokens.device)[:, None]
    for _ in range(hole.shape[1]):
        x = passes.bidirectional(canvas)[row, hole - 1]
        certainty, guess = passes.twin_logits(x).softmax(-1).max(-1)
        certainty = certainty.masked_fill(canvas.gather(1, hole) != mask, -1.0)
        position = certainty.argmax(1, keepdim=True)
        canvas = canvas.scatter(1, hole.gather(1, position), guess.gather(1, position))
    return canvas.gather(1, hole)


def _fill_left_to_right(passes: FillPasses, tokens: Tensor, hole: Tensor) -> Tensor:
    row = torch.arange(len(tokens), device=tokens.device)
    text = tokens.clone()
    for position in hole.unbind(1):
        x = passes.causal(text)[row, position - 1]
        text[row, position] = passes.pair.clean.logits(x).argmax(-1)
    return text.gather(1, hole)


def _rank(passes: FillPasses, tokens: Tensor, position: Tensor, candidates: Tensor) -> Tensor:
    """The candidate with which the causal model finds the text most probable."""
    row = torch.arange(len(tokens), device=tokens.device)
    after = position[:, None] + torch.arange(_RIGHT + 1, device=tokens.device)
    scores = []
    for candidate in candidates.unbind(1):
        text = tokens.clone()
        text[row, position] = candidate
        x = passes.causal(text)[row[:, None], after - 1]
        scores.append(-surprises(passes.pair.clean, x, text.gather(1, after)).sum(1))
    return candidates.gather(1, torch.stack(scores, 1).argmax(1, keepdim=True))[:, 0]


@torch.no_grad()
def find_errors(pair: Pair, batch: TrainingBatch, seed: int = 0) -> dict[str, float]:
    """ROC AUC of the twin's and the causal model's surprise at tokens that were replaced by samples
    of the causal model (a tenth), and how often the twin's top token restores them."""
    tokens = batch.inputs
    random = torch.Generator().manual_seed(seed)
    objective = FillTwinObjective(pair.mask, pair.clean)
    sampled = objective._sample_tokens(pair.twin, tokens, torch.zeros_like(tokens), random)
    wrong = torch.rand(tokens.shape, generator=random).to(tokens.device) < 0.1
    wrong &= sampled != tokens
    first = tokens.shape[1] // 8
    wrong[:, :first] = False
    text = torch.where(wrong, sampled, tokens)
    passes = FillPasses(pair, tokens)
    x = passes.bidirectional(text)[:, :-1]
    twin = surprises(pair.twin, x, text[:, 1:])
    causal = surprises(pair.clean, passes.causal(text)[:, :-1], text[:, 1:])
    restored = top_tokens(pair.twin, x, pair.mask) == tokens[:, 1:]
    labels = wrong[:, 1:]
    counted = slice(first - 1, None)
    return {
        "planted": int(wrong.sum()),
        "twin AUC": roc_auc(twin[:, counted].cpu(), labels[:, counted].cpu()),
        "causal AUC": roc_auc(causal[:, counted].cpu(), labels[:, counted].cpu()),
        "twin restores": float(restored[labels].float().mean()),
    }


# -- puzzles ---------------------------------------------------------------------------------------


def solve_puzzles(
    folder: Path, names: tuple[str, ...], count: int, device: torch.device
) -> dict[str, Any]:
    """Share of puzzles solved exactly, and passes, by kind of puzzle and order of filling."""
    model = load_transformer(open_checkpoint(folder), device=str(device))
    orders = ("left",) if model.config.sight == "causal" else ORDERS
    results: dict[str, Any] = {}
    for name in names:
        puzzle = puzzle_by_name(name)
        prompts, _ = puzzle.generate(count, np.random.default_rng(99))
        results[name] = {}
        for order in orders:
            right, passes = 0, 0.0
            for start in range(0, count, 256):
                part = prompts[start : start + 256]
                solution = solve(model, puzzle, part, order)
                right += sum(map(puzzle.is_solved, part, solution.answers))
                passes += solution.passes * len(part)
            results[name][order] = {"solved": right / count, "passes": passes / count}
    return results
