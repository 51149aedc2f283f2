"""What a pass says of places: a pick for each, and how sure the model is of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unspool.decoding.diffusion_options import DiffusionPlan
from unspool.decoding.orders import Guesses
from unspool.decoding.passes import Change, Place
from unspool.engine.steps import Candidate, Step, explained_step
from unspool.sampling import Chain, Pick, RowInput, score
from unspool.sampling.draw import ORDER_STREAM, in_pass, uniform
from unspool.sampling.picker import sees_history
from unspool.session import Session


class Guesser:
    """Picks tokens for the places of one text. Logits have a row for each place."""

    def __init__(self, lm: Session, plan: DiffusionPlan) -> None:
        self._lm, self._plan = lm, plan
        self._prompt = plan.request.prompt
        self._sees_history = sees_history(plan.request.settings)

    def combined(self, found: Sequence[Any], rows: slice) -> Any:
        """The logits that are gone by: with guidance, further from those without a prompt. The
        mask is not among what may be said."""
        logits: Any = found[0][rows]
        guidance = self._plan.guidance
        if guidance:
            without: Any = found[1][rows]
            logits = without + (guidance + 1) * (logits - without)
        own = logits.copy() if isinstance(logits, np.ndarray) else logits.clone()
        own[:, self._plan.kind.mask_id] = -math.inf
        return own

    def picks(
        self, logits: Any, places: Sequence[int], filled: Sequence[Step | None], number: int,
        allowed: Any = None,
    ) -> list[Pick]:  # fmt: skip
        """A token for each place, in the pass of this number."""
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
        chain = Chain([request.settings] * len(rows))
        return chain.pick(logits, rows, top=max(2, self._plan.top))

    def guesses(self, places: Sequence[int], picks: Sequence[Pick], number: int) -> Guesses:
        """The picks as an order weighs them."""
        request, start = self._plan.request, len(self._prompt)
        stream, seed = in_pass(ORDER_STREAM, number), request.settings.seed
        return Guesses(
            places,
            [pick.token for pick in picks],
            np.array([math.exp(pick.logprob) for pick in picks]),
            np.array([_margin(pick) for pick in picks]),
            np.array([pick.entropy for pick in picks]),
            np.array([uniform(seed, request.limits.sample, start + n, stream) for n in places]),
        )

    def place(self, number: int, pick: Pick, change: Change = None) -> Place:
        """A place with what was picked for it, and whether that was set."""
        told = self._told((c.token, c.logprob, c.probability) for c in pick.candidates)
        token, shown = pick.token if change else None, self._lm.readable(pick.token)
        return Place(number, token, shown, math.exp(pick.logprob), told, change)

    def seen(self, logits: Any, places: Sequence[int], tokens: Sequence[int]) -> list[Place]:
        """Places that have a token: how likely that is now, beside the others."""
        if not len(places):
            return []
        found = score(logits, tokens, self._plan.top)
        seen = []
        for row, (number, token) in enumerate(zip(places, tokens, strict=True)):
            best = zip(found.top_tokens[row], found.top_logprobs[row], strict=True)
            told = self._told((int(t), float(p), math.exp(p)) for t, p in best)
            chance = math.exp(found.logprobs[row])
            seen.append(Place(number, token, self._lm.readable(token), chance, told))
        return seen

    def step(self, place: Place, pick: Pick, number: int) -> Step:
        """What was set in a place, as a step."""
        position, token_bytes = len(self._prompt) + place.number, self._lm.engine.token_bytes
        step = explained_step(pick, position, place.text, token_bytes, 0.0, None)
        return replace(step, canvas_pass=number, candidates=place.candidates)

    def given_step(self, number: int, token: int) -> Step:
        """A token that somebody put in a place, before any pass."""
        own, position = self._lm.engine.token_bytes(token), len(self._prompt) + number
        return Step(token, own, self._lm.readable(token), 0.0, position, chosen=True)

    def _told(self, best: Any) -> tuple[Candidate, ...]:
        readable = self._lm.readable
        told = tuple(Candidate(t, readable(t), logprob, chance) for t, logprob, chance in best)
        return told[: self._plan.top]


def _margin(pick: Pick) -> float:
    best = [math.exp(candidate.logprob) for candidate in pick.candidates[:2]]
    return best[0] - best[-1] if len(best) > 1 else best[0]
