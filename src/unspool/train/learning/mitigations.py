"""Two remedies against what next-token training leaves out, as one objective.

Scheduled sampling (Bengio et al. 2015): in training every token is guessed from words of the text,
in writing from the model's own. So a share of the input tokens is replaced by what the model itself
would have put there; the targets stay. The share grows from 0 to `scheduled_sampling` over the
training. As in Mihaylova and Martins (2019) the model reads the text once, all replacements are
drawn from that, and then it reads and learns: two passes instead of one for each token.

Unlikelihood (Welleck et al. 2019, token level): beside the right token becoming likelier, those
that occurred before it in the text become less likely, so that loops do not feed themselves:

    loss = -log p(x_t) - alpha * sum over c of log(1 - p(c)),   c in {x_1 ... x_t-1} without x_t
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unspool.errors import SettingsError
from unspool.model.transformer import Transformer
from unspool.train.learning.cross_entropy import summed_loss
from unspool.train.learning.forward import Sight, hidden, inside
from unspool.train.learning.objectives import Loss

if TYPE_CHECKING:
    from unspool.train.data.batches import Batch

_CERTAIN = 1 - 1e-5  # the likeliest that a wrong token may be before its loss stops growing
_DRAWN_AT_ONCE = 1 << 24  # logits in memory together, when tokens are drawn


@dataclass(slots=True)
class MitigatedNextToken:
    """`next_token` with scheduled sampling, unlikelihood, or both."""

    scheduled_sampling: float = 0.0  # share of the inputs at the end of the training
    unlikelihood: float = 0.0  # alpha
    progress: float = field(default=1.0, compare=False)  # share of the training that is done

    def __post_init__(self) -> None:
        if not 0 <= self.scheduled_sampling <= 1:
            raise SettingsError(
                f"scheduled sampling is {self.scheduled_sampling!r}; it may be a share from 0 to 1"
            )
        if not 0 <= self.unlikelihood < math.inf:
            raise SettingsError(
                f"unlikelihood is {self.unlikelihood!r}; it may be a weight from 0 up"
            )

    def __call__(self, model: Transformer, batch: Batch, rng: torch.Generator) -> Loss:
        tokens, targets = batch.ids[:, :-1], batch.ids[:, 1:]
        allowed = None if batch.documents is None else inside(batch.documents)
        sight = Sight.of(model.config, tokens, allowed, batch.documents)
        rate = self.scheduled_sampling * self.progress
        read = _with_own_tokens(model, batch, sight, rate, rng) if rate else tokens
        x = hidden(model, read, sight)
        summed = summed_loss(model, x, targets, batch.counted)
        count = targets.numel() if batch.counted is None else batch.counted.sum().clamp(min=1)
        extra: dict[str, float] = {}
        if self.unlikelihood:
            rows = [_unlikelihood(model, x[row], batch, row) for row in range(len(x))]
            repeated = torch.stack(rows).sum()
            extra["unlikelihood"] = float(repeated.detach() / count)
            summed = summed + self.unlikelihood * repeated
        return Loss(summed / count, count, extra)


# -- scheduled sampling ---------------------------------------------------------------------


def _with_own_tokens(
    model: Transformer, batch: Batch, sight: Any, rate: float, rng: torch.Generator
) -> Tensor:
    """The inputs, each with the chance `rate` replaced by a token that the model draws there."""
    tokens = batch.ids[:, :-1]
    replaced = (torch.rand(tokens.shape, generator=rng) < rate).to(tokens.device)
    replaced[:, 0] = False  # nothing stands before it to draw it from
    if batch.counted is not None:  # what the model never writes, it never errs in
        replaced[:, 1:] &= batch.counted[:, :-1]
    if batch.documents is not None:
        replaced[:, 1:] &= batch.documents[:, 1:] == batch.documents[:, :-1]
    with torch.no_grad():
        x = hidden(model, tokens, sight)
        before = x[:, :-1][replaced[:, 1:]]  # the vector of a place says what comes behind it
        chances = torch.rand(len(before), generator=rng).to(tokens.device)
        mixed = tokens.clone()
        mixed[replaced] = _drawn(model, before, chances)
    return mixed


def _drawn(model: Transformer, x: Tensor, chances: Tensor) -> Tensor:
    """A token for each vector: the first whose share and those before it reach its chance."""
    size = max(64, _DRAWN_AT_ONCE // model.config.vocab_size)
    found = [chances.new_empty(0, dtype=torch.long)]
    for part, chance in zip(x.split(size), chances.split(size), strict=True):
        shares = model.logits(part).float().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(shares, (chance * shares[:, -1:].squeeze(-1))[:, None])
        found.append(drawn.squeeze(-1).clamp(max=model.config.vocab_size - 1))
    return torch.cat(found)


# -- unlikelihood ---------------------------------------------------------------------------


def _unlikelihood(model: Transformer, x: Tensor, batch: Batch, row: int) -> Tensor:
    """The sum over a row's targets of -log(1 - p) of each token that occurred before, once each."""
    tokens, targets = batch.ids[row, :-1], batch.ids[row, 1:]
    places = torch.arange(len(tokens), device=tokens.device)
    known = places[:, None] >= places[None, :]  # [target, token before it]
    again = (tokens[:, None] == tokens[None, :]) & ~known.T  # [token, the same one before it]
    if batch.documents is not None:
        together = batch.documents[row][:, None] == batch.documents[row][None, :]
        known, again = known & together, again & together
    candidates = known & ~again.any(1) & (tokens[None, :] != targets[:, None])
    if batch.counted is not None:
        candidates = candidates & batch.counted[row][:, None]
    summed: Tensor = checkpoint(_piece, model, x, tokens, candidates, use_reentrant=False)
    return summed


def _piece(model: Transformer, x: Tensor, tokens: Tensor, candidates: Tensor) -> Tensor:
    likely = model.logits(x).float().softmax(-1)[:, tokens]  # [target, token before it]
    return -(torch.log1p(-likely.clamp(max=_CERTAIN)) * candidates).sum()
