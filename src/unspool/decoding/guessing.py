"""Sample a token for each position of a canvas, with its probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unspool.decoding.diffusion_options import DiffusionPlan
from unspool.decoding.orders import Predictions
from unspool.decoding.passes import CanvasPosition, Change
from unspool.engine.steps import Candidate, Step, explained_step
from unspool.sampling import Chain, Pick, RowInput, score
from unspool.sampling.draw import ORDER_STREAM, stream_of_pass, uniform
from unspool.sampling.picker import needs_history
from unspool.session import Session


class CanvasSampler:
    """Samples tokens for the positions of one canvas. Logits have one row per position."""

    def __init__(self, lm: Session, plan: DiffusionPlan) -> None:
        self._lm, self._plan = lm, plan
        self._prompt = plan.request.prompt
        self._chains: dict[int, Chain] = {}  # by number of rows
        self._sees_history = needs_history(plan.request.settings)

    def guided_logits(self, logits_rows: Sequence[Any], rows: slice) -> Any:
        """Logits with guidance applied (classifier-free) and the mask token excluded."""
        logits: Any = logits_rows[0][rows]
        guidance = self._plan.guidance
        if guidance:
            unconditional: Any = logits_rows[1][rows]
            logits = unconditional + (guidance + 1) * (logits - unconditional)
        masked = logits.copy() if isinstance(logits, np.ndarray) else logits.clone()
        masked[:, self._plan.kind.mask_id] = -math.inf
        return masked

    def picks(
        self, logits: Any, places: Sequence[int], filled: Sequence[Step | None], number: int,
        allowed: Any = None,
    ) -> list[Pick]:  # fmt: skip
        """Sample a token for each position in pass `number`."""
        if not len(places):
            return []
        request, history = self._plan.request, list[int]()
        if self._sees_history:
            history = [*self._prompt, *(step.token for step in filled if step is not None)]
        start, sample = len(self._prompt), request.limits.sample
        rows = [
            RowInput(
                history, start, sample, position=start + n, canvas_pass=number, allowed=allowed
            )
            for n in places
        ]
        chain = self._chains.get(len(rows))
        if chain is None:
            chain = self._chains[len(rows)] = Chain([request.settings] * len(rows))
        return chain.pick(logits, rows, top=max(2, self._plan.top))

    def guesses(self, places: Sequence[int], picks: Sequence[Pick], number: int) -> Predictions:
        """Convert picks to the input of an order."""
        request, start = self._plan.request, len(self._prompt)
        stream, seed = stream_of_pass(ORDER_STREAM, number), request.settings.seed
        return Predictions(
            places,
            [pick.token for pick in picks],
            np.array([math.exp(pick.logprob) for pick in picks]),
            np.array([_margin(pick) for pick in picks]),
            np.array([pick.entropy for pick in picks]),
            np.array([uniform(seed, request.limits.sample, start + n, stream) for n in places]),
        )

    def place(self, number: int, pick: Pick, change: Change = None) -> CanvasPosition:
        """Describe a position with its sampled token and whether that was set."""
        candidates = self._candidates((c.token, c.logprob, c.probability) for c in pick.candidates)
        token, text = pick.token if change else None, self._lm.readable(pick.token)
        return CanvasPosition(number, token, text, math.exp(pick.logprob), candidates, change)

    def describe_filled(
        self, logits: Any, places: Sequence[int], tokens: Sequence[int]
    ) -> list[CanvasPosition]:
        """Describe positions that have a token, with its probability in this pass."""
        if not len(places):
            return []
        scores = score(logits, tokens, self._plan.top)
        result = []
        for row, (number, token) in enumerate(zip(places, tokens, strict=True)):
            best = zip(scores.top_tokens[row], scores.top_logprobs[row], strict=True)
            candidates = self._candidates((int(t), float(p), math.exp(p)) for t, p in best)
            chance = math.exp(scores.logprobs[row])
            result.append(
                CanvasPosition(number, token, self._lm.readable(token), chance, candidates)
            )
        return result

    def step(self, place: CanvasPosition, pick: Pick, number: int) -> Step:
        """Build the step of a token that was set."""
        position, token_bytes = len(self._prompt) + place.number, self._lm.engine.token_bytes
        step = explained_step(pick, position, place.text, token_bytes, 0.0, None)
        return replace(step, canvas_pass=number, candidates=place.candidates)

    def given_step(self, number: int, token: int) -> Step:
        """Build the step of an initial token given by the caller."""
        token_bytes, position = self._lm.engine.token_bytes(token), len(self._prompt) + number
        return Step(token, token_bytes, self._lm.readable(token), 0.0, position, chosen=True)

    def _candidates(self, best: Any) -> tuple[Candidate, ...]:
        readable = self._lm.readable
        candidates = tuple(
            Candidate(t, readable(t), logprob, chance) for t, logprob, chance in best
        )
        return candidates[: self._plan.top]


def _margin(pick: Pick) -> float:
    best = [math.exp(candidate.logprob) for candidate in pick.candidates[:2]]
    return best[0] - best[-1] if len(best) > 1 else best[0]
