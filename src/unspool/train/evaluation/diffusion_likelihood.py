"""Likelihoods of texts by diffusion models: an estimate of a lower bound (ELBO).

A diffusion model has no chain rule over left-to-right tokens. What it has is a prediction of masked
places from the visible ones. Averaged over which places of a target are masked, it bounds the
log-probability from below (LLaDA, arXiv 2502.09992, equation 6):

    log p(target | context)  >=  E over l, places of size l   L / l * sum of log p(token | visible)

with l uniform in 1 ... L, the number of tokens in the target. Short targets are computed exactly,
over all sets of places; longer ones from random sets, the same for all targets of a length, so that
the answers of one question are compared under equal conditions. A model with blocks is scored
block by block, each after the true tokens of those before; places of the last block after the
target stay masked.

    estimate_likelihoods(lm, [(context_ids, target_ids), ...])[0].total
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from unspool.decoding.diffusion.options import canvas_kind
from unspool.engine.canvas import Canvas, CanvasKind, PassRequest, open_canvas, run_passes
from unspool.errors import SettingsError, check_int
from unspool.lens.activations import to_numpy
from unspool.sampling import score
from unspool.session import Session
from unspool.train.evaluation.bits_per_byte import Likelihood, Pair

DEFAULT_SAMPLES = 32
_MAX_LOGIT_ROWS = 512  # per step: bounds the memory


def is_diffusion_model(lm: Session) -> bool:
    """Whether a model fills masked places instead of reading from left to right."""
    return lm.config.sight != "causal"


def estimate_likelihoods(
    lm: Session,
    pairs: Sequence[Pair],
    *,
    num_samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    check_greedy: bool = True,
    on_progress: Callable[[int], object] = lambda done: None,
) -> list[Likelihood]:
    """Estimate the lower bound of each target's log-probability after its context.

    Args:
        lm: A diffusion model, or a masked model such as BERT.
        pairs: Token ids of contexts and targets. A context that is too long is truncated at its
            start.
        num_samples: Sets of masked places for each target, or for each block of it. A target of L
            tokens with 2^L - 1 <= `num_samples` is computed exactly.
        seed: Of the random sets.
        check_greedy: Also find whether greedy decoding (the most confident place first) yields the
            target; else `greedy` is False.
        on_progress: Called with the number of pairs that are done.

    Returns:
        Likelihoods, in the order of the pairs. `logprobs` has one value for each block.
    """
    check_int("num_samples", num_samples, least=1)
    kind = canvas_kind(lm, {})
    results = []
    for number, pair in enumerate(pairs, 1):
        context, target = _truncate(pair, lm.context)
        logprobs = []
        is_greedy = check_greedy or not target
        for start, end in _blocks(len(context), len(target), kind):
            block = _Block(lm, kind, [*context, *target[:start]], target[start:end])
            logprobs.append(block.estimate(num_samples, seed))
            is_greedy = is_greedy and block.is_greedy()
        results.append(Likelihood(tuple(logprobs), is_greedy))
        on_progress(number)
    return results


def _truncate(pair: Pair, max_context: int) -> tuple[list[int], list[int]]:
    context, target = list(pair[0]), list(pair[1])
    room = max_context - len(target)
    if room < 0:
        raise SettingsError(
            f"a continuation has {len(target):,} tokens, more than the model's context of "
            f"{max_context:,}"
        )
    return context[max(0, len(context) - room) :], target


def _blocks(num_context: int, length: int, kind: CanvasKind) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each block in a target; without blocks it is one."""
    start = 0
    while start < length:
        end = length
        if kind.sight == "block":
            end = min(length, start + kind.block - (num_context + start) % kind.block)
        yield start, end
        start = end


@dataclass(frozen=True, slots=True)
class MaskedSet:
    """Places that are masked together, and the weight of their log-probabilities."""

    places: tuple[int, ...]
    weight: float


def masked_sets(length: int, num_samples: int, seed: int) -> list[MaskedSet]:
    """Return the sets of places to mask in a target: all of them if they are few, or random ones.

    The number of masked places is stratified: it covers 1 to `length` evenly.
    """
    if 2**length - 1 <= num_samples:
        return [
            MaskedSet(places, 1 / (size * math.comb(length, size)))
            for size in range(1, length + 1)
            for places in combinations(range(length), size)
        ]
    rng = np.random.default_rng((seed, length))
    offset = rng.random()
    result = []
    for number in range(num_samples):
        size = 1 + int((number + offset) * length / num_samples)
        places = rng.choice(length, size, replace=False)
        weight = length / size / num_samples
        result.append(MaskedSet(tuple(sorted(places.tolist())), weight))
    return result


class _Block:
    """The tokens of a target that one canvas holds, and the text before them."""

    def __init__(self, lm: Session, kind: CanvasKind, before: list[int], target: list[int]) -> None:
        self.lm, self.kind, self.before, self.target = lm, kind, before, target
        self.num_places = len(target)
        if kind.sight == "block":  # a complete block, as in training
            end = len(before) + len(target)
            self.num_places += min(-end % kind.block, lm.context - end)

    def estimate(self, num_samples: int, seed: int) -> float:
        """Return the lower bound of the target's log-probability."""
        masks = masked_sets(len(self.target), num_samples, seed)
        group = max(1, _MAX_LOGIT_ROWS // self.num_places)
        total = 0.0
        for start in range(0, len(masks), group):
            batch = masks[start : start + group]
            with ExitStack() as stack:
                canvases = [stack.enter_context(self._open(mask.places)) for mask in batch]
                outputs = run_passes([PassRequest(canvas) for canvas in canvases])
            for mask, logits in zip(batch, outputs, strict=True):
                rows = self._without_mask(logits)[list(mask.places)]
                tokens = [self.target[place] for place in mask.places]
                total += mask.weight * math.fsum(score(rows, tokens).logprobs.tolist())
        return total

    def is_greedy(self) -> bool:
        """Whether unmasking the most confident place of each pass yields the target.

        Stops at the first place that gets another token, which is usually soon.
        """
        with self._open(range(len(self.target))) as canvas:
            if (first := canvas.next_logits()) is not None:
                token = int(self._without_mask(first)[0].argmax())
                if token != self.target[0]:
                    return False
                canvas.set(0, token)
            while (masked := canvas.masked) and masked[0] < len(self.target):
                rows = self._without_mask(canvas.logits())[masked]
                best = rows.argmax(-1)
                surest = int(score(rows, best.tolist()).logprobs.argmax())
                place, token = masked[surest], int(best[surest])
                if place < len(self.target) and token != self.target[place]:
                    return False
                canvas.set(place, token)
        return True

    def _open(self, masked: Iterable[int]) -> Canvas:
        """Open a canvas with all tokens of the target but the masked ones."""
        canvas = open_canvas(self.lm.engine, self.before, self.num_places, self.kind)
        for place in sorted({*range(len(self.target))} - {*masked}):
            canvas.set(place, self.target[place])
        return canvas

    def _without_mask(self, logits: Any) -> Any:
        """Return logits [places, vocabulary] in which the mask token is impossible."""
        rows = np.array(to_numpy(logits), np.float32)
        rows[:, self.kind.mask_id] = -np.inf
        return rows
