"""A text in diffusion: its blocks, what each pass sets and remasks, and its end."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile
from time import perf_counter
from typing import Any, Literal

from unspool.backends.step import Logits
from unspool.decoding.diffusion_options import DiffusionPlan
from unspool.decoding.guessing import CanvasSampler
from unspool.decoding.orders import spread
from unspool.decoding.passes import CanvasPosition, Diffusion, DiffusionPass
from unspool.engine.canvas import Window, open_canvas
from unspool.engine.ending import StopChecker
from unspool.engine.steps import Step
from unspool.errors import SettingsError
from unspool.sampling import GrammarState, Pick
from unspool.session import Session

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
        return self._filled[self._done] is None

    def _reset_block(self) -> None:
        self._count = 0  # passes over this block
        self._checks = 0  # ... of these, since it was first full
        self._cleared: dict[int, int] = {}  # position -> number of times
        self._schedule: list[int] | None = None
        self._evaluates = False  # the full block is evaluated once more

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

    def apply_first(self, logits: Logits) -> DiffusionPass:
        """Set the first position of a block from the logits of the finished text before it."""
        first = self._done
        if self._grammar is not None:
            picks = self._by_grammar([first], self._sampler.guided_logits([logits], slice(1)), 1)
        else:
            picks = dict(zip([first], self._sample_rows([logits], slice(1), [first]), strict=True))
        result = self._record(
            "text", {first: self._sampler.place(first, picks[first], "set")}, picks
        )
        self._after_pass(True, False)
        return result

    def apply_pass(self, logits_rows: list[Logits]) -> DiffusionPass:
        """Apply the logits of a pass over the canvas."""
        block, first = self._block, self._done
        offset = 0 if self.window is not None else self._offset
        logits = self._sampler.guided_logits(logits_rows, slice(offset, offset + len(block)))
        masked = [n for n in block if self._filled[n] is None]
        filled = [n for n in block if self._filled[n] is not None]
        picks = self._sample(logits, masked)
        tokens = [step.token for step in map(self._filled.__getitem__, filled) if step is not None]
        scored = self._sampler.describe_filled(logits[[n - first for n in filled]], filled, tokens)
        places = {place.number: place for place in scored}
        places |= {n: self._sampler.place(n, pick) for n, pick in zip(masked, picks, strict=True)}
        accepted = self._choose(masked, picks, logits) if masked else {}
        for number, pick in accepted.items():
            places[number] = self._sampler.place(number, pick, "set")
        if filled and self._may_revise(bool(masked)):
            accepted |= self._revise(filled, places, logits)
        result = self._record("look" if self._evaluates else "canvas", places, accepted)
        self._count += 1
        changes = {place.change for place in places.values()}
        self._after_pass(bool(masked), not changes.isdisjoint(("cleared", "edited")))
        return result

    def _sample_rows(self, logits_rows: list[Logits], rows: slice, places: list[int]) -> list[Pick]:
        logits = self._sampler.guided_logits(logits_rows, rows)
        return self._sampler.picks(logits, places, self._filled, len(self.result.passes))

    def _sample(self, logits: Any, places: list[int], allowed: Any = None) -> list[Pick]:
        """Sample tokens for some positions of the block."""
        rows = logits[[n - self._done for n in places]]
        number = len(self.result.passes)
        return self._sampler.picks(rows, places, self._filled, number, allowed)

    def _min_to_set(self, masked: int) -> int:
        """Minimum number of positions that the pass must set."""
        if self.plan.steps is None:
            return min(self.plan.least, masked)
        if self._schedule is None:
            self._schedule = spread(masked, self.plan.steps)
        remaining = self._schedule[self._count :]  # the last pass also sets remasked positions
        return min(max(1, remaining[0]), masked) if len(remaining) > 1 else masked

    def _choose(self, masked: list[int], picks: list[Pick], logits: Any) -> dict[int, Pick]:
        """Choose the predictions to keep."""
        least = self._min_to_set(len(masked))
        if self._grammar is not None:
            return self._by_grammar(masked, logits, least)
        guesses = self._sampler.guesses(masked, picks, len(self.result.passes))
        indices = sorted({int(number) for number in self.plan.order(guesses, least)})
        if not indices or not 0 <= indices[0] <= indices[-1] < len(masked):
            raise SettingsError(
                f"the order returned {indices[:8]} for {len(masked)} predictions; it must return "
                "at least one index, from 0 on"
            )
        return {masked[number]: picks[number] for number in indices}

    def _by_grammar(self, masked: list[int], logits: Any, least: int) -> dict[int, Pick]:
        """Set tokens from left to right, each allowed by the grammar."""
        assert self._grammar is not None
        accepted: dict[int, Pick] = {}
        for place in masked:
            pick = self._sample(logits, [place], self._grammar.mask())[0]
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
        self, filled: list[int], places: dict[int, CanvasPosition], logits: Any
    ) -> dict[int, Pick]:
        """Edit and remask tokens set earlier; returns the edited ones."""
        plan, edited = self.plan, dict[int, Pick]()
        if plan.edit is not None:
            for number, pick in zip(filled, self._sample(logits, filled), strict=True):
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
        accepted: dict[int, Pick],
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
