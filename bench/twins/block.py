"""Measures of a block twin: a bound on its perplexity, and how far it agrees with its model.

The bound (arXiv 2503.09573) adds, for each block, what its first token costs the causal model and
what the others cost the twin: k of them hidden, k drawn evenly, each hidden one counted n/k.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from twins.models import Pair, best, surprises
from unspool.train.data.batches import TrainingBatch
from unspool.train.twins.objectives import (
    CleanNoisyPasses,
    block_starts,
    document_ids,
    document_starts,
)

SIZES = (4, 8, 16, 32)


@torch.no_grad()
def perplexities(pair: Pair, batches: list[TrainingBatch], repeats: int = 8) -> dict[str, Any]:
    """Of the causal model, and of the twin at each block size as a multiple of that."""
    rows, length = batches[0].inputs.shape
    halves = CleanNoisyPasses(pair.clean.config, rows, length, batches[0].ids.device, copies=1)
    nats: dict[int, float] = dict.fromkeys((0, *SIZES), 0.0)
    count = 0.0
    rng = torch.Generator().manual_seed(0)
    for batch in batches:
        tokens, documents = batch.inputs, document_ids(batch)
        starts = document_starts(documents)
        counted = _counted(batch, starts)
        count += float(counted.sum())
        for size in SIZES:
            blocks = _blocks(starts, size)
            halves.set_starts(starts, blocks)
            clean = surprises(pair.clean, halves.read(pair.clean, tokens)[:, :-1], tokens[:, 1:])
            nats[0] += float((clean * counted).sum()) / len(SIZES)
            for _ in range(repeats):
                hide, weight = drawn(blocks, rng)
                x = halves.noisy_pass(pair.twin, tokens.masked_fill(hide, pair.mask))[:, :-1]
                guessed = surprises(pair.twin, x, tokens[:, 1:]) * (hide * weight)[:, 1:]
                first = (torch.arange(length, device=blocks.device) == blocks)[:, 1:]
                nats[size] += float(((guessed + clean * first) * counted).sum()) / repeats
    causal = math.exp(nats[0] / count)
    told = {f"block {size}": math.exp(nats[size] / count) / causal for size in SIZES}
    return {"causal perplexity": causal, **told}


def _blocks(starts: Tensor, size: int) -> Tensor:
    same = torch.full((len(starts), 1), size, device=starts.device)
    return block_starts(starts, same, torch.zeros_like(same))


def _counted(batch: TrainingBatch, starts: Tensor) -> Tensor:
    """Targets that are text, and of a conversation the answers; none begins its document."""
    places = torch.arange(starts.shape[1], device=starts.device)
    fine = ((places != starts) & (document_ids(batch) >= 0))[:, 1:]
    return fine if batch.loss_mask is None else fine & batch.loss_mask[:, :-1]


def drawn(blocks: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """In each block of n tokens but the first, k hidden ones, k drawn evenly from 1 to n; and what
    each counts: n/k."""
    rows, length = blocks.shape
    places = torch.arange(length, device=blocks.device).expand(rows, -1)
    blocks = blocks.long()
    others = torch.zeros_like(blocks).scatter_add_(1, blocks, torch.ones_like(blocks))
    others = others.gather(1, blocks) - 1
    level = torch.rand(blocks.shape, generator=rng).to(blocks.device).gather(1, blocks)
    hidden = (level * others).floor() + 1
    score = torch.rand(blocks.shape, generator=rng, dtype=torch.float64).to(blocks.device)
    score = torch.where(places == blocks, 2.0, score)  # the first is never among them
    order = (blocks * 4 + score).argsort(1)
    rank = torch.zeros_like(blocks).scatter_(1, order, places) - blocks
    return (rank < hidden) & (places != blocks), others / hidden


@torch.no_grad()
def agreement(pair: Pair, batches: list[TrainingBatch], size: int = 8) -> dict[str, Any]:
    """How often the twin, shown nothing of a block but its first token, guesses what the causal
    model finds likeliest there, by the place in the block; and how many tokens a pass of the causal
    model that would give as drafts."""
    rows, length = batches[0].inputs.shape
    device = batches[0].ids.device
    halves = CleanNoisyPasses(pair.clean.config, rows, length, device, copies=1)
    hits, seen = torch.zeros(size, device=device), torch.zeros(size, device=device)
    accepted = begun = 0.0
    for batch in batches:
        tokens, documents = batch.inputs, document_ids(batch)
        starts = document_starts(documents)
        blocks = _blocks(starts, size)
        halves.set_starts(starts, blocks)
        clean = best(pair.clean, halves.read(pair.clean, tokens)[:, :-1])
        places = torch.arange(length, device=device)
        noisy = tokens.masked_fill(places != blocks, pair.mask)
        twin = best(pair.twin, halves.noisy_pass(pair.twin, noisy)[:, :-1], pair.mask)
        offset, counted = (places - blocks)[:, 1:], _counted(batch, starts)
        same = (twin == clean) & counted
        for place in range(1, size):
            hits[place] += (same & (offset == place)).sum()
            seen[place] += (counted & (offset == place)).sum()
        run, going = torch.zeros_like(same[:, 0]).float(), torch.zeros_like(same[:, 0])
        for place in range(length - 1):  # runs of agreement from each block's start
            first = offset[:, place] == 1
            going = torch.where(first, counted[:, place], going) & same[:, place]
            begun += float((first & counted[:, place]).sum())
            run += going & (offset[:, place] >= 1)
        accepted += float(run.sum())
    shares = (hits / seen.clamp(min=1))[1:].tolist()
    return {"agreement": shares, "tokens a pass": 1 + accepted / max(1.0, begun)}
