"""Answers to puzzles by a twin, plainly: no cache, no engine, one place after the other.

found = solutions(model, puzzle, prompts, order="confident")
found.answers, found.passes

left       from left to right (all that a causal twin can)
confident  each time the place whose likeliest token is likeliest
margin     ... whose likeliest token is furthest ahead of the next
random     any place
all        every place at once, in one pass
0.9        every place that is at least so sure, and the surest
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unspool.errors import SettingsError
from unspool.model.transformer import Transformer
from unspool.train.learning.forward import Sight, everything, hidden
from unspool.train.twins.puzzles.puzzle import Puzzle, decoded, encoded

ORDERS = ("left", "confident", "margin", "random", "all", "0.9", "0.99")


@dataclass(frozen=True, slots=True)
class Solutions:
    answers: list[str]
    passes: float  # through the model, for each puzzle on average


@torch.no_grad()
def solutions(
    model: Transformer, puzzle: Puzzle, prompts: list[str], order: str | None = None, seed: int = 0
) -> Solutions:
    """The twin's answers, its likeliest token in each place."""
    causal = model.config.sight == "causal"
    order = order or ("left" if causal else "confident")
    if causal and order != "left":
        raise SettingsError("a causal twin writes from left to right only")
    device = model.embed.weight.device
    asked = torch.from_numpy(encoded(puzzle, prompts)).to(device)
    if causal:
        found = _written(model, asked, puzzle.answer)
        return Solutions(decoded(puzzle, found.cpu().numpy()), float(puzzle.answer))
    filled, passes = _filled(model, asked, puzzle.answer, order, seed)
    return Solutions(decoded(puzzle, filled.cpu().numpy()), passes)


def _written(model: Transformer, asked: Tensor, count: int) -> Tensor:
    cache = model.new_cache(asked.shape[1] + count, len(asked))
    token, found = asked, []
    for _ in range(count):
        token = model(token, cache, last_only=True)[:, -1].argmax(-1, keepdim=True)
        found.append(token)
    return torch.cat(found, 1)


def _filled(
    model: Transformer, asked: Tensor, count: int, order: str, seed: int
) -> tuple[Tensor, float]:
    mask = model.config.mask_id
    assert mask is not None
    rng = torch.Generator().manual_seed(seed)
    canvas = torch.full((len(asked), count), mask, device=asked.device)
    both = torch.cat((asked, canvas), 1)
    sight = Sight.of(model.config, both, everything)
    passes = torch.zeros(len(asked))
    while bool((open_ := canvas == mask).any()):
        passes += open_.any(1).cpu()
        x = hidden(model, torch.cat((asked, canvas), 1), sight)[:, asked.shape[1] :]
        logits = model.logits(x).float()
        logits[..., mask] = -torch.inf
        chances = logits.softmax(-1)
        canvas = torch.where(
            open_ & _chosen(chances, open_, order, rng), chances.argmax(-1), canvas
        )
    return canvas, float(passes.mean())


def _chosen(chances: Tensor, open_: Tensor, order: str, rng: torch.Generator) -> Tensor:
    """The places that are set in this pass; at least one in each row."""
    if order == "all":
        return open_
    best = chances.topk(2, -1).values
    if order == "random":
        worth = torch.rand(open_.shape, generator=rng).to(open_.device)
    elif order == "left":
        worth = -torch.arange(open_.shape[1], device=open_.device).expand_as(open_).float()
    else:
        worth = best[..., 0] - best[..., 1] if order == "margin" else best[..., 0]
    worth = worth.masked_fill(~open_, -torch.inf)
    first = torch.zeros_like(open_).scatter_(1, worth.argmax(1, keepdim=True), True)
    return first | (best[..., 0] >= _threshold(order))


def _threshold(order: str) -> float:
    try:
        return float(order)
    except ValueError:
        if order in ORDERS:
            return torch.inf
        raise SettingsError(
            f"there is no order {order!r}; there are {', '.join(ORDERS[:5])}, or a number: how "
            "sure the twin must be"
        ) from None
