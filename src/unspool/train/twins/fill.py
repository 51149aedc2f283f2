"""B: a twin that sees the whole text, for gaps and for doubt, as an objective of the trainer.

Of the rows of a batch a quarter each has hidden spans, hidden answers, tokens hidden evenly, and
noise: up to a fifth of the tokens that are shown are replaced by what the causal model might have
written there. In rows with noise the tokens that are shown are guessed too: how likely the twin
finds the token that stands there is its doubt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from unspool.model.transformer import Transformer
from unspool.train.data.batches import Batch
from unspool.train.learning.cross_entropy import summed_loss
from unspool.train.learning.objectives import Loss
from unspool.train.tuning.preference import as_before
from unspool.train.twins.block import documents_of, guessing, kept_halves, opposite
from unspool.train.twins.halves import Halves, document_starts
from unspool.train.twins.noise import hidden_evenly, hidden_spans, wrong_places

_AT_ONCE = 1 << 25  # logits that are sampled from together


@dataclass(eq=False)
class FillTwin:
    """Hidden tokens from everything around them, and wrong ones among those that are shown."""

    mask_id: int
    clean: Transformer | None = field(default=None, repr=False)  # None: LoRA switched off
    wrong: float = 0.2  # the most of the tokens that are shown
    shown_weight: float = 0.25
    _halves: dict[tuple[int, int], Halves] = field(default_factory=dict, repr=False)
    _readers: dict[tuple[int, int], Halves] = field(default_factory=dict, repr=False)

    def __call__(self, model: Transformer, batch: Batch, rng: torch.Generator) -> Loss:
        tokens, documents = batch.inputs, documents_of(batch)
        starts = document_starts(documents)
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        may = (places != starts) & (documents >= 0)  # nobody stands before a document's first
        quarter = rows_of_each(len(tokens))
        if batch.counted is not None:
            answers = _answers(batch.counted)
            may[quarter[1]] &= answers[quarter[1]]
        hide = self._drawn(tokens, quarter, rng) & may
        noisy = tokens.clone()
        last = quarter[3]
        wrong = wrong_places(len(tokens[last]), tokens.shape[1], rng, self.wrong).to(tokens.device)
        others = self._sampled(model, tokens[last], starts[last], rng)
        noisy[last] = torch.where(wrong & may[last], others, tokens[last])
        halves = kept_halves(self._halves, model, tokens)
        halves.place(starts)
        x = halves.whole(model, opposite(noisy, hide, may & ~hide, self.mask_id))
        hidden_loss, count = _mean(model, guessing(x, hide), tokens, may)
        shown = torch.cat(tuple(part[last] for part in x.chunk(2)))
        shown_loss, _ = _mean(model, guessing(shown, ~hide[last]), tokens[last], may[last])
        told = {"hidden": float(hidden_loss.detach()), "shown": float(shown_loss.detach())}
        return Loss(hidden_loss + self.shown_weight * shown_loss, count, told)

    def _drawn(self, tokens: Tensor, quarter: list[slice], rng: torch.Generator) -> Tensor:
        length = tokens.shape[1]
        rows = [len(tokens[part]) for part in quarter]
        drawn = (
            hidden_spans(rows[0], length, rng),
            hidden_evenly(rows[1], length, rng),
            hidden_evenly(rows[2], length, rng),
            hidden_evenly(rows[3], length, rng, most=0.5),
        )
        return torch.cat(drawn).to(tokens.device)

    def _sampled(
        self, model: Transformer, tokens: Tensor, starts: Tensor, rng: torch.Generator
    ) -> Tensor:
        """What the causal model might have written in each place; its first is the text's own."""
        seed = int(torch.randint(1 << 62, (1,), generator=rng))
        own = torch.Generator(tokens.device).manual_seed(seed)  # there are many numbers to draw
        with torch.no_grad(), as_before(model, self.clean) as clean:
            halves = kept_halves(self._readers, clean, tokens)
            halves.place(starts)
            flat = halves.read(clean, tokens)[:, :-1].flatten(0, 1)
            size = max(64, _AT_ONCE // clean.config.vocab_size)
            found = [_picked(clean.logits(part).float(), own) for part in flat.split(size)]
        return torch.cat((tokens[:, :1], torch.cat(found).view(len(tokens), -1)), 1)


def _picked(logits: Tensor, rng: torch.Generator) -> Tensor:
    """One token a row, each as often as it is likely."""
    noise = torch.empty_like(logits).exponential_(generator=rng).clamp(min=1e-20)
    return (logits - noise.log()).argmax(-1)


def _mean(model: Transformer, x: Tensor, tokens: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    weights = counted[:, 1:].float()
    count = weights.sum().clamp(min=1)
    return summed_loss(model, x, tokens[:, 1:], weights) / count, count


def rows_of_each(rows: int) -> list[slice]:
    """Which rows of a batch are noised in which of the four ways; the last has at least one."""
    last = min(rows * 3 // 4, rows - 1)
    borders = [0, last // 3, last * 2 // 3, last, rows]
    return [slice(a, b) for a, b in pairwise(borders)]


def _answers(counted: Tensor) -> Tensor:
    """The inputs that count; `counted` speaks of each input's successor."""
    return torch.cat((torch.zeros_like(counted[:, :1]), counted[:, :-1]), 1)
