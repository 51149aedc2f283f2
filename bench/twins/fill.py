"""Measures of a fill twin: holes that are filled exactly, and planted errors that are found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twins.models import Pair, best, surprises
from unspool.train.data.batches import TrainingBatch
from unspool.train.twins.objectives import CleanNoisyPasses, FillTwinObjective

HOLES = (1, 2, 4, 8)
_CANDIDATES = 20
_RIGHT = 12  # tokens behind a hole by which candidates are ranked


class Looking:
    """Rows of one length, each one document, read by both models."""

    def __init__(self, pair: Pair, tokens: Tensor) -> None:
        self.pair = pair
        self._halves = CleanNoisyPasses(pair.clean.config, *tokens.shape, tokens.device, copies=1)  # type: ignore[arg-type]
        self._halves.set_starts(torch.zeros_like(tokens))

    def causal(self, tokens: Tensor) -> Tensor:
        return self._halves.read(self.pair.clean, tokens)

    def bidirectional_pass(self, tokens: Tensor) -> Tensor:
        return self._halves.bidirectional_pass(self.pair.twin, tokens)


@torch.no_grad()
def holes(pair: Pair, batch: TrainingBatch, seed: int = 0) -> dict[str, Any]:
    """The share of holes of each length that come out exactly as they were: by the twin, surest
    place first; by the causal model from left to right; and for one token by ranking."""
    tokens = batch.inputs
    rows, length = tokens.shape
    rng = torch.Generator().manual_seed(seed)
    looking, row = Looking(pair, tokens), torch.arange(rows, device=tokens.device)
    told: dict[str, Any] = {}
    for count in HOLES:
        low, high = length // 3, max(length // 3 + 1, length - _RIGHT - count - 1)
        begin = torch.randint(low, high, (rows,), generator=rng).to(tokens.device)
        hole = begin[:, None] + torch.arange(count, device=tokens.device)
        wanted = tokens.gather(1, hole)
        found = {"twin": _by_twin(looking, tokens, hole), "causal": _by_left(looking, tokens, hole)}
        if count == 1:
            left = looking.causal(tokens)[row, begin - 1]
            hidden = looking.bidirectional_pass(tokens.scatter(1, hole, pair.mask))[row, begin - 1]
            given = {
                "causal ranks its own": pair.clean.logits(left),
                "causal ranks the twin's": _without(pair.twin.logits(hidden), pair.mask),
            }
            for name, logits in given.items():
                candidates = logits.float().topk(_CANDIDATES, -1).indices
                found[name] = _ranked(looking, tokens, begin, candidates)[:, None]
        told[str(count)] = {
            name: float((guess == wanted).all(1).float().mean()) for name, guess in found.items()
        }
    return told


def _without(logits: Tensor, token: int) -> Tensor:
    logits[..., token] = -torch.inf
    return logits


def _by_twin(looking: Looking, tokens: Tensor, hole: Tensor) -> Tensor:
    """Each time the surest place of the hole is set."""
    mask = looking.pair.mask
    canvas = tokens.scatter(1, hole, mask)
    row = torch.arange(len(tokens), device=tokens.device)[:, None]
    for _ in range(hole.shape[1]):
        x = looking.bidirectional_pass(canvas)[row, hole - 1]
        chances = _without(looking.pair.twin.logits(x).float(), mask).softmax(-1)
        sure, guess = chances.max(-1)
        sure = sure.masked_fill(canvas.gather(1, hole) != mask, -1.0)
        place = sure.argmax(1, keepdim=True)
        canvas = canvas.scatter(1, hole.gather(1, place), guess.gather(1, place))
    return canvas.gather(1, hole)


def _by_left(looking: Looking, tokens: Tensor, hole: Tensor) -> Tensor:
    row = torch.arange(len(tokens), device=tokens.device)
    text = tokens.clone()
    for place in hole.unbind(1):
        x = looking.causal(text)[row, place - 1]
        text[row, place] = looking.pair.clean.logits(x).argmax(-1)
    return text.gather(1, hole)


def _ranked(looking: Looking, tokens: Tensor, place: Tensor, candidates: Tensor) -> Tensor:
    """The candidate with which the causal model finds the whole text likeliest."""
    row = torch.arange(len(tokens), device=tokens.device)
    behind = place[:, None] + torch.arange(_RIGHT + 1, device=tokens.device)
    scores = []
    for candidate in candidates.unbind(1):
        text = tokens.clone()
        text[row, place] = candidate
        x = looking.causal(text)[row[:, None], behind - 1]
        scores.append(-surprises(looking.pair.clean, x, text.gather(1, behind)).sum(1))
    return candidates.gather(1, torch.stack(scores, 1).argmax(1, keepdim=True))[:, 0]


@torch.no_grad()
def planted(
    pair: Pair, batch: TrainingBatch, share: float = 0.1, seed: int = 0
) -> dict[str, float]:
    """Tokens replaced by what the causal model might have written: how well the twin's doubt, and
    the causal model's own surprise, tell them from the others (area under the ROC curve)."""
    tokens = batch.inputs
    rng = torch.Generator().manual_seed(seed)
    sampled = FillTwinObjective(pair.mask, pair.clean)._sampled(
        pair.twin, tokens, torch.zeros_like(tokens), rng
    )
    wrong = (torch.rand(tokens.shape, generator=rng).to(tokens.device) < share) & (
        sampled != tokens
    )
    first = tokens.shape[1] // 8
    wrong[:, :first] = False
    text = torch.where(wrong, sampled, tokens)
    looking = Looking(pair, tokens)
    twin = surprises(pair.twin, looking.bidirectional_pass(text)[:, :-1], text[:, 1:])
    causal = surprises(pair.clean, looking.causal(text)[:, :-1], text[:, 1:])
    seen = slice(first - 1, None)
    return {
        "planted": int(wrong.sum()),
        "twin AUC": area(twin[:, seen], wrong[:, 1:][:, seen]),
        "causal AUC": area(causal[:, seen], wrong[:, 1:][:, seen]),
        "twin restores": float(
            (best(pair.twin, looking.bidirectional_pass(text)[:, :-1], pair.mask) == tokens[:, 1:])[
                wrong[:, 1:]
            ]
            .float()
            .mean()
        ),
    }


def area(scores: Tensor, positive: Tensor) -> float:
    """How often a positive one has the higher score than another; a tie counts half."""
    flat, yes = scores.flatten().double().cpu(), positive.flatten().bool().cpu()
    _, inverse, counts = flat.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[inverse]
    ones, zeros = int(yes.sum()), int((~yes).sum())
    if not ones or not zeros:
        return float("nan")
    return float((ranks[yes].sum() - ones * (ones + 1) / 2) / (ones * zeros))
