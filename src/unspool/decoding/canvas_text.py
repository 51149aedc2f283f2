"""One text that is being filled: its blocks, what each pass sets and takes back, and its end."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile
from time import perf_counter
from typing import Any, Literal

from unspool.backends.step import Logits
from unspool.decoding.diffusion_options import DiffusionPlan
from unspool.decoding.guessing import Guesser
from unspool.decoding.orders import spread
from unspool.decoding.passes import Diffusion, Pass, Place
from unspool.engine.canvas import Window, open_canvas
from unspool.engine.ending import Ending
from unspool.engine.steps import Step
from unspool.errors import SettingsError
from unspool.sampling import GrammarState, Pick
from unspool.session import Session

_OFTEN = 3  # how often a place may be cleared: enough, and an end to it
_UNLIKELY = 0.1


class CanvasText:
    """A text on its way. Places are numbered from the prompt's end; a block of them is filled, then
    the next."""

    def __init__(self, lm: Session, plan: DiffusionPlan, result: Diffusion) -> None:
        self.plan, self.result = plan, result
        self.finished = False
        self.begins = True  # a new block, of which nothing is guessed yet
        self.since = perf_counter()
        self._guesser = Guesser(lm, plan)
        self._context = lm.engine.backend.context
        self._prompt = len(plan.request.prompt)
        self._done = 0  # places before the block
        self._filled: list[Step | None] = []  # of all places that the canvas has had
        self._grammar: GrammarState | None = None
        if plan.request.grammar is not None:
            self._grammar = plan.request.grammar.start()
        self._fresh_block()
        size = plan.length if plan.kind.sight == "whole" else self._block_length()
        prompts = [plan.request.prompt]
        if plan.guidance:
            prompts.append((plan.kind.mask_id,) * self._prompt)
        self.canvases = [open_canvas(lm.engine, prompt, size, plan.kind) for prompt in prompts]
        self.canvas = self.canvases[0]
        self._add_places(size)
        if plan.cache != "none":
            result.notes.append(
                f"cache={plan.cache}: what lies outside the block is computed once a block, so the "
                "text is approximately what it would be"
            )
        self._skip_given()

    def close(self) -> None:
        """Whatever happened: give everything back, and tell what there is."""
        for canvas in self.canvases:
            canvas.close()
        if not self.finished:
            self._tell()

    # -- blocks -----------------------------------------------------------------------------------

    def _block_length(self) -> int:
        plan, start = self.plan, self._prompt + self._done
        if plan.kind.sight == "block":  # blocks lie where the model was trained to have them
            return min(plan.block - start % plan.block, self._context - start)
        return min(plan.block, plan.length - self._done)

    @property
    def _block(self) -> range:
        """The places that are being filled."""
        return range(self._done, min(self._done + self._block_length(), len(self._filled)))

    def _add_places(self, count: int) -> None:
        """More places at the end of the canvas, with the tokens that were given for them."""
        first, given = len(self._filled), self.plan.given
        self._filled += [None] * count
        for number in range(first, min(first + count, len(given))):
            token = given[number]
            if token is not None:
                self._filled[number] = self._guesser.given_step(number, token)
                for canvas in self.canvases:
                    canvas.set(self._prompt + number - canvas.start, token)

    @property
    def wants_first(self) -> bool:
        """Whether the first place of the block has no token yet."""
        return self._filled[self._done] is None

    def _fresh_block(self) -> None:
        self._count = 0  # passes over the canvas since it began
        self._checks = 0  # ... of these, since it was first full
        self._cleared: dict[int, int] = {}  # how often a place was
        self._schedule: list[int] | None = None
        self._looks = False  # it is full, and is looked at once more

    @property
    def _offset(self) -> int:
        """Where the block begins on the canvas."""
        return self._prompt + self._done - self.canvas.start

    @property
    def window(self) -> Window:
        """Which places of the canvas are computed, if not all."""
        if self.plan.cache == "none" or self._count == 0:
            return None
        first = self._offset
        return first, first + len(self._block) if self.plan.cache == "dual" else None

    def _is_full(self) -> bool:
        return None not in [self._filled[n] for n in self._block]

    def _next_block(self) -> None:
        """The next block of which something is still to be said."""
        self._advance()
        self._skip_given()

    def _skip_given(self) -> None:
        """A block that was given whole needs no pass, unless tokens may be taken back."""
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
            more = self._block_length()
            self.canvas.append(more)
            self._add_places(more)
        self.begins = True
        self._fresh_block()

    # -- a pass -----------------------------------------------------------------------------------

    def take_first(self, logits: Logits) -> Pass:
        """The first place of a block, as the finished text before it guesses it: no pass over the
        canvas could say more of it."""
        first = self._done
        if self._grammar is not None:
            kept = self._by_grammar([first], self._guesser.combined([logits], slice(1)), 1)
        else:
            kept = dict(zip([first], self._picks([logits], slice(1), [first]), strict=True))
        made = self._record("text", {first: self._guesser.place(first, kept[first], "set")}, kept)
        self._go_on(True, False)
        return made

    def take(self, found: list[Logits]) -> Pass:
        """What a pass over the canvas says, and what is set after it."""
        block, first = self._block, self._done
        offset = 0 if self.window is not None else self._offset
        logits = self._guesser.combined(found, slice(offset, offset + len(block)))
        masked = [n for n in block if self._filled[n] is None]
        kept = [n for n in block if self._filled[n] is not None]
        picks = self._of(logits, masked)
        tokens = [step.token for step in map(self._filled.__getitem__, kept) if step is not None]
        seen = self._guesser.seen(logits[[n - first for n in kept]], kept, tokens)
        places = {place.number: place for place in seen}
        places |= {n: self._guesser.place(n, pick) for n, pick in zip(masked, picks, strict=True)}
        chosen = self._chosen(masked, picks, logits) if masked else {}
        for number, pick in chosen.items():
            places[number] = self._guesser.place(number, pick, "set")
        if kept and self._may_revise(bool(masked)):
            chosen |= self._revise(kept, places, logits)
        made = self._record("look" if self._looks else "canvas", places, chosen)
        self._count += 1
        changes = {place.change for place in places.values()}
        self._go_on(bool(masked), not changes.isdisjoint(("cleared", "edited")))
        return made

    def _picks(self, found: list[Logits], rows: slice, places: list[int]) -> list[Pick]:
        logits = self._guesser.combined(found, rows)
        return self._guesser.picks(logits, places, self._filled, len(self.result.passes))

    def _of(self, logits: Any, places: list[int], allowed: Any = None) -> list[Pick]:
        """Picks for some places of the block."""
        rows = logits[[n - self._done for n in places]]
        number = len(self.result.passes)
        return self._guesser.picks(rows, places, self._filled, number, allowed)

    def _least(self, masked: int) -> int:
        """How many places the pass has to set."""
        if self.plan.steps is None:
            return min(self.plan.least, masked)
        if self._schedule is None:
            self._schedule = spread(masked, self.plan.steps)
        left = self._schedule[self._count :]  # places that were cleared come on top at the end
        return min(max(1, left[0]), masked) if len(left) > 1 else masked

    def _chosen(self, masked: list[int], picks: list[Pick], logits: Any) -> dict[int, Pick]:
        """Those of the guesses that are kept."""
        least = self._least(len(masked))
        if self._grammar is not None:
            return self._by_grammar(masked, logits, least)
        guesses = self._guesser.guesses(masked, picks, len(self.result.passes))
        found = sorted({int(number) for number in self.plan.order(guesses, least)})
        if not found or not 0 <= found[0] <= found[-1] < len(masked):
            raise SettingsError(
                f"the order kept {found[:8]} of {len(masked)} guesses; it must keep at least one "
                "of them, by their numbers from 0 on"
            )
        return {masked[number]: picks[number] for number in found}

    def _by_grammar(self, masked: list[int], logits: Any, least: int) -> dict[int, Pick]:
        """From left to right, each token one that the grammar allows behind those before it."""
        assert self._grammar is not None
        kept: dict[int, Pick] = {}
        for place in masked:
            pick = self._of(logits, [place], self._grammar.mask())[0]
            if len(kept) >= least and math.exp(pick.logprob) < self.plan.threshold:
                break
            self._grammar.advance(pick.token)
            kept[place] = pick
            if pick.token in self.plan.request.limits.end_ids or self._grammar.must_end:
                break
        return kept

    # -- taking back ------------------------------------------------------------------------------

    def _may_revise(self, masked: bool) -> bool:
        if not self.plan.revises or self._looks:
            return False
        return masked or self._checks < self.plan.edit_passes

    def _revise(self, kept: list[int], places: dict[int, Place], logits: Any) -> dict[int, Pick]:
        """Replace and clear tokens that were set before; gives the new ones."""
        plan, edited = self.plan, dict[int, Pick]()
        if plan.edit is not None:
            for number, pick in zip(kept, self._of(logits, kept), strict=True):
                if pick.token != places[number].token and math.exp(pick.logprob) > plan.edit:
                    edited[number] = pick
                    places[number] = self._guesser.place(number, pick, "edited")
        last = plan.steps is not None and self._count >= plan.steps - 1
        if plan.remask is not None and not last:
            for number in (number for number in kept if number not in edited):
                often = self._cleared.get(number, 0)
                if places[number].probability < plan.remask and often < _OFTEN:
                    self._cleared[number] = often + 1
                    places[number] = replace(places[number], token=None, change="cleared")
        return edited

    def _go_on(self, had_masked: bool, took_back: bool) -> None:
        """Whether the block is full, and the text at its end."""
        self._checks += not had_masked
        plan, full = self.plan, self._is_full()
        if full and plan.steps == 1 and not self._looks:
            self._looks = True  # what was set at once has never been seen together
            return
        if full and plan.revises and not self._looks and plan.edit_passes:
            full = not had_masked and (not took_back or self._checks >= plan.edit_passes)
        if (full or not plan.revises) and self._has_ended():
            self._finish()
        elif full:
            self._next_block()

    # -- what is told -----------------------------------------------------------------------------

    def _record(
        self, kind: Literal["canvas", "text", "look"], places: dict[int, Place],
        chosen: dict[int, Pick],
    ) -> Pass:  # fmt: skip
        """Bring what was decided to the canvas, and keep the pass. A last block may reach beyond
        the text: of what stands there nobody is told."""
        now, number = perf_counter(), len(self.result.passes)
        seconds, steps = now - self.since, list[Step]()
        for place in (places[n] for n in sorted(places)):
            if place.change is None:
                continue
            step = None
            if place.token is not None:
                step = self._guesser.step(place, chosen[place.number], number)
                steps.append(step)
            self._filled[place.number] = step
            for canvas in self.canvases:
                token = self.plan.kind.mask_id if place.token is None else place.token
                canvas.set(self._prompt + place.number - canvas.start, token)
        made = Pass(
            number,
            kind,
            tuple(None if step is None else step.token for step in self._all()),
            tuple(places[n] for n in sorted(places) if n < self.plan.length),
            tuple(replace(step, seconds=seconds) for step in steps if self._is_told(step)),
            seconds,
        )
        self.result.passes.append(made)
        return made

    def _is_told(self, step: Step) -> bool:
        return step.position - self._prompt < self.plan.length

    def _all(self) -> list[Step | None]:
        """The places of the text, those that are still to come included."""
        length = self.plan.length
        return [*self._filled, *[None] * (length - len(self._filled))][:length]

    # -- the end ----------------------------------------------------------------------------------

    def _has_ended(self) -> bool:
        """Whether nothing can follow what stands before the first masked place."""
        limits = self.plan.request.limits
        if limits.stop or self._grammar is not None:
            return self._leading()[1] == "stop"
        known = takewhile(lambda step: step is not None, self._filled)
        return any(step is not None and step.token in limits.end_ids for step in known)

    def _leading(self) -> tuple[list[Step], str | None]:
        """The text from its beginning to the first masked place, and why it ends there, if it
        does: with an end token, a stop string, what the grammar says, or for want of places."""
        limits = replace(self.plan.request.limits, max_tokens=self.plan.length, context=1 << 62)
        ending, steps = Ending(limits, self._prompt), list[Step]()
        for number, step in enumerate(self._all()):
            if step is None:
                break
            begun = ending.text.half
            must_end = self._grammar is not None and number + 1 == len(self._grammar)
            must_end = must_end and self._grammar is not None and self._grammar.must_end
            length = self._prompt + number + 1
            shown, finish = ending.push(step.token, step.bytes, length, must_end)
            shown += ending.finish() if finish else ""
            steps.append(replace(step, text=shown, begun=begun, finish_reason=finish))
            if finish:
                return steps, finish
        if steps and (rest := ending.finish()):
            steps[-1] = replace(steps[-1], text=steps[-1].text + rest)
        return steps, None

    def _finish(self) -> None:
        self.finished = True
        self._tell()

    def _tell(self) -> None:
        result = self.result
        result.steps, reason = self._leading()
        result.finish_reason = reason or ("context" if self.finished else "interrupted")
        if self.plan.steps == 1 and result.passes:
            last = result.passes[-1].places
            unlikely = sum(place.probability < _UNLIKELY for place in last)
            result.notes.append(
                f"all at once: {result.repeats} tokens repeat the one before them, and {unlikely} "
                f"of {len(last)} are less than {_UNLIKELY:.0%} likely beside the others"
            )
