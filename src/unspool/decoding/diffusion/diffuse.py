"""Diffusion: denoise a canvas pass by pass, for one text or many, complete or as a stream.

Ordinary settings are sampled by the backend inside the step (`CanvasSampler.encode` and `read`):
per position it returns the token, its log-probability, and what the order of unmasking needs.
Candidates, guidance, grammars and unusual sampling stages need the logits on the host.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from time import perf_counter
from typing import Any, Literal

import numpy as np

from unspool.backends.step import Logits
from unspool.decoding.diffusion.options import DiffusionPlan, Predictions, make_plan, spread
from unspool.decoding.diffusion.result import (
    CanvasPosition,
    Change,
    Diffusion,
    DiffusionPass,
    Diffusions,
)
from unspool.engine.canvas import (
    PassRequest,
    PlacePicks,
    Window,
    open_canvas,
    run_first_place_passes,
    run_passes,
)
from unspool.engine.request import StopChecker
from unspool.engine.results import Candidate, Step, explained_step
from unspool.errors import SettingsError
from unspool.progress import progress_bar
from unspool.sampling import Chain, GrammarState, Pick, RowInput, score
from unspool.sampling.draw import ORDER_STREAM, stream_of_pass, uniform
from unspool.sampling.picker import (
    TARGET_LOGPROB,
    SamplingRows,
    can_sample_on_device,
    encode_canvas,
    history_range,
    needs_history,
)
from unspool.session import Prompt, Session

# -- Sample a token for each position of a canvas, with its probability


@dataclass(frozen=True, slots=True)
class PlacePrediction:
    """The token sampled for a position."""

    token: int
    logprob: float
    entropy: float
    margin: float
    pick: Pick | None = None  # if it was sampled on the host


class CanvasSampler:
    """Samples tokens for the positions of one canvas."""

    def __init__(self, lm: Session, plan: DiffusionPlan) -> None:
        self._lm, self._plan = lm, plan
        self._prompt = plan.request.prompt
        self._chains: dict[int, Chain] = {}  # by number of rows
        settings, kind = plan.request.settings, plan.kind
        self._sees_history = needs_history(settings)
        # Without text before it, the first two tokens of a shifted model share one row.
        has_all_rows = bool(self._prompt) or not kind.shifted
        self.on_host = bool(
            plan.top or plan.guidance or plan.request.grammar is not None or not has_all_rows
        ) or not can_sample_on_device(settings)  # fmt: skip

    def _history(self, filled: Sequence[Step | None]) -> list[int]:
        if not self._sees_history:
            return []
        return [*self._prompt, *(step.token for step in filled if step is not None)]

    # -- on the backend ---------------------------------------------------------------------------

    def encode(
        self, places: Sequence[int], filled: Sequence[Step | None], number: int
    ) -> SamplingRows:
        """Encode how the backend samples these positions in pass `number`.

        Filled positions also get the probability of their token.
        """
        request, start, history = self._plan.request, len(self._prompt), self._history(filled)
        bounds = history_range(request.settings, start, len(history)) if history else (0, 0)
        steps = [filled[n] for n in places]
        return encode_canvas(
            request.settings, request.limits.sample, [start + n for n in places], number, history,
            bounds, self._plan.kind.mask_id, [-1 if s is None else s.token for s in steps],
        )  # fmt: skip

    def read(
        self, outputs: Sequence[Logits | PlacePicks], rows: slice, first: int,
        filled: Sequence[Step | None], number: int, known_logprobs: dict[int, float],
    ) -> PickedPositions | PositionLogits:  # fmt: skip
        """Interpret the outputs of pass `number`, whose `rows` belong to the positions from `first`
        on. `known_logprobs` has log-probabilities of filled positions that were not computed."""
        if isinstance(outputs[0], PlacePicks):
            return PickedPositions(self, outputs[0], first, known_logprobs)
        return PositionLogits(self, self._guided_logits(outputs, rows), first, filled, number)

    # -- on the host ------------------------------------------------------------------------------

    def _guided_logits(self, logits_rows: Sequence[Any], rows: slice) -> Any:
        """Logits with guidance applied (classifier-free) and the mask token excluded."""
        logits: Any = logits_rows[0][rows]
        guidance = self._plan.guidance
        if guidance:
            unconditional: Any = logits_rows[1][rows]
            logits = unconditional + (guidance + 1) * (logits - unconditional)
        masked = logits.copy() if isinstance(logits, np.ndarray) else logits.clone()
        masked[:, self._plan.kind.mask_id] = -math.inf
        return masked

    def pick(
        self, logits: Any, places: Sequence[int], filled: Sequence[Step | None], number: int,
        allowed: Any = None,
    ) -> list[Pick]:  # fmt: skip
        """Sample a token for each position in pass `number`, from its row of logits."""
        request, history = self._plan.request, self._history(filled)
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

    # -- for both ---------------------------------------------------------------------------------

    def predictions(
        self, places: Sequence[int], sampled: Sequence[PlacePrediction], number: int
    ) -> Predictions:
        """Build the input of an order."""
        request, start = self._plan.request, len(self._prompt)
        stream, seed = stream_of_pass(ORDER_STREAM, number), request.settings.seed
        return Predictions(
            places,
            [prediction.token for prediction in sampled],
            np.array([math.exp(prediction.logprob) for prediction in sampled]),
            np.array([prediction.margin for prediction in sampled]),
            np.array([prediction.entropy for prediction in sampled]),
            np.array([uniform(seed, request.limits.sample, start + n, stream) for n in places]),
        )

    def place(self, number: int, sampled: PlacePrediction, change: Change = None) -> CanvasPosition:
        """Describe a position with its sampled token and whether that was set."""
        best = () if sampled.pick is None else sampled.pick.candidates
        candidates = self.candidates((c.token, c.logprob, c.probability) for c in best)
        token, text = sampled.token if change else None, self._lm.readable(sampled.token)
        return CanvasPosition(number, token, text, math.exp(sampled.logprob), candidates, change)

    def filled_place(
        self, number: int, token: int, logprob: float, candidates: tuple[Candidate, ...] = ()
    ) -> CanvasPosition:
        """Describe a position that has a token, with its probability in this pass."""
        text = self._lm.readable(token)
        return CanvasPosition(number, token, text, math.exp(logprob), candidates)

    def step(self, place: CanvasPosition, sampled: PlacePrediction, number: int) -> Step:
        """Build the step of a token that was set."""
        position, token_bytes = len(self._prompt) + place.number, self._lm.engine.token_bytes
        if sampled.pick is None:
            piece = token_bytes(sampled.token)
            step = Step(sampled.token, piece, place.text, sampled.logprob, position)
        else:
            step = explained_step(sampled.pick, position, place.text, token_bytes, 0.0, None)
        return replace(step, canvas_pass=number, candidates=place.candidates)

    def given_step(self, number: int, token: int) -> Step:
        """Build the step of an initial token given by the caller."""
        token_bytes, position = self._lm.engine.token_bytes(token), len(self._prompt) + number
        return Step(token, token_bytes, self._lm.readable(token), 0.0, position, chosen=True)

    def candidates(self, best: Any) -> tuple[Candidate, ...]:
        readable = self._lm.readable
        candidates = tuple(
            Candidate(t, readable(t), logprob, chance) for t, logprob, chance in best
        )
        return candidates[: self._plan.top]

    def describe(
        self, logits: Any, places: Sequence[int], tokens: Sequence[int]
    ) -> list[CanvasPosition]:
        """Describe filled positions from their rows of logits."""
        scores = score(logits, tokens, self._plan.top)
        result = []
        for row, (number, token) in enumerate(zip(places, tokens, strict=True)):
            best = zip(scores.top_tokens[row], scores.top_logprobs[row], strict=True)
            candidates = self.candidates((int(t), float(p), math.exp(p)) for t, p in best)
            result.append(self.filled_place(number, token, scores.logprobs[row], candidates))
        return result


@dataclass(frozen=True, slots=True)
class PositionLogits:
    """The logits of a pass, to be sampled on the host."""

    sampler: CanvasSampler
    logits: Any  # one row per position, from `first` on
    first: int
    filled: Sequence[Step | None]
    number: int

    def predict(self, places: Sequence[int], allowed: Any = None) -> list[PlacePrediction]:
        """Sample a token for each position; `allowed`: the tokens that a grammar allows."""
        if not len(places):
            return []
        rows = self.logits[[n - self.first for n in places]]
        picks = self.sampler.pick(rows, places, self.filled, self.number, allowed)
        return [PlacePrediction(p.token, p.logprob, p.entropy, p.margin, p) for p in picks]

    def describe(self, places: Sequence[int], tokens: Sequence[int]) -> list[CanvasPosition]:
        """Describe filled positions, with the probabilities of their tokens."""
        if not len(places):
            return []
        return self.sampler.describe(self.logits[[n - self.first for n in places]], places, tokens)


@dataclass(frozen=True, slots=True)
class PickedPositions:
    """What the backend sampled in a pass."""

    sampler: CanvasSampler
    picks: PlacePicks  # for the positions from `first` on
    first: int
    known_logprobs: dict[int, float]  # log-probabilities of filled positions that were not computed

    def predict(self, places: Sequence[int], allowed: Any = None) -> list[PlacePrediction]:
        """Return the token of each position."""
        assert allowed is None  # a grammar samples on the host
        picks, rows = self.picks, [n - self.first for n in places]
        details = self.picks.details[rows, :TARGET_LOGPROB].tolist()
        return [
            PlacePrediction(picks.tokens[row], picks.logprobs[row], *values)
            for row, values in zip(rows, details, strict=True)
        ]

    def describe(self, places: Sequence[int], tokens: Sequence[int]) -> list[CanvasPosition]:
        """Describe filled positions, with the probabilities of their tokens."""
        return [
            self.sampler.filled_place(number, token, self.logprob(number))
            for number, token in zip(places, tokens, strict=True)
        ]

    def logprob(self, place: int) -> float:
        """Log-probability of a filled position's token."""
        if place in self.known_logprobs:
            return self.known_logprobs[place]
        return float(self.picks.details[place - self.first, TARGET_LOGPROB])


# -- A text in diffusion: its blocks, what each pass sets and remasks, and its end


Rows = PositionLogits | PickedPositions

_MAX_CLEARS = 3  # per position, so that diffusion terminates
_UNLIKELY = 0.1


class CanvasText:
    """A text in progress. Positions are numbered from the end of the prompt and filled block by
    block."""

    def __init__(self, lm: Session, plan: DiffusionPlan, result: Diffusion) -> None:
        self.plan, self.result = plan, result
        self.finished = False
        self.begins = True  # a new block without predictions
        self.since = perf_counter()
        self._sampler = CanvasSampler(lm, plan)
        self._context = lm.engine.backend.context
        self._prompt = len(plan.request.prompt)
        self._done = 0  # positions before the block
        self._filled: list[Step | None] = []  # per position of all blocks so far
        self._grammar: GrammarState | None = None
        if plan.request.grammar is not None:
            self._grammar = plan.request.grammar.start()
        self._reset_block()
        size = plan.length if plan.kind.sight == "whole" else self._block_length()
        prompts = [plan.request.prompt]
        if plan.guidance:
            prompts.append((plan.kind.mask_id,) * self._prompt)
        self.canvases = [open_canvas(lm.engine, prompt, size, plan.kind) for prompt in prompts]
        self.canvas = self.canvases[0]
        self._add_places(size)
        if plan.cache != "none":
            result.notes.append(
                f"cache={plan.cache}: tokens outside the block are computed once per block, so the "
                "text is approximate"
            )
        self._skip_given()

    def close(self) -> None:
        """Release the canvases and publish the partial result. Safe to call twice."""
        for canvas in self.canvases:
            canvas.close()
        if not self.finished:
            self._publish()

    # -- blocks -----------------------------------------------------------------------------------

    def _block_length(self) -> int:
        plan, start = self.plan, self._prompt + self._done
        if plan.kind.sight == "block":  # blocks are aligned as in training
            return min(plan.block - start % plan.block, self._context - start)
        return min(plan.block, plan.length - self._done)

    @property
    def _block(self) -> range:
        """Positions of the current block."""
        return range(self._done, min(self._done + self._block_length(), len(self._filled)))

    def _add_places(self, count: int) -> None:
        """Add positions at the end of the canvas, with their initial tokens."""
        first, tokens = len(self._filled), self.plan.given
        self._filled += [None] * count
        for number in range(first, min(first + count, len(tokens))):
            token = tokens[number]
            if token is not None:
                self._filled[number] = self._sampler.given_step(number, token)
                for canvas in self.canvases:
                    canvas.set(self._prompt + number - canvas.start, token)

    @property
    def needs_first(self) -> bool:
        """Whether the first position of the block is masked."""
        return not self.finished and self._filled[self._done] is None

    def _reset_block(self) -> None:
        self._count = 0  # passes over this block
        self._checks = 0  # ... of these, since it was first full
        self._cleared: dict[int, int] = {}  # position -> number of times
        self._schedule: list[int] | None = None
        self._evaluates = False  # the full block is evaluated once more
        self._first_logprob: float | None = None  # of the first position's token, if known

    @property
    def _offset(self) -> int:
        """Start of the block on the canvas."""
        return self._prompt + self._done - self.canvas.start

    @property
    def window(self) -> Window:
        """Positions of the canvas to compute; None: all."""
        if self.plan.cache == "none" or self._count == 0:
            return None
        first = self._offset
        return first, first + len(self._block) if self.plan.cache == "dual" else None

    def _is_full(self) -> bool:
        return None not in [self._filled[n] for n in self._block]

    def _next_block(self) -> None:
        """Go to the next block that has masked positions."""
        self._advance()
        self._skip_given()

    def _skip_given(self) -> None:
        """Skip blocks given completely, unless tokens may change."""
        while not self.finished and not self.plan.revises and self._is_full():
            if self._leading()[1] == "stop":
                self._finish()
            else:
                self._advance()

    def _advance(self) -> None:
        size = len(self._block)
        self._done += size
        if self._done >= self.plan.length or self._block_length() == 0:
            self._finish()
            return
        if self.plan.kind.sight != "whole":
            self.canvas.commit(size)
            num_added = self._block_length()
            self.canvas.append(num_added)
            self._add_places(num_added)
        self.begins = True
        self._reset_block()

    # -- a pass -----------------------------------------------------------------------------------

    @property
    def on_host(self) -> bool:
        """Whether passes return logits; else the backend samples."""
        return self._sampler.on_host

    def first_place_sampling(self) -> SamplingRows | None:
        """How the backend samples the first position of the block; None: on the host."""
        return None if self.on_host else self._encode(range(self._done, self._done + 1))

    def pass_requests(self) -> list[PassRequest]:
        """The next pass over each canvas."""
        rows, first = None, 0
        if not self.on_host:
            places = self._block[self._num_known :]
            rows, first = self._encode(places), self._offset + self._num_known
        return [PassRequest(canvas, self.window, rows, first) for canvas in self.canvases]

    def _encode(self, places: range) -> SamplingRows:
        return self._sampler.encode(places, self._filled, len(self.result.passes))

    @property
    def _num_known(self) -> int:
        """1 if finished text predicts the first position of the block, whose token cannot change:
        then its probability is known."""
        is_known = self._first_logprob is not None and not (self.plan.revises or self.on_host)
        return int(is_known and self.canvas.text_predicts_first)

    def apply_first(self, outputs: Logits | PlacePicks) -> DiffusionPass:
        """Set the first position of a block from the prediction of the finished text before it."""
        first, number = self._done, len(self.result.passes)
        rows = self._sampler.read([outputs], slice(1), first, self._filled, number, {})
        if self._grammar is not None:
            picks = self._by_grammar([first], rows, 1)
        else:
            picks = {first: rows.predict([first])[0]}
        self._first_logprob = picks[first].logprob
        result = self._record(
            "text", {first: self._sampler.place(first, picks[first], "set")}, picks
        )
        self._after_pass(True, False)
        return result

    def apply_pass(self, outputs: list[Logits | PlacePicks]) -> DiffusionPass:
        """Apply the outputs of a pass over the canvas."""
        block, number = self._block, len(self.result.passes)
        offset = 0 if self.window is not None else self._offset
        known_logprobs: dict[int, float] = {}
        if self._num_known and self._first_logprob is not None:
            known_logprobs[block[0]] = self._first_logprob
        part, first = slice(offset, offset + len(block)), block[0] + self._num_known
        rows = self._sampler.read(outputs, part, first, self._filled, number, known_logprobs)
        masked = [n for n in block if self._filled[n] is None]
        filled = [n for n in block if self._filled[n] is not None]
        picks = rows.predict(masked)
        tokens = [step.token for step in map(self._filled.__getitem__, filled) if step is not None]
        places = {place.number: place for place in rows.describe(filled, tokens)}
        if isinstance(rows, PickedPositions) and block[0] in places:
            self._first_logprob = rows.logprob(block[0])
        places |= {n: self._sampler.place(n, pick) for n, pick in zip(masked, picks, strict=True)}
        accepted = self._choose(masked, picks, rows) if masked else {}
        for place, pick in accepted.items():
            places[place] = self._sampler.place(place, pick, "set")
        if filled and self._may_revise(bool(masked)):
            accepted |= self._revise(filled, places, rows)
        result = self._record("look" if self._evaluates else "canvas", places, accepted)
        self._count += 1
        changes = {place.change for place in places.values()}
        self._after_pass(bool(masked), not changes.isdisjoint(("cleared", "edited")))
        return result

    def _min_to_set(self, masked: int) -> int:
        """Minimum number of positions that the pass must set."""
        if self.plan.steps is None:
            return min(self.plan.least, masked)
        if self._schedule is None:
            self._schedule = spread(masked, self.plan.steps)
        remaining = self._schedule[self._count :]  # the last pass also sets remasked positions
        return min(max(1, remaining[0]), masked) if len(remaining) > 1 else masked

    def _choose(
        self, masked: list[int], picks: list[PlacePrediction], rows: Rows
    ) -> dict[int, PlacePrediction]:
        """Choose the predictions to keep."""
        least = self._min_to_set(len(masked))
        if self._grammar is not None:
            return self._by_grammar(masked, rows, least)
        guesses = self._sampler.predictions(masked, picks, len(self.result.passes))
        indices = sorted({int(number) for number in self.plan.order(guesses, least)})
        if not indices or not 0 <= indices[0] <= indices[-1] < len(masked):
            raise SettingsError(
                f"the order returned {indices[:8]} for {len(masked)} predictions; it must return "
                "at least one index, from 0 on"
            )
        return {masked[number]: picks[number] for number in indices}

    def _by_grammar(self, masked: list[int], rows: Rows, least: int) -> dict[int, PlacePrediction]:
        """Set tokens from left to right, each allowed by the grammar."""
        assert self._grammar is not None
        accepted: dict[int, PlacePrediction] = {}
        for place in masked:
            pick = rows.predict([place], self._grammar.mask())[0]
            if len(accepted) >= least and math.exp(pick.logprob) < self.plan.threshold:
                break
            self._grammar.advance(pick.token)
            accepted[place] = pick
            if pick.token in self.plan.request.limits.end_ids or self._grammar.must_end:
                break
        return accepted

    # -- revising ---------------------------------------------------------------------------------

    def _may_revise(self, masked: bool) -> bool:
        if not self.plan.revises or self._evaluates:
            return False
        return masked or self._checks < self.plan.edit_passes

    def _revise(
        self, filled: list[int], places: dict[int, CanvasPosition], rows: Rows
    ) -> dict[int, PlacePrediction]:
        """Edit and remask tokens set earlier; returns the edited ones."""
        plan, edited = self.plan, dict[int, PlacePrediction]()
        if plan.edit is not None:
            for number, pick in zip(filled, rows.predict(filled), strict=True):
                if pick.token != places[number].token and math.exp(pick.logprob) > plan.edit:
                    edited[number] = pick
                    places[number] = self._sampler.place(number, pick, "edited")
        last = plan.steps is not None and self._count >= plan.steps - 1
        if plan.remask is not None and not last:
            for number in (number for number in filled if number not in edited):
                num_cleared = self._cleared.get(number, 0)
                if places[number].probability < plan.remask and num_cleared < _MAX_CLEARS:
                    self._cleared[number] = num_cleared + 1
                    places[number] = replace(places[number], token=None, change="cleared")
        return edited

    def _after_pass(self, had_masked: bool, took_back: bool) -> None:
        """Advance if the block is full, and finish if the text has ended."""
        self._checks += not had_masked
        plan, full = self.plan, self._is_full()
        if full and plan.steps == 1 and not self._evaluates:
            self._evaluates = True  # tokens set in one pass were predicted independently
            return
        if full and plan.revises and not self._evaluates and plan.edit_passes:
            full = not had_masked and (not took_back or self._checks >= plan.edit_passes)
        if (full or not plan.revises) and self._has_ended():
            self._finish()
        elif full:
            self._next_block()

    # -- recording --------------------------------------------------------------------------------

    def _record(
        self, kind: Literal["canvas", "text", "look"], places: dict[int, CanvasPosition],
        accepted: dict[int, PlacePrediction],
    ) -> DiffusionPass:  # fmt: skip
        """Write the decisions to the canvas and record the pass. Positions of the last block beyond
        the text are not reported."""
        now, number = perf_counter(), len(self.result.passes)
        seconds, steps = now - self.since, list[Step]()
        for place in (places[n] for n in sorted(places)):
            if place.change is None:
                continue
            step = None
            if place.token is not None:
                step = self._sampler.step(place, accepted[place.number], number)
                steps.append(step)
            self._filled[place.number] = step
            for canvas in self.canvases:
                token = self.plan.kind.mask_id if place.token is None else place.token
                canvas.set(self._prompt + place.number - canvas.start, token)
        result = DiffusionPass(
            number,
            kind,
            tuple(None if step is None else step.token for step in self._all_steps()),
            tuple(places[n] for n in sorted(places) if n < self.plan.length),
            tuple(replace(step, seconds=seconds) for step in steps if self._is_reported(step)),
            seconds,
        )
        self.result.passes.append(result)
        return result

    def _is_reported(self, step: Step) -> bool:
        return step.position - self._prompt < self.plan.length

    def _all_steps(self) -> list[Step | None]:
        """Steps of all positions of the text; None where masked or not reached."""
        length = self.plan.length
        return [*self._filled, *[None] * (length - len(self._filled))][:length]

    # -- the end ----------------------------------------------------------------------------------

    def _has_ended(self) -> bool:
        """Whether the text before the first masked position has ended."""
        limits = self.plan.request.limits
        if limits.stop or self._grammar is not None:
            return self._leading()[1] == "stop"
        leading = takewhile(lambda step: step is not None, self._filled)
        return any(step is not None and step.token in limits.end_ids for step in leading)

    def _leading(self) -> tuple[list[Step], str | None]:
        """Steps up to the first masked position, and the finish reason if the text ends there (end
        token, stop string, grammar, or length)."""
        limits = replace(self.plan.request.limits, max_tokens=self.plan.length, context=1 << 62)
        ending, steps = StopChecker(limits, self._prompt), list[Step]()
        for number, step in enumerate(self._all_steps()):
            if step is None:
                break
            partial_utf8 = ending.text.partial_utf8
            must_end = self._grammar is not None and number + 1 == len(self._grammar)
            must_end = must_end and self._grammar is not None and self._grammar.must_end
            length = self._prompt + number + 1
            text_piece, finish = ending.push(step.token, step.bytes, length, must_end)
            text_piece += ending.finish() if finish else ""
            steps.append(
                replace(step, text=text_piece, partial_utf8=partial_utf8, finish_reason=finish)
            )
            if finish:
                return steps, finish
        if steps and (tail := ending.finish()):
            steps[-1] = replace(steps[-1], text=steps[-1].text + tail)
        return steps, None

    def _finish(self) -> None:
        self.finished = True
        self._publish()

    def _publish(self) -> None:
        result = self.result
        result.steps, reason = self._leading()
        result.finish_reason = reason or ("context" if self.finished else "interrupted")
        if self.plan.steps == 1 and result.passes:
            last = result.passes[-1].places
            unlikely = sum(place.probability < _UNLIKELY for place in last)
            result.notes.append(
                f"all at once: {result.repeats} tokens repeat the one before them, and {unlikely} "
                f"of {len(last)} have a probability below {_UNLIKELY:.0%} given the others"
            )


# -- Masked diffusion: fill a text in any order, several positions per denoising pass


_MAX_TEXTS = 64  # per pass: more rows make it longer and hardly more efficient
_PAGE_SHARE = 0.9  # of all pages, for canvases


def diffuse(lm: Session, prompt: Prompt, **options: Any) -> Diffusion:
    """Generate one text by diffusion."""
    return diffuse_all(lm, [prompt], options, progress=False)[0]


def diffuse_all(
    lm: Session, prompts: Sequence[Prompt], options: dict[str, Any], *, progress: bool = True
) -> Diffusions:
    """Generate one text per prompt, with their passes batched."""
    plans = [make_plan(lm, prompt, options) for prompt in prompts]
    results = Diffusions(Diffusion(plan.request) for plan in plans)
    with progress_bar("filling", sum(plan.length for plan in plans), show=progress) as report:
        filled = [0] * len(plans)
        for number, denoising_pass in _run_passes(lm, plans, results):
            filled[number] = len(denoising_pass.tokens) - denoising_pass.masked
            report(sum(filled))
    return results


class DiffusionStream(Iterator[DiffusionPass]):
    """The denoising passes of one text; leaving the loop in any way ends it."""

    def __init__(self, lm: Session, prompt: Prompt, options: dict[str, Any]) -> None:
        plan = make_plan(lm, prompt, options)
        self.result = Diffusion(plan.request)  # the text so far
        self.length = plan.length  # number of positions
        self._passes = _run_passes(lm, [plan], [self.result])

    def __iter__(self) -> Iterator[DiffusionPass]:
        try:
            for _, denoising_pass in self._passes:
                yield denoising_pass
        finally:
            self.close()

    def __next__(self) -> DiffusionPass:
        return next(self._passes)[1]

    def close(self) -> None:
        """Stop; `result` has the tokens set so far."""
        self._passes.close()


def stream_diffusion(lm: Session, prompt: Prompt, **options: Any) -> DiffusionStream:
    """Generate by diffusion and yield each pass."""
    return DiffusionStream(lm, prompt, options)


def _run_passes(
    lm: Session, plans: Sequence[DiffusionPlan], results: Sequence[Diffusion]
) -> Generator[tuple[int, DiffusionPass], None, None]:
    """Run diffusions in parallel, as many as fit in memory; yields (text index, pass)."""
    active: list[tuple[int, CanvasText]] = []
    waiting = deque(enumerate(zip(plans, results, strict=True)))
    try:
        while active or waiting:
            while waiting and _fits(lm, [text.plan for _, text in active], waiting[0][1][0]):
                number, (plan, result) = waiting.popleft()
                active.append((number, CanvasText(lm, plan, result)))
            yield from _run_round(active)
            for _, text in (entry for entry in active if entry[1].finished):
                text.close()
            active = [entry for entry in active if not entry[1].finished]
    finally:
        for _, text in active:
            text.close()


def _run_round(active: Sequence[tuple[int, CanvasText]]) -> Iterator[tuple[int, DiffusionPass]]:
    """Run one pass of every text; a new block may get its first token before that."""
    for _, text in active:
        text.since = perf_counter()
    starting = [(number, text) for number, text in active if text.begins and text.needs_first]
    for _, text in active:
        text.begins = False
    predicted = run_first_place_passes(
        [(text.canvas, text.first_place_sampling()) for _, text in starting]
    )
    for (number, text), outputs in zip(starting, predicted, strict=True):
        if outputs is not None:
            yield number, text.apply_first(outputs)
    ready = [(number, text) for number, text in active if not (text.finished or text.begins)]
    requests = [request for _, text in ready for request in text.pass_requests()]
    results = iter(run_passes(requests))
    for number, text in ready:
        yield number, text.apply_pass([next(results) for _ in text.canvases])


def _fits(lm: Session, running: Sequence[DiffusionPlan], new: DiffusionPlan) -> bool:
    """Whether the pages suffice for one more text; canvases hold pages between passes."""
    tree, size = lm.engine.tree, lm.engine.tree.page_size
    needed = 0
    for plan in (*running, new):
        tokens = len(plan.request.prompt) + plan.length + plan.kind.block
        needed += (-(-tokens // size) + 1) * (2 if plan.guidance else 1)
    return not running or (len(running) < _MAX_TEXTS and needed <= tree.pool.count * _PAGE_SHARE)
